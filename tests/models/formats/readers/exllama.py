"""ExLlamaV2's and exllamav3's own kernels as judges, without a GPU.

`make test` installs their sources alone. WEIGHTSMITH_EXLLAMA names another folder with both packages. The kernels that
reconstruct a weight are cut from these sources and compiled with g++ (12 or later, on x86) and `device.hpp`; nothing of them is
copied here. What their loaders do in Python before is done here in numpy.
"""

from __future__ import annotations

import ctypes as c
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.readers import installed

_HERE = Path(__file__).parent
FOLDER = installed("WEIGHTSMITH_EXLLAMA", "exllama")

needs_exllama = pytest.mark.skipif(
    not ((FOLDER / "exllamav2").is_dir() and (FOLDER / "exllamav3").is_dir() and shutil.which("g++")),
    reason="needs ExLlama: its sources, and g++ on x86",
)

Tensors = Mapping[str, np.ndarray]

_EXL2_HEAD = """
#define THREADS_X 32
#define BLOCK_KN_SIZE 128
"""
_EXL2 = """
extern "C" void shuffle(uint32_t* q, int k, int n, int r8, int r6, int r5, int r4, int r3, int r2)
{
    launch((n + 31) / 32, 1, 32, 1, [&] { shuffle_kernel(q, k, n, r8, r6, r5, r4, r3, r2); });
}
extern "C" void reconstruct(uint32_t* q, uint16_t* perm, uint32_t* scale, half* top, uint16_t* map, int k, int n, int groups,
    half* out, int r8, int r6, int r5, int r4, int r3, int r2)
{
    half* unused = new half[(size_t)65536 * n]; // rows before the last pass may be those of a larger matrix
    launch((n + 127) / 128, (k + 127) / 128, 128, PASSES, [&] {
        reconstruct_kernel(q, perm, scale, top, map, k, n, groups, last ? out : unused, r8, r6, r5, r4, r3, r2, 0, k); });
    delete[] unused;
}
extern "C" void reconstruct_gptq(uint32_t* q, uint32_t* zeros, half* scales, int k, int n, int size, int groups, half* out)
{
    launch((n + 511) / 512, (k + 127) / 128, 128, PASSES, [&] {
        reconstruct_gptq_kernel(q, nullptr, zeros, scales, k, n, size, groups, out, k, 0, k); });
}
"""
_EXL3 = """
#define CASE(k, cb, half_k) if (bits2 == 2 * k + half_k && codebook == cb) \\
    return launch(n / 128, rows, 256, PASSES, [&] { reconstruct_tile<k, cb, half_k>(out, packed, n / 16, 0); })
#define ALL(cb) CASE(1, cb, 0); CASE(2, cb, 0); CASE(3, cb, 0); CASE(4, cb, 0); \\
    CASE(5, cb, 0); CASE(6, cb, 0); CASE(7, cb, 0); CASE(8, cb, 0)
extern "C" void reconstruct(half* out, uint16_t* packed, int rows, int n, int bits2, int codebook)
{
    ALL(0); ALL(1); ALL(2);
    CASE(1, 2, 1); CASE(2, 2, 1); CASE(3, 2, 1);
    __builtin_trap();
}
"""


def _function(source: Path, head: str) -> str:
    """A function of a source, with its template line, up to the brace that ends it."""
    text = source.read_text()
    at = text.index(head)
    if template := re.search(r"template <[^>]*>\s*$", text[:at]):
        at = template.start()
    return text[at : text.index("\n}", at) + 3]


def _folder(package: str) -> Path:
    return FOLDER / package / f"{package}_ext"


def _compiled(text: str, include: Path) -> c.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text(f'#include "{_HERE / "device.hpp"}"\n{text}')
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-fpermissive", "-w", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        return c.CDLL(str(library))


@cache
def exl2_kernels() -> c.CDLL:
    cuda = _folder("exllamav2") / "cuda"
    headers = [f'#include "quant/qdq_{bits}.cuh"' for bits in (2, 3, 4, 5, 6, 8)]
    views = re.sub(r"#include <cuda\w*\.h>", "", (cuda / "matrix_view.cuh").read_text())
    names = ("shuffle_kernel", "reconstruct_kernel", "reconstruct_gptq_kernel")
    kernels = [_function(cuda / "q_matrix.cu", f"__global__ void {name}") for name in names]
    return _compiled("\n".join([*headers, views, _EXL2_HEAD, *kernels, _EXL2]), cuda)


