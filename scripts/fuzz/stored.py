"""Checkpoints whose weights are encoded: those of every format, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng
from scripts.fuzz.models import use_checkpoint
from scripts.fuzz.mutators import mutate_bytes, mutate_gguf, mutate_json, mutate_safetensors

_QUANTISATION_WORDS = tuple(
    "bits group_size mode version checkpoint_format dynamic quant_method packing_format extra_config data_type "
    "global_quant_config layer_quant_config weight dtype qscheme weight_block_size expert_dtype "
    "config_groups targets strategy num_bits format layers params hidden_size".split()
)


def mutate_quantised(rng: Rng, data: bytes) -> bytes:
    """Another config.json, header or tensor data: the JSON of bitsandbytes and ComfyUI, and GPTQ's indexes, are data."""
    if data.startswith(b"{"):
        return mutate_json(rng, data, _QUANTISATION_WORDS)
    if rng.random() < 0.5:
        return mutate_safetensors(rng, data)
    start = 8 + int.from_bytes(data[:8], "little")
    body = mutate_bytes(rng, data[start:])
    return data[:start] + body[: len(data) - start].ljust(len(data) - start, b"\xff")


_EXL2 = "exl2"
_QUANTISED = (
    *("gptq-3", "gptq-4-act-order", "awq-4", "autoround-6-asymmetric", "bnb-nf4-nested", "bnb-int8", "exl3-3-3inst", "mlx-3"),
    *("mlx-nvfp4", "hqq-3-axis-0", "hqq-4-offloaded", "compressed-3-loose", "compressed-8-act-order", "quark-int4-per_group"),
)
_SCALED = ("DeepSeek V4 experts", "stacked experts", "Quark INT8", "Quark MXFP4", "AutoRound NVFP4")
_COMFYUI = ("comfyui-old", "comfyui", "comfyui-metadata", "comfyui-nvfp4", "comfyui-mxfp8", "comfyui-rotated")
_GROUPS = ("mixed-groups", "mlx-modules")
"""Models whose modules have settings of their own, which config.json names by patterns, or under other names."""
_STORED = (*_QUANTISED, *_SCALED, *_COMFYUI, *_GROUPS, _EXL2)


def _make_quantised() -> None:
    from tests.mini import write_checkpoint
    from tests.models.formats.exl2.test_reading import write
    from tests.models.formats.quantised import CASES
    from tests.models.formats.test_scaled import CASES as SCALED

    write(Path(_EXL2), 0, 96)
    for name in _QUANTISED:
        case = CASES[name]()
        write_checkpoint(Path(name), case.tensors, case.config)
    for name in _SCALED:
        entry, tensors, _ = SCALED[name]
        write_checkpoint(Path(name), tensors, {"model_type": "llama", "quantization_config": entry})
    _make_comfyui()
    _make_groups()


def _make_comfyui() -> None:
    from tests.mini import write_checkpoint
    from tests.models.formats.test_comfyui import INT8, OLD, ONE, TILED, text, write_file

    stored, scales, _ = OLD["groups of musubi-tuner"]
    old = {"q.weight": stored, "q.scale_weight": scales, "q.scale_input": ONE, "scaled_fp8": stored[0, :2]}
    settings = {"format": "int8_blockwise", "group_size": 64, "orig_dtype": "torch.float16", "params": {}}
    new = {"q.weight": INT8, "q.weight_scale": ONE.repeat(8).reshape(2, 4)}
    stated = {name: {"q.comfy_quant": text({"format": name})} for name in ("nvfp4", "mxfp8")}
    tiled = [{**{f"q.{end}": part for end, part in TILED[name][0].items()}, **stated[name]} for name in stated]
    rotated = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    turned = {"q.weight": INT8, "q.weight_scale": ONE, "q.comfy_quant": text(rotated)}
    models = (old, {**new, "q.comfy_quant": text(settings)}, new, *tiled, turned)
    for name, tensors in zip(_COMFYUI, models, strict=True):
        write_checkpoint(Path(name), tensors, {"model_type": "flux", "dtype": "bfloat16"})
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"q": settings}})}
    write_file(Path(_COMFYUI[2]) / "model.safetensors", new, metadata)


def _make_groups() -> None:
    import numpy as np

    from tests.mini import write_checkpoint
    from tests.models.formats.compressed_tensors import test_groups as groups
    from tests.models.formats.test_mlx_settings import EIGHT, eight, four, model

    four_bits, _ = groups.weight(groups.MLP, 4, 256, (32, 256), np.int32)
    eight_bits, _ = groups.weight(groups.ATTENTION, 8, 128, (32, 128), np.int64)
    settings = [groups.group(4, None, ["re:.*mlp.*", "Linear"]), groups.group(8, None, [groups.ATTENTION])]
    groups.write(Path(_GROUPS[0]), settings, {**four_bits, **eight_bits})
    overrides = {"language_model.model.layers.0.mlp.up_proj": EIGHT}
    case = model(
        four("model.layers.0.mlp.gate_proj"), eight("model.layers.0.mlp.up_proj"), overrides=overrides, hidden_size=128
    )
    write_checkpoint(Path(_GROUPS[1]), case.tensors, case.config)


def _use_quantised(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    yield next(use_checkpoint(file, rng))


def _make_gguf() -> None:
    """A model of one layer, whose header is most of the file."""
    import numpy as np

    from weightsmith._base.tensors import BLOCKS, DTYPES, TensorSpec
    from weightsmith._models.formats.gguf.layout import Value, encode_metadata, make_layout

    f32, q8_0 = DTYPES["F32"], BLOCKS["Q8_0"]
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<|x|>"]
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    keys = {"general.architecture": Value("str", "llama")} | {f"llama.{k}": Value("u32", n) for k, n in sizes.items()}
    keys |= {
        "llama.attention.layer_norm_rms_epsilon": Value("f32", 1e-5),
        "tokenizer.ggml.model": Value("str", "llama"),
        "tokenizer.ggml.tokens": Value("str", tokens),
        "tokenizer.ggml.scores": Value("f32", [-float(i) for i in range(10)]),
        "tokenizer.ggml.token_type": Value("i32", [2, 3, 3, 1, 1, 1, 1, 1, 1, 3]),
        "tokenizer.ggml.eos_token_id": Value("u32", 2),
    }
    specs = [TensorSpec("token_embd.weight", q8_0, (10, 32)), TensorSpec("output_norm.weight", f32, (32,))]
    specs += [TensorSpec(f"blk.0.{name}.weight", f32, (32,)) for name in ("attn_norm", "ffn_norm")]
    specs += [TensorSpec("blk.0.attn_q.weight", q8_0, (32, 32)), TensorSpec("rope_freqs.weight", f32, (8,))]
    ones = np.ones(1, "<f4").tobytes()
    Path("g").mkdir()
    (shard,) = make_layout(specs, 10**9, encode_metadata(keys)).shards
    Path("g/model.gguf").write_bytes(shard.header + ones * ((shard.nbytes - len(shard.header)) // 4))


def _use_gguf(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    yield next(use_checkpoint(file, rng))


KINDS = {
    "quantised": Kind(
        _make_quantised,
        tuple(f"{name}/{file}" for name in _STORED for file in ("config.json", "model.safetensors")),
        mutate_quantised,
        _use_quantised,
    ),
    "gguf": Kind(_make_gguf, ("g/model.gguf",), mutate_gguf, _use_gguf),
}
