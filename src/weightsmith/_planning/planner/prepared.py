"""What planning gives: a plan, first a draft, with the open models that it reads; and what it was made from.

A recipe whose result is a model of another is a `Stage`. A result that is not written is a source of tensors that computes what
is read (`engine.computed`), so several recipes are one plan: nothing but the last result is stored.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weightsmith._base.errors import UnknownName, WeightsmithError, nearest
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._base.idioms import Closing
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.structure import Structure
from weightsmith._models.tokenizers.files import settings_in
from weightsmith._outputs.manifest import check_file_name
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.loading import Check, Question
from weightsmith._planning.planner.outputs import Origins
from weightsmith._planning.planner.parameters import Origin, Resolver
from weightsmith._planning.recipe import Recipe, Surgery, Upcycling
from weightsmith._plans import ModelInput, Plan, PlanDraft

if TYPE_CHECKING:
    from weightsmith._engine.computed import ComputedSource

MAX_READS = 64
"""Tiles that are read for one tile of a result that is computed on the way. Each use of it reads them again."""
MAX_DEPTH = 8
"""Results that are computed on the way, each for the next."""

Written = Mapping[str, Path]
"""Folders with results of other recipes, by `Stage.path`."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made from: a recipe that was read, and the values of its options. The same request gives the same plan.

    recipe    of a merge or of a mixture
    source    name and text of the recipe, ("", "") if it has no lines
    folder    that paths in the recipe start from
    problems  found while it was read
    settings  of the format that `options.quantize` names
    is_copy   of one model, which is no adapter: adapters are merged, not copied
    """

    recipe: Recipe | Upcycling | Surgery
    options: RecipeOptions
    source: tuple[str, str] = ("", "")
    folder: Path = Path()
    problems: tuple[WeightsmithError, ...] = ()
    settings: object = None
    is_copy: bool = False


@dataclass(slots=True)
class Prepared(Closing):
    """A plan and the open models that it reads: first a draft, which features change in place, then finished.

    Close it, or use it as a context manager.

    structure  of the donor
    named      other files that the recipe or the settings name: code of a merge method, prompts, saliency, a measurement
    stages     the other recipes whose results it reads, each after those whose results it reads itself
    loading    what transformers is to be asked of the output before it is published; None: nothing
    request    what it was made from, to plan it again when a stage is written; None for a plan that was made before
    source     name and text of the recipe, ("", "") if it has no lines
    """

    draft: PlanDraft
    inputs: Sequence[Checkpoint]
    structure: Structure
    origins: Origins = field(default_factory=dict)
    resolver: Resolver | None = None
    named: list[Path] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    loading: Question | None = None
    request: PlanRequest | None = None
    source: tuple[str, str] = ("", "")
    _plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The finished plan."""
        assert self._plan is not None, "the plan is not finished"
        return self._plan

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        inputs: Sequence[Checkpoint],
        structure: Structure,
        named: Iterable[Path] = (),
        stages: Iterable[Stage] = (),
    ) -> Self:
        """A plan that is finished, with its models."""
        return cls(PlanDraft.of(plan), inputs, structure, named=list(named), stages=list(stages), _plan=plan)

    def with_plan(self, plan: Plan) -> Self:
        """Another finished plan of the same models."""
        return replace(self, _plan=plan)

    def draft_again(self) -> Self:
        """The beginning of another plan of the same models."""
        draft = PlanDraft.of(self.plan)
        return replace(self, draft=draft, named=[*self.named], stages=[*self.stages], request=None, _plan=None)

    def check(self) -> None:
        """Ask `loading` now, and add its warnings. Raises PlanError if transformers could not load the output."""
        if self.loading is not None:
            with Check(self.loading, self.source) as check:
                self.draft.warnings += check.wait()
            self.loading = None

    def finish(self, *, check: bool = False) -> Self:
        """Make the plan of the draft. The models are closed if it is invalid.

        check  see `check`; else whoever runs the plan asks

        Raises PlanError, and StoreError for tensors that cannot be stored.
        """
        try:
            if check:
                self.check()
            self._plan = self.draft.finish()
        except BaseException:
            self.close()
            raise
        return self

    def explain(self, tensor: str) -> list[Origin]:
        """The value of every parameter of one output tensor, and where the recipe says so; [] for one that is copied.

        Raises UnknownName.
        """
        names = [step.out.name for step in self.plan.steps]
        if tensor not in names:
            fix = "see the names with `weightsmith plan RECIPE --json`, or give a pattern such as '*.0.*'"
            raise UnknownName(f"the output has no tensor '{tensor}'{nearest(tensor, names)}", fix=fix)
        if self.resolver is None or tensor not in self.origins:
            return []
        segment, sources, t = self.origins[tensor]
        return self.resolver.explain(segment, tensor, sources or (tensor,) * len(segment.feeds), t)

    def close(self) -> None:
        """Close the checkpoints."""
        for checkpoint in self.inputs:
            checkpoint.close()


