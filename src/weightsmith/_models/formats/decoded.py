"""A source whose weights are decoded from codes on each read: what every quantisation has in common.

A quantisation describes each of its weights as a `Weight`: which stored tensors it consists of, and how any run of its elements
is decoded from them. `reader` makes a source of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import CheckpointError, FormatError, Unsupported, raised_at
from weightsmith._base.files import Extent, show
from weightsmith._base.strict_json import parse_object
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith._files.pytorch import gather
from weightsmith._models.formats.config import (
    DAMAGED_CHECKPOINT,
    config_entries,
    damaged,
    quantisation_entry,
    setting,
    unsupported,
    without_entries,
)
from weightsmith._models.structure.projections import FUSED, TRANSPOSED_MODELS
from weightsmith.abc.stored import Config, Wrapped
from weightsmith.abc.tensors import StoredAs, StoredPart, Tensors, Verbatim, byte_view, check_range, digest, spec_of

if TYPE_CHECKING:
    from weightsmith.abc.tensors import Buffer

F32 = DTYPES["F32"]
ROWS_BYTES = 4 << 20
"""Float32 rows to decode at once from codes that are packed along the rows: each read may sweep all of them."""


@dataclass(frozen=True, slots=True)
class Weight(ABC):
    """One weight of the plain model. Its `repr` is part of the source's identity.

    spec           name, F32, shape [outputs, inputs]
    stored         the stored tensors that it is decoded from, which the source hides
    natural_dtype  the dtype in which loaders compute with it
    encoding       the name of one that stores it in the same tensors, with codes of the same meaning; "": none is known
    """

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    encoding: str = field(default="", kw_only=True, repr=False)

    @property
    def preferred_rows(self) -> int:
        return 1

    def part_of(self, stored: TensorSpec) -> StoredPart:
        """Its part of one of its stored tensors."""
        return StoredPart(stored.name, stored.dtype)

    @abstractmethod
    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        """values = elements first … first + n, n > 0, in row-major order. Thread-safe; scratch memory is bounded.

        Raises FormatError for stored values that no weight can have; the source adds where.
        """


@dataclass(frozen=True, slots=True)
class JoinedWeight(Weight):
    """A weight whose rows are those of others. parts: from its first row to its last."""

    parts: tuple[Weight, ...]

    @property
    def preferred_rows(self) -> int:
        return max(part.preferred_rows for part in self.parts)

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        top, start, end = 0, first, first + values.size
        for part in self.parts:
            bottom = top + part.spec.size
            if top <= start < min(bottom, end):
                stop = min(end, bottom)
                part.decode(stored, start - top, values[start - first : stop - first])
                start = stop
            top = bottom


def join_projections(weights: Sequence[Weight]) -> list[Weight]:
    """Weights as Phi-3 has them: `qkv_proj` and `gate_up_proj` in place of their parts.

    Parts are joined where all are there, with the same inputs.
    """
    by_name = {weight.spec.name: weight for weight in weights}
    joined, used = [], set()
    for name in by_name:
        head, _, leaf = name.removesuffix(".weight").rpartition(".")
        for whole, leaves in FUSED.items():
            names = [f"{head}.{part_name}.weight" for part_name in leaves]
            if leaf != leaves[0] or not all(part_name in by_name for part_name in names):
                continue
            parts = tuple(by_name[part_name] for part_name in names)
            if len({part.spec.shape[1] for part in parts}) == 1:
                shape = sum(part.spec.shape[0] for part in parts), parts[0].spec.shape[1]
                tensors = tuple(part_name for part in parts for part_name in part.stored)
                joined.append(
                    JoinedWeight(TensorSpec(f"{head}.{whole}.weight", F32, shape), tensors, parts[0].natural_dtype, parts)
                )
                used.update(names)
    return [*joined, *(weight for name, weight in by_name.items() if name not in used)]


class DecodedTensors:
    """A source that shows another one's quantised weights as F32, hides the tensors that they consist of, and passes all else.

    specs     the plain model's tensors
    identity  the stored source's, and the description of each weight
    paths     the stored source's

    Thread-safe if the stored source is.
    """

    def __init__(
        self, stored: Tensors, weights: Sequence[Weight], dropped: Sequence[str], where: str, prefix: str = ""
    ) -> None:
        """
        stored   the source that holds the codes; closed with this one
        weights  of the plain model; no two of one name
        dropped  stored tensors that are no part of the plain model
        where    the model as the user named it, for messages
        prefix   of the names of all stored tensors, which the plain model's do not have

        Raises FormatError if a weight has the name of another tensor.
        """
        self._stored, self._where, self._prefix = stored, where, prefix
        self.sources = (stored,)
        self._weights = {weight.spec.name: weight for weight in weights}
        hidden = {*dropped, *(name for weight in weights for name in weight.stored)}
        specs = {name.removeprefix(prefix): spec for name, spec in stored.specs.items() if name not in hidden}
        if prefix:
            specs = {name: replace(spec, name=name) for name, spec in specs.items()}
        for name, weight in self._weights.items():
            if name in specs:
                raise damaged(f"tensor {show(name)} is stored twice: as numbers and as codes {show(weight.stored[0])}", where)
            specs[name] = weight.spec
        self.specs: Mapping[str, TensorSpec] = {name: specs[name] for name in sorted(specs, key=natural_key)}
        self.identity = digest([stored.identity, [repr(weight) for weight in weights], list(dropped), prefix])
        self.paths: tuple[Path, ...] = stored.paths

    @property
    def state(self) -> str:
        return digest([self.identity, self._stored.state])

    @property
    def verbatim(self) -> Verbatim:
        """The stored source."""
        return Verbatim(self._stored, self.stored_as)

    def stored_as(self, name: str) -> StoredAs | None:
        """How the stored source has a tensor."""
        weight, specs = self._weight(name), self._stored.specs
        if weight is None:
            stored = specs[self._prefix + name]
            return StoredAs("", (StoredPart(stored.name, stored.dtype),))
        return StoredAs(weight.encoding, tuple(weight.part_of(specs[part]) for part in weight.stored), decoded=True)

    def natural_dtype(self, name: str) -> DType:
        weight = self._weight(name)
        return self._stored.natural_dtype(self._prefix + name) if weight is None else weight.natural_dtype

    def location(self, name: str) -> tuple[int, int] | None:
        return self._stored.location(self._prefix + name) if self._weight(name) is None else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        weight, stored = self._weight(name), self._stored
        if weight is None:
            return stored.extents(self._prefix + name, start_byte, nbytes)
        specs = [stored.specs[stored_name] for stored_name in weight.stored]
        return tuple(extent for spec in specs for extent in stored.extents(spec.name, 0, spec.nbytes))

    def preferred_rows(self, name: str) -> int:
        weight = self._weight(name)
        return self._stored.preferred_rows(self._prefix + name) if weight is None else weight.preferred_rows

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        weight = self._weight(name)
        if weight is None:
            self._stored.read_into(self._prefix + name, start_byte, out)
            return
        target = np.frombuffer(byte_view(out), np.uint8)
        check_range(weight.spec, start_byte, target.size, self._where)
        if target.size == 0:
            return
        if start_byte % 4 == 0 and target.size % 4 == 0 and target.ctypes.data % 4 == 0:
            self._decode(weight, start_byte // 4, target.view(np.float32))
            return
        first, end = start_byte // 4, -(-(start_byte + target.size) // 4)
        values = np.empty(end - first, np.float32)
        self._decode(weight, first, values)
        target[:] = values.view(np.uint8)[start_byte - first * 4 :][: target.size]

    def check_unchanged(self) -> None:
        self._stored.check_unchanged()

    def close(self) -> None:
        self._stored.close()

    def _decode(self, weight: Weight, first: int, values: npt.NDArray[np.float32]) -> None:
        with raised_at(self._where):
            weight.decode(self._stored, first, values)

    def _weight(self, name: str) -> Weight | None:
        return self._weights.get(spec_of(self.specs, name, self._where).name)


class QuantisedModel:
    """A model whose weights are decoded: its stored tensors and config.json, and the checks of both.

    stored, config, where  as `StoredFormat.read` gets them
    specs                  of the stored tensors
    entry                  what config.json says of quantisation
    """

    def __init__(self, stored: Tensors, config: Config, where: str) -> None:
        """Raises Unsupported if two entries of config.json differ."""
        self.stored, self.config, self.where, self.specs = stored, config, where, stored.specs
        self.entry: Mapping[str, Any] = quantisation_entry(config, where)[1] if config_entries(config) else {}

    def damaged(self, what: str) -> FormatError:
        """The error of tensors that contradict each other or config.json."""
        return damaged(what, self.where)

    def unsupported(self, what: str) -> Unsupported:
        """The error of weights that are stored in a way that is not read."""
        return unsupported(what, self.where)

    def setting(self, key: str, default: object, allowed: Sequence[object], entry: Mapping[str, Any] | None = None) -> Any:
        """A value of the entry; see `config.setting`."""
        return setting(self.entry if entry is None else entry, key, default, allowed, self.where)

    def group_size(self, key: str = "group_size", entry: Mapping[str, Any] | None = None) -> int:
        """The number of inputs that share a scale; -1 for all of them. Raises FormatError."""
        value = (self.entry if entry is None else entry).get(key)
        if type(value) is not int or not (value == -1 or 1 <= value <= 1 << 24):
            raise self.damaged(f"{key} in config.json is {show(value)}, not -1 or a whole number from 1")
        return value

    def modules(self, suffix: str) -> list[str]:
        """The modules X with a stored tensor X{suffix}."""
        return [name.removesuffix(suffix) for name in self.specs if name.endswith(suffix)]

    def part(self, name: str, dtypes: Sequence[str], shape: tuple[int | None, ...]) -> TensorSpec:
        """A tensor that a quantised weight consists of. shape: None for any length.

        Raises FormatError if it is missing or has another shape, Unsupported for another dtype.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise self.damaged(f"tensor {show(name)} is missing, which a quantised weight needs")
        if spec.dtype.name not in dtypes:
            raise self.unsupported(f"tensor {show(name)} is {spec.dtype}, and only {', '.join(dtypes)} are read")
        if len(spec.shape) != len(shape) or any(n is not None and n != m for n, m in zip(shape, spec.shape, strict=True)):
            expected = str(["any" if n is None else n for n in shape]).replace("'", "")
            what = f"tensor {show(name)} is {list(spec.shape)}, and the other tensors of its weight require {expected}"
            raise self.damaged(what)
        return spec

    def decoded(
        self, weights: Sequence[Weight], kind: str, parts: Sequence[str], dropped: Sequence[str] = (), prefix: str = ""
    ) -> Wrapped:
        """The plain model: its source, and config.json without the entry of the quantisation.

        kind    the quantisation, for messages: `GPTQ`
        parts   suffixes of the stored tensors that belong to a weight; first the one that is missing if others are left over
        dropped, prefix   see `DecodedTensors`

        Raises Unsupported for models whose layers store [inputs, outputs]: a square matrix would be transposed silently. Raises
        FormatError for a part of a quantised weight that is incomplete: it would be taken for a plain tensor.
        """
        refuse_transposed(self.config, kind, self.where)
        source = DecodedTensors(self.stored, weights, dropped, self.where, prefix)
        _check_complete(source.specs, weights, parts, self.where)
        return Wrapped(source, without_entries(self.config))


