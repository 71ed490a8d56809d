"""The output of a run: whether it can be written, its files besides the weights, and the provenance in its manifest."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, OutputExists, ParameterError
from weightsmith._base.files import expand_user
from weightsmith._base.options import named
from weightsmith._execution.options import RunOptions
from weightsmith._execution.report import PAGE_NAME, Moved, to_json
from weightsmith._files.containers import MLX_ADAPTER, PEFT, SAFETENSORS
from weightsmith._files.hf_folder import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.locks import JOURNAL
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import place_of, remove_published
from weightsmith._outputs.staging import staged_path
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Plan
from weightsmith._version import __version__
from weightsmith.abc.output import Target

if TYPE_CHECKING:
    from weightsmith._execution.report import Squares
    from weightsmith.abc.product import ProductReport


def check_output(out: str | os.PathLike[str], plan: Plan, options: RunOptions, protected: Sequence[Path]) -> None:
    """Raise StoreError if the output cannot be written there, before work that takes time.

    Removes only what a run has left that died after it had published this output.
    """
    target = place_of(out)
    try:
        path = staged_path(target, options.staging)
        notes = read_journal(staging_folder(path) / JOURNAL).notes if options.resume else {}
        target.check_free(overwrite=options.overwrite, protected=protected, reads=models_read(plan), notes=notes)
    except OutputExists:
        remove_published(staged_path(target, options.staging), target)
        raise


def check_options(out: str | os.PathLike[str], options: RunOptions, *, part: bool = False) -> Target:
    """The place of an output. Raises ParameterError for options that it does not have.

    part  the run does a part of a plan, for no driver
    """
    place = place_of(out)
    if options.report is not None and (page := page_beside(out, options.report)) is not None:
        from weightsmith._base.report.html import check_page

        check_page(page)
    is_folder = place.publication == "rename"
    if options.ray is not None and not place.parts:
        _refuse("one process uploads weight files to the Hub", "write to a bucket or a shared folder, or leave --ray out")
    if part and not (is_folder or place.leaderless):
        _refuse("parts of a plan share a folder or a bucket", "run the whole plan, or write the parts to one of these")
    if part and options.overwrite and not is_folder:
        _refuse("parts replace no output there", "choose another prefix, or remove the old output; and leave --overwrite out")
    if options.push is not None and not is_folder:
        _refuse("--push uploads a local folder", "write to a folder, or leave --push out")
    if options.evaluate is not None and not is_folder:
        _refuse("--evaluate reads the result before it is published", "write to a folder, or leave --evaluate out")
    if options.keep_stages and not is_folder:
        _refuse("results of stages are kept in local folders", "write to a folder, or leave --keep-stages out")
    if options.commit_message is not None and options.push is None and place.publication != "commit":
        what = "there is no commit: the output is not on the Hub"
        fix = "write to hf://org/name, add --push org/name, or leave --commit-message out"
        raise ParameterError(what, where="commit_message", fix=fix, state=NOTHING_WRITTEN)
    return place


def page_beside(out: str | os.PathLike[str], report: str) -> str | None:
    """The file of a report outside the output; None for OUT/report.html, which is a file of the output.

    >>> page_beside("out", "page.html"), page_beside("out", "./out/report.html"), page_beside("s3://b/out", "s3://b/out/report.html")
    ('page.html', None, None)
    """
    page, home = (
        str(name).rstrip("/") if "://" in str(name) else os.path.abspath(expand_user(name))  # noqa: PTH100  links stay
        for name in (report, out)
    )
    if not page.startswith(f"{home}/") and "://" not in page:
        return report
    if page != f"{home}/{PAGE_NAME}":
        what = "a report in the output has the name report.html" if page.startswith(f"{home}/") else "a report is a local file"
        fix = f"write --report {home}/{PAGE_NAME}, or a file outside of the output"
        raise ParameterError(what, where=named("report"), fix=fix, state=NOTHING_WRITTEN)
    return None


def sibling(out: str | os.PathLike[str], suffix: str) -> Path:
    """A local folder for what an output needs: next to it, or in the current folder if the output is an address.

    >>> sibling("models/out", ".measurement").name, sibling("s3://models/out", ".measurement").relative_to(Path.cwd())
    ('out.measurement', PosixPath('out-e614e439.measurement'))
    """
    folder = place_of(out).local
    return folder.with_name(f"{folder.name}{suffix}")


def models_read(plan: Plan) -> list[str]:
    """The models that a plan reads, as the recipe names them."""
    return [ref for model in plan.models for ref in (model.ref, *([] if model.plan is None else models_read(model.plan)))]


def _refuse(what: str, fix: str) -> None:
    raise ParameterError(f"the output is an address, and {what}", fix=fix, state=NOTHING_WRITTEN)


RECIPE_NAME = "recipe.yml"
_MAX_PAGE_BYTES = 2 << 20

_CONFIG_NAMES = {SAFETENSORS: "config.json", PEFT: "adapter_config.json", MLX_ADAPTER: "adapter_config.json"}
"""Container → the file of `Plan.config`, if it is one."""


def other_bytes(plan: Plan, donor: Checkpoint, options: RunOptions) -> int:
    """Approximate size of all files except weights: carried files, the recipe (also in the card), the report, and others."""
    carried = sum(path.stat().st_size for name in plan.carried if (path := donor.folder / name).is_file())
    carried += sum(map(len, plan.files.values()))
    page = 0 if options.report is None else _MAX_PAGE_BYTES
    return carried + len(json.dumps(plan.config)) + 2 * len(plan.recipe.encode()) + (64 << 10) + page


_RECORD_BYTES = 160
"""Bytes that a tensor takes in the manifest, besides the names of tensor and file."""
_SMALL_BYTES = 64 << 10
"""More than most files have that are written for a model."""


def other_sizes(prepared: Prepared, options: RunOptions, out: str) -> dict[str, int]:
    """The files of an output except weights, and about how many bytes each has; reports of products may add some.

    out  the output
    """
    plan, donor = prepared.plan, prepared.inputs[prepared.plan.donor]
    missing = donor.missing
    sizes = {name: missing.get(donor.folder / name, _SMALL_BYTES) for name in plan.carried}
    sizes |= {name: path.stat().st_size for name in plan.carried if (path := donor.folder / name).is_file()}
    sizes |= {name: len(data) for name, data in (*plan.files.items(), *plan.layout.indexes.items())}
    if plan.config is not None and plan.container in _CONFIG_NAMES:
        sizes[_CONFIG_NAMES[plan.container]] = len(json.dumps(plan.config))
    if plan.follows_recipe:
        sizes[RECIPE_NAME] = len(plan.recipe)
    if options.report is not None and ("://" in options.report or page_beside(out, options.report) is None):
        from weightsmith._execution.report import page_names

        sizes |= dict.fromkeys(page_names(plan), _SMALL_BYTES)
    if options.card:
        sizes[CARD_NAME] = _SMALL_BYTES + len(plan.recipe)
    shards = plan.layout.shards
    records = sum(_RECORD_BYTES + len(spec.name) + len(shard.name) for shard in shards for spec in shard.tensors)
    return {**sizes, MANIFEST_NAME: _SMALL_BYTES + len(plan.recipe) + records}


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
        from weightsmith._execution.report import MOVED_NAME, PICTURES, merge_report, report_files

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

    once = {(model.ref, model.revision): model for model in reversed(plan.models)}  # not again as its files have it
    models = [model for model in plan.models if once[model.ref, model.revision] is model]
    return [{"ref": m.ref, "revision": m.revision, "identity": m.identity, **merge(m.plan)} for m in models]


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
