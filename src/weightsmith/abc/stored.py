"""The interfaces of a stored format: its record, and its encodings, which make stored tensors of the rows of one.

An encoding only defines which names, dtypes and shapes it supports; the planner decides which tensors of a model to encode (not
norms and routers, nor embeddings and heads for most).
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._plans import PlanDraft, Read
from weightsmith.abc.product import Arrays
from weightsmith.abc.tensors import FileKind, StoredAs, Tensors

Config = Mapping[str, Any]
Specs = Mapping[str, TensorSpec]
Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Modules:
    """Which linear modules of a model an encoding stores, and which not.

    ignored  of those that it does not: names, or patterns for `re.match` after `re:` that hold under any prefix
    plain    the names of the same, `model.layers.0.mlp.gate`; `lm_head` is always among them
    encoded  the names of those that it stores
    """

    ignored: Sequence[str] = ()
    plain: Sequence[str] = ()
    encoded: Sequence[str] = ()


WHOLE = 1 << 62
"""`Encoding.align_rows` of an encoding that needs all rows of a matrix at once."""

Kind = Literal["plain", "float", "integer", "trellis", "blocks"]
"""What codes are: plain numbers, small floats or integers with scales, states of a trellis, ggml's blocks."""


Importances = Literal["no", "may", "must"]
"""It takes no importances of columns, or any, or cannot do without."""

HessianForm = Literal["no", "sorted", "in order", "whole"]
"""None; a factorised one, with the input features in the order of its diagonal, or in their own; one as it is."""

Float16 = Literal["no", "default", "always"]


@dataclass(frozen=True, slots=True)
class ActivationScale:
    """A scale of one element.

    name   of the tensor, after its module
    dtype  of the tensor
    of     (largest magnitude, finite) → the array [1]
    """

    name: str
    dtype: str
    of: Callable[[float], npt.NDArray[Any]]

    def out(self, module: str) -> TensorSpec:
        """The stored tensor of a module, or of the weight of one."""
        return TensorSpec(f"{module.removesuffix('.weight')}.{self.name}", DTYPES[self.dtype], (1,))


@dataclass(frozen=True, slots=True)
class CacheEncoding:
    """How programs store the keys and values that they keep, if an output tells them the scales.

    name          as users write it: `fp8`
    keys, values  the scales of an attention module
    described     config.json of the encoded weights → the same, with the cache
    """

    name: str
    keys: ActivationScale
    values: ActivationScale
    described: Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Unread:
    """A weight that is not in memory twice while it is put in order: heads can be larger than layers.

    shape  [N, K]
    fill   fills an array, float32
    """

    shape: tuple[int, int]
    fill: Callable[[Rows], None]

    def read(self) -> tuple[Rows, mmap.mmap]:
        """The array, and the memory that it is in."""
        pages = mmap.mmap(-1, 4 * self.shape[0] * self.shape[1])
        array = np.frombuffer(pages, np.float32).reshape(self.shape)
        self.fill(array)
        return array, pages


@dataclass(frozen=True, slots=True)
class FactoredHessian:
    """A Hessian, ready for any number of matrices with the same inputs (q, k and v; gate and up; all their candidates).

    order   int64 [K]: input features, those with the largest diagonal first
    factor  torch float32 [K, K], upper triangular: U with UᵀU = H⁻¹, in that order
    """

    order: npt.NDArray[np.int64]
    factor: Any


