"""`weightsmith merge`, `moe` and `run`, which make a model of several; and `plan`, which says how."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import weightsmith
from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.help import answer
from weightsmith._app.cli.work import CommandWork, show_warnings, working
from weightsmith._base.errors import printable
from weightsmith._base.text import count, fact, heading, result, say, section, show_json, show_table, size, warn
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._files.remote.addresses import is_address
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans.summary import reading_text, stream_text, time_text

if TYPE_CHECKING:
    from weightsmith._features.mixture.router import RoutingReport
    from weightsmith._files.remote.ahead import TransferEstimate
    from weightsmith._planning.planner.prepared import Prepared
    from weightsmith._plans import Plan, Step
    from weightsmith._plans.summary import Summary, UploadEstimate


@options.expand
def merge(
    context: typer.Context,
    recipe: options.Recipe,
    out: options.Out,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Merge checkpoints into OUT as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith merge ties.yml merged
        weightsmith merge ties.yml merged-q4 --quantize gguf-q4_k_m --threads 8
    """
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        work.make(weightsmith.merge, options.recipe_source(recipe), records=(planning, settings, running))


# ---- weightsmith moe


ROUTER = "router"
"""The product whose report says where tokens go."""


@options.expand
def moe(
    context: typer.Context,
    recipe: options.Recipe,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: options.PlanOnly = False,
    routing_only: Annotated[bool, typer.Option("--routing", help="Show the routing of the prompts; write nothing.")] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a mixture of experts as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith moe experts.yml mixture
        weightsmith moe experts.yml --routing
    """
    options.check_out(out, plan=plan_only, routing=routing_only)
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        source = options.recipe_source(recipe)
        if not plan_only and not routing_only:
            merged = work.make(weightsmith.moe, source, records=(planning, settings, running))
            report = None if merged is None else cast("RoutingReport | None", merged.reports.get(ROUTER))
            if report is not None and report.routing is not None and work.shows:
                show_table(*report.routing.summary_table(), right=set(range(1, len(report.routing.experts) + 3)))
            return
        from weightsmith._features.any_recipe import prepare_any

        planning = replace(planning, routing_report=True) if routing_only else planning
        with prepare_any(source, planning, settings, command="moe", check=plan_only) as prepared:
            show_warnings(prepared.plan, prepared.source)
            if plan_only:
                show_plan(prepared, running, out, as_json=as_json)
            else:
                _route(prepared, recipe, running, work)


def _route(prepared: Prepared, recipe: str, running: RunOptions, work: CommandWork) -> None:
    """Compute the router weights alone, and show the routing."""
    if all(product.name != ROUTER for product in prepared.plan.products):
        raise typer.BadParameter("this recipe makes no router weights.", param_hint="--routing")
    from weightsmith._execution.execute import make_product

    with work.running() as watching:
        report = cast("RoutingReport | None", make_product(prepared, ROUTER, running, watching.progress))
    for finding in () if report is None else report.warnings(recipe):
        warn(finding)
    _show_routing(report, as_json=work.as_json)


def _show_routing(report: RoutingReport | None, *, as_json: bool) -> None:
    if as_json:
        routing = None if report is None or report.routing is None else report.routing.to_json()
        show_json(routing)
    elif report is None or report.routing is None:
        result("the recipe has no prompts, so there is nothing to route")
    else:
        show_table(*report.routing.summary_table(), right=set(range(1, len(report.routing.experts) + 3)))
        result()
        show_table(*report.routing.by_layer(), right=set(range(len(report.routing.groups) + 1)))


# ---- weightsmith run


def parse_part(text: str) -> tuple[int, int]:
    """Part and number of parts, from `2/4`.

    >>> parse_part("2/4")
    (2, 4)
    """
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text.strip(), re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a part: write 2/4 for the second of four.")
    return int(match[1]), int(match[2])


@options.expand
def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan, as `weightsmith plan RECIPE --json` prints it.")],
    out: options.Out,
    running: RunOptions,
    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="K/N",
            show_default=False,
            help="Run only part K of N, for several processes; OUT is not created yet.",
        ),
    ] = "",
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow the plan's merge method to run a Python file.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run PLAN, or one part of it, and write OUT.

    The output is identical to that of the recipe. The models must not have changed since the plan was made. When all parts are
    done, run the same command without --part to finish.

    Examples:
        weightsmith run plan.json merged
        weightsmith run plan.json merged --part 2/4
    """
    options.check_plan(plan)
    chosen = parse_part(part) if part else None
    if chosen and running.push:
        raise typer.BadParameter("a part publishes nothing: give it to the run without --part.", param_hint="--push")
    if chosen and running.ray is not None:
        raise typer.BadParameter("a cluster does all parts: leave out --part.", param_hint="--ray")
    with working("reading the plan and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        merged = work.make(weightsmith.run, plan, records=(running,), part=chosen, allow_code=allow_code)
        if merged is None and chosen is not None:
            wrote(f"Part {chosen[0]} of {chosen[1]} is done.")
            if not quiet:
                say(f"part {chosen[0]} of {chosen[1]} is done; without --part the same command publishes when all are")


# ---- `weightsmith plan`


_PIECES_SHOWN = 12
AS_IT_IS = "as it is"


@options.expand
def plan(
    context: typer.Context,
    recipe: options.Recipe,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: Annotated[
        str,
        typer.Argument(
            metavar="[OUT]",
            help="With an address, the uploads are shown. A folder is ignored, so you can write plan for merge.",
            show_default=False,
        ),
    ] = "",
    explain: Annotated[
        str,
        typer.Option(
            "--explain",
            metavar="TENSOR",
            show_default=False,
            help="Show where the parameters of a tensor, or of '*.mlp.*', come from.",
        ),
    ] = "",
    distance: Annotated[
        bool,
        typer.Option("--distance", help="Merge without writing; show how far each layer moves from the base."),
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show the plan of RECIPE.

    Writes nothing, and reads only model headers unless --distance is given. Shows how much will be downloaded (with --stream,
    transferred), and the modules that a recipe can name under `modules:`.

    Accepts the options of merge, or of moe for a mixture. --json prints the whole plan, for `weightsmith run`.

    Examples:
        weightsmith plan ties.yml
        weightsmith plan ties.yml --explain model.layers.3.mlp.up_proj.weight
    """
    with working("reading the recipe and the models' headers", quiet=quiet, as_json=as_json):
        answer(context, quiet=quiet)
        from weightsmith._features.any_recipe import prepare_any

        with prepare_any(options.recipe_source(recipe), planning, settings, check=True) as prepared:
            show_warnings(prepared.plan, prepared.source)
            if quiet and not as_json:
                return
            if explain:
                _explain(prepared, explain, as_json=as_json)
            elif distance:
                _distance(prepared, running, as_json=as_json)
            else:
                show_plan(prepared, running, out, as_json=as_json)


def show_plan(prepared: Prepared, running: RunOptions, out: str, *, as_json: bool) -> None:
    """Show a plan as text or as JSON. out: of its run, if that is known; the uploads to an address are shown."""
    from weightsmith._execution.execute import check_computable
    from weightsmith._execution.summary import summarise

    if as_json:
        check_computable(prepared)
    summary = summarise(prepared, running, out or "out")
    if as_json:
        show_json(_to_json(prepared.plan, summary), exact=True)
    else:
        _show(prepared.plan, summary, running, out)


def _distance(prepared: Prepared, running: RunOptions, *, as_json: bool) -> None:
    from weightsmith._execution.execute import measure_distance
    from weightsmith._execution.report import to_json

    moved = measure_distance(prepared, running)
    if as_json:
        show_json(to_json(moved))
    elif not moved:
        result("nothing is merged with a base, so there is no distance")
    else:
        rows = [(m.name, f"{m.delta:.4g}", m.percent(3)) for m in moved]
        show_table(("", "‖merged - base‖", "share of the base"), rows, right={1, 2})


def _show(plan: Plan, summary: Summary, running: RunOptions, out: str) -> None:
    _show_models(plan, summary)
    _show_output(plan, summary)
    _show_cost(summary, running.max_memory_bytes)
    if not summary.measured:
        _show_upload(summary.upload, "hf://" if running.push is not None else out)
    _show_tensors(summary)
    if summary.changes and not summary.measured:
        section("config.json")
        show_table(("key", "was", "becomes"), [(c.key, short(c.old), short(c.new)) for c in summary.changes])
    if plan.vocabulary is not None:
        _vocabulary(plan.vocabulary)
    _show_files(plan)


def _show_models(plan: Plan, summary: Summary) -> None:
    """What is merged, and what must be there first."""
    fact("method", plan.provenance.name)
    for i, (ref, revision) in enumerate({model.ref: model.revision for model in plan.models}.items()):
        fact("" if i else "models", f"{ref}{f' at {revision}' if revision else ''}")
    for stage in summary.stages:
        nbytes = f"{count(stage.tensors, 'tensor')}, {size(stage.nbytes)}"
        how = f"written first, because {stage.why}" if stage.why else "computed on the fly"
        fact("stage", f"{stage.name}: {stage.method} of {', '.join(stage.models)}; {nbytes}, {how}")
    for i, text in enumerate(summary.texts):
        rows = f"{count(text.rows, 'row')} of {text.tokens:,} tokens of {text.text}, through {text.model}"
        measured = rows if text.rows else f"{text.model}, earlier: {text.text}"
        fact("" if i else "measured", f"{measured}: {', '.join(text.kinds)}, {size(text.nbytes)}")
    if summary.texts:
        fact("disk", f"{size(summary.product_bytes)} at most, beside the output, for one layer's statistics at a time")
    if summary.downloads:
        files = count(len(summary.downloads), "file")
        fact("download", f"{size(summary.download_bytes)} in {files}, before the merge begins; only headers were read")
    if summary.transfer.needed_bytes:
        fact("stream", _transfer(summary.transfer))
        opened = summary.opening
        fact("", f"and {size(opened.nbytes)} in {count(opened.requests, 'request')} to open the models, now and when it runs")


def _show_output(plan: Plan, summary: Summary) -> None:
    tensors, shards = count(summary.tensors, "tensor"), plan.layout.shards
    if not summary.measured:
        files = count(len(shards), "file") + (f" of at most {size(plan.max_shard_bytes)}" if len(shards) > 1 else "")
        fact("output", f"{tensors}, {size(summary.out_bytes)}, in {files}")
        return
    fact("measured", "first: that decides how weights are stored, the sizes and config.json")
    target = None if plan.then is None else plan.then.settings.get("target")
    if target is not None:
        most = str(target).rpartition("=")[2]
        fact("target", f"then sizes are tried until KL on the text of --evaluate is at most {most}")
    about = f"about {size(summary.out_bytes)}" if summary.out_bytes else "sizes follow from the measurement"
    fact("output", f"{tensors}, {about}")


def _show_cost(summary: Summary, max_memory: int | None) -> None:
    fact("read", f"{reading_text(summary)}{'; more when it is quantised then' if summary.measured else ''}")
    if summary.survey_bytes:
        fact("", f"{size(summary.survey_bytes)} of it before the first tensor is merged, for statistics of the whole model")
    if not summary.measured:
        fact("write", size(summary.write_bytes))
    memory = summary.memory
    over = "; this is the minimum" if max_memory is not None and memory.peak_bytes > max_memory else ""
    fact("memory", f"{size(memory.peak_bytes)} at most, with {count(memory.threads, 'thread')}{over}")
    if memory.calibrates and summary.texts:
        layer = f"{size(summary.measuring_bytes)} for a layer in float32 and its statistics"
        fact("", f"plus the measurement: torch, transformers, {layer}")
    elif memory.calibrates:
        fact("", "plus the calibration: torch, transformers, a layer in float32 and its inputs")
    if summary.writing_bytes:
        whole = f"{size(summary.writing_bytes)} for the whole model in float32"
        fact("", f"while a model writes its text: {whole}, or one layer at a time if that does not fit")
    if summary.time is not None:
        fact("time", time_text(summary.time))


def _show_upload(upload: UploadEstimate, out: str) -> None:
    """out: an address; others have no uploads."""
    sent = f"{size(upload.nbytes)} in {count(upload.files, 'file')}"
    if out.startswith("hf://"):
        fact("upload", f"{sent}, by {upload.hub_writes:,} requests, or more if the Hub takes files in parts")
    elif is_address(out):
        fact("upload", f"{sent}, by {upload.bucket_writes:,} requests, and {upload.bucket_reads:,} that look at objects")


def _show_tensors(summary: Summary) -> None:
    section("output tensors by op")
    ops = [(op.op, f"{op.tensors:,}", "" if summary.measured else size(op.nbytes)) for op in summary.ops]
    show_table(("op", "tensors", "" if summary.measured else "bytes"), ops, right={1, 2})
    if summary.stored:
        section("storage of tensors")
        stored = [(_stored_as(s.encoding), f"{s.tensors:,}", size(s.nbytes), s.why, s.first) for s in summary.stored]
        show_table(("stored as", "tensors", "bytes", "reason", "first tensor"), stored, right={1, 2})
    if summary.kinds:
        section("size by kind of tensor" + (" (about)" if summary.measured else ""))
        kinds = [(k.kind, f"{k.tensors:,}", size(k.nbytes), f"{8 * k.nbytes / max(1, k.elements):.2f}") for k in summary.kinds]
        show_table(("kind", "tensors", "bytes", "bits a number"), kinds, right={1, 2, 3})
    section("modules")
    stacks = [", ".join(f"{stack.prefix}0 to {stack.layers - 1}" for stack in module.stacks) for module in summary.modules]
    modules = [
        (module.name, f"{module.tensors:,}", layers, ", ".join(module.aliases))
        for module, layers in zip(summary.modules, stacks, strict=True)
    ]
    show_table(("module", "tensors", "layers", "also called"), modules, right={1})
    if summary.dropped:
        section("not in the output")
        dropped = [(f"{d.tensors:,}", d.model, d.reason, d.first) for d in summary.dropped]
        show_table(("tensors", "model", "reason", "first tensor"), dropped, right={0})


def _show_files(plan: Plan) -> None:
    if plan.files:
        section("written")
        say(printable(", ".join(plan.files)))
    if plan.lacking:
        section("files not in the output")
        show_table(("model", "files"), [(model, ", ".join(files)) for model, files in plan.lacking.items()])
    if plan.carried:
        section(f"copied from {plan.models[plan.donor].ref}")
        say(printable(", ".join(plan.carried)))


def _transfer(transfer: TransferEstimate) -> str:
    """The transfer of streamed models."""
    text = f"{stream_text(transfer)}, while the merge runs"
    if transfer.passes < 2:
        return text
    again = transfer.network_bytes - transfer.needed_bytes
    if not again:
        return f"{text}; later passes read the disk cache"
    return f"{text}; {size(again)} of it again for later passes, as the disk cache is full (--stream-cache)"


def _vocabulary(facts: Mapping[str, Any]) -> None:
    """The tokenizer of the output, and the sources of its token rows."""
    section("vocabulary")
    if facts.get("shared"):
        fact("tokens", f"the tokenizer of {facts['tokenizer']}, shared by all models")
        return
    new = facts.get("new", [])
    added = f", and {count(len(new), 'token')} added: {', '.join(new[:6])}{', ...' if len(new) > 6 else ''}" if new else ""
    fact("tokens", f"{facts['tokens']:,}, of {facts['tokenizer']}{added}")
    rows = f" instead of {facts['rows_before']:,}" if facts["rows"] != facts["rows_before"] else ""
    fact("rows", f"{facts['rows']:,}{rows}")
    show_table(("rows come from", "tokens"), [(name, f"{n:,}") for name, n in facts["sources"].items()], right={1})
    for name, n in facts.get("left_out", {}).items():
        say(printable(f"{count(n, 'token')} of {name} {'is' if n == 1 else 'are'} not in the output"))


def _to_json(plan: Plan, summary: Summary) -> dict[str, Any]:
    """The plan's own JSON with the place of each tensor, and the totals under `summary`."""
    shards, places = plan.layout.shards, plan.layout.places
    return plan.to_json() | {
        "places": {
            name: {"file": shards[place.shard].name, "offset": place.offset, "bytes": place.nbytes}
            for name, place in places.items()
        },
        "hash": plan.hash,
        "files": [{"name": s.name, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in shards],
        "summary": summary.to_json(),
    }


def short(value: Any, length: int = 60) -> str:
    """A config value on one line.

    >>> short([1] * 40, 12)
    '[1, 1, ... 40 items'
    """
    if value is None:
        return "-"
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= length:
        return text
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{text[:6].rstrip()} ... {len(value)} items"
    return f"{text[: max(1, length - 4)].rstrip()}..."


def _explain(prepared: Prepared, pattern: str, *, as_json: bool) -> None:
    from weightsmith._features.quantisation.calibration.weights import by_weight

    prepared = prepared.with_plan(by_weight(prepared.plan))
    arrays = {out.name: step.out.name for step in prepared.plan.steps for out in step.outs}
    names = [step.out.name for step in prepared.plan.steps]
    matching = [pattern] if pattern in names else [arrays[pattern]] if pattern in arrays else fnmatch.filter(names, pattern)
    matching = matching or [name for name in names if re.fullmatch(rf"{re.escape(pattern)}\.\d", name)]  # in parts
    if not matching:
        prepared.explain(pattern)  # raises
    if as_json:
        data = [_explanation(prepared, name) for name in matching]
        show_json(data[0] if pattern in (*names, *arrays) else data)
        return
    for number, name in enumerate(matching):
        if number:
            result()
        _show_tensor(prepared, name)


def _explanation(prepared: Prepared, tensor: str) -> dict[str, Any]:
    from weightsmith._features.quantisation.calibration.weights import CALIBRATED, calibrated_tensors

    plan, step, refs = prepared.plan, _step(prepared, tensor), [m.ref for m in prepared.plan.models]
    return {
        "tensor": tensor,
        "op": step.made_by,
        "dtype": step.out.dtype.name,
        "shape": list(step.out.shape),
        "encoding": step.encoding if plan.then is None else None,
        "stored": [
            {"name": out.name, "dtype": out.dtype.name, "shape": list(out.shape)} for out in step.outs if plan.then is None
        ],
        "measured_first": plan.then is not None,
        "calibrated": calibrated_tensors(plan).get(tensor) == CALIBRATED,
        "inputs": [{"model": refs[model], "tensor": name} for model, name in _inputs(step)],
        "pieces": [{"name": p.out.name, "shape": list(p.out.shape), "op": p.op} for p in step.pieces if not step.verbatim],
        "parameters": [
            {"parameter": o.parameter, "model": None if o.model is None else refs[o.model], "value": o.value, "where": o.where}
            for o in prepared.explain(tensor)
        ],
    }


def _step(prepared: Prepared, tensor: str) -> Step:
    return next(step for step in prepared.plan.steps if step.out.name == tensor)


def _inputs(step: Step) -> list[tuple[int, str]]:
    return list(dict.fromkeys((i.model, i.tensor) for leaf in step.leaves for i in leaf.inputs))


def _show_tensor(prepared: Prepared, tensor: str) -> None:
    plan, step, origins = prepared.plan, _step(prepared, tensor), prepared.explain(tensor)
    refs = [m.ref for m in plan.models]
    result(f"{heading(printable(tensor))} {list(step.out.shape)} {step.out.dtype}, made by {step.made_by}")
    for line in _notes(plan, step):
        say(printable(line))
    result()
    show_table(("from model", "tensor"), [(refs[model], name) for model, name in _inputs(step)])
    if step.pieces and not step.verbatim:
        result()
        result(f"{count(len(step.pieces), 'piece')}, each merged as a tensor of its own:")
        listed = [(p.out.name, str(list(p.out.shape)), p.op) for p in step.pieces]
        show_table(("piece", "shape", "made by"), listed[:_PIECES_SHOWN])
        if len(listed) > _PIECES_SHOWN:
            result(f"and {len(listed) - _PIECES_SHOWN:,} more")
    if origins:
        result()
        rows = [(o.parameter, "" if o.model is None else refs[o.model], _value(o.value), o.where) for o in origins]
        show_table(("parameter", "model", "value", "where"), rows)


def _stored_as(encoding: str) -> str:
    return AS_IT_IS if encoding == "plain" else encoding.removeprefix("plain ")


def _notes(plan: Plan, step: Step) -> Iterator[str]:
    """Notes on a tensor: its storage, and the reason if no model or method changes it."""
    from weightsmith import _methods as methods
    from weightsmith._features.quantisation.calibration.weights import calibrated_tensors
    from weightsmith._planning.planner.encode import COPIED, stored_plain
    from weightsmith._plans import PLAIN

    if plan.then is not None:
        yield f"the model is measured first, for {plan.provenance.format}: that decides how this is stored"
    if why := calibrated_tensors(plan).get(step.out.name):
        yield why
    if step.verbatim:
        yield COPIED
    if step.encoding != PLAIN:
        yield f"stored as {step.encoding}: {', '.join(f'{out.name} {out.dtype}' for out in step.outs)}"
    elif plan.encodings:
        yield f"stored as it is: {stored_plain(plan)[step.out.name]}"
    if step.base and not step.pieces and not step.merges:
        yield "the base's: no model takes part in it"
    merged = [leaf for leaf in step.leaves if leaf.merges]
    otherwise = methods.get(merged[0].op).otherwise if merged else ""
    if otherwise and all(leaf.role != "linear" for leaf in merged):
        yield f"{otherwise}: not a linear weight"


def _value(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
