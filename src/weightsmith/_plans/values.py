"""The frozen values of a Plan. Nothing here reads, writes or computes.

Read      a tensor of a model or product: all of it, a block, or rows or columns selected by a table
Product   a value that must exist before some steps can run: thresholds of a model, router rows, an order of neurons
Step      one output tensor: its op, its reads, and how it is stored
Plan      models, products, steps, and everything that is not a tensor
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from weightsmith._base.errors import Finding, legible
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.containers import CONTAINERS, PLAIN_NAMES, SAFETENSORS, Layout, Naming
from weightsmith._plans.codec import OMITTED, encode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from weightsmith._plans.summary import Summary

Value = bool | int | float | str
Parameters = Mapping[str, Value | None]

Role = Literal["linear", "vocabulary", "other"]
"""How methods treat a tensor: the weight of a linear layer inside a block; one row per token; anything else."""

COPY = "copy"
"""Copies bytes unchanged. With pieces: the stored tensors of an encoding, from files that have them (`Step.verbatim`)."""

CAST = "cast"
"""Converts to another dtype."""

JOIN = "join"
"""Concatenates the pieces of a step."""

PERTURB = "perturb"
"""Adds noise to an expert's values, reinitialises some of them, and scales the result."""

FILL = "fill"
"""Fills the tensor with one number; no inputs."""

OPERATIONS = frozenset({COPY, CAST, JOIN, PERTURB, FILL})
"""Ops other than merge methods."""

PLAIN = "plain"
"""The encoding of a tensor stored as plain values of its dtype."""

PRODUCTS = -1
"""`Read.model` of a product's array."""

NO_NEEDS = frozenset[str]()
_SUMMARY = "weightsmith._execution.summary"
"""Makes summaries. It needs the engine and the models, which import this module."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor: `rows` runs of `cols` elements, the first at `offset`, each starting `stride` after the last."""

    offset: int
    rows: int
    cols: int
    stride: int

    @property
    def whole_rows(self) -> bool:
        """Whether the block is one run of elements."""
        return self.cols == self.stride or self.rows == 1

    @property
    def end(self) -> int:
        """One past the flat index of the last element.

        >>> Block(offset=5, rows=3, cols=2, stride=10).end, Block(offset=5, rows=3, cols=0, stride=10).end
        (27, 5)
        """
        return self.offset + (self.rows - 1) * self.stride + self.cols if self.rows and self.cols else self.offset

    def flat(self, index: int) -> int:
        """The index in the flat tensor of the block's element `index`.

        >>> Block(offset=5, rows=3, cols=2, stride=10).flat(3)
        16
        """
        row, col = divmod(index, self.cols)
        return self.offset + row * self.stride + col


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows (axis 0) or columns (axis 1) of a matrix, selected by a table: position i is source position table[i]; -1: zeros.

    table     index into `Plan.tables`, or the name of a product's int32 vector
    block     the matrix, which must be contiguous (`whole_rows`)
    fallback  rows for the positions where the table has -1: gathers of rows with a table of the plan, as long as this one,
              and rows of the same length. Such a row is the mean of those that are not -1 there; zeros if all are. A single
              one is copied; a mean, or a row of another dtype, is rounded to the dtype of the tensor
    """

    table: int | str
    block: Block
    axis: Literal[0, 1] = 0
    fallback: tuple[Read, ...] = field(default=(), metadata=OMITTED)


View = Block | Gather


@dataclass(frozen=True, slots=True)
class Read:
    """Tensor `tensor` of `Plan.models[model]`, or a product's array (model is `PRODUCTS`): all of it, or a view."""

    model: int
    tensor: str
    view: View | None = None

    @property
    def table(self) -> str:
        """The product's vector that the view uses as its table; "" if none."""
        return self.view.table if isinstance(self.view, Gather) and isinstance(self.view.table, str) else ""