@cache
def exl3_kernels() -> c.CDLL:
    quant = _folder("exllamav3") / "quant"
    ptx = (quant.parent / "ptx.cuh").read_text()
    parts = [
        '#include "../ptx_portable.cuh"',
        "template <typename T, int n> struct Vec { T elems[n]; T& operator[](int i) { return elems[i]; } };",
        "using FragB = Vec<half2, 2>;",
        *(line for line in ptx.splitlines() if re.match(r"\s*#define (FSHF_IMM|BFE16_IMM).*exl3_", line)),
        "inline uint32_t bfe64(uint32_t low, uint32_t high, int at, int n)",
        "{ return exl3_bfe_u64(((uint64_t)high << 32) | low, at, n); }",
        "union half2_uint32 { uint32_t as_uint32; half2 as_half2; half2_uint32(uint32_t v) : as_uint32(v) {} };",
        "union half_uint16 { uint16_t as_uint16; half as_half; half_uint16(uint16_t v) : as_uint16(v) {} };",
        '#include "exl3_dq.cuh"',
        _function(quant / "reconstruct.cu", "__device__ __forceinline__\nvoid reconstruct_tile"),
        _EXL3,
    ]
    return _compiled("\n".join(parts), quant)


def _at(array: np.ndarray) -> c.c_void_p:
    assert array.flags.c_contiguous
    return c.c_void_p(array.ctypes.data)


def exl2(stored: Tensors, module: str) -> np.ndarray:
    """A weight as ExLlamaV2 reconstructs it: float16 [inputs, outputs]."""
    q, scale, top = (np.array(stored[f"{module}.{part}"]) for part in ("q_weight", "q_scale", "q_scale_max"))
    perm = np.argsort(stored[f"{module}.q_invperm"]).astype(np.uint16)
    starts = stored[f"{module}.q_groups"].reshape(-1, 2).astype(np.int64)
    bits = starts[:, 0]
    rows = np.diff([*starts[:, 1], len(q)]) * 32 // bits
    group_map = [entry for group, n in enumerate(rows) for j in range(n) for entry in (group, n - j)]
    limits = [int(rows[bits >= low].sum()) for low in (8, 6, 5, 4, 3, 2)]
    k, n = len(perm), q.shape[1]
    out, table = np.zeros((k, n), np.float16), np.array(group_map, np.uint16)
    top = top * np.float16(1 / 256)
    kernels = exl2_kernels()
    kernels.shuffle(_at(q), k, n, *limits)
    kernels.reconstruct(_at(q), _at(perm), _at(scale), _at(top), _at(table), k, n, len(rows), _at(out), *limits)
    return out


def gptq(stored: Tensors, module: str) -> np.ndarray:
    """A weight of GPTQ with 4 bits as ExLlamaV2 reconstructs it, its groups in order: float16 [inputs, outputs]."""
    q, zeros, scales = (np.array(stored[f"{module}.{part}"]) for part in ("qweight", "qzeros", "scales"))
    k, n = q.shape[0] * 8, q.shape[1]
    out = np.zeros((k, n), np.float16)
    kernels = exl2_kernels()
    kernels.shuffle(_at(q), k, n, 0, 0, 0, k, k, k)
    kernels.reconstruct_gptq(_at(q), _at(zeros), _at(scales), k, n, k // len(scales), len(scales), _at(out))
    return out


def exl3(stored: Tensors, module: str) -> np.ndarray:
    """A weight as exllamav3 reconstructs it, then rotated in float64: [inputs, outputs]."""
    packed = np.array(stored[f"{module}.trellis"])
    rows, columns, width = packed.shape
    inner = np.zeros((16 * rows, 16 * columns), np.float16)
    codebook = 1 if f"{module}.mcg" in stored else 2 if f"{module}.mul1" in stored else 0
    exl3_kernels().reconstruct(_at(inner), _at(packed), rows, 16 * columns, width // 8, codebook)
    rotated = _rotated(_rotated(inner.astype(np.float64).T).T)
    suh, svh = (stored[f"{module}.{part}"].astype(np.float64) for part in ("suh", "svh"))
    return suh[:, None] * rotated * svh


def _rotated(rows: np.ndarray) -> np.ndarray:
    """Each 128 numbers of a row by a Hadamard matrix."""
    matrix: Any = np.ones((1, 1))
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    return np.asarray((rows.reshape(-1, 128) @ matrix).reshape(rows.shape))
