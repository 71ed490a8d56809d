"""A recipe of `weightsmith moe` and the headers of its models in, a Plan out; or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weightsmith import recipe as recipes
from weightsmith.checkpoint import Checkpoint
from weightsmith.errors import Finding, ParameterError, PlanError, ShapeError, WeightsmithError
from weightsmith.formats.hf_folder import natural_key
from weightsmith.jobs.operations import COPY, JOIN
from weightsmith.mixture import kept
from weightsmith.mixture.assembly import Assembly, Donor, take
from weightsmith.mixture.choose import choose_layout
from weightsmith.mixture.computed import Computed
from weightsmith.mixture.dense import Dense, dense_parts
from weightsmith.mixture.gates import MODES, Gating
from weightsmith.mixture.layouts.base import ExpertLayout, Facts
from weightsmith.mixture.layouts.dense_config import semantics
from weightsmith.mixture.prepared import PreparedMixture
from weightsmith.mixture.prompts import Texts, read_texts
from weightsmith.mixture.report import Report
from weightsmith.mixture.routing import Progress, Routing, missing_packages, needs_states, route
from weightsmith.mixture.surgery import prepare_surgery
from weightsmith.mixture.transforms import Transforms, check_transforms, sharded, spread
from weightsmith.planner.build import Prepared, folder_of, parameter_names, prepare_recipe
from weightsmith.planner.dtypes import main_dtype
from weightsmith.planner.inputs import at, open_models
from weightsmith.planner.steps import MOE, Dropped, Plan, Source, Step
from weightsmith.planner.vocabulary import is_embedding
from weightsmith.recipe import Expert, ModelRef, Recipe, Surgery, Upcycling
from weightsmith.tensors import DTYPES, DType, TensorSpec


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

    def fill(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        report: bool = True,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Report | None:
        """Compute the router weights: the engine can run the plan then. The report is where they send the prompts' tokens.

        out       the folder that will be made: what needed hidden states is kept beside it until `forget`
        report    False: none; it takes the hidden states of all prompts, in every gate mode
        device    for the hidden states, as torch names it
        progress  called with bytes of weights that the prompts have gone through, and of all

        Raises PlanError for prompts, tokenizers and models that do not fit, and for router weights that cannot route.
        """
        routing = self._route(out, report=report, device=device, progress=progress)
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

    def forget(self, out: str | os.PathLike[str]) -> None:
        """Remove what `fill` kept beside the output."""
        kept.kept_file(out).unlink(missing_ok=True)

    def _route(self, out: str | os.PathLike[str] | None, *, report: bool, device: str, progress: Progress | None) -> Routing:
        dtype = self.computed.tensors[f"{self.gating.base.prefix}0.{self.layout.router}"].spec.dtype
        if out is None or not needs_states(self.gating, self.mode, report=report):
            return route(self.gating, self.mode, dtype, report=report, device=device, progress=progress)
        path, key = kept.kept_file(out), kept.key_of(self.gating, self.mode, dtype, report=report)
        found = kept.load(path, key)
        if found is None:
            found = route(self.gating, self.mode, dtype, report=report, device=device, progress=progress)
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
        prepared = builder.prepare(stack, lenient=lenient, allow_code=allow_code, folder=folder_of(source))
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
        self.transforms = Transforms(self.assembly, recipe.virtual_groups)
        self.warnings: list[Finding] = list(recipe.findings)

    def prepare(self, stack: ExitStack, *, lenient: bool, allow_code: bool, folder: Path) -> PreparedMoe:
        merge = partial(
            prepare_recipe, out_dtype=self.asked, seed=self.seed, lenient=lenient, allow_code=allow_code, folder=folder
        )
        base = self._base(stack, merge)
        experts = self._experts(base, stack, merge)
        self._check_recipe()
        mode = self.recipe.gate_mode or recipes.GATE_MODES[0]
        texts = self._texts()
        self._check_prompts(mode, texts)
        if base is None or None in experts:
            raise PlanError(self.problems)
        donors = [expert for expert in experts if expert is not None]
        listed = [*self.recipe.experts, *self.recipe.shared_experts]
        seen: set[int] = set()
        for donor, expert in zip(donors, listed, strict=True):
            if id(donor) not in seen:
                self._check_shapes(base, donor, expert, lenient=lenient)
            seen.add(id(donor))
        self.problems += check_transforms(self.recipe, donors[0].intermediate)
        chosen = choose_layout(self.recipe, base)
        if isinstance(chosen, WeightsmithError):
            raise PlanError([*self.problems, chosen])
        layout, found = chosen
        self.warnings += found
        if self.problems:
            raise PlanError(self.problems)
        if layout.shared_router and MODES[mode].needs != "nothing":
            self._warn_of_silent(texts[len(self.recipe.experts) :])
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
        steps = self._steps(layout, facts, base, donors)
        gated = listed if layout.shared_router else listed[: facts.experts]
        plan = self._plan(layout, facts, base, steps)
        prepared = Prepared(plan, tuple(self.assembly.inputs), base.donor.structure)
        gating = Gating(self.recipe, base, self.assembly, gated, self.seed, texts[: len(gated)])
        return PreparedMoe(prepared, layout, mode, gating, self.computed)

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

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_recipe(self) -> None:
        recipe, n = self.recipe, len(self.recipe.experts) * self.recipe.virtual_groups
        if recipe.experts_per_token > n:
            there = "there is 1 expert" if n == 1 else f"there are {n} experts"
            what = f"experts_per_token is {recipe.experts_per_token}, and {there}"
            self.problems.append(ParameterError(what, where=recipe.section.at("experts_per_token"), fix=f"at most {n}"))

    def _texts(self) -> list[Texts]:
        """The prompts of every expert, shared ones last."""
        texts = []
        for expert in (*self.recipe.experts, *self.recipe.shared_experts):
            own, problems = read_texts(expert, self.folder, self.recipe.prompt_tokens)
            texts.append(own)
            self.problems += problems
        return texts

    def _check_prompts(self, mode: str, texts: Sequence[Texts]) -> None:
        """Prompts that the gate mode needs and that are missing, or say nothing, are problems."""
        recipe = self.recipe
        if MODES[mode].needs == "nothing":
            return
        self.problems += missing_packages()
        experts = list(zip(recipe.experts, texts, strict=False))
        for expert, own in experts:
            if not own.told and not expert.prompts_file:  # a file that cannot be read is a problem of its own
                what = f"gate_mode {mode} needs prompts, and {expert.model} has none"
                fix = "write positive_prompts, texts that the expert is for; or gate_mode: random"
                self.problems.append(ParameterError(what, where=expert.section.where, fix=fix))
        seen: dict[object, int] = {}
        for e, (expert, own) in enumerate(experts):
            first = seen.setdefault(own.said, e)
            if own.told and recipe.experts[first].section is not expert.section:  # else: copies, which are meant
                what = f"experts {first} and {e} have the same prompts, so their router weights would be the same"
                fix = "give each expert prompts of its own, or write gate_mode: random"
                self.problems.append(ParameterError(what, where=expert.section.where, fix=fix))

    def _warn_of_silent(self, texts: Sequence[Texts]) -> None:
        """Shared experts that have a gate and no prompts to make it of."""
        for expert, own in zip(self.recipe.shared_experts, texts, strict=True):
            if not own.told:
                what = f"the shared expert {expert.model} has no prompts: its gate is one half, for every token"
                self.warnings.append(Finding(what, expert.section.where, fix="give it positive_prompts"))

    def _check_shapes(self, base: Dense, donor: Dense, expert: Expert, *, lenient: bool) -> None:
        where, label = expert.section.at("source_model"), base.donor.label
        if len(donor.layers) != len(base.layers):
            what = f"{expert.model} has {len(donor.layers)} layers, and {label} has {len(base.layers)}"
            self.problems.append(ShapeError(what, where=where, fix="experts need the depth and widths of the base"))
            return
        for i, (own, wanted) in enumerate(zip(donor.layers, base.layers, strict=True)):
            for part, block in own.mlp.items():
                if block.shape != wanted.mlp[part].shape:
                    what = f"{block.tensor} of {expert.model} is {list(block.shape)}, and layer {i} of {label} has"
                    what += f" {list(wanted.mlp[part].shape)}"
                    self.problems.append(ShapeError(what, where=where, fix="experts need the depth and widths of the base"))
                    return
        if donor is not base and (more := sorted({n for layer in donor.layers for n in layer.rest if n.startswith("mlp.")})):
            what = f"{expert.model} has {more[0]} in its layers, for which an expert has no place"
            self.problems.append(ShapeError(what, where=where, fix="an expert is gate, up and down projections alone"))
        acts = [str(semantics(each.donor.config)["hidden_act"]).replace("swish", "silu") for each in (donor, base)]
        if acts[0] != acts[1]:
            what = f"{expert.model} has the activation {acts[0]}, and {label} has {acts[1]}: the experts of a mixture have one"
            self.problems.append(ShapeError(what, where=where, fix="take experts with the base's activation"))
        ours, theirs = _vocabulary(base), _vocabulary(donor)
        if ours != theirs:
            what = f"{expert.model} has {theirs} tokens, and {label} has {ours}, which are the mixture's"
            fix = "an expert of use reads the base's tokens"
            if lenient:
                self.warnings.append(Finding(what, where, fix=fix))
            else:
                self.problems.append(ShapeError(what, where=where, fix=f"{fix}; --mergekit-lenient makes this a warning"))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _dtype(self, stored: DType) -> DType:
        return self.asked if self.asked is not None and stored.floating else stored

    def _steps(self, layout: ExpertLayout, facts: Facts, base: Dense, donors: Sequence[Dense]) -> list[Step]:
        steps = []
        for name in base.outside:
            step = base.donor.steps[name]
            steps.append(take(step, TensorSpec(name, self._dtype(step.out.dtype), step.out.shape)))
        number = self.assembly.add(self.computed)
        main = main_dtype(step.out for step in base.donor.steps.values()) or DTYPES["F32"]
        dtype = self._dtype(main)
        for i, layer in enumerate(base.layers):
            prefix = f"{base.prefix}{i}."
            for suffix, block in layer.rest.items():
                step = base.donor.steps[block.tensor]
                steps.append(take(step, TensorSpec(prefix + suffix, self._dtype(step.out.dtype), block.shape), block.window))
            routed, shared = donors[: facts.experts], donors[facts.experts :]
            experts = spread(self.recipe.experts, self.recipe.virtual_groups)
            steps += self._expert_steps(layout.tensors, prefix, i, base, routed, experts)
            steps += self._expert_steps(layout.shared, prefix, i, base, shared, self.recipe.shared_experts, alone=True)
            made = [TensorSpec(prefix + layout.router, dtype, (facts.experts, facts.hidden))]
            if layout.shared_router:
                made.append(TensorSpec(prefix + layout.shared_router, dtype, (facts.shared, facts.hidden)))
            constants = {prefix + fixed.suffix: fixed for fixed in layout.fixed(facts)}
            for name, fixed in constants.items():
                made.append(TensorSpec(name, dtype if fixed.dtype is None else DTYPES[fixed.dtype], fixed.shape))
            for spec in made:
                self.computed.add(spec)
                steps.append(Step(spec, COPY, (Source(number, spec.name),)))
            for name, fixed in constants.items():
                self.computed.fill(name, np.full(fixed.shape, fixed.value, np.float32))
        return sorted(steps, key=lambda step: natural_key(step.out.name))

    def _expert_steps(
        self,
        tensors: Sequence[tuple[str, tuple[str, ...]]],
        prefix: str,
        i: int,
        base: Dense,
        donors: Sequence[Dense],
        experts: Sequence[Expert],
        alone: bool = False,
    ) -> list[Step]:
        """The tensors of all experts of layer i. alone: there is one at most, and its tensors are matrices."""
        steps: list[Step] = []
        label = "shared {e}" if alone else "{e}"
        for template, parts in tensors if donors else ():
            name = prefix + template
            pieces = [
                [
                    self._part_step(f"{name.format(e=e)}[{part}]", part, i, base, donor, expert, label.format(e=e))
                    for part in parts
                ]
                for e, (donor, expert) in enumerate(zip(donors, experts, strict=True))
            ]
            if alone or "{e}" in template:
                steps += [_joined(name.format(e=e), own) for e, own in enumerate(pieces)]
            else:
                steps.append(_joined(name, [piece for own in pieces for piece in own], len(donors)))
        return steps

    def _part_step(self, name: str, part: str, i: int, base: Dense, donor: Dense, expert: Expert, label: str) -> Step:
        """One part of one expert: the donor's bytes, in the dtype that the base has there, or what the recipe makes of them."""
        block = donor.layers[i].mlp[part]
        stored = base.donor.steps[base.layers[i].mlp[part].tensor].out.dtype
        plain = take(donor.donor.steps[block.tensor], TensorSpec(name, self._dtype(stored), block.shape), block.window)
        return self.transforms.step(plain, expert, label, part)

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


def _joined(name: str, pieces: Sequence[Step], experts: int = 0) -> Step:
    """One matrix of several parts, one under the other; of several experts, [experts, rows, cols]."""
    first = pieces[0].out
    if len(pieces) == 1 and not experts:
        return _named(pieces[0], name)
    rows = sum(piece.out.shape[0] for piece in pieces)
    leaves = tuple(leaf for piece in pieces for leaf in piece.leaves)
    shape = (experts, rows // experts, first.shape[1]) if experts else (rows, first.shape[1])
    return Step(TensorSpec(name, first.dtype, shape), JOIN, (), pieces=leaves)


def _named(step: Step, name: str) -> Step:
    return replace(step, out=TensorSpec(name, step.out.dtype, step.out.shape))


def _vocabulary(dense: Dense) -> int:
    """Rows of the embedding; 0 when it has none."""
    specs = [dense.donor.steps[name].out for name in dense.outside]
    return next((spec.shape[0] for spec in specs if is_embedding(spec)), 0)
