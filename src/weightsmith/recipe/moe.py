"""Recipes of `weightsmith moe`: which kind one is, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith.errors import WeightsmithError
from weightsmith.recipe.kind import for_other_command, kind_of
from weightsmith.recipe.load import Written, read
from weightsmith.recipe.moe_grammar import UPCYCLING
from weightsmith.recipe.records import Expert, Section, Surgery, Upcycling
from weightsmith.recipe.report import Report
from weightsmith.recipe.surgery_grammar import SURGERY
from weightsmith.recipe.walk import Walk, in_order, unique

SURGERY_KEYS = frozenset(SURGERY.one_of)
"""A recipe with one of these at the top level is about a mixture of experts that is there."""


def is_moe(source: str | Path | Mapping[str, Any]) -> bool:
    """A recipe of `weightsmith moe`, by its top-level keys; False for one that cannot be read.

    >>> is_moe({"base_model": "a", "experts": []}), is_moe({"merge_method": "linear", "models": []})
    (True, False)
    """
    written = read(source, lenient=True)
    return not isinstance(written, WeightsmithError) and kind_of(written.document.root) == "moe"


def load_moe(
    source: str | Path | Mapping[str, Any], *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Upcycling | Surgery | None, list[WeightsmithError]]:
    """The recipe in `source` (a path, YAML text, or a mapping), and all its problems. Never raises.

    parameter_names  of all merge methods, for a merge that stands in the place of a model

    >>> recipe, problems = load_moe({"base_model": "a", "experts": [{"source_model": "b", "noise_scal": 1}]})
    >>> print(problems[0].finding.what)
    unknown key 'noise_scal' in an entry of 'experts' (did you mean 'noise_scale'?); mergekit ignored it without a word
    """
    written = read(source, lenient=lenient)
    if isinstance(written, WeightsmithError):
        return None, [written]
    if misplaced := for_other_command(written.document.root, "moe"):
        return None, [misplaced]
    report = Report(lenient, parameter_names, written.document.findings)
    recipe = _recipe(written, report) if written.document.root else None
    problems = unique([*written.document.problems, *report.problems])
    return recipe, problems if isinstance(source, Mapping) else in_order(problems)


def _recipe(written: Written, report: Report) -> Upcycling | Surgery | None:
    """The top-level keys say which kind it is."""
    root = written.document.root
    keys = root.value if root is not None and isinstance(root.value, dict) else {}
    return _surgery(written, report) if not SURGERY_KEYS.isdisjoint(keys) else _upcycling(written, report)


def _surgery(written: Written, report: Report) -> Surgery | None:
    root = written.document.root
    assert root is not None
    section = Walk(written.document, written.filename, report).section(root, SURGERY)
    if section is None or not report.whole:
        return None
    return Surgery(
        model=section.values["model"],
        prune=section.values.get("prune_experts"),
        merge=section.values.get("merge_experts"),
        dtype=section.values.get("dtype"),
        section=section,
        text=written.text,
        filename=written.filename,
        findings=tuple(report.findings),
    )


def _upcycling(written: Written, report: Report) -> Upcycling | None:
    root = written.document.root
    assert root is not None
    section = Walk(written.document, written.filename, report).section(root, UPCYCLING)
    if section is None or not report.whole:
        return None
    values = section.values
    experts = _experts(values["experts"])
    return Upcycling(
        base=values["base_model"],
        experts=experts,
        shared_experts=_experts(values.get("shared_experts", ())),
        architecture=values.get("architecture", ""),
        gate_mode=values.get("gate_mode", ""),
        experts_per_token=values.get("experts_per_token", min(2, len(experts) * values.get("virtual_groups", 1))),
        dtype=values.get("dtype"),
        section=section,
        text=written.text,
        filename=written.filename,
        findings=tuple(report.findings),
        prompt_tokens=values.get("prompt_tokens"),
        router_scale=values.get("router_scale", 1.0),
        virtual_groups=values.get("virtual_groups", 1),
    )


def _experts(sections: Sequence[Section]) -> tuple[Expert, ...]:
    return tuple(_expert(section) for section in sections for _ in range(section.values.get("copies", 1)))


def _expert(section: Section) -> Expert:
    values = section.values
    return Expert(
        model=values["source_model"],
        positive_prompts=values.get("positive_prompts", ()),
        negative_prompts=values.get("negative_prompts", ()),
        noise_scale=values.get("noise_scale", 0.0),
        residual_scale=values.get("residual_scale", 1.0),
        section=section,
        prompts_file=values.get("prompts_file", ""),
        held_out_file=values.get("held_out_file", ""),
        noise_fraction=values.get("noise_fraction", 1.0),
        drop_fraction=values.get("drop_fraction", 0.0),
    )
