"""LoRA adapters in GGUF files, as llama.cpp reads them.

    general.type          adapter
    adapter.type          lora
    adapter.lora.alpha    of all modules; the rank of each is that of its factors, and the scale alpha / rank. 0: the scale is 1
    NAME.lora_a           A [rank, inputs] of the tensor NAME; of the experts of a layer [experts, rank, inputs]
    NAME.lora_b           B [outputs, rank]; of experts [experts, outputs, rank]

Names are llama.cpp's, and so is the order of rows: those of B for q and k of Llama are reordered within each head. The factors
of `token_embd.weight` are [tokens, rank] and [hidden, rank]. llama.cpp skips norms without a word, and knows no norms of DoRA.

llama.cpp's converter does not write the number of heads, which the order of rows depends on. weightsmith does
(`attention.head_count`), and takes it from the base for files that lack it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, MismatchError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.formats.decoded import DecodedTensors, Weight, read_all
from weightsmith._models.formats.gguf.about import card_of_keys
from weightsmith._models.formats.gguf.architectures import architectures, text_config
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues
from weightsmith._models.formats.gguf.header import ADAPTER_TYPE, GgufHeader, GgufTensor, read_gguf_header, text_of
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.reading import MAX_EXPERTS, GgufTensors, StoredBlocks
from weightsmith._models.formats.gguf.writing import from_llama_order
from weightsmith._models.lora.adapter import Adapter, Factors
from weightsmith._models.sources.files import SourceFile, unite
from weightsmith.abc.tensors import Tensors

LORA = "lora"
ALPHA_KEY, TYPE_KEY = "adapter.lora.alpha", "adapter.type"
EMBEDDING = "token_embd.weight"
A_ENDING, B_ENDING = ".lora_a", ".lora_b"
_BASE_URL, _BASE_NAME = "general.base_model.0.repo_url", "general.base_model.0.name"
_HUB = "https://huggingface.co/"
_ALORA = "adapter.alora.invocation_tokens"
_MERGE = "merge it into the model with llama.cpp's llama-export-lora"
_HEADS = ("attention.head_count", "attention.head_count_kv")


def open_gguf_adapter(ref: str, path: Path) -> Adapter:
    """Open an adapter, as one of PEFT's folders. Reads its header.

    Raises FormatError for bytes that break the format and factors that do not fit, Unsupported for kinds of adapters and
    architectures that are not read.
    """
    header, where = read_gguf_header(path), str(path)
    keys = header.keys
    _check_kind(keys, where)
    architecture = _architecture(header, where)
    if architecture.multipliers:
        what = f"an adapter of {show(architecture.name)}: its factors are multiplied by numbers of the base's config.json"
        raise Unsupported(what, where=where, fix=f"use the adapter that it was made of, or {_MERGE}")
    stored: list[StoredBlocks] = []
    moved: list[MovedFactor] = []
    updates: dict[str, Factors] = {}
    turned: dict[str, str] = {}
    alpha = _alpha(keys, where)
    heads = _heads(GgufValues(keys, where, DAMAGED, f"{architecture.name}."))
    for name, (a, b) in _pairs(header, where).items():
        hub_name = architecture.hub_name(name)
        split = architecture.part_of(name) is not None or architecture.order(name, GgufConfig({})) is not None
        if hub_name is None or split or not name.endswith(".weight"):
            what = (
                f"factors of {show(name)}, which the Hub stores otherwise" if hub_name or split else f"factors of {show(name)}"
            )
            what += f", in an adapter of {show(architecture.name)}"
            raise Unsupported(what, where=where, fix=f"use the adapter that it was made of, or {_MERGE}")
        for module, one_a, one_b in _of_modules(hub_name.removesuffix(".weight"), a, b, where):
            embedding = name == EMBEDDING
            rank = _rank(one_a, one_b, embedding=embedding, where=where)
            inner = "lora_embedding_{}" if embedding else "lora_{}.weight"
            names = {part: f"{module}.{inner.format(part)}" for part in "AB"}
            for part, tensor in (("A", one_a), ("B", one_b)):
                dtype = DTYPES["F32"] if tensor.dtype.block > 1 else tensor.dtype
                reordered = part == "B" and architecture.rotated_heads(name, 1, 1)
                spec = TensorSpec(names[part], dtype, tensor.shape)
                stored.append(StoredBlocks(spec, path, tensor.offset, tensor.dtype))
                if embedding and part == "A":
                    turned_spec = TensorSpec(spec.name, DTYPES["F32"], spec.shape[::-1])
                    moved.append(MovedFactor(turned_spec, (spec.name,), dtype, transposed=True))
                elif reordered and heads:
                    moved.append(_in_order(spec, architecture.rotated_heads(name, *heads), where))
                elif reordered:
                    turned[names[part]] = name.split(".")[-2]
            updates[module] = Factors(names["A"], names["B"], embedding, alpha / rank if alpha else 1.0)
    dtypes = {tensor.dtype.name for tensor in header.tensors}
    natural = DTYPES[next(iter(dtypes)) if len(dtypes) == 1 and dtypes < {"F32", "F16", "BF16"} else "F32"]
    source: Tensors = GgufTensors(unite([stored], path.parent), [SourceFile(path, header.state, header.digest)], where, natural)
    if moved:
        source = DecodedTensors(source, moved, (), where)
    ordered = heads if any(weight.head_rows for weight in moved) else None
    config = {"base_model_name_or_path": base} if (base := _base(keys)) else {}
    checkpoint = Checkpoint(ref, source, ModelFolder(path.parent, config=config, said=card_of_keys(keys)))
    return Adapter(checkpoint, updates, turned=turned, heads=ordered)


def _check_kind(keys: Mapping[str, Any], where: str) -> None:
    """Raise Unsupported for other adapters than LoRAs."""
    if text_of(keys.get("general.type")) != ADAPTER_TYPE or text_of(keys.get(TYPE_KEY)) != LORA:
        what = (
            f"general.type is {show(keys.get('general.type'))} and {TYPE_KEY} {show(keys.get(TYPE_KEY))}, not adapter and lora"
        )
        raise Unsupported(
            what, where=where, fix="name a LoRA that llama.cpp's convert_lora_to_gguf.py or weightsmith has written"
        )
    if _ALORA in keys:
        what = "an activated LoRA, which is on for some tokens only"
        raise Unsupported(what, where=where, fix="use it with llama.cpp: it cannot be merged")


def check_heads(adapter: Adapter, config: Mapping[str, Any] | None) -> None:
    """Raise MismatchError if the file states other numbers of heads than its base. config: config.json of the base."""
    if adapter.heads is None or config is None:
        return
    of_text = GgufConfig(text_config(config))
    if of_text.get("num_attention_heads") is None:
        return
    number = of_text.count("num_attention_heads")
    heads, of_base = adapter.heads, (number, of_text.count("num_key_value_heads", number))
    if of_base != heads:
        what = f"it is for {heads[0]} heads of q and {heads[1]} of k, and the base has {of_base[0]} and {of_base[1]}"
        raise MismatchError(what, where=adapter.checkpoint.ref, fix="name the base that the adapter was trained on")


def in_hub_order(adapter: Adapter, config: Mapping[str, Any] | None) -> Adapter:
    """The adapter with the rows of q and k in the Hub's order; itself if they are. config: config.json of its base.

    Raises Unsupported without a config, FormatError for a number of heads that does not fit, and as `check_heads`. Closing it
    closes the adapter.
    """
    check_heads(adapter, config)
    if not adapter.turned:
        return adapter
    checkpoint = adapter.checkpoint
    if config is None:
        what = "its rows of q and k are in llama.cpp's order, which depends on the number of heads, and no config.json says it"
        raise Unsupported(what, where=checkpoint.ref, fix="name a base that has a config.json")
    of_text = GgufConfig(text_config(config))
    number = of_text.count("num_attention_heads")
    heads = {"attn_q": number, "attn_k": of_text.count("num_key_value_heads", number)}
    weights = [_in_order(checkpoint.specs[name], heads[module], checkpoint.ref) for name, module in adapter.turned.items()]
    source = DecodedTensors(checkpoint.source, weights, (), checkpoint.ref)
    folder = ModelFolder.like(checkpoint)
    return replace(adapter, checkpoint=Checkpoint(checkpoint.ref, source, folder, notes=checkpoint.notes), turned={})


@dataclass(frozen=True, slots=True)
class MovedFactor(Weight):
    """A factor that the file has transposed, or with the rows of each head in llama.cpp's order."""

    transposed: bool = False
    head_rows: int = 0

    @property
    def preferred_rows(self) -> int:
        return self.spec.shape[0] if self.transposed else self.head_rows

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        cols = self.spec.shape[1]
        if self.transposed:
            whole = read_all(stored, self.stored[0]).astype(np.float32).reshape(cols, -1).T
            values[:] = whole.reshape(-1)[first : first + values.size]
            return
        unit = cols * self.head_rows
        start, end = first // unit * unit, -(-(first + values.size) // unit) * unit
        whole = from_llama_order(read_all(stored, self.stored[0], start, end).astype(np.float32), self.head_rows, cols)
        values[:] = whole[first - start : first - start + values.size]


