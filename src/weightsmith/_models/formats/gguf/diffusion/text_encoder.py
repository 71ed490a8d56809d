"""GGUF files for ComfyUI of T5's encoder, the text encoder of many diffusion models: written and read.

ComfyUI-GGUF reads llama.cpp's names, as llama.cpp's converter and llama-quantize write them. Here T5 has transformers' names,
which ComfyUI's text encoder files have too. The sizes follow from shapes. The file has no tokenizer, because ComfyUI has its
own for T5. UMT5's is an exception: ComfyUI reads it from the file.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.header import GgufTensor
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.types import Chosen, Mixture, Shape, type_of
from weightsmith._models.tokenizers.vocabulary import PieceKind, read_sentencepiece

ARCHITECTURE = "t5encoder"
MODEL_TYPES = ("t5", "umt5")
"""In config.json."""
_MARK = "encoder.block.0.layer.0.SelfAttention.q.weight"
_EMBEDDING, _COPY = "shared.weight", "encoder.embed_tokens.weight"
_LAYER = re.compile(r"encoder\.block\.(0|[1-9][0-9]{0,5})\.(.+)\.weight")
_UNGATED = "layer.1.DenseReluDense.wi"
"""In the first T5, which Stable Audio uses. ComfyUI-GGUF reads llama.cpp's ffn_up as wi_1, the matrix beside a gate."""
TEXT_ENCODERS = ("t5", "t5encoder")
"""`general.architecture` of text encoders that have no other architecture here."""
_POSITIONS = "attn_rel_b.weight"
_CONTEXT, _EPSILON = 512, 1e-6
"""The same in every T5 model. They do not follow from shapes."""

T5_WHOLE: Mapping[str, str] = MappingProxyType(
    {"token_embd.weight": "shared.weight", "enc.output_norm.weight": "encoder.final_layer_norm.weight"}
)
_T5_LAYER = re.compile(r"enc\.blk\.(\d+)\.(\w+)\.weight")
T5_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_q": "layer.0.SelfAttention.q",
        "attn_k": "layer.0.SelfAttention.k",
        "attn_v": "layer.0.SelfAttention.v",
        "attn_o": "layer.0.SelfAttention.o",
        "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
        "attn_norm": "layer.0.layer_norm",
        "ffn_gate": "layer.1.DenseReluDense.wi_0",
        "ffn_up": "layer.1.DenseReluDense.wi_1",
        "ffn_down": "layer.1.DenseReluDense.wo",
        "ffn_norm": "layer.1.layer_norm",
    }
)
"""llama.cpp's name of a part of a layer → transformers'"""


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


def t5_name(name: str, tensors: Mapping[str, GgufTensor], where: str) -> str:
    """Transformers' name of a tensor of T5's encoder."""
    if name in T5_WHOLE:
        return T5_WHOLE[name]
    layer = _T5_LAYER.fullmatch(name)
    if layer is None or layer[2] not in T5_PARTS:
        what = f"tensor {show(name)} does not belong to the encoder of T5, and only encoders are read"
        raise Unsupported(what, where=where, fix="Use the model's original checkpoint, or a GGUF file of its encoder.")
    part = T5_PARTS[layer[2]]
    if layer[2] == "ffn_up" and f"enc.blk.{layer[1]}.ffn_gate.weight" not in tensors:
        part = "layer.1.DenseReluDense.wi"  # T5 1.0 has no gate
    return f"encoder.block.{layer[1]}.{part}.weight"


# ---- UMT5's tokenizer: the keys of a SentencePiece model, and such a model of the keys. ComfyUI's files of UMT5 have the
# model's bytes as the tensor `spiece_model`. In GGUF files, llama.cpp's keys have the same pieces, from which ComfyUI-GGUF
# makes such a tensor again.


SPIECE = "spiece_model"
"""The tensor of ComfyUI's files with the model's bytes."""
SPIECE_FILES = ("spiece.model", "tokenizer.model")
"""What the model is called beside the weights."""
UMT5_TOKENS = 256_384
"""Rows of UMT5's embedding. Other T5 models have ComfyUI's own tokenizer."""

_UNUSED_SCORE = -10_000.0
_IDS = {"eos": "eos", "pad": "padding", "unk": "unknown", "bos": "bos"}
"""Role of a piece → llama.cpp's name of its key."""
_NEEDED = ("eos", "pad")
_KINDS = frozenset(map(int, PieceKind))
_TRAINED = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
"""Role of a piece → the field of the model's TrainerSpec."""
_UNIGRAM, _MODEL_TYPE, _BYTE_FALLBACK = 1, 3, 35
_CHARSMAP, _PREFIX, _SQUEEZE = 2, 3, 4
_NO_PIECE = (1 << 64) - 1
"""-1, as protocol buffers store it."""