@dataclass(frozen=True, slots=True)
class Table:
    """Row or column numbers for `Gather` (int32), or importances of columns for an encoding (float32), little endian.

    >>> Table.of([2, -1]).array.tolist()
    [2, -1]
    """

    data: bytes

    @classmethod
    def of(cls, numbers: npt.ArrayLike) -> Table:
        """A table from a sequence of integers."""
        import numpy as np

        return cls(np.asarray(numbers, "<i4").tobytes())

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The numbers: int32 [n]."""
        import numpy as np

        return np.frombuffer(self.data, "<i4")

    @property
    def floats(self) -> npt.NDArray[np.float32]:
        """The importances: float32 [n]."""
        import numpy as np

        return np.frombuffer(self.data, "<f4")


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved parameters. Steps with equal parameters share them.

    shared   parameters of the output tensor
    models   parameters of each input of the step, in order ({} for a base without parameters)
    places   for each input, its position among the recipe's models, if some are left out; else ()
    """

    shared: Parameters
    models: tuple[Parameters, ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StatisticRead:
    """A statistic of what enters the weight that a step reads of one model, or of its gradients. Its job gets all of it.

    kind   a name of `weightsmith._activations.statistics.STATISTICS`
    input  place among the inputs of the step
    read   the array of a product: all of it, or whole rows
    """

    kind: str
    input: int
    read: Read


@dataclass(frozen=True, slots=True)
class Step:
    """How to compute one output tensor.

    out       name, dtype and shape of the tensor
    op        one of `OPERATIONS`, or the name of a merge method
    inputs    in the recipe's order; with a base, the base first
    base      whether inputs[0] is the base of the merge
    settings  index into `Plan.settings`
    pieces    for `join`: steps that each compute a run of the tensor's elements, as a tensor of its own. For `copy`: steps
              that fill `stored`, one tensor after the other
    needs     products that must be finished first, besides those that it reads
    role      how methods treat the tensor
    layer     prefix of its layer, `model.layers.3.`; "" outside the layers, and if the op does not use it
    encoding  how its values are stored
    stored    the tensors to write, if the encoding is not `plain`
    weighted  index into `Plan.tables` of the importances that the encoding takes; -1: none
    statistics  what its method knows of the inputs from a text; () for a tensor of which a text tells nothing
    """

    out: TensorSpec
    op: str
    inputs: tuple[Read, ...]
    base: bool = False
    settings: int = 0
    pieces: tuple[Step, ...] = field(default=(), metadata=OMITTED)
    needs: tuple[str, ...] = field(default=(), metadata=OMITTED)
    role: Role = field(default="other", metadata=OMITTED)
    layer: str = field(default="", metadata=OMITTED)
    encoding: str = field(default=PLAIN, metadata=OMITTED)
    stored: tuple[TensorSpec, ...] = field(default=(), metadata=OMITTED)
    weighted: int = field(default=-1, metadata=OMITTED)
    statistics: tuple[StatisticRead, ...] = field(default=(), metadata=OMITTED)

    @classmethod
    def copy(cls, out: TensorSpec, read: Read, dtype: DType) -> Step:
        """A copy of a tensor or of a part of it: a cast, if the result has another dtype. dtype: of the tensor."""
        return cls(out, COPY if out.dtype == dtype else CAST, (read,))

    def cast(self, dtype: DType) -> Step:
        """The step with a result of this dtype. A copy becomes a cast, if it has another."""
        if dtype == self.out.dtype:
            return self
        return replace(self, op=CAST if self.op == COPY else self.op, out=replace(self.out, dtype=dtype))

    @property
    def outs(self) -> tuple[TensorSpec, ...]:
        """The tensors to write: one, or those of the encoding."""
        return self.stored or (self.out,)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to write."""
        return sum(out.nbytes for out in self.outs)

    @property
    def verbatim(self) -> bool:
        """Whether what the encoding stores is copied from files that have the tensor so: nothing is decoded or encoded."""
        return self.op == COPY and bool(self.pieces)

    @property
    def places(self) -> Iterator[tuple[Step, int, int]]:
        """The leaves, the number of the tensor to write that a leaf is part of, and the index of its first element there."""
        number = origin = 0
        for leaf in self.leaves:
            yield leaf, number, origin
            origin += leaf.out.size
            if self.verbatim and origin * leaf.out.dtype.itemsize >= self.stored[number].nbytes:
                number, origin = number + 1, 0

    @property
    def family(self) -> str:
        """The encoding without its setting: `exl2` for `exl2 4/g128`."""
        return self.encoding.partition(" ")[0]

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The pieces, or else the step itself."""
        return self.pieces or (self,)

    def with_leaves(self, change: Callable[[Step], Step]) -> Step:
        """The step with each of its leaves changed."""
        return replace(self, pieces=tuple(map(change, self.pieces))) if self.pieces else change(self)

    @property
    def all_inputs(self) -> Iterator[Read]:
        """Its inputs, what replaces rows that they lack, and statistics. Not those of its pieces."""
        for read in self.inputs:
            yield read
            if isinstance(read.view, Gather):
                yield from read.view.fallback
        yield from (statistic.read for statistic in self.statistics)

    @property
    def merges(self) -> bool:
        """Whether the op is a merge method; for a `join`, check its leaves."""
        return self.op not in OPERATIONS

    @property
    def made_by(self) -> str:
        """The op of the leaves if all have the same, else `join`."""
        ops = {leaf.op for leaf in self.leaves}
        return ops.pop() if len(ops) == 1 else self.op

    @property
    def reads(self) -> Iterator[Read]:
        """All reads of its leaves."""
        for leaf in self.leaves:
            yield from leaf.inputs


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file of `Plan.models[model]` that a product reads, with its sha256 at planning time."""

    model: int
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Product:
    """A value that must exist before some steps can run. Computed once, stored in the staging folder, and reused on resume.

    name      unique in the plan
    op        its kind (`weightsmith._engine.products`)
    outs      its arrays, with names that are unique in the plan; steps read them as tensors
    settings  JSON values: everything it depends on, besides tensors and files
    steps     steps for the tensors it reads; () if its kind reads the steps that need it
    models    model indices; `settings` refers to positions in this list
    needs     products that must be finished first
    files     files that it reads
    transient only products need it: removed once these are finished, and made again only if one of them must be
    """

    name: str
    op: str
    outs: tuple[TensorSpec, ...]
    settings: Mapping[str, Any]
    steps: tuple[Step, ...] = ()
    models: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    files: tuple[FileRead, ...] = ()
    transient: bool = field(default=False, metadata=OMITTED)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input checkpoint: its name, and its identity at planning time.

    ref       as written in the recipe (`org/name@revision`, `./folder`, `base+adapter`)
    revision  commit of a Hub model, digest of the files' versions at another address, "" otherwise
    identity  hash of names, headers and sizes
    plan      of a merge whose result it is: its tensors are computed when they are read
    sample    hash of parts of the weight files that no revision names: see `Checkpoint.sample`
    """

    ref: str
    revision: str
    identity: str
    plan: Plan | None = field(default=None, metadata=OMITTED)
    sample: str = field(default="", metadata=OMITTED)


@dataclass(frozen=True, slots=True)
class Dropped:
    """An input tensor that is not used, and why."""

    model: int
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class TakenForCopy:
    """A tensor that is left out, or merged, as a copy of another one of its model: to be compared when both can be read.

    model  index
    other  the name of the other one
    """

    model: int
    tensor: str
    other: str


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The plan that follows from the products of another one, of which nothing else is run then.

    kind      one of `weightsmith._planning.follow_ups.KINDS`
    settings  JSON values: everything that the second plan depends on, besides the first plan and the arrays of its products
    """

    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The user's file that defines the merge method.

    name    as in the recipe, `./my_method.py:blend`
    folder  base for a relative name
    sha256  of the file
    """

    name: str
    folder: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The method or command of a plan, for the model card, the manifest and the summary. Not used in decisions.

    name      the merge method, or the command: `ties`, `moe`
    title     one sentence that describes the checkpoint
    source    the method's source, and remarks
    distance  the text after "Frobenius norms of merged - base" on the card
    code      the user's file, if any
    relation  to the models, in the Hub's words: `merge`, `quantized`; "" for a copy
    format    in which the weights are stored, if they are quantised: `gguf-q4_k_m`
    """

    name: str
    title: str = ""
    source: str = ""
    distance: str = ""
    code: OwnCode | None = None
    relation: str = "merge"
    format: str = ""


_STEPS_AT_ONCE = 1_000
"""Steps whose JSON is made together for the hash of a plan."""


@dataclass(frozen=True)
class Plan:
    """Everything a run will do.

    provenance       the method or command
    models           inputs, in the recipe's order (the base first, if any)
    steps            output tensors in model order
    settings         indexed by `Step.settings`
    products         values that some steps need, in dependency order
    tables           indexed by `Gather.table` and `Step.weighted`
    dropped          every unused input tensor, with a reason
    copies           of models that were not downloaded yet: what a run compares first
    config           the new config.json, or None if the donor has none
    donor            index of the model that supplies config, tokenizer and other files
    carried          names of the donor's files to copy unchanged
    files            other files to write, by name; they replace the donor's
    lacking          files beside the weights that a model has and the output lacks, by model; not used in decisions
    vocabulary       how the tokens of the output were found, for the summary; not used in decisions
    container        how tensors are laid out in files
    naming           of safetensors files, and what they contain besides tensors
    header           what GGUF files contain besides tensors: their keys
    mmproj           the keys of a second GGUF file, for images; empty: there is none
    max_shard_bytes  maximum size of a weight file
    seed             of the random masks
    warnings         for the user
    recipe           the recipe's text, unchanged
    follows_recipe   False: `recipe` holds the settings of a command instead, and is not written as a file
    then             the plan that follows from the products, if there is one; nothing else of this plan is run
    """

    provenance: Provenance
    models: tuple[ModelInput, ...]
    steps: tuple[Step, ...]
    settings: tuple[Settings, ...]
    products: tuple[Product, ...] = ()
    tables: tuple[Table, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    copies: tuple[TakenForCopy, ...] = field(default=(), metadata=OMITTED)
    config: dict[str, Any] | None = None
    donor: int = 0
    carried: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, metadata={**OMITTED, "key": "other_files"})
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=OMITTED)
    vocabulary: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    container: str = SAFETENSORS
    naming: Naming = field(default=PLAIN_NAMES, metadata=OMITTED)
    header: bytes = field(default=b"", metadata=OMITTED)
    mmproj: bytes = field(default=b"", metadata=OMITTED)
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    warnings: tuple[Finding, ...] = field(default=())
    recipe: str = ""
    follows_recipe: bool = field(default=True, metadata=OMITTED)
    then: FollowUp | None = field(default=None, metadata=OMITTED)

    @cached_property
    def layout(self) -> Layout:
        """The position of every output byte."""
        specs = [out for step in self.steps for out in step.outs]
        return CONTAINERS[self.container](specs, self.max_shard_bytes, self.naming, self.header, self.mmproj)

    def summary(self, *, allow_code: bool = False, **options: Any) -> Summary:
        """What a run of the plan reads, transfers, holds and writes, and about how long it takes. Reads headers only.

        options     those of `weightsmith.run`: the memory depends on the number of threads
        allow_code  as for `weightsmith.run`

        Raises PlanError if the models are not those of the plan, or not there.

        >>> plan = weightsmith.plan("ties.yml")  # doctest: +SKIP
        >>> print(plan.summary(threads=2))  # doctest: +SKIP
        tensors   290
        write     2.2 GB
        read      up to 13.2 GB (inputs of 6.6 GB, read up to 2 times)
        memory    184 MB at most, with 2 threads
        """
        return import_module(_SUMMARY).summary_of(self, options, allow_code=allow_code)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(step.nbytes for step in self.steps)

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """The steps of the output, and those that products read."""
        return (*self.steps, *(step for product in self.products for step in product.steps))

    @cached_property
    def encodings(self) -> tuple[str, ...]:
        """The encodings in use, other than `plain`, without their settings."""
        return tuple(dict.fromkeys(step.family for step in self.steps if step.family != PLAIN))

    @cached_property
    def widest(self) -> int:
        """The largest number of inputs of any step; those of merges that are computed on the way, and their results, count."""
        inner = sum(model.plan.widest + 1 for model in self.models if model.plan is not None)
        return max((len(leaf.inputs) for step in self.all_steps for leaf in step.leaves), default=1) + inner

    @cached_property
    def levels(self) -> int:
        """This plan, and the merges that are computed on the way."""
        return 1 + sum(model.plan.levels for model in self.models if model.plan is not None)

    @cached_property
    def maker(self) -> Mapping[str, str]:
        """Name of a product's array → name of the product."""
        return arrays_of(self.products)

    def products_for(self, steps: Iterable[Step], names: Collection[str] = ()) -> tuple[Product, ...]:
        """The products that these steps need, those named, and their dependencies; in plan order."""
        needed = {*names, *(name for step in steps for name in self.needs(step))}
        for product in reversed(self.products):
            needed.update(product.needs if product.name in needed else ())
        return tuple(product for product in self.products if product.name in needed)

    def leaves_of(self, product: Product) -> Iterator[Step]:
        """The steps whose tiles a product that streams reads."""
        for step in product.steps or self.steps:
            yield from (leaf for leaf in step.leaves if product.name in leaf.needs and leaf.out.size)

    @property
    def refs(self) -> tuple[str, ...]:
        """What the models are called. A quantised one may be among `models` twice: decoded, and as it is."""
        return tuple(dict.fromkeys(model.ref for model in self.models))

    @property
    def copies_codes(self) -> bool:
        """Whether some weights stay as an input stores them: they are copied, not decoded."""
        return any(step.verbatim for step in self.steps)

    def label(self, read: Read) -> str:
        """The model or product that a read refers to, for messages."""
        return f"product {self.maker[read.tensor]}" if read.model == PRODUCTS else self.models[read.model].ref

    def needs(self, step: Step) -> frozenset[str]:
        """The products that must be finished before a step can run."""
        return needs_of(step, self.maker) if self.products else NO_NEEDS

    @cached_property
    def hash(self) -> str:
        """Identity of the plan (sha256, hex). With equal inputs, equal hashes mean equal weight files."""
        data = replace(self, steps=()).to_json()
        for name in ("warnings", "lacking"):
            data.pop(name, None)
        todo = [data]
        while todo:
            one = todo.pop()
            one.pop("copies", None)  # not known of models that are downloaded already
            for model in one["models"]:  # samples are of the inputs
                model.pop("sample", None)
                todo += [model["plan"]] if "plan" in model else []
        digest, text_of = hashlib.sha256(), json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
        for number, name in enumerate(sorted(data)):
            digest.update(f"{',' if number else '{'}{text_of(name)}:".encode())
            if name != "steps":
                digest.update(text_of(data[name]).encode())
                continue
            # A few at a time: the text and the dicts of 70,000 steps would take 100 MB.
            for first in range(0, len(self.steps), _STEPS_AT_ONCE):
                steps = [encode(step) for step in self.steps[first : first + _STEPS_AT_ONCE]]
                digest.update(f"{',' if first else '['}{text_of(steps)[1:-1]}".encode())
            digest.update(b"]" if self.steps else b"[]")
        digest.update(b"}")
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"<Plan {self.provenance.name} of {len(self.models)} models: {len(self.steps):,} tensors, {self.nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        """For notebooks: totals, ops and warnings."""
        ops: dict[str, tuple[int, int]] = {}
        for step in self.steps:
            tensors, nbytes = ops.get(step.made_by, (0, 0))
            ops[step.made_by] = tensors + 1, nbytes + step.nbytes
        rows = [("method", self.provenance.name), ("models", ", ".join(self.refs))]
        rows += [(f"by {op}", f"{tensors:,} tensors, {nbytes:,} bytes") for op, (tensors, nbytes) in ops.items()]
        rows += [("not in the output", f"{len(self.dropped):,} tensors")] if self.dropped else []
        rows += [("warning", str(finding)) for finding in self.warnings]
        cells = "".join(f"<tr><th>{escape(legible(name))}</th><td>{escape(legible(text))}</td></tr>" for name, text in rows)
        return f"<table>{cells}</table>"

    def __getstate__(self) -> dict[str, Any]:
        # Skip cached properties: the layout is large and holds a view that cannot be pickled.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `plan_from_json` is its inverse."""
        return encode(self)


def arrays_of(products: Iterable[Product]) -> dict[str, str]:
    """Name of a product's array → name of the product."""
    return {out.name: product.name for product in products for out in product.outs}


def needs_of(step: Step, maker: Mapping[str, str]) -> frozenset[str]:
    """The products that must be finished before a step can run. maker: see `arrays_of`."""
    products = set(step.needs)
    for leaf in step.leaves:
        products.update(leaf.needs)
        for read in leaf.all_inputs:
            if read.model == PRODUCTS:
                products.add(maker[read.tensor])
            if read.table:
                products.add(maker[read.table])
    return frozenset(products)
