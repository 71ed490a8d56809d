"""ComfyUI-GGUF, from a clone that WEIGHTSMITH_COMFYUI_GGUF names: its converter, its loader, and its rules of types.

    git clone https://github.com/city96/ComfyUI-GGUF CLONE && git -C CLONE checkout 795e451

The rules are a patch of llama.cpp. A compiler makes a program of the lines that the patch adds, which asks for no more of
llama.cpp than names and sizes of tensors.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CLONE = os.environ.get("WEIGHTSMITH_COMFYUI_GGUF", "")

needs_comfyui_gguf = pytest.mark.skipif(not CLONE, reason="needs ComfyUI-GGUF: WEIGHTSMITH_COMFYUI_GGUF")
needs_rules = pytest.mark.skipif(not CLONE or shutil.which("g++") is None, reason="needs ComfyUI-GGUF")
"""The rules are compiled with g++."""


def module(name: str) -> Any:
    """A module of the clone, `tools.convert`, in a package without ComfyUI's nodes."""
    package = "comfyui_gguf_clone"
    if package not in sys.modules:
        root = types.ModuleType(package)
        root.__path__ = [CLONE]
        sys.modules[package] = root
        ops = types.ModuleType(f"{package}.ops")  # the original needs ComfyUI
        ops.GGMLTensor = _tensor_class()  # type: ignore[attr-defined]
        sys.modules[f"{package}.ops"] = ops
    return importlib.import_module(f"{package}.{name}")


def _tensor_class() -> type:
    """The class of tensors of the clone's ops.py, which is all that its loader takes from there."""
    import torch

    text = (Path(CLONE) / "ops.py").read_text()
    (source,) = re.findall(r"^class GGMLTensor.*?(?=^class )", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    loaded: type = names["GGMLTensor"]
    return loaded


_PROGRAM = """
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#define QK_K 256
#define LLAMA_LOG_WARN(...)
#define LLAMA_LOG_INFO(...)
enum ggml_type { %(types)s };
static const char * TYPES[] = { %(type_names)s };
enum llama_ftype { %(ftypes)s };
static const char * FTYPES[] = { %(ftype_names)s };
enum llm_arch { %(arches)s };
static const char * ARCHES[] = { %(arch_names)s };
struct ggml_tensor { std::string name; int64_t ne[4]; };
static const char * ggml_get_name(const ggml_tensor * t) { return t->name.c_str(); }
static int ggml_n_dims(const ggml_tensor * t) { for (int i = 3; i >= 1; --i) if (t->ne[i] > 1) return i + 1; return 1; }
struct llama_model { llm_arch arch; };
struct quantize_state_internal {
    const llama_model & model; int i_attention_wv = 0, i_ffn_down = 0, n_k_quantized = 0, n_fallback = 0;
};
template <int N> int find(const char * (&names)[N], const std::string & name) {
    for (int i = 0; i < N; ++i) if (name == names[i]) return i;
    throw std::runtime_error(name);
}
%(rules)s
int main() {
    std::string arch, ftype, type, text;
    std::cin >> arch >> ftype >> type;
    llama_model model{(llm_arch) find(ARCHES, arch)};
    quantize_state_internal qs{model};
    ggml_tensor t;
    while (std::cin >> t.name >> t.ne[0] >> t.ne[1] >> t.ne[2] >> t.ne[3]) {
        const ggml_tensor * tensor = &t;
        std::string name = t.name;
        bool quantize = name.size() >= 6 && name.rfind("weight") == name.size() - 6;
        quantize &= ggml_n_dims(tensor) >= 2;
        quantize &= name.find("_norm.weight") == std::string::npos;
        %(kept)s
        if (!quantize) { std::cout << "-\\n"; continue; }
        auto mixture = (llama_ftype) find(FTYPES, ftype);
        std::cout << TYPES[img_tensor_get_type(qs, (ggml_type) find(TYPES, type), tensor, mixture)] << "\\n";
    }
}
"""


def build_rules(folder: Path) -> Path:
    """The program of the patch's rules."""
    lines = (Path(CLONE) / "tools" / "lcpp.patch").read_text().splitlines()
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    text = "\n".join(added)
    (rules,) = re.findall(r"^static ggml_type img_tensor_get_type.*?^}", text, re.MULTILINE | re.DOTALL)
    (kept,) = re.findall(r"bool image_model = false;.*?quantize &= ggml_n_dims\(tensor\) == 2;\n\s*}", text, re.DOTALL)
    names: dict[str, str] = {"rules": rules, "kept": kept}
    for key, prefix, single in (("types", "GGML_TYPE_", "type_names"), ("ftypes", "LLAMA_FTYPE_MOSTLY_", "ftype_names")):
        known_types = ["Q8_0", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q2_K", "Q2_K_S", "Q3_K_S", "Q5_K_S"]
        known = dict.fromkeys([*re.findall(rf"{prefix}(\w+)", text), *known_types])
        names |= {key: ", ".join(f"{prefix}{name}" for name in known), single: ", ".join(f'"{name}"' for name in known)}
    arches = re.findall(r'\{ (LLM_ARCH_\w+), +"(\w+)" +\}', text)
    names |= {"arches": ", ".join(name for name, _ in arches), "arch_names": ", ".join(f'"{name}"' for _, name in arches)}
    source, program = folder / "rules.cpp", folder / "rules"
    source.write_text(_PROGRAM % names)
    subprocess.run(["g++", "-w", "-o", program, source], check=True)
    return program


def types_by_rules(
    program: Path, arch: str, ftype: str, default: str, tensors: Sequence[tuple[str, tuple[int, ...]]]
) -> list[str]:
    """The types of quantised tensors of these names and shapes; "-" for one that is not quantised."""
    lines = [f"{arch} {ftype} {default}"]
    for name, shape in tensors:
        sizes = [*shape[::-1], 1, 1, 1, 1][:4]
        lines.append(f"{name} {' '.join(map(str, sizes))}")
    run = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    return run.stdout.split()