def is_umt5(keys: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> bool:
    """Whether a file is UMT5's, whose tokenizer ComfyUI reads from the file of the weights."""
    rows = tensors.get("token_embd.weight")
    return keys["general.architecture"] in TEXT_ENCODERS and rows is not None and rows.shape[:1] == (UMT5_TOKENS,)


def spiece_keys(data: bytes, rows: int, where: str) -> dict[str, Value]:
    """The keys of a SentencePiece model with unigrams, as llama.cpp's converter writes them.

    data  the model
    rows  of the embedding: those without a piece are called `[PAD17]`

    Raises FormatError for damaged bytes, Unsupported for another model.
    """
    try:
        model = read_sentencepiece(data)
    except ValueError as error:
        raise FormatError(
            f"its SentencePiece model cannot be read: {error}", where=where, fix="download the model again"
        ) from error
    lacking = [role for role in _NEEDED if role not in model.roles]
    if model.bpe is not False or len(model.pieces) > rows or lacking:
        what = f"its SentencePiece model has {len(model.pieces):,} pieces for {rows:,} rows"
        what = f"its SentencePiece model has no piece for {lacking[0]}" if lacking else what
        what = "its SentencePiece model has no unigrams" if model.bpe is not False else what
        raise Unsupported(f"{what}, so it is not UMT5's", where=where, fix="use the tokenizer of the model's release")
    missing = rows - len(model.pieces)
    pads = [f"[PAD{number}]" for number in range(len(model.pieces), rows)]
    values = {
        "model": Value("str", "t5"),
        "pre": Value("str", "default"),
        "tokens": Value("str", [piece.text for piece in model.pieces] + pads),
        "scores": Value("f32", [piece.score for piece in model.pieces] + [_UNUSED_SCORE] * missing),
        "token_type": Value("i32", [piece.kind for piece in model.pieces] + [int(PieceKind.UNUSED)] * missing),
        "add_space_prefix": Value("bool", model.prefix),
        "remove_extra_whitespaces": Value("bool", model.squeeze),
        **({"precompiled_charsmap": Value("u8", list(model.charsmap))} if model.charsmap else {}),
        **{f"{name}_token_id": Value("u32", model.roles[role]) for role, name in _IDS.items() if role in model.roles},
        "add_bos_token": Value("bool", False),
        "add_eos_token": Value("bool", True),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def spiece_of_keys(keys: Mapping[str, Any], where: str) -> bytes | None:
    """A SentencePiece model with the pieces of a GGUF file; None if the file has no tokenizer. Raises FormatError."""
    tokens, scores, kinds = (_listed(keys, name) for name in ("tokens", "scores", "token_type"))
    if keys.get("tokenizer.ggml.model") != "t5" or not tokens:
        return None
    numbers = all(isinstance(score, float | int) and math.isfinite(score) and abs(score) < 3e38 for score in scores)
    known = _KINDS.issuperset(kinds)
    if len(tokens) != len(scores) or len(tokens) != len(kinds) or not numbers or not known:
        what = f"{len(tokens):,} tokens, {len(scores):,} scores and {len(kinds):,} types are not a tokenizer"
        raise FormatError(what, where=where, fix=DAMAGED)
    used = max((i + 1 for i, kind in enumerate(kinds) if kind != PieceKind.UNUSED), default=len(tokens))
    pieces = (
        _field(1, _field(1, str(token).encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for token, score, kind in zip(tokens[:used], scores, kinds, strict=False)
    )
    ids = {role: keys.get(f"tokenizer.ggml.{name}_token_id") for role, name in _IDS.items()}
    if wrong := [
        role for role, number in ids.items() if number is not None and not (type(number) is int and 0 <= number < used)
    ]:
        what = f"the number of the {wrong[0]} token is {show(ids[wrong[0]])}, and there are {used:,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    roles = {_TRAINED[role]: _NO_PIECE if number is None else number for role, number in ids.items()}
    trained = {_MODEL_TYPE: _UNIGRAM, _BYTE_FALLBACK: int(PieceKind.BYTE in kinds), **dict(sorted(roles.items()))}
    charsmap = keys.get("tokenizer.ggml.precompiled_charsmap")
    normalised = _field(_CHARSMAP, charsmap.astype(np.uint8).tobytes()) if isinstance(charsmap, np.ndarray) else b""
    for number, name in ((_PREFIX, "add_space_prefix"), (_SQUEEZE, "remove_extra_whitespaces")):
        normalised += _field(number, int(keys.get(f"tokenizer.ggml.{name}", True) is True))
    trainer = b"".join(_field(number, value) for number, value in trained.items())
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalised)


def _listed(keys: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = keys.get(f"tokenizer.ggml.{name}")
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return listed if isinstance(listed, list) else []


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: an integer, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """An integer, seven bits in each byte."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
