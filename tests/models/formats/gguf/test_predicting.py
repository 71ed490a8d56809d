"""Layers that predict several tokens at a time, in GGUF files: where llama.cpp loads them, they are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.tensors import DTYPES

BF16 = DTYPES["BF16"].numpy
Tensors = dict[str, npt.NDArray[Any]]

FAMILIES = {
    **dict.fromkeys(
        (
            *("glm4-moe", "glm4-moe-lite", "exaone-moe", "glm-dsa", "deepseek-v32", "qwen3-next", "hy-v3", "cohere2-moe"),
            "bailing-hybrid",
        ),
        "num_nextn_predict_layers",
    ),
    **dict.fromkeys(("qwen3.5", "qwen3.5-moe"), "mtp_num_hidden_layers"),
}
"""config.json's number of layers that predict."""
NUMBERED = ("glm4-moe", "glm4-moe-lite", "glm-dsa", "deepseek-v32", "hy-v3", "cohere2-moe", "bailing-hybrid")
"""Those whose layers that predict are numbered on; the others have a stack of them."""
LIKE = {"exaone-moe": 0}
"""Of those whose layers that predict have no experts: a layer without."""
LAST = dict.fromkeys(("hy-v3", "bailing-hybrid"), "final_layernorm")
"""The last norm of such a layer, where it has another name."""
ALONE = ("bailing-hybrid",)
"""Those whose layers that predict have no embedding and no head, and whose last norm llama.cpp calls `layer_output_norm`."""
STACK = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
ATTENDS = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.o_proj|attention\.kv_b_proj)")
TOKENS = [3, 17, 9, 30, 5]


def add_tokenizer(folder: Path) -> None:
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (folder / name).write_bytes(content)


def save(family: str, folder: Path, **changes: Any) -> tuple[Path, Path, Tensors]:
    """A tiny model, the same with a layer that predicts, and the tensors of this layer."""
    plain = zoo.save(family, folder / "plain", 1, **changes)
    add_tokenizer(plain)
    with weightsmith.open_checkpoint(plain) as opened:
        config, tensors = dict(opened.config or {}), {name: opened.read(name) for name in opened.specs}
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    full = max(int(match[1]) for name in tensors if (match := ATTENDS.match(name)))
    full = LIKE.get(family, full)
    random = np.random.default_rng(5)
    start = f"model.layers.{full}."
    block = {name.removeprefix(start): values for name, values in tensors.items() if name.startswith(start)}
    block = {name: (values + random.normal(0, 0.1, values.shape)).astype(values.dtype) for name, values in block.items()}
    alone = {f"{name}.weight": random.normal(0, 0.1, hidden).astype(BF16) for name in ("enorm", "hnorm", "shared_head.norm")}
    alone["eh_proj.weight"] = random.normal(0, 0.1, (hidden, 2 * hidden)).astype(BF16)
    if family in NUMBERED:
        head = tensors["lm_head.weight"] if "lm_head.weight" in tensors else tensors["model.embed_tokens.weight"]
        ends = () if family in ALONE else ("embed_tokens.weight", "shared_head.head.weight")
        alone |= {name: random.normal(0, 0.1, head.shape).astype(BF16) for name in ends}
        alone[f"{LAST.get(family, 'shared_head.norm')}.weight"] = alone.pop("shared_head.norm.weight")
        added = {f"model.layers.{layers}.{name}": values for name, values in (block | alone).items()}
    else:
        added = {f"mtp.layers.0.{name}": values for name, values in block.items()}
        added |= {f"mtp.{STACK[name.removesuffix('.weight')]}.weight": values for name, values in alone.items()}
    source = write_checkpoint(folder / "m", tensors | added, {**config, FAMILIES[family]: 1})
    add_tokenizer(source)
    return plain, source, added


