"""Recipe and headers in, Plan out; or every problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith import methods
from weightsmith import recipe as recipes
from weightsmith.checkpoint import Checkpoint
from weightsmith.errors import Finding, PlanError, UnknownName, WeightsmithError, nearest
from weightsmith.formats.hf_folder import natural_key
from weightsmith.methods.base import Method
from weightsmith.planner.account import Account
from weightsmith.planner.audit import Audit
from weightsmith.planner.blocks import BlockMaker, Part
from weightsmith.planner.config import output_config
from weightsmith.planner.donor import choose_donor
from weightsmith.planner.dtypes import DTypes
from weightsmith.planner.inputs import at, number_models, open_models
from weightsmith.planner.match import ModelNames
from weightsmith.planner.outputs import Models, Origins, Outputs
from weightsmith.planner.parameters import Origin, Resolver
from weightsmith.planner.placement import Placement, Placer
from weightsmith.planner.steps import ModelInput, Plan
from weightsmith.recipe import Recipe
from weightsmith.structure import Structure, analyse
from weightsmith.tensors import DType


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan and the open checkpoints it reads from; close it, or use it as a context manager.

    structure  of the donor
    """

    plan: Plan
    inputs: tuple[Checkpoint, ...]
    structure: Structure
    origins: Origins
    resolver: Resolver

    def explain(self, tensor: str) -> list[Origin]:
        """The value of every parameter of one output tensor, and where the recipe says so; [] for one that is copied.

        Raises UnknownName.
        """
        if tensor not in self.origins:
            names = [s.out.name for s in self.plan.steps]
            if tensor in names:
                return []
            raise UnknownName(f"the output has no tensor '{tensor}'{nearest(tensor, names)}")
        return self.resolver.explain(self.origins[tensor][0], tensor, *self.origins[tensor][1:])

    def close(self) -> None:
        """Close the checkpoints."""
        for checkpoint in self.inputs:
            checkpoint.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def prepare(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    out_dtype: DType | None = None,
    max_shard_bytes: int = 5_000_000_000,
    seed: int = 0,
    lenient: bool = False,
) -> Prepared:
    """Read a recipe and its models' headers and plan the merge.

    source           path of a YAML file, YAML text (with a newline), or a mapping
    out_dtype        overrides the recipe's
    max_shard_bytes  upper bound of a weight file
    seed             of random masks
    lenient          settings that mergekit ignores are warnings, not errors

    Raises PlanError with all problems. No tensor data is read. Cost: headers, and about 20 µs a tensor.
    """
    names = {p.name for m in methods.all_methods() for p in m.parameters}
    if isinstance(source, os.PathLike):
        source = Path(source)
    recipe, found = recipes.load(source, lenient=lenient, parameter_names=sorted(names))
    problems: list[WeightsmithError] = list(found)
    if recipe is None:
        raise PlanError(problems)
    method = None
    try:
        method = methods.get(recipe.merge_method)
    except UnknownName as error:
        problems.append(at(error, recipe.at("merge_method")))
    with ExitStack() as stack:
        prepared = _prepare(recipe, method, problems, stack, out_dtype, max_shard_bytes, seed, lenient=lenient)
        stack.pop_all()
        return prepared


