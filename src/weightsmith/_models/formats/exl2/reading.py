"""EXL2 weights: each read decodes the output features that it needs, as the loader does. All values are exact in float16.

Names are ExLlamaV2's: those of the Hugging Face model, but for Phi-3, whose projections are joined again. A head that was tied
is a matrix of its own in the file, and the loader uses it, so the plain model is untied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import DAMAGED_CHECKPOINT, damaged
from weightsmith._models.formats.decoded import (
    F32,
    QuantisedModel,
    Weight,
    bands,
    join_projections,
    read_all,
    read_columns,
    transposed_rows,
)
from weightsmith._models.formats.exl2.layout import (
    GEMMA3_PREFIX,
    ROWS,
    SUFFIXES,
    padded,
    scale_values,
    text_config,
    unpack_codes,
    why_illegal,
)
from weightsmith._models.formats.hessians import Group, Groups
from weightsmith.abc.stored import Config, Specs, Wrapped
from weightsmith.abc.tensors import Tensors

if TYPE_CHECKING:
    pass

_HEAD, _EMBEDDING = "lm_head", "embed_tokens.weight"
"""ExLlamaV2's names, which may have a prefix."""

_DERIVED = ("q_perm", "q_group_map")
"""Tensors that the loader computes from others, in case a file has them."""

_PARTS = tuple(f".{suffix}" for suffix in (*SUFFIXES, *_DERIVED))


@dataclass(frozen=True, slots=True)
class Parameters:
    """What all columns of a matrix share.

    groups  bits and rows
    order   int64 [K]: the input feature of each row of codes
    tops    float16 [G]: the largest scale of each group
    """

    groups: Groups
    order: npt.NDArray[np.int64]
    tops: npt.NDArray[np.float16]