class Encoding(ABC):
    """One way to store a tensor, as a value: equal ones store equal bytes. A frozen dataclass, of its setting.

    What others ask of it are properties; a subclass has a field or a property of its own for what differs. Stateless: any
    thread may encode any rows in any order.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """How plans and users write it: `fp8-dynamic`, `exl2 4/g128`. `find_encoding` gives the value of a name."""

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What its codes are."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """Bits of a code; the mean, if they differ."""

    @property
    def group(self) -> int | None:
        """Elements of a row that share a scale; None: a whole row, several, or there are no scales."""
        return None

    @property
    def symmetric(self) -> bool:
        """Whether codes have no zero point or bias."""
        return True

    @property
    def scale(self) -> DType | None:
        """The dtype of the scales; None: that of the tensor, or there are none."""
        return None

    @property
    def align_rows(self) -> int:
        """Runs of rows start at a multiple of this, and end at one or with the tensor. `WHOLE`: all rows come at once."""
        return 1

    @property
    def whole(self) -> int:
        """The number of stored tensors, the last of `outs`, that belong to the whole tensor, not to its rows."""
        return 0

    @property
    def vocabulary(self) -> bool:
        """Whether embeddings and output heads are encoded too."""
        return False

    @property
    def looked_up(self) -> bool:
        """Whether programs look rows up in codes, so that an embedding may be encoded if the user asks for that."""
        return self.vocabulary

    @property
    def of_blocks(self) -> bool:
        """Whether it is for single files of diffusion models and their text encoders, which have no config.json: the
        matrices of the blocks are encoded, and no two share a scale. `config` is not asked for."""
        return False

    @property
    def maxima(self) -> bool:
        """Whether `encode` needs the largest magnitude of the tensor, and of those that share a scale with it."""
        return False

    @property
    def importances(self) -> Importances:
        """Whether `encode` weighs the columns of a row."""
        return "no"

    @property
    def inputs(self) -> ActivationScale | None:
        """The scale of what enters the layer, which a text gives; None: it has none."""
        return None

    @property
    def hessian(self) -> HessianForm:
        """How `quantise` takes the Hessian of what enters the layer."""
        return "no"

    @property
    def scaled(self) -> bool:
        """Whether the input features of weights get scales before their codes are chosen, as in AWQ: what makes the features is
        divided by them. For an encoding with `hessian`."""
        return False

    @property
    def float16(self) -> Float16:
        """Whether programs compute in float16 with it, which cannot hold the states of all models."""
        return "no"

    @abstractmethod
    def refusal(self, spec: TensorSpec) -> str:
        """Why a tensor cannot be encoded, judged by name, dtype and shape; "" if it can."""

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """`tensors` of a tensor that can be encoded. Raises Unsupported with the reason of `refusal`."""
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return self.tensors(spec)

    @abstractmethod
    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors. All but the `whole` ones have something for each row, or for each band of `align_rows` rows.

        spec  the tensor, with its dtype without this encoding; `refusal` accepts it
        """

    @abstractmethod
    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """Fill `outs` with rows first_row … first_row + n of each stored tensor, and with all of the `whole` ones.

        rows       float32 [n, cols], C-contiguous
        first_row  a multiple of `align_rows`
        outs       one uint8 buffer for each of `outs(spec)`, exactly the size of these rows, or of the whole tensor
        numbers    float32: the largest magnitude [1], if it needs `maxima`; the importances that its step names; or empty

        Encodes NaN and infinity as the format allows; callers reject them. Raises NonFinite for a finite number that the
        format cannot hold.
        """

    def config(self, modules: Modules) -> dict[str, Any]:
        """Top-level keys that config.json needs so that readers decode the tensors; {} for plain tensors.

        Raises Unsupported if it cannot say which modules are encoded.
        """
        return {}

    def importance_counts(self, spec: TensorSpec) -> tuple[int, ...]:
        """The numbers of importances that a tensor may have: one for each column, or for each column of each matrix."""
        return ()

    def quantise(self, weight: Rows | Unread, hessian: Rows | FactoredHessian | None, threads: int) -> Arrays:
        """The stored arrays of a weight, with codes that suit what enters its layer: for an encoding with `hessian`.

        weight   float32 [N, K], or what reads it; not modified
        hessian  of its inputs, as `hessian` says; None: codes are rounded to nearest
        threads  that may be used; the result does not depend on them

        Raises NonFinite; ParameterError for a Hessian of another number of inputs than K.
        """
        raise NotImplementedError(f"{self.name} takes no Hessian")

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        """The tensor as readers compute it from its stored arrays, float32: for an encoding that is calibrated."""
        raise NotImplementedError(f"{self.name} is not decoded")