def _in_order(spec: TensorSpec, heads: int, where: str) -> MovedFactor:
    rows = spec.shape[0]
    if rows % (2 * heads):
        what = f"{show(spec.name)} has {rows:,} rows for {heads:,} heads"
        raise FormatError(what, where=where, fix="name the base that the adapter was trained on")
    return MovedFactor(replace(spec, dtype=DTYPES["F32"]), (spec.name,), spec.dtype, head_rows=rows // heads)


def _architecture(header: GgufHeader, where: str) -> GgufArchitecture:
    """The first architecture of this name that has all tensors."""
    name = header.keys.get("general.architecture")
    alike = [candidate for candidate in architectures() if candidate.name == name]
    if not alike:
        known = ", ".join(dict.fromkeys(candidate.name for candidate in architectures()))
        what = f"an adapter of the architecture {show(name)}"
        raise Unsupported(what, where=where, fix=f"use the adapter that it was made of; adapters of these are read: {known}")
    tensors = {re.sub(r"\.lora_[ab]$", "", tensor.name) for tensor in header.tensors}
    return max(alike, key=lambda candidate: sum(candidate.hub_name(tensor) is not None for tensor in tensors))


def _pairs(header: GgufHeader, where: str) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    """llama.cpp's name of a tensor → its factors."""
    parts: dict[str, dict[str, GgufTensor]] = {}
    for tensor in header.tensors:
        name, ending = tensor.name[: -len(A_ENDING)], tensor.name[-len(A_ENDING) :]
        if ending not in (A_ENDING, B_ENDING) or not name:
            what = f"{show(tensor.name)} is no factor of a LoRA, and llama.cpp leaves it out"
            raise Unsupported(what, where=where, fix="use the adapter that it was made of")
        parts.setdefault(name, {})[ending] = tensor
    if not parts:
        raise FormatError("an adapter without tensors", where=where, fix=DAMAGED)
    if alone := [name for name, pair in parts.items() if len(pair) < 2]:
        what = f"{show(alone[0])} has an {next(iter(parts[alone[0]]))[1:]} alone"
        raise FormatError(what, where=where, fix=DAMAGED)
    return {name: (pair[A_ENDING], pair[B_ENDING]) for name, pair in sorted(parts.items())}


def _of_modules(module: str, a: GgufTensor, b: GgufTensor, where: str) -> Iterator[tuple[str, GgufTensor, GgufTensor]]:
    """The factors of a module; of the experts of a layer, those of each."""
    if "{}" not in module:
        yield module, a, b
        return
    if not len(a.shape) == len(b.shape) == 3 or a.shape[0] != b.shape[0] or a.shape[0] > MAX_EXPERTS:
        what = f"factors of experts have the shapes {list(a.shape)} and {list(b.shape)}"
        raise FormatError(what, where=f"{where}: {a.name}", fix=DAMAGED)
    for expert in range(a.shape[0]):
        yield module.format(expert), _matrix(a, expert), _matrix(b, expert)


def _matrix(tensor: GgufTensor, expert: int) -> GgufTensor:
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)


