"""How a Plan comes to be: from features, which fill a draft, or from JSON. Both pass the checks of `PlanDraft.finish`, once.

The JSON is untrusted. `planner.reopen` checks that a plan fits its inputs (blocks inside tensors, equal sizes).
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Self

from weightsmith._base.errors import Finding
from weightsmith._base.redaction import has_secret
from weightsmith._base.tensors import BLOCKS, DTYPES, TensorSpec
from weightsmith._files.containers import CONTAINERS, PLAIN_NAMES, SAFETENSORS, Naming
from weightsmith._plans.codec import (
    FORMS,
    Form,
    check_name,
    check_path,
    decode,
    decode_fields,
    decode_record,
    encode,
    encode_record,
    has_type,
    invalid,
)
from weightsmith._plans.values import (
    COPY,
    JOIN,
    PLAIN,
    PRODUCTS,
    Block,
    Dropped,
    FileRead,
    FollowUp,
    Gather,
    ModelInput,
    Plan,
    Product,
    Provenance,
    Read,
    Settings,
    Step,
    Table,
    TakenForCopy,
    View,
)
from weightsmith._version import __version__


@dataclass(slots=True)
class PlanDraft:
    """A plan in the making. Features fill and change it in place; `finish` makes the Plan, once.

    The fields are those of `Plan`, with lists and dicts in place of tuples and mappings. A second plan that is derived from a
    finished one (a sample of it, the plan that follows from its products) starts with `PlanDraft.of(plan)`.

    >>> from weightsmith._plans import COPY, Read
    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> draft = PlanDraft(Provenance("copy"), [ModelInput("a", "", "hash")])
    >>> weight = TensorSpec("w", DTYPES["F32"], (2,))
    >>> draft.steps.append(Step(weight, COPY, (Read(0, "w"),), settings=draft.add_settings(Settings({}, ({},)))))
    >>> draft.warn("the model is small", where="w")
    >>> draft.finish()
    <Plan copy of 1 models: 1 tensors, 8 bytes>
    """

    provenance: Provenance
    models: list[ModelInput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    settings: list[Settings] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    copies: list[TakenForCopy] = field(default_factory=list)
    config: dict[str, Any] | None = None
    donor: int = 0
    carried: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    lacking: dict[str, tuple[str, ...]] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] | None = None
    container: str = SAFETENSORS
    naming: Naming = PLAIN_NAMES
    header: bytes = b""
    mmproj: bytes = b""
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    warnings: list[Finding] = field(default_factory=list)
    recipe: str = ""
    follows_recipe: bool = True
    then: FollowUp | None = None
    _finished: bool = False

    @classmethod
    def of(cls, plan: Plan | PlanDraft) -> Self:
        """A draft with the contents of another plan or draft, which stays as it is."""
        draft = cls(plan.provenance)
        for entry in fields(Plan):
            value = getattr(plan, entry.name)
            if isinstance(value, tuple | list):
                value = list(value)
            setattr(draft, entry.name, dict(value) if entry.name in ("files", "lacking") else value)
        return draft

    @property
    def held(self) -> set[str]:
        """The names of the output's files beside the weights."""
        return {*self.carried, *self.files, *([] if self.config is None else ["config.json"])}

    def add_settings(self, settings: Settings) -> int:
        """The index of these settings; equal ones are stored once."""
        if settings not in self.settings:
            self.settings.append(settings)
        return self.settings.index(settings)

    def add_table(self, table: Table) -> int:
        """The index of a table; equal ones are stored once."""
        if table not in self.tables:
            self.tables.append(table)
        return self.tables.index(table)

    def leave_out(self, steps: Collection[Step], reason: str) -> None:
        """Leave out some steps, and record why their tensors are not used. Products that read all steps still read these."""
        names = {step.out.name for step in steps}
        if names:
            self.fix_products(self.steps)
        reads = [read for step in steps for read in step.reads if read.model != PRODUCTS]
        self.dropped += [Dropped(read.model, read.tensor, reason) for read in reads]
        self.steps = [step for step in self.steps if step.out.name not in names]

    def fix_products(self, steps: Sequence[Step]) -> None:
        """Give each product without steps of its own those of these that need it: it reads them even if the plan loses them."""
        for i, product in enumerate(self.products):
            readable = [step for step in steps if any(product.name in leaf.needs for leaf in step.leaves)]
            if not product.steps and readable:
                self.products[i] = replace(product, steps=tuple(readable))

    def warn(self, what: str, where: str = "", fix: str = "") -> None:
        """Add a warning."""
        self.warnings.append(Finding(what, where, fix=fix))

    def finish(self, *, stored: bool = True) -> Plan:
        """The plan, checked: unique names, valid indices, products before the steps that need them, complete pieces, layout.

        stored  the output is written to files. False: its layout is not made, so its names need not suit the files

        Raises FormatError, and StoreError for names that cannot be stored. Cost: about 8 µs a tensor.
        """
        assert not self._finished, "a draft becomes a plan once"
        self._finished = True
        self.warnings = list(dict.fromkeys(self.warnings))
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(Plan)}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        plan = Plan(**values)
        _check(plan)
        if stored:
            plan.layout  # noqa: B018  names that cannot be stored show here
        return plan


