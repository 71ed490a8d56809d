"""A model with a LoRA adapter applied: W + scaling · B @ A, computed for the bytes that are asked for, when they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith.checkpoint import Checkpoint
from weightsmith.errors import Finding, ShapeError, nearest
from weightsmith.formats.hf_folder import natural_key
from weightsmith.formats.safetensors import StoredTensor
from weightsmith.lora.adapter import Adapter, Factors
from weightsmith.tensors import DTYPES, DType, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

_EMBEDDINGS, _HEADS = ("embed_tokens", "wte", "embed_in"), ("lm_head", "embed_out")
_FUSED = {part: "qkv_proj" for part in ("q_proj", "k_proj", "v_proj")} | {p: "gate_up_proj" for p in ("gate_proj", "up_proj")}
_SHOWN = 8  # problems that a message lists

Shape = tuple[int, ...]


class Applied(Checkpoint):
    """A base model with an adapter; like any other checkpoint to those that read it.

    Tensors that the adapter changes are F32 (F64 where the base's are): base and update, rounded once, so that
    a merge sees the update as it was trained and not what is left of it in 16 bits. `kept_as` gives the base's own dtype.
    config, files and folder are the base's.

    Where embedding and head are one tensor and the adapter changes one of them, the head becomes a tensor of its own, as it was
    while the adapter was trained.

    Raises ShapeError with everything in the adapter that the base has no place for.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, ref: str) -> None:
        self.base, self.adapter = base, adapter
        own = adapter.checkpoint
        self.ref, self.folder = ref, base.folder
        self.revision = f"{base.revision}+{own.revision}" if own.revision else base.revision
        self.config: dict[str, Any] | None = base.config
        self.files, self.ignored, self.weights, self.metadata = base.files, base.ignored, base.weights, base.metadata
        self.quantised = base.quantised
        self._origin = dict.fromkeys(base.tensors, "")  # tensor → the base's that it stands for, "": its own
        self._updates: dict[str, Factors] = {}
        self._replaced: dict[str, str] = {}
        self._factors: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]] = {}
        self._lock = threading.Lock()
        notes: list[Finding] = []
        self._match(notes)
        self.tensors = {name: self._stored(name) for name in sorted(self._origin, key=natural_key)}
        self.nbytes = sum(t.spec.nbytes for t in self.tensors.values())
        digest = json.dumps(own.config, sort_keys=True)
        self.header_hash = xxhash.xxh3_128_hexdigest("\n".join((base.header_hash, own.header_hash, digest)).encode())
        self.state_hash = xxhash.xxh3_128_hexdigest("\n".join((base.state_hash, own.state_hash, digest)).encode())
        if other := [name for name in adapter.tokenizer if not _same(own.folder / name, base.folder / name)]:
            fix = "if the adapter was trained with it, copy it into the output"
            what = f"tokenizer files beside the adapter differ from the base's, and are not used: {', '.join(other)}"
            notes.append(Finding(what, ref, fix=fix))
        self.notes = (*base.notes, *notes)

    @property
    def folders(self) -> tuple[Path, ...]:
        return (*self.base.folders, *self.adapter.checkpoint.folders)

    def kept_as(self, name: str) -> DType:
        origin = self._origin[self._tensor(name).spec.name] or name
        return self.base.kept_as(origin) if origin in self.base.tensors else self.tensors[name].spec.dtype

    def location(self, name: str) -> tuple[int, int]:
        """As of any checkpoint; (-1, 0) for a tensor that is in no file."""
        self._tensor(name)
        if name in self._updates:
            return -1, 0
        if name in self._replaced:
            return self.adapter.checkpoint.location(self._replaced[name])
        return self.base.location(self._origin[name] or name)

    def read_into(self, name: str, start_byte: int, buffer: memoryview | npt.NDArray[np.uint8]) -> None:
        spec = self._tensor(name).spec
        if name not in self._updates:
            self._source(name)(start_byte, buffer)
            return
        from weightsmith.kernels.codecs import BLOCK
        from weightsmith.kernels.lora import add_low_rank

        out = np.frombuffer(buffer, np.uint8)
        width = spec.dtype.itemsize
        first, end = start_byte // width, -(-(start_byte + out.size) // width)
        stored = self._source_dtype(name)
        raw = np.empty((end - first) * stored.itemsize, np.uint8)
        self._source(name)(first * stored.itemsize, raw)
        left, right = self._factors_of(name)
        values = np.empty(end - first, spec.dtype.numpy)
        row, total = np.empty(BLOCK, spec.dtype.numpy), np.empty(BLOCK)
        add_low_rank(raw, stored.code, first, values.size, left, right, self._updates[name].scaling, values, row, total)
        out[:] = values.view(np.uint8)[start_byte - first * width :][: out.size]

    def close(self) -> None:
        self.base.close()
        self.adapter.checkpoint.close()

    # --- what the adapter changes --------------------------------------------------------------------------------------------

    def _match(self, notes: list[Finding]) -> None:
        """Find the base's tensor for everything in the adapter."""
        adapter, problems = self.adapter, []
        rename = self._renaming([*(f"{m}.weight" for m in adapter.updates), *adapter.replacements])
        tied = self._tied_embedding()
        for stored_name, source in adapter.replacements.items():
            name = rename(stored_name)
            if name in self._origin or (tied and _module(name) in _HEADS):
                self._origin[name] = "" if name in self._origin else tied
                self._replaced[name] = source
                problem = self._replacement_problem(name)
            else:
                problem = self._no_place(name)
            if problem:
                problems.append(problem)
        for module, factors in adapter.updates.items():
            name = rename(f"{module}.weight")
            if name not in self._origin and tied and _module(name) in _HEADS:
                self._origin[name] = tied
            problem = self._shape_problem(name, factors) if name in self._origin else self._no_place(name)
            if problem:
                problems.append(problem)
            self._updates[name] = factors
        problems += self._check_rows() if not problems else []
        if problems:
            shown = [*problems[:_SHOWN], *([f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])]
            what = f"the adapter does not fit {self.base.ref}: {len(problems)} of its targets have no place there"
            fix = "name the base model that the adapter was trained on; its adapter_config.json says "
            fix += repr((adapter.checkpoint.config or {}).get("base_model_name_or_path"))
            raise ShapeError(what, where=adapter.checkpoint.ref, details=shown, fix=fix)
        if tied:
            self._untie(tied, notes)

    def _renaming(self, targets: Iterable[str]) -> Callable[[str], str]:
        """From the adapter's names to the base's, which may begin with other modules (`model.`, `language_model.model.`).

        Only a way that no other way does as well as: `layers.0` of a language model is not to be taken for a vision tower's.
        """
        names, tensors = list(targets), self.base.tensors
        parts = [name.split(".") for name in tensors]
        beginnings = dict.fromkeys(".".join(p[:k]) + "." for k in (1, 2) for p in parts if len(p) > k)
        ways = {(drop, b): [b + name.split(".", drop)[-1] for name in names] for drop in (0, 1, 2) for b in ("", *beginnings)}
        fits = {way: sum(name in tensors for name in found) for way, found in ways.items()}
        best = [way for way, n in fits.items() if n == max(fits.values())]
        if (0, "") in best or len({tuple(ways[way]) for way in best}) > 1:
            return lambda name: name
        drop, beginning = best[0]
        return lambda name: beginning + name.split(".", drop)[-1]

    def _no_place(self, name: str) -> str:
        parts = name.split(".")
        fused = ".".join([*parts[:-2], _FUSED.get(_module(name), ""), parts[-1]])
        if fused in self.base.tensors:
            return f"{name}: the base keeps it inside {fused}, and an adapter for the parts cannot be applied to the whole"
        return f"{name}: the base has no such tensor{nearest(name, self.base.tensors)}"

    def _replacement_problem(self, name: str) -> str:
        own = self.adapter.checkpoint.tensors[self._replaced[name]].spec
        base = self.base.tensors[name].spec if name in self.base.tensors else own
        grown = _module(name) in (*_EMBEDDINGS, *_HEADS) and own.shape[1:] == base.shape[1:] and len(own.shape) > 0
        if own.shape != base.shape and not grown:
            return f"{name}: {list(base.shape)} in the base, and {list(own.shape)} is to take its place"
        if own.dtype.floating != base.dtype.floating:
            return f"{name}: {base.dtype} in the base, and {own.dtype} is to take its place"
        return ""

    def _check_rows(self) -> list[str]:
        """Tokens that the adapter adds must be in embedding and head alike; config.json says how many there are then."""
        vocabulary = [name for name in self._origin if _module(name) in (*_EMBEDDINGS, *_HEADS)]
        rows = {name: self._source_spec(name).shape[0] for name in vocabulary}
        grown = {
            self.base.tensors[n].spec.shape[0]: rows[n] for n in vocabulary if n in self._replaced and n in self.base.tensors
        }
        grown = {old: new for old, new in grown.items() if old != new}
        if grown and len(set(rows.values())) > 1:
            return [f"{name}: would have {n} rows, and embedding and head need as many" for name, n in rows.items()]
        for old, new in grown.items():
            self.config = _resized(self.config, old, new)
        return []

    def _shape_problem(self, name: str, factors: Factors) -> str:
        spec = self._source_spec(name)
        a, b = self._shapes(factors)
        if not spec.dtype.floating or spec.shape not in ((b[0], a[1]), (a[1], b[0])):
            return f"{name}: {list(spec.shape)} {spec.dtype} in the base, and the adapter is for {[b[0], a[1]]}"
        return ""

    def _shapes(self, factors: Factors) -> tuple[Shape, Shape]:
        tensors = self.adapter.checkpoint.tensors
        return tensors[factors.a].spec.shape, tensors[factors.b].spec.shape

    def _tied_embedding(self) -> str:
        """The base's embedding where it is also the head, and no file holds a head; else ""."""
        config = self.base.config or {}
        architectures = config.get("architectures")
        causal = isinstance(architectures, list) and any("CausalLM" in str(name) for name in architectures)
        if config.get("tie_word_embeddings", True) is False or not causal:
            return ""
        if any(_module(name) in _HEADS for name in self.base.tensors):
            return ""
        return next((name for name in self.base.tensors if _module(name) in _EMBEDDINGS), "")

    def _untie(self, embedding: str, notes: list[Finding]) -> None:
        """Give the head numbers of its own, where the adapter changes it or the embedding alone."""
        heads = [name for name in self._origin if _module(name) in _HEADS]
        changed = embedding in self._updates or embedding in self._replaced
        if not heads and changed and self._source_spec(embedding).shape == self.base.tensors[embedding].spec.shape:
            heads = ["lm_head.weight"]
            self._origin[heads[0]] = embedding
        if heads:
            self.config = {**(self.config or {}), "tie_word_embeddings": False}
            what = f"the adapter was trained on the {'embedding' if changed else 'head'}, which the base ties to its "
            what += f"{'head' if changed else 'embedding'}: they are two tensors now"
            notes.append(Finding(what, self.ref, fix="peft's merge_and_unload would change both at once"))

    # --- tensors -------------------------------------------------------------------------------------------------------------

    def _source_spec(self, name: str) -> TensorSpec:
        """What a tensor starts from, before the update."""
        if name in self._replaced:
            return self.adapter.checkpoint.tensors[self._replaced[name]].spec
        return self.base.tensors[self._origin[name] or name].spec

    def _source_dtype(self, name: str) -> DType:
        return self._source_spec(name).dtype

    def _source(self, name: str) -> Callable[[int, memoryview | npt.NDArray[np.uint8]], None]:
        """Reads the bytes that a tensor starts from."""
        if name in self._replaced:
            return lambda start, buffer: self.adapter.checkpoint.read_into(self._replaced[name], start, buffer)
        return lambda start, buffer: self.base.read_into(self._origin[name] or name, start, buffer)

    def _stored(self, name: str) -> StoredTensor:
        if name in self._replaced:
            found = self.adapter.checkpoint.tensors[self._replaced[name]]
        else:
            found = self.base.tensors[self._origin[name] or name]
        spec = found.spec
        dtype = spec.dtype
        if name in self._updates and dtype.name != "F64":
            dtype = DTYPES["F32"]
        return replace(found, spec=TensorSpec(name, dtype, spec.shape))

    def _factors_of(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        """left [rows, rank] and right [rank, cols] of the update of a tensor [rows, cols]; read once and kept."""
        with self._lock:
            if name not in self._factors:
                factors = self._updates[name]
                a = self.adapter.checkpoint.read(factors.a).astype(np.float32)
                b = self.adapter.checkpoint.read(factors.b).astype(np.float32)
                if self._transposed(factors, self.tensors[name].spec.shape):
                    a, b = b.T, a.T
                self._factors[name] = np.ascontiguousarray(b, np.float64), np.ascontiguousarray(a)
            return self._factors[name]

    def _transposed(self, factors: Factors, shape: Shape) -> bool:
        """The weight is (B @ A)ᵀ: an embedding, or one of GPT-2's. The shape says so, and of a square one the config."""
        a, b = self._shapes(factors)
        if b[0] == a[1]:
            return factors.embedding or self.adapter.transposed
        return shape == (a[1], b[0])


def _resized(config: Any, old: int, new: int) -> Any:
    """A config whose vocabularies of `old` tokens have `new` ones."""
    if not isinstance(config, dict):
        return config
    return {key: new if key == "vocab_size" and value == old else _resized(value, old, new) for key, value in config.items()}


def _module(name: str) -> str:
    """The last module of a weight's name; "" of what is no weight."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "weight" else ""


def _same(a: Path, b: Path) -> bool:
    """Two files hold the same bytes."""
    try:
        return a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()
    except OSError:
        return False
