"""What a Plan is made of. Frozen values; nothing here reads, writes or computes.

Read      a tensor of a model or of a product: whole, a block of it, or rows and columns picked by a table
Product   a value that must exist before some steps can run: thresholds of a whole model, router rows, an order of neurons
Step      one tensor: the op that makes it, from which reads, and how it is stored
Plan      models, products, steps, and all that is not a tensor
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from weightsmith._version import __version__
from weightsmith.containers import CONTAINERS, SAFETENSORS, Layout
from weightsmith.errors import Finding
from weightsmith.tensors import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Value = bool | int | float | str
Parameters = Mapping[str, Value | None]

Role = Literal["linear", "vocabulary", "other"]
"""What a tensor is to a method: the weight of a linear layer inside a block; rows that are tokens; anything else."""

COPY = "copy"
"""Bytes as they are."""

CAST = "cast"
"""The same numbers in another dtype."""

JOIN = "join"
"""The pieces of a step, one after another."""

PERTURB = "perturb"
"""Numbers of an expert with noise, some of them drawn anew, times a factor."""

FILL = "fill"
"""One number everywhere; no inputs."""

OPERATIONS = frozenset({COPY, CAST, JOIN, PERTURB, FILL})
"""The ops that are not merge methods."""

PLAIN = "plain"
"""The encoding of a tensor that is stored as numbers of its dtype."""

PRODUCTS = -1
"""`Read.model` of what a product makes."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor's elements: `rows` runs of `cols` elements, the first at `offset`, `stride` from one to the next."""

    offset: int
    rows: int
    cols: int
    stride: int

    @property
    def whole_rows(self) -> bool:
        """The block is one run of elements."""
        return self.cols == self.stride or self.rows == 1

    @property
    def end(self) -> int:
        """One past the flat index of its last element.

        >>> Block(offset=5, rows=3, cols=2, stride=10).end
        27
        """
        return self.offset + (self.rows - 1) * self.stride + self.cols if self.rows and self.cols else self.offset

    def flat(self, index: int) -> int:
        """The tensor's flat index of the block's element `index`.

        >>> Block(offset=5, rows=3, cols=2, stride=10).flat(3)
        16
        """
        row, col = divmod(index, self.cols)
        return self.offset + row * self.stride + col


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows (axis 0) or columns (axis 1) of a matrix, in the order of a table: place i holds what is at table[i]; -1: zeros.

    table  index into `Plan.tables`, or the name of a product's int32 vector
    block  the matrix; its rows follow each other (`whole_rows`), as those of a whole tensor do
    """

    table: int | str
    block: Block
    axis: Literal[0, 1] = 0


View = Block | Gather


@dataclass(frozen=True, slots=True)
class Read:
    """Tensor `tensor` of `Plan.models[model]`, or of a product (model is `PRODUCTS`): whole, or as a view shows it."""

    model: int
    tensor: str
    view: View | None = None

    @property
    def table(self) -> str:
        """The product's vector that the view is ordered by, "" if there is none."""
        return self.view.table if isinstance(self.view, Gather) and isinstance(self.view.table, str) else ""


