"""GGUF files written by the package gguf, an implementation of the format that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import libgguf
import numpy as np

from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.layout import TYPE_IDS
from weightsmith._models.formats.gguf.reading import open_files

BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *BYTES,
    "\u2581",
    "a",
    "b",
    "c",
    "\u2581a",
    "ab",
    "\u2581ab",
    "\u2581\u2581",
    "<|x|>",
    "<think>",
]
PIECE_TYPES = [2, 3, 3, *[6] * 256, *[1] * 8, 3, 4]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(8)] + [-1000.0, -1000.0],
    "tokenizer.ggml.token_type": PIECE_TYPES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
MERGES = ["\u0120 a", "a b", "\u0120a b", "1 2"]
LETTERS = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*LETTERS, "\u0120a", "ab", "\u0120ab", "12", "<|im_end|>", "<think>"],
    "tokenizer.ggml.token_type": [*[1] * 260, 3, 4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 260,
    "tokenizer.chat_template": "{{ messages }}",
}
SIZES: dict[str, Any] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
}


def tokenizer_files(keys: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer that a GGUF file with these keys has."""
    tokens = len(keys["tokenizer.ggml.tokens"])
    sizes = dict.fromkeys(("block_count", "context_length", "embedding_length", "feed_forward_length"), 1)
    sizes |= {"attention.head_count": 1, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    with TemporaryDirectory() as folder:
        tensors = {"token_embd.weight": (np.ones((tokens, 2)), "F32")}
        opened = open_files([write_gguf(Path(folder, "t.gguf"), "llama", tensors, {**sizes, **keys})], None, "t")
        opened.source.close()
        return {name: content for name, content in opened.files.items() if name.startswith("tokenizer")}


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, tuple[np.ndarray, str]],
    keys: Mapping[str, Any],
    part: tuple[int, int] = (0, 1),
) -> Path:
    """A GGUF file with these keys (sizes without the architecture in front) and tensors: values, or bytes, and their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if part[1] > 1:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    for name, (values, kind) in tensors.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType(TYPE_IDS[kind]))
        elif kind == "F32":
            writer.add_tensor(name, values.astype(np.float32))
        else:
            number = gguf.GGMLQuantizationType(TYPE_IDS[kind])
            data = libgguf.quantize_rows(values.astype(np.float32), int(number))
            writer.add_tensor(name, np.ascontiguousarray(data).view(np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(values: np.ndarray, kind: str) -> np.ndarray:
    """What a reader makes of values that were stored as a type."""
    if kind == "F32":
        return values.astype(np.float32)
    stored = libgguf.quantize_rows(values.astype(np.float32), TYPE_IDS[kind])
    if kind == "F16":
        return np.asarray(stored, np.float16)
    return np.asarray(libgguf.dequantize_rows(stored.view(np.uint8), TYPE_IDS[kind], values.shape[-1]))


def llama(seed: int = 0, kind: str = "Q8_0", vocabulary: int = len(PIECES)) -> dict[str, tuple[np.ndarray, str]]:
    """The tensors of a tiny Llama, under llama.cpp's names."""
    rng = np.random.default_rng(seed)

    def weight(rows: int, cols: int, kind: str = kind) -> tuple[np.ndarray, str]:
        return rng.standard_normal((rows, cols)).astype(np.float32) * 0.1, kind

    tensors = {"token_embd.weight": weight(vocabulary, 64), "output_norm.weight": (rng.standard_normal(64), "F32")}
    tensors |= {
        "blk.0.attn_norm.weight": (rng.standard_normal(64), "F32"),
        "blk.0.ffn_norm.weight": (rng.standard_normal(64), "F32"),
        "blk.0.attn_q.weight": weight(64, 64),
        "blk.0.attn_k.weight": weight(32, 64),
        "blk.0.attn_v.weight": weight(32, 64, "F16"),
        "blk.0.attn_output.weight": weight(64, 64, "Q4_0"),
        "blk.0.ffn_gate.weight": weight(96, 64),
        "blk.0.ffn_up.weight": weight(96, 64),
        "blk.0.ffn_down.weight": weight(64, 96),
    }
    return tensors


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of each tensor."""
    data = path.read_bytes()
    return {t.name: (t.dtype.name, t.shape, data[t.offset : t.offset + t.nbytes]) for t in read_gguf_header(path).tensors}


ORIGIN = ("general.name", "general.base_model", "general.tags", "general.license", "GGUF.")


def computed(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, Any]]:
    """The tensors, and the keys that do not say what the model is made from."""
    fields = gguf.GGUFReader(path).fields
    return stored(path), {name: field.contents() for name, field in fields.items() if not name.startswith(ORIGIN)}