def quantize(source: Path, out: Path, name: str = "f32") -> Path:
    quantised = weightsmith.quantize(source, out, f"gguf-{name}", progress=False)
    assert not any("predict" in str(warning) for warning in quantised.warnings)
    return out / "model.gguf"


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_logits_with_them(family: str, tmp_path: Path) -> None:
    plain, source, _ = save(family, tmp_path)
    logits = []
    for number, folder in enumerate((plain, source)):
        with llama_cpp.Judge(quantize(folder, tmp_path / f"q{number}")) as judge:
            logits.append(judge.logits(TOKENS))
    assert np.array_equal(*logits)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_written_as_llama_cpps_converter_does_and_come_back(family: str, tmp_path: Path) -> None:
    plain, source, added = save(family, tmp_path)
    path = quantize(source, tmp_path / "q")
    written, without = stored(path), stored(quantize(plain, tmp_path / "p"))
    assert {name: written[name] for name in without} == without
    keys = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    stem = keys["general.architecture"]
    layers = keys[f"{stem}.block_count"] - 1
    assert keys[f"{stem}.nextn_predict_layers"] == 1
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, layers + 1)  # older versions have no such names for Qwen
    alone = {re.sub(r"^.*?(layers\.\d+\.|mtp\.)", "", name): values for name, values in added.items()}
    numbered = (*STACK, *(() if family in ALONE else ("embed_tokens",)))
    for module, here in ({name: name for name in numbered} if family in NUMBERED else STACK).items():
        stored_name = str(known.get_name(f"model.layers.{layers}.{module}"))
        if family in ALONE:
            stored_name = stored_name.replace("nextn.shared_head_norm", "layer_output_norm")
        _, shape, data = written[f"{stored_name}.weight"]
        last = LAST.get(family, here) if module == "shared_head.norm" else here
        values = alone[f"{last}.weight"].astype(np.float32)
        shift = 1 if family.startswith("qwen") and "norm" in module else 0  # as Gemma's norms
        assert np.array_equal(np.frombuffer(data, "<f4").reshape(shape), values + np.float32(shift)), module
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        published = zoo.published_names_of_ling(here.specs)  # of others, the same
        assert back.specs.keys() == {*published.values()}
        for name in added:
            assert np.allclose(back.read(name).astype(np.float32), here.read(name).astype(np.float32), rtol=0, atol=1e-6), name
        assert back.config is not None
        assert (back.config["num_hidden_layers"], back.config[FAMILIES[family]]) == (layers, 1)
        assert not any("predict" in str(note) for note in back.notes)


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5"])
def test_types_are_those_of_llama_cpps_quantiser(family: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    if family == "qwen3.5":
        wide = {"hidden_size": 256, "intermediate_size": 512}
    _, source, _ = save(family, tmp_path, **wide)
    plain = quantize(source, tmp_path / "f32")
    ours = stored(quantize(source, tmp_path / "q", "q4_k_m"))
    assert llama_cpp.quantize(plain, tmp_path / "theirs.gguf", 15)
    theirs = stored(tmp_path / "theirs.gguf")
    assert {name: kind for name, (kind, _, _) in ours.items()} == {name: kind for name, (kind, _, _) in theirs.items()}
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize("name", ["iq2_xxs", "nvfp4"])
def test_types_that_they_cannot_have(name: str, tmp_path: Path) -> None:
    """No text is run through them, so they have no importances; and llama.cpp may not multiply them by factors."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "vocab_size": 262}
    family = "glm4-moe" if name == "iq2_xxs" else "qwen3.5"
    _, source, _ = save(family, tmp_path, **(wide if name == "iq2_xxs" else {"hidden_size": 256, "intermediate_size": 512}))
    text: dict[str, Any] = (
        {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32} if name == "iq2_xxs" else {}
    )
    weightsmith.quantize(source, tmp_path / "q", f"gguf-{name}", progress=False, **text)
    kinds = {tensor: kind for tensor, (kind, _, _) in stored(tmp_path / "q" / "model.gguf").items()}
    last = max(int(tensor.split(".")[1]) for tensor in kinds if tensor.startswith("blk."))
    assert name.upper() in {kind for tensor, kind in kinds.items() if not tensor.startswith(f"blk.{last}.")}
    assert name.upper() not in {kind for tensor, kind in kinds.items() if tensor.startswith(f"blk.{last}.")}


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5"])
def test_incomplete_ones_are_left_out(family: str, tmp_path: Path) -> None:
    plain, source, added = save(family, tmp_path)
    with weightsmith.open_checkpoint(source) as opened:
        tensors = {
            name: opened.read(name) for name in opened.specs if not name.endswith(("hnorm.weight", "norm_hidden.weight"))
        }
        config = dict(opened.config or {})
    write_checkpoint(source, tensors, config)
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    what = f"{len(added) - 1} tensors are left out: layers that predict several tokens at a time"
    assert any(what in str(warning) for warning in quantised.warnings)
    assert stored(tmp_path / "q" / "model.gguf") == stored(quantize(plain, tmp_path / "p"))


def test_a_layer_that_predicts_with_experts_where_llama_cpp_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LIKE, "exaone-moe")
    _, source, added = save("exaone-moe", tmp_path)
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(source)}]}, quantize="gguf-f32")
    assert {tensor.tensor for tensor in plan.dropped} == added.keys()
    assert any("layers that predict several tokens" in str(warning) for warning in plan.warnings)