def reader(
    kind: str, parts: Sequence[str], weights: Callable[[QuantisedModel], Sequence[Weight]]
) -> Callable[[Tensors, Config, str], Wrapped]:
    """`StoredFormat.read` from a function that finds the weights of a model. kind, parts: see `QuantisedModel.decoded`."""

    def read(stored: Tensors, config: Config, where: str) -> Wrapped:
        model = QuantisedModel(stored, config, where)
        return model.decoded(weights(model), kind, parts)

    return read


def refuse_transposed(config: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise Unsupported for models whose layers store [inputs, outputs]."""
    if config.get("model_type") in TRANSPOSED_MODELS:
        what = f"{kind} weights of model_type {show(config['model_type'])} are not read: its layers store [inputs, outputs]"
        raise unsupported(what, where)


def _check_complete(specs: Mapping[str, TensorSpec], weights: Sequence[Weight], parts: Sequence[str], where: str) -> None:
    """Raise FormatError if a tensor of the plain model is part of a quantised weight whose other tensors are missing.

    A plain model may have its own X.scales or X.biases: they count as parts only if they are integers, if there are other parts
    of X, or if the last component of X is also the name of a module whose weight is decoded.
    """
    unread: dict[str, list[TensorSpec]] = {}
    for name, spec in specs.items():
        if name.endswith(".weight") and spec.dtype.name[0] in "IU":
            what = f"tensor {show(name)} is {spec.dtype}, the codes of a quantised weight, and its scales are missing"
            raise damaged(what, where)
        module, dot, suffix = name.rpartition(".")
        if dot + suffix in parts and f"{module}.weight" not in specs:
            unread.setdefault(module, []).append(spec)
    quantised = {weight.spec.name.split(".")[-2:][0] for weight in weights}
    for module, of_module in unread.items():
        first = of_module[0]
        is_scale = first.name.endswith((".scales", ".biases")) and first.dtype.name[0] not in "IU"
        if not is_scale or len(of_module) > 1 or module.rpartition(".")[2] in quantised:
            what = f"tensor {show(first.name)} is part of a quantised weight, and {show(module + parts[0])} is missing"
            raise damaged(what, where)


def read_all(stored: Tensors, name: str, start: int = 0, end: int | None = None) -> npt.NDArray[Any]:
    """Elements start … end of a stored tensor, flat, in its own dtype."""
    spec = stored.specs[name]
    values = np.empty((spec.size if end is None else end) - start, spec.dtype.numpy)
    stored.read_into(name, start * spec.dtype.itemsize, values.view(np.uint8))
    return values


MAX_JSON_BYTES = 64 << 10


def read_json(stored: Tensors, name: str, where: str, content: str) -> dict[str, Any]:
    """The JSON object whose text is the bytes of a stored tensor, read while the model is opened.

    content  for the message of a Hub model that is not downloaded yet: what the text says

    Raises FormatError for another tensor or text, Unsupported if it is not downloaded.
    """
    spec = stored.specs[name]
    if spec.dtype.name != "U8" or spec.nbytes > MAX_JSON_BYTES:
        raise damaged(f"tensor {show(name)} is {list(spec.shape)} {spec.dtype}, not the bytes of a short JSON text", where)
    data = read_if_here(stored, name)
    if data is None:
        what = f"{content} are stored with their codes, and these are not downloaded yet"
        raise Unsupported(what, where=where, fix="Download the model first, with `hf download`.")
    return parse_object(data.tobytes(), f"tensor {show(name)}", where, DAMAGED_CHECKPOINT)


def read_if_here(stored: Tensors, name: str) -> npt.NDArray[Any] | None:
    """A small stored tensor, flat, in its own dtype; None if it is one of a Hub model that is not downloaded yet."""
    try:
        return read_all(stored, name)
    except CheckpointError as error:
        if isinstance(error, FormatError) or "not downloaded" not in str(error):
            raise
        return None


def read_columns(stored: Tensors, name: str, width: int, rows: slice, cols: slice) -> npt.NDArray[Any]:
    """A block of a stored tensor that is seen as rows of `width` elements: [rows, cols] in its own dtype, C-contiguous.

    Columns that are far apart are read one by one, close ones with what lies between them.
    """
    dtype = stored.specs[name].dtype
    block = np.empty((rows.stop - rows.start, cols.stop - cols.start), dtype.numpy)
    if block.size:
        offset = (rows.start * width + cols.start) * dtype.itemsize
        out = byte_view(block.reshape(-1).view(np.uint8))
        gather(lambda at, into: stored.read_into(name, at, into), offset, dtype.itemsize, block.shape, (width, 1), 0, out)
    return block


CHUNK_ELEMENTS = 1 << 18
"""Elements to decode at a time; of whole rows, one row at least."""


def chunks(first: int, values: npt.NDArray[np.float32]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Runs of elements for `Weight.decode`: the number of the first one, and where they go."""
    for start in range(0, values.size, CHUNK_ELEMENTS):
        yield first + start, values[start : start + CHUNK_ELEMENTS]


def bands(
    first: int, values: npt.NDArray[np.float32], cols: int, rows: int = 0, align: int = 1
) -> Iterator[tuple[int, int, int, npt.NDArray[np.float32]]]:
    """Runs of rows for `Weight.decode` of a weight whose rows are decoded as a whole.

    rows   the most of a run, a multiple of `align`; 0: `CHUNK_ELEMENTS`
    align  runs begin and end at multiples of it

    Yields the first row, the end of the rows, the elements of them before the wanted ones, and where these go.

    >>> [(row, end, skip, part.size) for row, end, skip, part in bands(5, np.empty(7, np.float32), 4)]
    [(1, 3, 1, 7)]
    """
    rows = rows or max(1, CHUNK_ELEMENTS // cols)
    row, end = first // (cols * align) * align, first + values.size
    while row * cols < end:
        bottom = min(row + rows, -(-end // (cols * align)) * align)
        start = max(first, row * cols)
        yield row, bottom, start - row * cols, values[start - first : bottom * cols - first]
        row = bottom


BAND_CODES = 1 << 20
"""Codes of a transposed weight to unpack at a time, of 32 outputs at least."""

Band = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.float32]]
"""codes [inputs, outputs of the band], zeros and scales [groups, outputs of the band]."""


def transposed_rows(outputs: int, inputs: int) -> int:
    """`preferred_rows` of a weight that is stored as [inputs, outputs]."""
    return max(1, min(outputs, max(32, ROWS_BYTES // (4 * max(inputs, 1)) // 32 * 32)))


@dataclass(frozen=True, slots=True)
class TransposedWeight(Weight):
    """A weight [outputs, inputs] that is stored as [inputs, outputs], with zeros and scales of groups of inputs.

    groups      rows of the scales
    group_size  consecutive inputs of a group
    """

    groups: int
    group_size: int

    @property
    def preferred_rows(self) -> int:
        return transposed_rows(*self.spec.shape)

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.codes import dequantise_transposed

        (outputs, inputs), groups = self.spec.shape, self.groups_of_inputs(stored)
        most = max(32, BAND_CODES // inputs // 32 * 32)
        top, end = first // inputs // 32 * 32, -(-(first + values.size) // inputs)
        while top < end:
            bottom = min(top + most, -(-end // 32) * 32, outputs)
            codes, zeros, scales = self.band(stored, slice(top, bottom))
            dequantise_transposed(codes.reshape(-1), zeros.reshape(-1), scales.reshape(-1), groups, top, first, values)
            top = bottom

    def groups_of_inputs(self, stored: Tensors) -> npt.NDArray[np.int64]:
        """[inputs]: the group of each."""
        return np.arange(self.spec.shape[1]) // self.group_size

    @abstractmethod
    def band(self, stored: Tensors, outputs: slice) -> Band:
        """Some outputs, unpacked; the slice begins at a multiple of 32, and ends at one or at the last output."""