def _check(plan: Plan) -> None:
    """Check everything that does not depend on the inputs: valid indices, unique names, complete pieces."""
    models, known = len(plan.models), set[str]()
    if not 0 <= plan.donor < models:
        raise invalid("plan.donor", f"there is no model {plan.donor}")
    for name in (*plan.carried, *plan.files):
        check_path(name, "plan.other_files" if name in plan.files else "plan.carried")
        if name in plan.carried and name in plan.files:
            raise invalid("plan.other_files", f"{name!r} is carried too")
    check_name(plan.naming.stem, "plan.naming")
    for folder in plan.naming.folders:
        check_path(folder, "plan.naming")
    for part, stem in plan.naming.parts.items():
        if part not in plan.naming.folders:
            raise invalid("plan.naming", f"{part!r} is none of its folders")
        check_name(stem, "plan.naming")
    for model in plan.models:
        inner = model.plan
        if inner is not None and (inner.products or inner.then is not None or any(s.encoding != PLAIN for s in inner.steps)):
            raise invalid(f"model {model.ref}", "what is computed on the way has neither products nor encodings")
    for settings in plan.settings:
        if settings.places and (len(settings.places) != len(settings.models) or min(settings.places) < 0):
            raise invalid("plan.settings", f"{list(settings.places)} are not the places of {len(settings.models)} inputs")
    arrays: set[str] = set()
    for product in plan.products:
        if product.name in known:
            raise invalid("plan.products", f"duplicate product {product.name!r}")
        if not known.issuperset(product.needs):
            raise invalid(f"product {product.name}", f"it needs {product.needs}, which are not defined before it")
        needed = known | {product.name}  # a survey's steps may need the survey itself
        for step in product.steps:
            _check_step(plan, step, needed, arrays)
        if any(not 0 <= m < models for m in (*product.models, *(file.model for file in product.files))):
            raise invalid(f"product {product.name}", f"there are {models} models")
        for out in product.outs:
            if out.name in arrays:
                raise invalid(f"product {product.name}", f"duplicate array {out.name!r}")
            arrays.add(out.name)
        known.add(product.name)
    transient = {product.name for product in plan.products if product.transient}
    for step in plan.steps:
        _check_step(plan, step, known, arrays)
        if not transient.isdisjoint(plan.needs(step)):
            raise invalid(f"step {step.out.name}", "it needs a transient product")
    if any(not 0 <= d.model < models for d in plan.dropped):
        raise invalid("plan.dropped", f"there are {models} models")
    if any(not 0 <= copy.model < models for copy in plan.copies):
        raise invalid("plan.copies", f"there are {models} models")


def _check_step(plan: Plan, step: Step, products: set[str], arrays: set[str]) -> None:
    at = f"step {step.out.name}"
    if (step.op == JOIN) != bool(step.pieces) and not step.verbatim:
        raise invalid(at, "a join must have pieces, and other steps must not")
    if any(piece.pieces or piece.op == JOIN for piece in step.pieces):
        raise invalid(at, "a piece cannot contain pieces")
    if (step.encoding == PLAIN) == bool(step.stored):
        raise invalid(at, "an encoding other than plain must list its stored tensors")
    if step.weighted >= 0 and (step.weighted >= len(plan.tables) or step.encoding == PLAIN):
        raise invalid(at, f"there is no table {step.weighted}, or no encoding that takes it")
    if step.verbatim:
        _check_verbatim(step, at)
    elif step.pieces and sum(piece.out.size for piece in step.pieces) != step.out.size:
        raise invalid(at, f"its pieces do not have {step.out.size:,} elements in total")
    needs = (*step.needs, *(name for piece in step.pieces for name in piece.needs))
    if not products.issuperset(needs):
        raise invalid(at, f"it needs {needs}, which are not all products of this plan")
    for leaf in step.leaves:
        if leaf.out.dtype is not step.out.dtype and not step.verbatim:
            raise invalid(at, "a piece has a different dtype than its tensor")
        if not 0 <= leaf.settings < len(plan.settings):
            raise invalid(at, f"there are no settings {leaf.settings}")
        if leaf.merges and len(plan.settings[leaf.settings].models) != len(leaf.inputs):
            raise invalid(at, f"settings {leaf.settings} are for a different number of inputs")
        for statistic in leaf.statistics:
            if statistic.read.model != PRODUCTS or not 0 <= statistic.input < len(leaf.inputs):
                raise invalid(at, f"the statistic {statistic.read.tensor!r} is not of an input, or no product's array")
            if statistic.read.view is not None and not (
                isinstance(statistic.read.view, Block) and statistic.read.view.whole_rows
            ):
                raise invalid(at, f"the statistic {statistic.read.tensor!r} is not read by whole rows")
        for read in leaf.all_inputs:
            if read.model == PRODUCTS:
                if read.tensor not in arrays:
                    raise invalid(at, f"no product provides {read.tensor!r}")
            elif not 0 <= read.model < len(plan.models):
                raise invalid(at, f"there is no model {read.model}")
            if isinstance(read.view, Gather):
                table = read.view.table
                if table not in arrays if isinstance(table, str) else table >= len(plan.tables):
                    raise invalid(at, f"there is no table {table!r}")


