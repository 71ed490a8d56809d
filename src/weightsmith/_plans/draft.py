"""A Plan in the making, and the checks that every plan passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from weightsmith._base.errors import Finding
from weightsmith._files.containers import PLAIN_NAMES, SAFETENSORS, Naming
from weightsmith._plans.codec import check_name, check_path, invalid
from weightsmith._plans.values import (
    JOIN,
    PLAIN,
    PRODUCTS,
    Block,
    Dropped,
    FollowUp,
    Gather,
    ModelInput,
    Plan,
    Product,
    Provenance,
    Settings,
    Step,
    Table,
)


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


def _check_step(plan: Plan, step: Step, products: set[str], arrays: set[str]) -> None:
    at = f"step {step.out.name}"
    if (step.op == JOIN) != bool(step.pieces):
        raise invalid(at, "a join must have pieces, and other steps must not")
    if any(piece.pieces or piece.op == JOIN for piece in step.pieces):
        raise invalid(at, "a piece cannot contain pieces")
    if (step.encoding == PLAIN) == bool(step.stored):
        raise invalid(at, "an encoding other than plain must list its stored tensors")
    if step.weighted >= 0 and (step.weighted >= len(plan.tables) or step.encoding == PLAIN):
        raise invalid(at, f"there is no table {step.weighted}, or no encoding that takes it")
    if step.pieces and sum(piece.out.size for piece in step.pieces) != step.out.size:
        raise invalid(at, f"its pieces do not have {step.out.size:,} elements in total")
    needs = (*step.needs, *(name for piece in step.pieces for name in piece.needs))
    if not products.issuperset(needs):
        raise invalid(at, f"it needs {needs}, which are not all products of this plan")
    for leaf in step.leaves:
        if leaf.out.dtype is not step.out.dtype:
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