def _prepare(
    recipe: Recipe,
    method: Method | None,
    problems: list[WeightsmithError],
    stack: ExitStack,
    out_dtype: DType | None,
    max_shard_bytes: int,
    seed: int,
    *,
    lenient: bool,
) -> Prepared:
    """The stages: the recipe alone, the models alone, layers, tensors, config.json. Each looks as far as it can see."""
    models, refs = number_models(recipe)
    labels = [str(ref) for ref in refs]
    warnings = list(recipe.findings)
    parts: list[Part] = []
    wrong: set[int] = set()
    if method is not None:
        maker = BlockMaker(recipe, method, models, labels)
        parts = maker.parts()
        audit = Audit(method, labels, recipe.at("merge_method"), lenient=lenient)
        audit.run([block for part in parts for block in part.blocks])
        problems += [*maker.problems, *audit.problems]
        warnings += [*maker.warnings, *audit.warnings]
        wrong = audit.wrong
    opened, found = open_models(refs, stack)
    problems += found
    structures = [None if c is None else analyse([t.spec for t in c.tensors.values()], c.config) for c in opened]
    donor, finding = choose_donor(structures, labels)
    warnings += finding
    inputs = [c for c in opened if c is not None]
    shape = structures[donor]
    if method is None or shape is None:
        raise _refusal(problems, recipe)
    specs = [{} if c is None else {name: t.spec for name, t in c.tensors.items()} for c in opened]
    matched = [None if s is None else ModelNames(s, own, shape, specs[donor]) for s, own in zip(structures, specs, strict=True)]
    placer = Placer(recipe, labels, matched, shape)
    placements = placer.place(parts)
    problems += placer.problems
    if len(inputs) < len(refs) or not placements:
        raise _refusal(problems, recipe)

    complete = [n for n in matched if n is not None]
    base = models[recipe.base_model] if recipe.base_model is not None else None
    facts = Models(
        labels=labels,
        tensors=[c.tensors for c in inputs],
        specs=specs,
        configs=[c.config for c in inputs],
        structures=[n.structure for n in complete],
        names=complete,
        donor=donor,
        base=base,
    )
    broken = bool(placer.problems) or any(block.broken for p in parts for block in p.blocks)
    asked = out_dtype or recipe.out_dtype or recipe.dtype
    resolver, account, dtypes = Resolver(method, labels, wrong), Account(labels, complete), DTypes(asked, specs)
    outputs = Outputs(facts, method, resolver, account, dtypes)
    outputs.make(placements)
    found, idle = resolver.finish()
    problems += [*outputs.problems, *found]
    if broken or outputs.problems:
        raise _refusal(problems, recipe)
    dropped, lost = account.settle(shape, donor, placements)
    problems += lost
    steps = sorted(outputs.steps, key=lambda step: natural_key(step.out.name))
    checkpoint = inputs[donor]
    config = None
    if checkpoint.config is None:
        fix = "name its folder, not the file" if not checkpoint.files else "add a config.json to its folder"
        what = f"the output has no config.json and no tokenizer: {labels[donor]} has none"
        warnings.append(Finding(what, fix=fix) if not checkpoint.files else Finding(f"the output has no config.json: {labels[donor]} has none", fix=fix))
    else:
        try:
            config, notes = output_config(
                checkpoint.config,
                shape,
                outputs.layers,
                [step.out for step in steps],
                stored=specs[donor],
                asked=asked,
                untie=outputs.untie,
            )
        except WeightsmithError as error:
            problems.append(at(error, recipe.at("slices" if recipe.slices else "modules" if recipe.modules else "models")))
        else:
            if notes:
                warnings.append(Finding("config.json follows the new layers", "config.json", notes))
    if problems:
        raise _refusal(problems, recipe)
    warnings += _untouched(recipe, placements, labels[donor])
    warnings += [*outputs.warnings, *account.findings(), *dtypes.findings(), *idle]
    plan = Plan(
        method=method.name,
        models=tuple(ModelInput(label, c.revision, c.header_hash) for label, c in zip(labels, inputs, strict=True)),
        steps=tuple(steps),
        settings=tuple(resolver.settings),
        dropped=dropped,
        config=config,
        donor=donor,
        carried=tuple(f for f in checkpoint.files if f != "config.json"),
        max_shard_bytes=max_shard_bytes,
        seed=seed,
        warnings=tuple(warnings),
        recipe=recipe.text,
    )
    plan.layout  # noqa: B018  names that cannot be stored show here
    return Prepared(plan, tuple(inputs), shape, outputs.origins, resolver)


def _untouched(recipe: Recipe, placements: Sequence[Placement], donor: str) -> list[Finding]:
    """A warning for the modules that the recipe does not mention."""
    names = [p.module for p in placements if not p.blocks]
    if not names:
        return []
    what = f"modules {', '.join(names)} are" if len(names) > 1 else f"module {names[0]} is"
    if recipe.slices:
        return [Finding(f"{what} copied from {donor}: 'slices' is about the layers of one module", recipe.at("slices"))]
    fix = "mergekit leaves such a module out of the output"
    return [Finding(f"{what} not mentioned, and copied from {donor}", recipe.at("modules"), fix=fix)]


def _refusal(problems: Sequence[WeightsmithError], recipe: Recipe) -> PlanError:
    """The error with all problems: those with a line in the recipe first, in its order."""
    unique = {(type(p), str(p)): p for p in problems}

    def line(problem: WeightsmithError) -> tuple[float, int]:
        match = re.match(r":(\d+):(\d+)", problem.finding.where.removeprefix(recipe.filename))
        return (int(match[1]), int(match[2])) if match else (float("inf"), 0)

    return PlanError(sorted(unique.values(), key=line))