def maximum_name(tensor: str) -> str:
    """The name of the array with the largest magnitude of a tensor."""
    return f"magnitudes: {tensor}"


def grouped_name(name: str, group: int | None, groups: Sequence[int]) -> str:
    """The name of an encoding with a group size; groups: all there are, the default first; () without a choice.

    >>> grouped_name("w4a16", 128, (128, 64)), grouped_name("w4a16", 64, (128, 64))
    ('w4a16', 'w4a16-g64')
    """
    return name if not groups or group == groups[0] else f"{name}-g{group}"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Tensors that are decoded from stored ones.

    source  its tensors; closes the stored source
    config  config.json to match these tensors
    notes   warnings for the user
    kind    title of the stored format; "" for tensors as stored
    """

    source: Tensors
    config: Config | None
    notes: tuple[Finding, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Writing:
    """An encoding, or several that differ in the size of their groups, that users can ask for: `--quantize w4a16`.

    name       as users write it; also the name of the first encoding
    summary    one line: what is stored, and how many bits a weight takes
    readers    the programs that load it
    encodings  by group size, the default first; 0 where there is no choice
    adapt      changes the draft of an encoded model, such as config.json for one reader: (draft, the encoding)
    rows       for weights whose width no group size divides: a row has one scale. It needs `StoredFormat.mixed`. None: these
               weights are stored as they are
    """

    name: str
    summary: str
    readers: str
    encodings: Mapping[int, Encoding]
    adapt: Callable[[PlanDraft, Encoding], None] = lambda draft, encoding: None
    rows: Encoding | None = None

    @property
    def all_encodings(self) -> tuple[Encoding, ...]:
        """Those of all group sizes, and `rows`."""
        return (*self.encodings.values(), *([self.rows] if self.rows is not None else []))


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model that an output is made from.

    id    org/name on the Hub, or the name of its folder
    card  front matter of its card
    """

    id: str
    card: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is beside the weights of a draft.

    origins  the models that it is made from
    read     (names) → the contents of those of these files that the output has
    donor    (name) → the contents of a file of the model whose files the output has; None: there is none
    held     takes the names of files whose contents the output has in another form, such as keys of a header
    tensor   (name) → the bytes of a small tensor of the same model as `donor`; None: there is none
    numbers  (names) → the numbers of these tensors of the draft, which have one each, as the output would store them
    stored_as  (what is read) → how the files of its model have the tensor; None: not so that it can be copied
    undecoded  (what is read) → the index of a model that has the tensors of its files as `stored_as` names them
    header   (names) → the header of the files of the same model as `donor`, if the output's files of these names, and the
             tokens in its config.json, are made from it; else {}
    """

    origins: Sequence[ModelOrigin]
    read: Callable[[Sequence[str]], Mapping[str, bytes]]
    donor: Callable[[str], bytes | None]
    held: Callable[[Iterable[str]], None]
    tensor: Callable[[str], bytes | None] = lambda _name: None
    numbers: Callable[[Sequence[str]], Mapping[str, float]] = lambda _names: {}
    stored_as: Callable[[Read], StoredAs | None] = lambda _read: None
    undecoded: Callable[[Read], int] = lambda read: read.model
    header: Callable[[Sequence[str]], Mapping[str, Any]] = lambda _names: {}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """How a model is to be written.

    settings     the options in `ModelFormat.settings`, by name
    importances  of the columns of weights, measured on a text: float32, by the names that the weights have in the draft
    types        of stored tensors, chosen for a size
    """

    settings: Mapping[str, Any]
    importances: Mapping[str, Rows] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)


class ModelFormat(ABC):
    """A way to write a whole model that users can ask for: `--quantize gguf-q4_k_m`. It changes names, keys and files, too.

    name      as users write it
    summary   one line: what is stored, and how many bits a weight takes
    readers   the programs that load it
    program   the one whose names and types it has
    settings  options that `prepare` reads, besides those of a measurement
    measures  whether importances may be measured, and types chosen for a size
    shard_bytes  maximum size of a weight file, unless the user says another
    """

    name: str
    summary: str
    readers: str
    program: str
    settings: frozenset[str]
    measures: bool = False
    shard_bytes: int = 5_000_000_000

    @abstractmethod
    def prepare(self, draft: PlanDraft, companions: ModelFiles, request: ModelRequest) -> Mapping[str, bytes]:
        """Make a draft of plain tensors one of the format; return files to add to the output.

        Reads headers and small files only, never tensor data. Raises PlanError, Unsupported and FormatError.
        """

    def modules(self, config: Config | None, read: Callable[[str], bytes | None]) -> Collection[str]:
        """Modules of sentence-transformers behind the model whose weights the format stores, too: their subfolders.

        read  gives the contents of a file of the model's folder, by its name
        """
        return ()

    def part(self, parts: Collection[str]) -> str:
        """Which of these parts of a pipeline of diffusers the format stores; "" if there is none, or several."""
        return ""

    def weighed(self, config: Config | None, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Those of some tensors of the draft whose columns may have importances. Raises Unsupported for another model."""
        return []

    def candidates(
        self, config: Config | None, specs: Iterable[TensorSpec], request: ModelRequest
    ) -> dict[str, tuple[str, ...]]:
        """The encodings to try for each tensor of the draft whose type is not asked for."""
        return {}

    def stored_name(self, config: Config | None, weight: str) -> str:
        """The name of the stored tensor that has a tensor of the draft."""
        return weight


