"""GGUF files for ComfyUI of T5's encoder, the text encoder of many diffusion models.

ComfyUI-GGUF reads llama.cpp's names, as llama.cpp's converter and llama-quantize write them. The sizes follow from shapes. The
file has no tokenizer, because ComfyUI has its own for T5. UMT5's is an exception: ComfyUI reads it from the file (`spiece.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.single_files import T5_PARTS, T5_WHOLE
from weightsmith._models.formats.gguf.types import Chosen, Mixture, Shape, type_of

ARCHITECTURE = "t5encoder"
MODEL_TYPES = ("t5", "umt5")
"""In config.json."""
_MARK = "encoder.block.0.layer.0.SelfAttention.q.weight"
_EMBEDDING, _COPY = "shared.weight", "encoder.embed_tokens.weight"
_LAYER = re.compile(r"encoder\.block\.(0|[1-9][0-9]{0,5})\.(.+)\.weight")
_UNGATED = "layer.1.DenseReluDense.wi"
"""In the first T5, which Stable Audio uses. ComfyUI-GGUF reads llama.cpp's ffn_up as wi_1, the matrix beside a gate."""
_POSITIONS = "attn_rel_b.weight"
_CONTEXT, _EPSILON = 512, 1e-6
"""The same in every T5 model. They do not follow from shapes."""


def is_t5(names: Collection[str]) -> bool:
    """Whether a model with tensors of these names is T5."""
    return _MARK in names


def t5_names(names: Collection[str], where: str) -> dict[str, str]:
    """llama.cpp's name of each tensor of T5's encoder, without a second copy of the embedding.

    Raises Unsupported for a tensor outside the encoder, and for an encoder whose feed-forward layers have no gate.

    >>> t5_names(["shared.weight", "encoder.block.3.layer.1.DenseReluDense.wo.weight"], "t5")
    {'shared.weight': 'token_embd.weight', 'encoder.block.3.layer.1.DenseReluDense.wo.weight': 'enc.blk.3.ffn_down.weight'}
    """
    wholes = {name: theirs for theirs, name in T5_WHOLE.items()}
    parts = {name: theirs for theirs, name in T5_PARTS.items()}
    placed = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if name == _COPY and _EMBEDDING in names:
            continue
        if name in wholes or name == _COPY:
            placed[name] = wholes.get(name, "token_embd.weight")
        elif layer is not None and layer[2] in parts:
            placed[name] = f"enc.blk.{layer[1]}.{parts[layer[2]]}.weight"
        elif layer is not None and layer[2] == _UNGATED:
            what = f"its feed-forward layers have no gate ({show(name)}), and ComfyUI-GGUF loads only T5 1.1, which has gates"
            raise Unsupported(what, where=where, fix="choose another format, such as comfyui-fp8")
        else:
            what = f"tensor {show(name)} does not belong to the encoder of T5, and only encoders are written"
            raise Unsupported(what, where=where, fix="use a file with only the encoder, as ComfyUI and pipelines have it")
    return placed


def t5_keys(specs: Mapping[str, TensorSpec], mixture: Mixture, where: str) -> dict[str, Value]:
    """The keys of a file, without a tokenizer.

    specs  by llama.cpp's names

    Raises Unsupported for tensors that are missing or of shapes that do not fit together.
    """
    needed = ("token_embd.weight", f"enc.blk.0.{_POSITIONS}", "enc.blk.0.attn_q.weight", "enc.blk.0.ffn_up.weight")
    if missing := [name for name in needed if name not in specs or len(specs[name].shape) != 2]:
        raise Unsupported(
            f"there is no matrix {missing[0]}, as llama.cpp calls it", where=where, fix="download the model again"
        )
    embedding, positions, queries, up = (specs[name].shape for name in needed)
    buckets, heads = positions
    if not heads or queries[0] % heads:
        what = f"{heads:,} heads of relative positions do not divide the {queries[0]:,} rows of q"
        raise Unsupported(what, where=where, fix="download the model again")
    numbers = {int(name.split(".")[2]) for name in specs if name.startswith("enc.blk.")}
    if gaps := [number for number in range(max(numbers)) if number not in numbers]:
        what = f"there is no layer {gaps[0]:,}, and there is one {max(numbers):,}"
        raise Unsupported(what, where=where, fix="download the model again")
    counts = {
        "context_length": _CONTEXT,
        "embedding_length": embedding[1],
        "feed_forward_length": up[0],
        "block_count": len(numbers),
        "attention.head_count": heads,
        "attention.key_length": queries[0] // heads,
        "attention.value_length": queries[0] // heads,
        "attention.relative_buckets_count": buckets,
    }
    return {
        "general.architecture": Value("str", ARCHITECTURE),
        "general.quantization_version": Value("u32", 2),
        "general.file_type": Value("u32", mixture.number),
        **{f"{ARCHITECTURE}.{name}": Value("u32", count) for name, count in counts.items()},
        f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon": Value("f32", _EPSILON),
    }


def t5_types(mixture: Mixture, specs: Collection[TensorSpec], keys: Mapping[str, Value], chosen: Chosen) -> list[str]:
    """The types that llama.cpp gives the tensors. specs: under its names, in order; keys: from `t5_keys`."""
    stated = {name.removeprefix(f"{ARCHITECTURE}."): value.value for name, value in keys.items()}
    heads, layers = int(str(stated["attention.head_count"])), int(str(stated["block_count"]))
    shape = Shape(layers, heads, heads, experts=0, tied=True, weighted=False, big=False)
    return ["F32" if spec.name.endswith(_POSITIONS) else type_of(mixture, spec, shape, chosen) for spec in specs]