def _check_verbatim(step: Step, at: str) -> None:
    """Check that pieces that are copied fill the stored tensors, one after the other."""
    left = [out.nbytes for out in step.stored]
    for piece in step.pieces:
        while left and not left[0]:
            left.pop(0)
        if piece.op != COPY or len(piece.inputs) != 1 or not piece.out.nbytes or not left or piece.out.nbytes > left[0]:
            raise invalid(at, "its pieces are not copies that fill its stored tensors, one after the other")
        left[0] -= piece.out.nbytes
    if any(left) or step.inputs:
        raise invalid(at, "its pieces do not fill its stored tensors")


# ---- plans from JSON, and the parts of a plan whose JSON is not an object with a key for each field


MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 62

_SPEC = "name", "dtype", "shape"
_ORDER = ("provenance", "models", "settings", "products", "tables", "steps")
"""The first keys of a plan; the others are in the order of its fields."""


def plan_from_json(data: Any) -> Plan:
    """The inverse of `Plan.to_json`. Keys of no field are ignored. Raises FormatError for invalid values, and StoreError."""
    values = decode_fields(Plan, data, "plan", open_keys=True)
    if values["container"] not in CONTAINERS:
        raise invalid("plan.container", f"{values['container']!r} is not one of {', '.join(CONTAINERS)}")
    if not 1 <= values["max_shard_bytes"] <= MAX_ELEMENTS:
        raise invalid("plan.max_shard_bytes", f"{values['max_shard_bytes']} is out of range")
    if has_secret(values["recipe"]):
        raise invalid("plan.recipe", "it holds a password, a token or a key, and would be stored with the model")
    values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    return PlanDraft(**values).finish()


def _encode_plan(plan: Plan) -> dict[str, Any]:
    data = encode_record(plan)
    return {"weightsmith": __version__, **{key: data[key] for key in _ORDER}, **data}


def _decode_spec(value: Any, at: str) -> TensorSpec:
    name, dtype, shape = decode(tuple[str, str, tuple[int, ...]], value, at)
    if dtype not in DTYPES and dtype not in BLOCKS:
        raise invalid(at, f"{dtype!r} is not a dtype")
    spec = TensorSpec(name, DTYPES.get(dtype) or BLOCKS[dtype], shape)
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape) or spec.size > MAX_ELEMENTS:
        raise invalid(at, f"{list(shape)} is not a shape")
    return spec


def _encode_step(step: Step) -> dict[str, Any]:
    data = encode_record(step)
    return {**dict(zip(_SPEC, data.pop("out"), strict=True)), **data}


def _decode_step(value: Any, at: str) -> Step:
    data = decode(dict[str, Any], value, at)
    if missing := [key for key in _SPEC if key not in data]:
        raise invalid(at, f"{missing[0]!r} is missing")
    rest = {key: one for key, one in data.items() if key not in _SPEC}
    step = decode_record(Step, {"out": [data[key] for key in _SPEC], **rest}, at)
    for key in ("settings", "weighted"):
        if key in data and not 0 <= data[key] <= MAX_ELEMENTS:
            raise invalid(f"{at}.{key}", f"{data[key]} is out of range")
    return step


def _encode_read(read: Read) -> list[Any]:
    view = read.view
    place = [] if view is None else encode(view) if isinstance(view, Block) else [encode(view)]
    return [read.model, read.tensor, *place]