Mark = Callable[[str, Specs], str]
"""(name of a stored tensor, all specs) → what it is quantised with; "" if it is not."""


def labelled(label: str) -> Mark:
    """The mark of a name that says it all."""
    return lambda name, specs: label


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """One way to store the weights of a model: how it is recognised, read and written. It is the `FORMAT` of a module.

    name        `compressed_tensors`
    title       for messages: `GPTQ`
    recognises  whether tensors are stored so: (config.json, specs of the stored tensors)
    read        decodes them: (stored tensors, config.json, the model as the user named it). Raises FormatError, Unsupported
    marks       ends of names of its tensors, by which a model is found to be quantised if config.json does not say so
    files       file formats of its own, which need no other
    writes      encodings of weights that users can ask for
    models      ways to write whole models that they can ask for; a function, because plans that write none need none
    unlisted    encodings without a setting that they cannot ask for
    mixed       config.json of a model whose weights are in several of the encodings: (`Encoding.config` of each; for each,
                the names of its modules, or patterns after `re:`). None: there is one encoding for all
    caches      how programs that load what it writes can store keys and values
    parse       the encoding of a name with a setting: `exl2 4/g128`; None for other names. Raises ValueError for a setting that
                there is not
    """

    name: str
    title: str
    recognises: Callable[[Config, Specs], bool] = lambda config, specs: False
    read: Callable[[Tensors, Config, str], Wrapped] = lambda stored, config, where: Wrapped(stored, config)
    marks: Mapping[str, Mark] = field(default_factory=dict)
    files: tuple[FileKind, ...] = ()
    writes: tuple[Writing, ...] = ()
    models: Callable[[], tuple[ModelFormat, ...]] = lambda: ()
    unlisted: tuple[Encoding, ...] = ()
    caches: tuple[CacheEncoding, ...] = ()
    mixed: Callable[[Sequence[Config], Sequence[Sequence[str]]], dict[str, Any]] | None = None
    parse: Callable[[str], Encoding | None] = lambda name: None

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """All without a setting."""
        return (*self.unlisted, *(encoding for family in self.writes for encoding in family.all_encodings))
