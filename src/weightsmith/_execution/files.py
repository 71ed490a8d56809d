"""The files of an output besides its weights: config, recipe, card, reports; and the provenance in its manifest."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import Finding
from weightsmith._execution.distance import Moved, to_json
from weightsmith._execution.options import RunOptions
from weightsmith._files.containers import PEFT, SAFETENSORS
from weightsmith._models.card import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.planner import Prepared
from weightsmith._plans import Plan
from weightsmith._version import __version__

if TYPE_CHECKING:
    from weightsmith._engine.products import ProductReport
    from weightsmith._execution.page import Squares


RECIPE_NAME = "recipe.yml"
_MAX_PAGE_BYTES = 2 << 20

_CONFIG_NAMES = {SAFETENSORS: "config.json", PEFT: "adapter_config.json"}
"""Container → the file of `Plan.config`, if it is one."""


def other_bytes(plan: Plan, donor: Checkpoint, options: RunOptions) -> int:
    """Approximate size of all files except weights: carried files, the recipe (also in the card), the report, and others."""
    carried = sum(path.stat().st_size for name in plan.carried if (path := donor.folder / name).is_file())
    carried += sum(map(len, plan.files.values()))
    page = 0 if options.report is None else _MAX_PAGE_BYTES
    return carried + len(json.dumps(plan.config)) + 2 * len(plan.recipe.encode()) + (64 << 10) + page


def other_files(
    prepared: Prepared,
    name: str,
    repo: str,
    squares: Squares,
    distance: tuple[Moved, ...],
    reports: Mapping[str, ProductReport],
    warnings: Sequence[Finding],
    options: RunOptions,
) -> dict[str, bytes | Path]:
    """All files except weights. These replace the donor's files of the same name.

    name     of the output
    repo     the model on the Hub that it becomes; "" for none
    squares, distance   how far its tensors and layers are from the base
    reports  of products
    warnings    warnings
    """
    plan = prepared.plan
    donor = prepared.inputs[plan.donor]
    files: dict[str, bytes | Path] = {name: donor.folder / name for name in plan.carried} | dict(plan.files)
    if plan.config is not None and plan.container in _CONFIG_NAMES:
        files[_CONFIG_NAMES[plan.container]] = (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()
    if plan.follows_recipe:
        files[RECIPE_NAME] = plan.recipe.encode()
    pictures = ""
    if options.report is not None:
        from weightsmith._execution.page import MOVED_NAME, PICTURES, merge_report, report_files

        files |= report_files(merge_report(plan, name, squares, distance, reports.values(), warnings))
        pictures = PICTURES if MOVED_NAME in files else ""
    if options.card:
        from weightsmith._execution.cards import model_card

        sections = [pictures, *(report.section() for report in reports.values())]
        text = model_card(plan, name, distance, "".join(sections), inputs=prepared.inputs, repo=repo)
        files[CARD_NAME] = text.encode(errors="replace")
    for report in reports.values():
        files |= report.files()
    return files


def _inputs(plan: Plan) -> list[dict[str, Any]]:
    """The models; with the method and the models of each merge that is computed on the way."""

    def merge(plan: Plan | None) -> dict[str, Any]:
        return {} if plan is None else {"merge_method": plan.provenance.name, "inputs": _inputs(plan)}

    return [{"ref": m.ref, "revision": m.revision, "identity": m.identity, **merge(m.plan)} for m in plan.models]


def provenance(plan: Plan, distance: tuple[Moved, ...]) -> dict[str, Any]:
    """The provenance of the output, for its manifest."""
    code_file = plan.provenance.code
    code = {} if code_file is None else {"merge_method_code": {"name": code_file.name, "sha256": code_file.sha256}}
    return {
        "made_by": {
            "weightsmith": __version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "numba": version("numba"),
        },
        "merge_method": plan.provenance.name,
        **code,
        **({"quantised": plan.provenance.format} if plan.provenance.format else {}),
        "seed": plan.seed,
        "inputs": _inputs(plan),
        "dropped": [{"model": plan.models[d.model].ref, "tensor": d.tensor, "reason": d.reason} for d in plan.dropped],
        "distance_from_base": to_json(distance),
        "recipe": plan.recipe,
    }
