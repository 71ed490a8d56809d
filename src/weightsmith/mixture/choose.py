"""Which layout the output has: the one that the recipe names, else the first that can hold the models."""

from __future__ import annotations

import re

from weightsmith.errors import Finding, UnknownName, Unsupported, WeightsmithError, nearest
from weightsmith.mixture.dense import Dense
from weightsmith.mixture.layouts import all_layouts
from weightsmith.mixture.layouts.base import ExpertLayout, semantics
from weightsmith.recipe import Upcycling


def choose_layout(recipe: Upcycling, base: Dense) -> tuple[ExpertLayout, list[Finding]] | WeightsmithError:
    """The layout, with what the user should know of the choice; or why there is none."""
    layouts = all_layouts()
    where = recipe.section.at("architecture")
    named = recipe.architecture
    if named:
        layouts = tuple(layout for layout in layouts if _is_called(layout, named))
        if not layouts:
            names = [layout.name for layout in all_layouts()]
            what = f"no architecture is called '{named}'{nearest(named, names)}"
            return UnknownName(what, where=where, fix=f"architectures: {', '.join(names)}")
    model_type = str(base.donor.config.get("model_type", ""))
    reasons = {layout.name: why_not(layout, recipe, base) for layout in layouts}
    for layout in layouts:
        if reasons[layout.name] or not (named or model_type in layout.dense):
            continue
        if model_type in layout.dense:
            return layout, []
        known = ", ".join(layout.dense)
        what = f"{layout.title} computes what {known} models do; whether it does for {model_type} is not known"
        return layout, [Finding(what, where, fix="compare the output with the base before you use it")]
    tried = [
        f"{layout.name}: {reasons[layout.name] or f'not known to compute what a {model_type} model does'}" for layout in layouts
    ]
    fits = [o.name for o in all_layouts() if o not in layouts and model_type in o.dense and not why_not(o, recipe, base)]
    whose = f"experts of {base.donor.label} ({model_type or 'no model type'})"
    return Unsupported(
        f"{named} cannot hold {whose}" if named else f"no architecture can hold {whose}",
        where=where,
        details=tried,
        fix=f"write architecture: {' or '.join(fits)}" if fits else "",
    )


def why_not(layout: ExpertLayout, recipe: Upcycling, base: Dense) -> str:
    """Why a layout cannot hold what a recipe asks for; "" when it can."""
    problems = list(layout.check(semantics(base.donor.config)))
    for names in (set(layer.rest) for layer in base.layers):
        if more := sorted(names - layout.layer - layout.optional):
            problems.append(f"it has no place for {more[0]}")
        if missing := sorted(layout.layer - names - layout.fillable):
            problems.append(f"it needs {missing[0]}, which the base has not")
    low, high = layout.shared_experts
    n = len(recipe.shared_experts)
    if not low <= n <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        problems.append(f"it takes {wanted} shared experts, not {n}")
    if layout.max_experts is not None and len(recipe.experts) > layout.max_experts:
        problems.append(f"it takes at most {layout.max_experts} experts, not {len(recipe.experts)}")
    return next(iter(problems), "")


def _is_called(layout: ExpertLayout, name: str) -> bool:
    wanted = _plain(name)
    return any(_plain(n).startswith(wanted) for n in (layout.name, layout.title, layout.architecture, layout.model_type))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