def _rank(a: GgufTensor, b: GgufTensor, *, embedding: bool, where: str) -> int:
    ranks = {a.shape[1 if embedding else 0], b.shape[-1]} if len(a.shape) == len(b.shape) == 2 else set()
    if len(ranks) != 1 or not all(tensor.dtype.floating or tensor.dtype.block > 1 for tensor in (a, b)):
        what = (
            f"{show(a.name)} is {list(a.shape)} {a.dtype}, and {show(b.name)} {list(b.shape)} {b.dtype}: no factors of a matrix"
        )
        raise FormatError(what, where=where, fix=DAMAGED)
    return ranks.pop()


def _alpha(keys: Mapping[str, Any], where: str) -> float:
    alpha = keys.get(ALPHA_KEY, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise FormatError(f"{ALPHA_KEY} is {show(alpha)}, not a finite number", where=where, fix=DAMAGED)
    return float(alpha)


def _heads(values: GgufValues) -> tuple[int, int] | None:
    """The numbers of heads of q and of k; None if the file does not say them."""
    if _HEADS[0] not in values:
        return None
    number = values.count(_HEADS[0])
    return number, values.count(_HEADS[1], number)


def _base(keys: Mapping[str, Any]) -> str:
    url, name = keys.get(_BASE_URL), keys.get(_BASE_NAME)
    if isinstance(url, str) and url.startswith(_HUB) and re.fullmatch(r"[\w.-]+/[\w.-]+", url.removeprefix(_HUB), re.ASCII):
        return url.removeprefix(_HUB)
    return name if isinstance(name, str) else ""


def adapter_keys(architecture: GgufArchitecture, config: Mapping[str, Any], alpha: float, base: str) -> dict[str, Value]:
    """The keys of an adapter. config: of the language model; base: its name, or Hub id."""
    keys = {"general.architecture": Value("str", architecture.name), "general.type": Value("str", ADAPTER_TYPE)}
    keys[TYPE_KEY] = Value("str", LORA)
    keys[ALPHA_KEY] = Value("f32", alpha)
    if base:
        organization, _, name = base.rpartition("/")
        keys["general.base_model.count"] = Value("u32", 1)
        keys[_BASE_NAME] = Value("str", name)
        if organization:
            keys["general.base_model.0.organization"] = Value("str", organization)
            keys[_BASE_URL] = Value("str", f"{_HUB}{base}")
    if architecture.rotated:
        of_text = GgufConfig(config)
        number = of_text.count("num_attention_heads")
        for key, heads in zip(_HEADS, (number, of_text.count("num_key_value_heads", number)), strict=True):
            keys[f"{architecture.name}.{key}"] = Value("u32", heads)
    return keys
