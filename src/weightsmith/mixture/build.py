"""A recipe of `weightsmith moe` and the headers of its models in, a Plan out; or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weightsmith import recipe as recipes
from weightsmith.checkpoint import Checkpoint
from weightsmith.errors import Finding, PlanError, WeightsmithError
from weightsmith.mixture.assembly import Assembly, Donor
from weightsmith.mixture.checks import Checks
from weightsmith.mixture.choose import choose_layout
from weightsmith.mixture.computed import Computed
from weightsmith.mixture.dense import Dense, dense_parts
from weightsmith.mixture.layouts.base import ExpertLayout, Facts
from weightsmith.mixture.layouts.dense_config import semantics
from weightsmith.mixture.prepared import PreparedMixture
from weightsmith.mixture.routing import kept
from weightsmith.mixture.routing.gates import MODES, Gating
from weightsmith.mixture.routing.report import Report
from weightsmith.mixture.routing.route import Progress, Routing, needs_states, route
from weightsmith.mixture.steps import Steps
from weightsmith.mixture.surgery.build import prepare_surgery
from weightsmith.mixture.transforms import Transforms, check_transforms, sharded, spread
from weightsmith.planner.build import Prepared, folder_of, parameter_names, prepare_recipe
from weightsmith.planner.dtypes import main_dtype
from weightsmith.planner.inputs import at, open_models
from weightsmith.planner.steps import MOE, Dropped, Plan, Step
from weightsmith.recipe import ModelRef, Recipe, Surgery, Upcycling
from weightsmith.tensors import DType


@dataclass(frozen=True, slots=True)
class PreparedMoe(PreparedMixture):
    """A plan whose router weights are not computed yet, and what they are computed from. Close it, or use `with`.

    layout   of the output
    mode     of the gates
    """

    layout: ExpertLayout
    mode: str
    gating: Gating
    computed: Computed

    beside: ClassVar[bool] = True

    def fill(
        self,
        folder: Path | None = None,
        *,
        report: bool | None = None,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Report | None:
        """Compute the router weights. The report is where they send the prompts' tokens.

        folder    where router weights that needed hidden states are kept, and are found again
        report    True: in every gate mode, which takes the hidden states of all prompts; False: none; None: where the gate mode
                  needs these anyway
        device    for the hidden states, as torch names it
        progress  called with bytes of weights that the prompts have gone through, and of all

        Raises PlanError for prompts, tokenizers and models that do not fit, and for router weights that cannot route.
        """
        report = needs_states(self.gating, self.mode, report=False) if report is None else report
        routing = self._route(folder, report=report, device=device, progress=progress)
        made = routing.rows
        routed = len(self.gating.recipe.experts)
        if self.layout.sigmoid:
            # The norm of the hidden state is near √hidden: of rows that long too, as random ones are, the logits are so far
            # below 0 that all sigmoids of a token may be 0.
            made[:, :routed] /= max(1.0, float(np.linalg.norm(made[:, :routed], axis=-1).max()))
        for i in range(len(self.gating.base.layers)):
            layer = f"{self.gating.base.prefix}{i}."
            groups = self.gating.recipe.virtual_groups
            self.computed.fill(layer + self.layout.router, np.repeat(made[i, :routed], groups, axis=0))
            if self.layout.shared_router:
                self.computed.fill(layer + self.layout.shared_router, made[i, routed:])
        return routing.report

    def identify(self, *, report: bool = False) -> str:
        """Identity of the router weights, and of the report: of all that they follow from."""
        return kept.key_of(self.gating, self.mode, self._dtype, report=report)

    @property
    def _dtype(self) -> DType:
        """Of the router weights."""
        return self.computed.tensors[f"{self.gating.base.prefix}0.{self.layout.router}"].spec.dtype

    def _route(self, folder: Path | None, *, report: bool, device: str, progress: Progress | None) -> Routing:
        if folder is None or not needs_states(self.gating, self.mode, report=report):
            return route(self.gating, self.mode, self._dtype, report=report, device=device, progress=progress)
        path, key = folder / kept.NAME, self.identify(report=report)
        found = kept.load(path, key)
        if found is None:
            found = route(self.gating, self.mode, self._dtype, report=report, device=device, progress=progress)
            kept.save(path, key, found)
        return found


def prepare_moe(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    out_dtype: DType | None = None,
    max_shard_bytes: int = 5_000_000_000,
    seed: int = 0,
    lenient: bool = False,
    allow_code: bool = False,
) -> PreparedMixture:
    """Read a recipe of `weightsmith moe` and its models' headers and plan the checkpoint.

    source      path of a YAML file, YAML text (with a newline), or a mapping
    out_dtype   overrides the recipe's
    seed        of random router weights, noise, and of masks in a merge that is made on the way
    lenient     settings that mergekit ignores are warnings, not errors
    allow_code  the Python file that a merge in the recipe may name is run

    Raises PlanError with all problems. No tensor data is read.
    """
    if isinstance(source, os.PathLike):
        source = Path(source)
    recipe, problems = recipes.load_moe(source, lenient=lenient, parameter_names=parameter_names())
    if recipe is None:
        raise PlanError(problems)
    if isinstance(recipe, Surgery):
        return prepare_surgery(recipe, problems, out_dtype=out_dtype, max_shard_bytes=max_shard_bytes, folder=folder_of(source))
    with ExitStack() as stack:
        builder = _Builder(recipe, problems, out_dtype or recipe.dtype, max_shard_bytes, seed, folder_of(source))
        prepared = builder.prepare(stack, lenient=lenient, allow_code=allow_code)
        stack.pop_all()
        return prepared


class _Builder:
    def __init__(
        self,
        recipe: Upcycling,
        problems: Sequence[WeightsmithError],
        asked: DType | None,
        max_shard_bytes: int,
        seed: int,
        folder: Path,
    ) -> None:
        self.recipe = recipe
        self.problems = list(problems)
        self.asked = asked
        self.max_shard_bytes = max_shard_bytes
        self.seed = seed
        self.folder = folder
        self.assembly = Assembly()
        self.computed = Computed()
        self.warnings: list[Finding] = list(recipe.findings)

    def prepare(self, stack: ExitStack, *, lenient: bool, allow_code: bool) -> PreparedMoe:
        merge = partial(
            prepare_recipe, out_dtype=self.asked, seed=self.seed, lenient=lenient, allow_code=allow_code, folder=self.folder
        )
        base = self._base(stack, merge)
        experts = self._experts(base, stack, merge)
        checks = Checks(self.recipe, self.folder, lenient=lenient)
        checks.check_recipe()
        mode = self.recipe.gate_mode or recipes.GATE_MODES[0]
        texts = checks.read_texts()
        checks.check_prompts(mode, texts)
        if base is None or None in experts:
            raise PlanError([*self.problems, *checks.problems])
        donors = [expert for expert in experts if expert is not None]
        listed = [*self.recipe.experts, *self.recipe.shared_experts]
        seen: set[int] = set()
        for donor, expert in zip(donors, listed, strict=True):
            if id(donor) not in seen:
                checks.check_expert(base, donor, expert)
            seen.add(id(donor))
        self.problems += checks.problems
        self.problems += check_transforms(self.recipe, donors[0].intermediate)
        chosen = choose_layout(self.recipe, base)
        if isinstance(chosen, WeightsmithError):
            raise PlanError([*self.problems, chosen])
        layout, found = chosen
        self.warnings += found
        if self.problems:
            raise PlanError(self.problems)
        if layout.shared_router and MODES[mode].needs != "nothing":
            checks.warn_of_silent(texts[len(self.recipe.experts) :])
        self.warnings += checks.warnings
        n, groups = len(self.recipe.experts), self.recipe.virtual_groups
        donors = [*(shard for donor in donors[:n] for shard in sharded(donor, groups)), *donors[n:]]
        facts = Facts(
            config=semantics(base.donor.config),
            present=frozenset(base.layers[0].rest),
            experts=n * groups,
            shared=len(self.recipe.shared_experts),
            per_token=self.recipe.experts_per_token,
            intermediate=donors[0].intermediate,
            hidden=base.hidden,
            scales=(
                tuple(expert.residual_scale for expert in spread(self.recipe.experts, groups)),
                tuple(expert.residual_scale for expert in self.recipe.shared_experts),
            ),
        )
        self.warnings += [Finding(text, self.recipe.filename) for text in layout.warnings(facts)]
        transforms = Transforms(self.assembly, groups)
        steps = Steps(self.recipe, base, layout, facts, self.assembly, self.computed, transforms, self.asked).make(donors)
        gated = listed if layout.shared_router else listed[: facts.experts]
        plan = self._plan(layout, facts, base, steps)
        prepared = Prepared(plan, tuple(self.assembly.inputs), base.donor.structure)
        gating = Gating(self.recipe, base, self.assembly, gated, self.seed, texts[: len(gated)])
        made = PreparedMoe(prepared, layout, mode, gating, self.computed)
        self.computed.identify = made.identify
        return made

    # --- models ------------------------------------------------------------------------------------------------------

    def _base(self, stack: ExitStack, merge: Callable[[Recipe], Prepared]) -> Dense | None:
        base = self.recipe.base
        if isinstance(base, ModelRef):
            return self._dense(self._open([base], stack)[0], str(base), base.where)
        return self._merged(base, self.recipe.section.at("base_model"), stack, merge)

    def _merged(self, recipe: Recipe, where: str, stack: ExitStack, merge: Callable[[Recipe], Prepared]) -> Dense | None:
        """A merge that is made on the way."""
        try:
            prepared = merge(recipe)
        except PlanError as error:
            self.problems += error.problems
            return None
        stack.callback(prepared.close)
        self.warnings += prepared.plan.warnings
        return self._parts(self.assembly.merge(prepared), where)

    def _experts(self, base: Dense | None, stack: ExitStack, merge: Callable[[Recipe], Prepared]) -> list[Dense | None]:
        """The model of every expert, shared ones last; one that is named often, or is the base, is opened once."""
        listed = [*self.recipe.experts, *self.recipe.shared_experts]
        refs = dict.fromkeys(e.model for e in listed if isinstance(e.model, ModelRef) and e.model != self.recipe.base)
        opened = dict(zip(refs, self._open(list(refs), stack), strict=True))
        parts = {ref: self._dense(opened[ref], str(ref), ref.where) for ref in refs}
        merged: dict[str, Dense | None] = {}
        found = []
        for expert in listed:
            if isinstance(expert.model, ModelRef):
                found.append(parts.get(expert.model, base))
            elif expert.model == self.recipe.base:
                found.append(base)
            else:
                where = expert.section.at("source_model")
                if where not in merged:
                    merged[where] = self._merged(expert.model, where, stack, merge)
                found.append(merged[where])
        return found

    def _open(self, refs: Sequence[ModelRef], stack: ExitStack) -> list[Checkpoint | None]:
        opened, problems = open_models(refs, stack)
        self.problems += problems
        return opened

    def _dense(self, checkpoint: Checkpoint | None, label: str, where: str) -> Dense | None:
        return None if checkpoint is None else self._parts(self.assembly.checkpoint(checkpoint, label), where)

    def _parts(self, donor: Donor, where: str) -> Dense | None:
        parts = dense_parts(donor)
        if isinstance(parts, Dense):
            return parts
        self.problems.append(at(parts, where))
        return None

    # --- the rest of the plan ----------------------------------------------------------------------------------------

    def _plan(self, layout: ExpertLayout, facts: Facts, base: Dense, steps: Sequence[Step]) -> Plan:
        config = layout.config(facts)
        dtype = main_dtype(step.out for step in steps)
        if dtype is not None:
            config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype.torch}
        checkpoint = base.donor.checkpoint
        return Plan(
            method=MOE,
            models=tuple(self.assembly.models),
            steps=tuple(steps),
            settings=tuple(self.assembly.settings),
            dropped=self._dropped(base, steps),
            config=config,
            donor=self.assembly.add(checkpoint),
            carried=tuple(f for f in checkpoint.files if f != "config.json"),
            max_shard_bytes=self.max_shard_bytes,
            seed=self.seed,
            warnings=tuple(dict.fromkeys(self.warnings)),
            recipe=self.recipe.text,
        )

    def _dropped(self, base: Dense, steps: Sequence[Step]) -> tuple[Dropped, ...]:
        """Every tensor of every model that no step reads, and why."""
        used = {(i.model, i.tensor) for step in steps for leaf in step.leaves for i in leaf.inputs}
        of_base = {(i.model, i.tensor) for step in base.donor.steps.values() for leaf in step.leaves for i in leaf.inputs}
        buffers = {(i.model, i.tensor) for name in base.dropped for i in base.donor.steps[name].inputs}
        dropped = []
        for number, checkpoint in enumerate(self.assembly.inputs):
            for tensor in checkpoint.tensors:
                if (number, tensor) in buffers:
                    dropped.append(Dropped(number, tensor, "models compute it for themselves"))
                elif (number, tensor) not in used:
                    own = (number, tensor) in of_base
                    reason = "its place is taken by the experts" if own else "only the MLPs of this model are used"
                    dropped.append(Dropped(number, tensor, reason))
        return tuple(dropped)
