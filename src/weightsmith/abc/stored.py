"""The interfaces of a stored format: its record, and its encodings, which make stored tensors of the rows of one.

An encoding only defines which names, dtypes and shapes it supports; the planner decides which tensors of a model to encode (not
norms and routers, nor embeddings and heads for most).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding
from weightsmith._base.tensors import TensorSpec
from weightsmith._plans import PlanDraft
from weightsmith.abc.files import FileKind
from weightsmith.abc.tensors import Tensors

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


class Encoding(Protocol):
    """One way to store a tensor. Stateless: any thread may encode any rows in any order.

    name        in plans: `fp8-dynamic`
    align_rows  runs of rows start at a multiple of this, and end at a multiple or at the end of the tensor. `WHOLE`: all rows
                come at once
    whole       the number of stored tensors, the last of `outs`, that belong to the whole tensor, not to its rows
    product     the kind of product whose array for the tensor `encode` gets; "" if it needs the rows alone
    vocabulary  whether embeddings and output heads are encoded too
    """

    @property
    def name(self) -> str: ...

    @property
    def align_rows(self) -> int: ...

    @property
    def whole(self) -> int: ...

    @property
    def product(self) -> str: ...

    @property
    def vocabulary(self) -> bool: ...

    def refusal(self, spec: TensorSpec) -> str:
        """Why a tensor cannot be encoded, judged by name, dtype and shape; "" if it can."""
        ...

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors. All but the `whole` ones have something for each row, or for each band of `align_rows` rows.

        spec  the tensor, with its dtype without this encoding

        Raises Unsupported with the reason of `refusal`.
        """
        ...

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """Fill `outs` with rows first_row … first_row + n of each stored tensor, and with all of the `whole` ones.

        rows       float32 [n, cols], C-contiguous
        first_row  a multiple of `align_rows`
        outs       one uint8 buffer for each of `outs(spec)`, exactly the size of these rows, or of the whole tensor
        numbers    the product's array for this tensor, or the table that its step names, float32; empty without either

        Encodes NaN and infinity as the format allows; callers reject them. Raises NonFinite for a finite number that the
        format cannot hold.
        """
        ...

    def config(self, modules: Modules) -> dict[str, Any]:
        """Top-level keys that config.json needs so that readers decode the tensors; {} for plain tensors.

        Raises Unsupported if it cannot say which modules are encoded.
        """
        ...


def array_name(encoding: Encoding, tensor: str) -> str:
    """The name of the array that the product of an encoding makes for a tensor.

    >>> array_name(find_encoding("nvfp4a16"), "q_proj.weight")  # doctest: +SKIP
    'magnitudes: q_proj.weight'
    """
    return f"{encoding.product}: {tensor}"


def grouped_name(name: str, group: int, groups: Sequence[int]) -> str:
    """The name of an encoding with a group size; groups: all there are, the default first.

    >>> grouped_name("w4a16", 128, (128, 64)), grouped_name("w4a16", 64, (128, 64))
    ('w4a16', 'w4a16-g64')
    """
    return name if group == groups[0] else f"{name}-g{group}"


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
    """

    name: str
    summary: str
    readers: str
    encodings: Mapping[int, Encoding]


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model that an output is made from.

    id    org/name on the Hub, or the name of its folder
    card  front matter of its card
    """

    id: str
    card: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beside:
    """What is beside the weights of a draft.

    origins  the models that it is made from
    read     (names) → the contents of those of these files that the output has
    donor    (name) → the contents of a file of the model whose files the output has; None: there is none
    held     takes the names of files whose contents the output has in another form, such as keys of a header
    """

    origins: Sequence[ModelOrigin]
    read: Callable[[Sequence[str]], Mapping[str, bytes]]
    donor: Callable[[str], bytes | None]
    held: Callable[[Iterable[str]], None]


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
    """

    name: str
    summary: str
    readers: str
    program: str
    settings: frozenset[str]
    measures: bool = False

    @abstractmethod
    def prepare(self, draft: PlanDraft, beside: Beside, request: ModelRequest) -> Mapping[str, bytes]:
        """Make a draft of plain tensors one of the format; return files to add to the output.

        Reads headers and small files only, never tensor data. Raises PlanError, Unsupported and FormatError.
        """

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
    parse: Callable[[str], Encoding | None] = lambda name: None

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """All without a setting."""
        return (*self.unlisted, *(encoding for each in self.writes for encoding in each.encodings.values()))