def read_parameters(
    q_groups: npt.NDArray[np.int16],
    q_scale_max: npt.NDArray[np.float16],
    q_invperm: npt.NDArray[np.int32],
    rows: int,
    where: str = "",
) -> Parameters:
    """Check and interpret a matrix's small tensors.

    rows   of q_weight
    where  the module, for messages

    Raises FormatError: groups that the loader would misread, or that do not fit q_weight; a q_invperm that is no permutation.
    """

    def refuse(what: str) -> FormatError:
        return damaged(f"not a matrix of EXL2: {what}", where)

    bits, starts = q_groups[::2].tolist(), q_groups[1::2].astype(np.uint16).tolist()
    if not bits or len(bits) != len(starts) or len(q_scale_max) != len(bits):
        raise refuse(f"q_groups has {len(q_groups)} numbers, two for each group, and q_scale_max has {len(q_scale_max)}")
    groups = []
    for number, (b, start, end) in enumerate(zip(bits, starts, [*starts[1:], rows], strict=True)):
        if b <= 0 or end <= start or (end - start) * 32 % b:
            raise refuse(f"group {number} has rows {start:,} to {end:,} of q_weight, and {b} bits")
        groups.append(Group(b, (end - start) * 32 // b))
    k = len(q_invperm)
    if why := why_illegal(groups, k):
        raise refuse(why)
    if starts[0]:
        raise refuse(f"its groups begin at row {starts[0]:,} of q_weight")
    inverse = q_invperm.astype(np.int64)
    if inverse.min() < 0 or inverse.max() >= k or (np.bincount(inverse, minlength=k) != 1).any():
        raise refuse(f"q_invperm is not a permutation of {k:,} input features")
    order = np.empty(k, np.int64)
    order[inverse] = np.arange(k)
    if not np.isfinite(q_scale_max).all():
        raise refuse("q_scale_max contains NaN or infinity")
    return Parameters(tuple(groups), order, q_scale_max)


def decode_columns(q_weight: npt.NDArray[Any], q_scale: npt.NDArray[Any], parameters: Parameters) -> npt.NDArray[np.float16]:
    """The weights of some output features as the loader computes them: float16 [n, K].

    q_weight  int32 [R, n]: their columns
    q_scale   int32 [G, n / 8]: the words that hold their scale codes; n is a multiple of 8
    """
    from weightsmith._kernels.exl2 import dequantise
    from weightsmith._kernels.jit import writable

    n = q_weight.shape[1]
    assert n % 8 == 0
    assert q_scale.shape == (len(parameters.groups), n // 8)
    scales = scale_values(parameters.tops, unpack_codes(q_scale))
    out = np.empty((n, 2 * len(parameters.order)), np.uint8)
    bits, rows = (np.array([group[i] for group in parameters.groups], np.int64) for i in (0, 1))
    words = writable(np.ascontiguousarray(q_weight)).view(np.uint32)
    dequantise(words, bits, rows, scales, parameters.order, out)
    return out.view(np.float16)


@dataclass(frozen=True, slots=True)
class Module:
    """A stored matrix: its name without a suffix, and the rows of the weight that it holds (without padding)."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Exl2Weight(Weight):
    """One weight. module: the matrix that holds it."""

    module: Module

    @property
    def preferred_rows(self) -> int:
        return transposed_rows(*self.spec.shape)

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        _decode(stored, self.module, first, values, self.spec.shape[1])


def _decode(stored: Tensors, module: Module, first: int, values: npt.NDArray[np.float32], k: int) -> None:
    """values = elements first … of one stored matrix [outputs, k]."""
    packed, cols = stored.specs[f"{module.name}.q_weight"].shape
    tops, groups, inverse = (read_all(stored, f"{module.name}.{suffix}") for suffix in SUFFIXES[2:])
    parameters = read_parameters(groups, tops, inverse, packed, module.name)
    for top, bottom, skip, part in bands(first, values, k, transposed_rows(cols, k), 8):
        columns = slice(top, bottom)
        words = read_columns(stored, f"{module.name}.q_weight", cols, slice(0, packed), columns)
        scales = read_columns(
            stored, f"{module.name}.q_scale", cols // 8, slice(0, len(parameters.groups)), slice(top // 8, bottom // 8)
        )
        part[:] = decode_columns(words, scales, parameters).reshape(-1)[skip:][: part.size]


def recognises(config: Config, specs: Specs) -> bool:
    return any(name.endswith(".q_groups") for name in specs)


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    prefix = ""
    if (text := text_config(config, stored.specs)) is not None:
        prefix, config = GEMMA3_PREFIX, text
    model = QuantisedModel(stored, config, where)
    modules = {name: _module(model, name) for name in model.modules(".q_weight")}
    weights: list[Weight] = []
    for name, (module, k) in modules.items():
        spec = TensorSpec(f"{name}.weight".removeprefix(prefix), F32, (module.outputs, k))
        weights.append(Exl2Weight(spec, tuple(f"{name}.{suffix}" for suffix in SUFFIXES), DTYPES["F16"], module))
    if config.get("architectures") == ["Phi3ForCausalLM"]:
        weights = join_projections(weights)
    derived = [name for name in stored.specs if name.endswith(_DERIVED) and name.rpartition(".")[0] in modules]
    wrapped = model.decoded(weights, "EXL2", _PARTS, derived, prefix)
    plain = dict(wrapped.config or {})
    if any(_is_head(name) for name in modules):
        plain["tie_word_embeddings"] = False
        if isinstance(text := plain.get("text_config"), Mapping):
            plain["text_config"] = {**text, "tie_word_embeddings": False}
    return Wrapped(wrapped.source, plain, wrapped.notes)


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == _HEAD


def _module(model: QuantisedModel, name: str) -> tuple[Module, int]:
    """A stored matrix and its input features. Raises FormatError for tensors that do not fit together."""
    packed, cols = model.part(f"{name}.q_weight", ("I32",), (None, None)).shape
    k = model.part(f"{name}.q_invperm", ("I32",), (None,)).shape[0]
    groups = model.part(f"{name}.q_scale_max", ("F16",), (None,)).shape[0]
    model.part(f"{name}.q_scale", ("I32",), (groups, cols // 8))
    model.part(f"{name}.q_groups", ("I16",), (2 * groups,))
    why = why_illegal((Group(8, k),), k)
    if not why and (cols % ROWS or not cols):
        why = f"it has {cols:,} columns, which must be a multiple of {ROWS}"
    if not why and not 2 * k <= 32 * packed <= 8 * k:
        why = f"q_weight has {packed:,} rows, which {k:,} input features with 2 to 8 bits cannot take"
    if why:
        raise FormatError(f"not a matrix of EXL2: {why}", where=f"{model.where}: {show(name)}", fix=DAMAGED_CHECKPOINT)
    return Module(name, _outputs(model.specs, name, cols, model.config)), k


def _outputs(specs: Mapping[str, TensorSpec], name: str, cols: int, config: Mapping[str, Any]) -> int:
    """Columns without padding. Only a head is padded: it has as many outputs as there are tokens."""
    if not _is_head(name):
        return cols
    tokens: list[Any] = [spec.shape[0] for spec in specs.values() if spec.name.endswith(_EMBEDDING) and spec.shape]
    tokens.append(config.get("vocab_size"))
    return next((n for n in tokens if type(n) is int and 0 < n and padded(n) == cols), cols)