@dataclass(frozen=True, slots=True)
class Table:
    """Row or column numbers for `Gather`: int32, little endian.

    >>> Table.of([2, -1]).array.tolist()
    [2, -1]
    """

    data: bytes

    @classmethod
    def of(cls, numbers: npt.ArrayLike) -> Table:
        """The table of a sequence of integers."""
        import numpy as np

        return cls(np.asarray(numbers, "<i4").tobytes())

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The numbers: int32 [n]."""
        import numpy as np

        return np.frombuffer(self.data, "<i4")


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved parameters, shared by all the steps that have the same ones.

    shared   the parameters of the output tensor
    models   for each input of the step, in order, its own parameters ({} for a base that takes none)
    places   for each input its place among those that the recipe lists, where some are left out; else ()
    """

    shared: Parameters
    models: tuple[Parameters, ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """How one output tensor is made.

    out       name, dtype and shape of the tensor
    op        `copy` (bytes as they are), another of `OPERATIONS`, the name of a merge method, or `join`: the pieces one after
              another
    inputs    in the recipe's order; with a base, the base first
    base      True when inputs[0] is the base of the merge
    settings  index into `Plan.settings`
    pieces    of a `join`: steps that each make a run of the tensor's elements, as if it were a tensor of its own
    needs     products that must be finished first, beside those that it reads
    role      what the tensor is to a method
    layer     prefix of the layer it belongs to, `model.layers.3.`; "" outside the layers, and where no op asks
    encoding  how its numbers are stored
    stored    the tensors that are written, when the encoding is not `plain`
    """

    out: TensorSpec
    op: str
    inputs: tuple[Read, ...]
    base: bool = False
    settings: int = 0
    pieces: tuple[Step, ...] = ()
    needs: tuple[str, ...] = ()
    role: Role = "other"
    layer: str = ""
    encoding: str = PLAIN
    stored: tuple[TensorSpec, ...] = ()

    @property
    def outs(self) -> tuple[TensorSpec, ...]:
        """The tensors that are written: one, or as many as the encoding makes of it."""
        return self.stored or (self.out,)

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The steps that do the work: the pieces, else the step itself."""
        return self.pieces or (self,)

    @property
    def merges(self) -> bool:
        """A merge method makes the tensor; of a `join`, ask its leaves."""
        return self.op not in OPERATIONS

    @property
    def made_by(self) -> str:
        """The op of the leaves where all have the same, else `join`."""
        ops = {leaf.op for leaf in self.leaves}
        return ops.pop() if len(ops) == 1 else self.op

    @property
    def reads(self) -> Iterator[Read]:
        """Everything that is read for it."""
        for leaf in self.leaves:
            yield from leaf.inputs


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file that a product reads, beside tensors: of `Plan.models[model]`, and the sha256 that it had when planned."""

    model: int
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Product:
    """A value that must exist before some steps can run. It is made once, kept in the staging folder, and found on resume.

    name      unique in the plan
    op        which kind it is (`weightsmith.products`)
    outs      the arrays that it makes; their names are unique in the plan, and steps read them as tensors
    settings  JSON values: all that it follows from, beside tensors and files
    steps     how the tensors are made that it looks at; () with a kind that looks at the steps that need it
    models    numbers of models that `settings` speaks of, by their place here
    needs     products that must be finished first
    files     that it reads
    """

    name: str
    op: str
    outs: tuple[TensorSpec, ...]
    settings: Mapping[str, Any]
    steps: tuple[Step, ...] = ()
    models: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    files: tuple[FileRead, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input checkpoint: how the user named it, and what it was when planned.

    ref       as written in the recipe (`org/name@revision`, `./folder`, `base+adapter`)
    revision  commit of a hub model, "" otherwise
    identity  of names, headers and sizes: another checkpoint has another one
    """

    ref: str
    revision: str
    identity: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """An input tensor that is not in the output, and why."""

    model: int
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The user's own file that a merge method comes from.

    name    as the recipe names it, `./my_method.py:blend`
    folder  that the name starts from
    sha256  of the file
    """

    name: str
    folder: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Made:
    """What made a plan: for the model card, the manifest and the summary. Code never compares it.

    name      the merge method, or the command: `ties`, `moe`
    title     one sentence: what the checkpoint is
    source    where that comes from, and what to know of it
    distance  what follows "Frobenius norms of merged - base" on the card
    code      the user's own file, if there is one
    """

    name: str
    title: str = ""
    source: str = ""
    distance: str = ""
    code: OwnCode | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, before anything does.

    made             what made it
    models           inputs, in the recipe's order (base first when there is one)
    steps            output tensors in model order
    settings         the tables `Step.settings` points into
    products         what must exist before some steps, in an order in which they can be made
    tables           that `Gather.table` points into
    dropped          every input tensor that is not used, with its reason
    config           the new config.json, or None when the donor has none
    donor            index of the model that gives config, tokenizer and all other files
    carried          names of the donor's files copied as they are
    container        how tensors are laid out in files
    max_shard_bytes  upper bound of a weight file
    seed             of the random masks
    warnings         what the user should know
    recipe           the recipe's text, byte for byte
    """

    made: Made
    models: tuple[ModelInput, ...]
    steps: tuple[Step, ...]
    settings: tuple[Settings, ...]
    products: tuple[Product, ...] = ()
    tables: tuple[Table, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    config: dict[str, Any] | None = None
    donor: int = 0
    carried: tuple[str, ...] = ()
    container: str = SAFETENSORS
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    warnings: tuple[Finding, ...] = field(default=())
    recipe: str = ""

    @cached_property
    def layout(self) -> Layout:
        """Where every output byte goes."""
        return CONTAINERS[self.container]([out for step in self.steps for out in step.outs], self.max_shard_bytes)

    @cached_property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of steps that are not stored as plain numbers."""
        return tuple(dict.fromkeys(step.encoding for step in self.steps if step.encoding != PLAIN))

    @cached_property
    def widest(self) -> int:
        """Inputs of the step that has most."""
        steps = [*self.steps, *(step for product in self.products for step in product.steps)]
        return max((len(leaf.inputs) for step in steps for leaf in step.leaves), default=1)

    @cached_property
    def maker(self) -> Mapping[str, str]:
        """Name of a product's array → name of the product."""
        return {out.name: product.name for product in self.products for out in product.outs}

    def products_for(self, steps: Iterable[Step], names: Collection[str] = ()) -> tuple[Product, ...]:
        """The products that some steps need, or that are named, and those that these need; in the plan's order."""
        wanted = {*names, *(name for step in steps for name in self.needs(step))}
        for product in reversed(self.products):
            wanted.update(product.needs if product.name in wanted else ())
        return tuple(product for product in self.products if product.name in wanted)

    def label(self, read: Read) -> str:
        """Where a read takes its tensor from, for messages."""
        return f"product {self.maker[read.tensor]}" if read.model == PRODUCTS else self.models[read.model].ref

    def needs(self, step: Step) -> frozenset[str]:
        """The products that must be finished before a step can run."""
        found = set(step.needs)
        for leaf in step.leaves:
            found.update(leaf.needs)
            for read in leaf.inputs:
                if read.model == PRODUCTS:
                    found.add(self.maker[read.tensor])
                if read.table:
                    found.add(self.maker[read.table])
        return frozenset(found)

    @cached_property
    def hash(self) -> str:
        """Identity of the plan: with equal inputs, equal hashes mean equal weight files (sha256, hex)."""
        data = self.to_json()
        data.pop("warnings")
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __repr__(self) -> str:
        nbytes = sum(out.nbytes for step in self.steps for out in step.outs)
        return f"<Plan {self.made.name} of {len(self.models)} models: {len(self.steps):,} tensors, {nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        """What notebooks show: the sums, the ops and the warnings."""
        ops: dict[str, tuple[int, int]] = {}
        for step in self.steps:
            tensors, nbytes = ops.get(step.made_by, (0, 0))
            ops[step.made_by] = tensors + 1, nbytes + sum(out.nbytes for out in step.outs)
        rows = [("method", self.made.name), ("models", ", ".join(model.ref for model in self.models))]
        rows += [(f"by {op}", f"{tensors:,} tensors, {nbytes:,} bytes") for op, (tensors, nbytes) in ops.items()]
        rows += [("not in the output", f"{len(self.dropped):,} tensors")] if self.dropped else []
        rows += [("warning", str(finding)) for finding in self.warnings]
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table>{cells}</table>"

    def __getstate__(self) -> dict[str, Any]:
        # Without what is computed from the rest: the layout is large, and holds a view that cannot be pickled.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `plan_from_json` is its inverse."""
        return {
            "weightsmith": __version__,
            "made": _encode_made(self.made),
            "models": [{"ref": m.ref, "revision": m.revision, "identity": m.identity} for m in self.models],
            "settings": [
                {"shared": dict(s.shared), "models": [dict(m) for m in s.models], "places": list(s.places)}
                for s in self.settings
            ],
            "products": [_encode_product(p) for p in self.products],
            "tables": [base64.b64encode(t.data).decode() for t in self.tables],
            "steps": [_encode_step(s) for s in self.steps],
            "dropped": [[d.model, d.tensor, d.reason] for d in self.dropped],
            "config": self.config,
            "donor": self.donor,
            "carried": list(self.carried),
            "container": self.container,
            "max_shard_bytes": self.max_shard_bytes,
            "seed": self.seed,
            "warnings": [{"what": w.what, "where": w.where, "details": list(w.details), "fix": w.fix} for w in self.warnings],
            "recipe": self.recipe,
        }


def _encode_made(made: Made) -> dict[str, Any]:
    code = None if made.code is None else dict(zip(("name", "folder", "sha256"), astuple(made.code), strict=True))
    return {"name": made.name, "title": made.title, "source": made.source, "distance": made.distance, "code": code}


def _encode_product(product: Product) -> dict[str, Any]:
    return {
        "name": product.name,
        "op": product.op,
        "outs": [_encode_spec(out) for out in product.outs],
        "settings": dict(product.settings),
        "steps": [_encode_step(step) for step in product.steps],
        "models": list(product.models),
        "needs": list(product.needs),
        "files": [list(astuple(file)) for file in product.files],
    }


def _encode_spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype.name, list(spec.shape)]


def _encode_step(step: Step) -> dict[str, Any]:
    """One step as JSON values; what has its default is left out."""
    data: dict[str, Any] = {
        "name": step.out.name,
        "dtype": step.out.dtype.name,
        "shape": list(step.out.shape),
        "op": step.op,
        "inputs": [_encode_read(read) for read in step.inputs],
        "base": step.base,
        "settings": step.settings,
    }
    if step.pieces:
        data["pieces"] = [_encode_step(piece) for piece in step.pieces]
    if step.needs:
        data["needs"] = list(step.needs)
    if step.role != "other":
        data["role"] = step.role
    if step.layer:
        data["layer"] = step.layer
    if step.encoding != PLAIN:
        data["encoding"] = step.encoding
        data["stored"] = [_encode_spec(spec) for spec in step.stored]
    return data


def _encode_read(read: Read) -> list[Any]:
    view = read.view
    if view is None:
        return [read.model, read.tensor]
    if isinstance(view, Block):
        return [read.model, read.tensor, *astuple(view)]
    return [read.model, read.tensor, {"table": view.table, "axis": view.axis, "block": list(astuple(view.block))}]
