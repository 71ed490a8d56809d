"""Chooses the output layout: the one the recipe names, else the first that can hold the models."""

from __future__ import annotations

import re

from weightsmith.errors import Finding, UnknownName, Unsupported, WeightsmithError, nearest
from weightsmith.mixture.dense import Dense
from weightsmith.mixture.layouts import all_layouts
from weightsmith.mixture.layouts.base import ExpertLayout
from weightsmith.mixture.limits import why_not
from weightsmith.recipe import Upcycling


def choose_layout(recipe: Upcycling, base: Dense) -> tuple[ExpertLayout, list[Finding]] | WeightsmithError:
    """The layout and warnings about it, or an error that says why none fits."""
    layouts = all_layouts()
    where = recipe.section.at("architecture")
    named = recipe.architecture
    if named:
        layouts = _called(named)
        if not layouts:
            names = [layout.name for layout in all_layouts()]
            what = f"unknown architecture '{named}'{nearest(named, names)}"
            return UnknownName(what, where=where, fix=f"write one of {', '.join(names)}")
    model_type = str(base.donor.config.get("model_type", ""))
    counts = len(recipe.experts) * recipe.virtual_groups, len(recipe.shared_experts)
    reasons = {layout.name: why_not(layout, base, *counts) for layout in layouts}
    for layout in layouts:
        if reasons[layout.name] or not (named or model_type in layout.dense):
            continue
        if model_type in layout.dense:
            return layout, []
        known = f"is equivalent to {', '.join(layout.dense)} models" if layout.dense else "has no dense equivalent"
        what = f"{layout.title} {known}; it is not known to be equivalent to {model_type} models"
        return layout, [Finding(what, where, fix="compare the output with the base before you use it")]
    tried = [
        f"{layout.name}: {reasons[layout.name] or f'not known to be equivalent to {model_type} models'}" for layout in layouts
    ]
    fits = [o.name for o in all_layouts() if o not in layouts and model_type in o.dense and not why_not(o, base, *counts)]
    whose = f"experts of {base.donor.label} ({model_type or 'no model type'})"
    return Unsupported(
        f"{named} cannot hold {whose}" if named else f"no architecture can hold {whose}",
        where=where,
        details=tried,
        fix=f"write architecture: {' or '.join(fits)}" if fits else "",
    )


def _called(name: str) -> tuple[ExpertLayout, ...]:
    """Layouts with this name. If there are none, those whose names start with it, as in mergekit."""
    wanted = _plain(name)
    names = {o.name: {_plain(n) for n in (o.name, o.title, o.architecture, *o.aliases)} for o in all_layouts()}
    exact = tuple(o for o in all_layouts() if wanted in names[o.name])
    return exact or tuple(o for o in all_layouts() if any(n.startswith(wanted) for n in names[o.name]))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