@dataclass(frozen=True, slots=True)
class Stage:
    """A recipe whose result is a model of another.

    path    of references to it (`ModelRef.path`)
    label   its name; or where it is, if it is written inside another
    plan    of its result
    source  its result, computed when it is read
    reads   tiles that are read for one of its tiles
    depth   results that are computed for it, each for the next
    why     why it must be written before it can be read; "" if it need not be
    request  what it is made from; None for a plan that was made before
    """

    path: str
    label: str
    plan: Plan
    source: ComputedSource
    reads: int
    depth: int
    why: str = ""
    request: PlanRequest | None = None

    @classmethod
    def of(cls, path: str, label: str, plan: Plan, inputs: Sequence[Checkpoint], others: Sequence[Stage]) -> Stage:
        """The stage of a plan. others: that it may read."""
        from weightsmith._engine.computed import ComputedSource

        source = ComputedSource(plan, inputs, label)
        known = {id(stage.source): stage for stage in others}
        used = {i: known[id(c.source)] for i, c in enumerate(inputs) if c.plan is not None}
        depth = 1 + max((stage.depth for stage in used.values()), default=0)
        leaves = [leaf.inputs for step in plan.steps for leaf in step.leaves]
        tiles = {i: stage.reads for i, stage in used.items()}
        reads = max((sum(tiles.get(read.model, 1) for read in leaf) for leaf in leaves), default=1)
        why = ""
        if plan.products:
            why = f"{plan.provenance.name} looks at the whole model first"
        elif source.holds_matrices:
            why = f"{plan.provenance.name} holds whole matrices"
        elif reads > MAX_READS:
            why = f"each of its tiles is computed from {reads} others"
        elif depth > MAX_DEPTH:
            why = f"it depends on {depth} others, one after the other"
        return cls(path, label, plan, source, reads, depth, why)

    def result(self) -> Checkpoint:
        """Its result, as a model of another: computed by the other plan, or written before it is read."""
        plan, inputs = self.plan, self.source.inputs
        donor = inputs[plan.donor]
        others = [checkpoint for checkpoint in inputs if checkpoint is not donor]
        temporary = _files_of(plan, donor) if plan.files else None
        folder = ModelFolder(
            donor.folder if temporary is None else Path(temporary.name),
            config=plan.config,
            files=tuple(sorted({*plan.carried, *plan.files, *([] if plan.config is None else ["config.json"])})),
            alone=donor.alone,
            temporary=temporary,
            repositories=tuple(dict.fromkeys(r for checkpoint in (donor, *others) for r in checkpoint.repositories)),
            subfolders=plan.naming.folders,
            parts={part: _part_config(plan, donor, part) for part in plan.naming.parts},
        )
        metadata = dict(plan.naming.metadata)
        return Checkpoint(self.label, self.source, folder, metadata=metadata, plan=None if self.why else plan)


def _part_config(plan: Plan, donor: Checkpoint, part: str) -> Mapping[str, Any]:
    """The config.json of a part of a pipeline."""
    written = plan.files.get(f"{part}/config.json")
    return donor.parts.get(part, {}) if written is None else settings_in(written)


def _files_of(plan: Plan, donor: Checkpoint) -> tempfile.TemporaryDirectory[str]:
    """The files of a result that has some of its own, such as a tokenizer; they replace the donor's."""
    donor.fetch(plan.carried)
    temporary = tempfile.TemporaryDirectory(prefix="weightsmith-", ignore_cleanup_errors=True)
    files: dict[str, bytes | Path] = {name: donor.folder / name for name in plan.carried}
    for name, data in {**files, **plan.files}.items():
        path = Path(temporary.name) / check_file_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_bounded(data, MAX_COPIED_BYTES) if isinstance(data, Path) else data)
    return temporary


def model_input(checkpoint: Checkpoint) -> ModelInput:
    """What a plan holds of a model."""
    return ModelInput(checkpoint.ref, checkpoint.revision, checkpoint.identity, checkpoint.plan, checkpoint.sample())


def code_files(plan: Plan | PlanDraft) -> tuple[Path, ...]:
    """The user's own file that the merge method comes from, if there is one."""
    code = plan.provenance.code
    return () if code is None or not code.folder else (Path(code.folder) / expand_user(code.name.rpartition(":")[0]),)


def missing_files(models: Iterable[Checkpoint]) -> dict[Path, int]:
    """Files of Hub models that must be downloaded before tensors are read, and their sizes."""
    return {path: nbytes for model in models for path, nbytes in model.missing.items()}


def stream(models: Iterable[Checkpoint]) -> None:
    """Read the weights of Hub models where they are; `download` then fetches the other files alone."""
    for model in models:
        model.stream()


def download(models: Iterable[Checkpoint]) -> None:
    """Download what is missing. Raises CheckpointError."""
    for model in models:
        model.download()


def make_readable(models: Sequence[Checkpoint], *, streamed: bool) -> None:
    """Download missing files of Hub models, so that their tensors can be read. streamed: all but the weights.

    Raises CheckpointError.
    """
    if streamed:
        stream(models)
    if missing_files(models):
        download(models)