def _decode_read(value: Any, at: str) -> Read:
    if not isinstance(value, list) or len(value) < 2 or type(value[0]) is not int or not isinstance(value[1], str):
        raise invalid(at, "a read is [model, tensor], optionally with a view")
    model, tensor, *view = value
    decoded: View | None = None
    if view:
        decoded = decode(Gather, view[0], at) if len(view) == 1 else decode(Block, view, at)
    return Read(model, tensor, decoded)


def _decode_block(value: Any, at: str) -> Block:
    data = value if isinstance(value, list) else ()
    if len(data) != 4 or any(type(n) is not int or not 0 <= n <= MAX_ELEMENTS for n in data):
        raise invalid(at, "a block is [offset, rows, cols, stride]")
    return Block(*data)


def _encode_gather(view: Gather) -> dict[str, Any]:
    return {"table": view.table, "axis": view.axis, **encode_record(view)}


def _decode_gather(value: Any, at: str) -> Gather:
    view = decode_record(Gather, value, at)
    if isinstance(view.table, int) and view.table < 0:
        raise invalid(at, "a table is an index or a product's array")
    if not view.block.whole_rows:
        raise invalid(at, "a gathered block must be contiguous")
    plain = not view.axis and isinstance(view.table, int)
    if view.fallback and (not plain or not all(map(_is_fallback, view.fallback))):
        raise invalid(at, "a fallback must be rows, gathered by a table of the plan")
    return view


def _is_fallback(read: Read) -> bool:
    view = read.view
    return isinstance(view, Gather) and isinstance(view.table, int) and view.axis == 0 and not view.fallback


def _decode_table(value: Any, at: str) -> Table:
    data = decode(bytes, value, at)
    if len(data) % 4:
        raise invalid(at, "a table must be numbers of 4 bytes in base64")
    return Table(data)


def _decode_bytes(value: Any, at: str) -> bytes:
    try:
        return base64.b64decode(decode(str, value, at), validate=True)
    except ValueError:
        raise invalid(at, "it is not base64") from None


def _decode_file(value: Any, at: str) -> FileRead:
    file = FileRead(*decode(tuple[int, str, str], value, at))
    check_name(file.name, at)
    return file


def _row(record: Any) -> list[Any]:
    return list(astuple(record))


FORMS.update(
    {
        Plan: Form(_encode_plan, lambda value, _at: plan_from_json(value)),
        TensorSpec: Form(lambda spec: [spec.name, spec.dtype.name, list(spec.shape)], _decode_spec),
        Step: Form(_encode_step, _decode_step),
        Read: Form(_encode_read, _decode_read),
        Block: Form(_row, _decode_block),
        Gather: Form(_encode_gather, _decode_gather),
        Table: Form(lambda table: encode(table.data), _decode_table),
        bytes: Form(lambda data: base64.b64encode(data).decode(), _decode_bytes),
        Dropped: Form(_row, lambda value, at: Dropped(*decode(tuple[int, str, str], value, at))),
        FileRead: Form(_row, _decode_file),
    }
)


# ---- settings of products


class ProductSettings(ABC):
    """Base of the records that are the settings of a product."""

    __slots__ = ()

    @classmethod
    def of(cls, product: Product) -> Self:
        """From the settings of a product. Raises FormatError."""
        return decode(cls, product.settings, f"product {product.name}")

    def to_json(self) -> dict[str, Any]:
        """The settings of a product."""
        return encode(self)

    @classmethod
    def check(cls, product: Product) -> str:
        """Why a product is invalid, or "": `ProductKind.check`."""
        if not has_type(product.settings, cls):
            return f"its settings are not those of a {product.op} product"
        return cls.of(product).problem(product, {step.out.name: step.out.shape for step in product.steps})

    @abstractmethod
    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why a product with these settings is invalid, or "". shapes: of its steps"""


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text, cut into rows of tokens.

    source     the absolute path of a file: .txt, .jsonl or .parquet; `built-in`; `own`: the model writes it
    sha256     of the text; "" for one that the model writes, when the plan is run
    rows       number of rows
    tokens     tokens per row
    seed       for choosing rows, or for writing them
    tokenizer  sha256 of the tokenizer.json that cuts it
    """

    source: str
    sha256: str
    rows: int
    tokens: int
    seed: int
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class StatisticRequest:
    """A statistic of one model on one text.

    kind   a name of `weightsmith._activations.statistics.STATISTICS`
    model  its index in the plan
    text   with as many rows as it has; `weightsmith._activations.model.text_for` makes it
    merged  what enters a layer comes out of the merged layers below
    """

    kind: str
    model: int
    text: TextSource
    merged: bool = False
