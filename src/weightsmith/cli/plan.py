"""`weightsmith plan`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import show_warnings
from weightsmith.cli.mergekit_flags import answer
from weightsmith.errors import printable
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.progress import no_bars_in_logs
from weightsmith.text import count, fact, heading, result, say, show_json, show_table, size, status_line

if TYPE_CHECKING:
    from weightsmith.cli.summary import Summary
    from weightsmith.planner import Prepared
    from weightsmith.plans import Plan, Step
    from weightsmith.remote.ahead import Travel

_PIECES_SHOWN = 12
AS_IT_IS = "as it is"


@options.expand()
def plan(
    context: typer.Context,
    recipe: options.Recipe,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: Annotated[
        str, typer.Argument(metavar="[OUT]", help="Not looked at: a command line of merge works here.", show_default=False)
    ] = "",
    explain: Annotated[
        str,
        typer.Option(
            "--explain",
            metavar="TENSOR",
            show_default=False,
            help="Show the parameters of one output tensor, or of all that a pattern such as '*.mlp.*' matches, and the line "
            "of the recipe each comes from.",
        ),
    ] = "",
    distance: Annotated[
        bool,
        typer.Option("--distance", help="Merge without writing, and show how far each layer moves from the base."),
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show what merging RECIPE would do. Reads headers only (but for --distance), writes nothing.

    Of hub models it reads the headers by byte range, and says what a merge would download, or with --stream read where it is.

    Names the modules that `modules:` in a recipe takes. Takes the options of merge, and of moe for a recipe of a mixture. With
    --json: the whole plan, which `weightsmith run` takes, and where each tensor goes.
    """
    with failures(as_json=as_json), status_line("reading the recipe and the models' headers", quiet=quiet or as_json):
        no_bars_in_logs(quiet=quiet)
        answer(context, quiet=quiet)
        from weightsmith.api import prepare_any

        with prepare_any(options.recipe_source(recipe), planning, settings, check=True) as prepared:
            show_warnings(prepared)
            if quiet and not as_json:
                return
            if explain:
                _explain(prepared, explain, as_json=as_json)
            elif distance:
                _distance(prepared, running, as_json=as_json)
            else:
                show_plan(prepared, running, as_json=as_json)


def show_plan(prepared: Prepared, running: RunOptions, *, as_json: bool) -> None:
    """What a plan would do."""
    from weightsmith.cli.summary import summarise
    from weightsmith.execution import check_computable

    if as_json:
        check_computable(prepared)
    if running.stream:
        from weightsmith.planner.prepared import stream

        stream(prepared.inputs)
    summary = summarise(prepared, running)
    if as_json:
        show_json(_to_json(prepared.plan, summary), exact=True)
    else:
        _show(prepared.plan, summary, running.max_memory_bytes)


def _distance(prepared: Prepared, running: RunOptions, *, as_json: bool) -> None:
    from weightsmith.distance import to_json
    from weightsmith.execution import measure_distance

    moved = measure_distance(prepared, running)
    if as_json:
        show_json(to_json(moved))
    elif not moved:
        result("nothing is merged with a base, so there is no distance from one")
    else:
        rows = [(m.name, f"{m.delta:.4g}", m.percent(3)) for m in moved]
        show_table(("", "‖merged - base‖", "share of the base"), rows, right={1, 2})


def _show(plan: Plan, summary: Summary, max_memory: int | None) -> None:
    shards = plan.layout.shards
    fact("method", plan.made.name)
    for i, model in enumerate(plan.models):
        fact("" if i else "models", f"{model.ref}{f' at {model.revision}' if model.revision else ''}")
    for stage in summary.stages:
        nbytes = f"{count(stage.tensors, 'tensor')}, {size(stage.nbytes)}"
        how = f"written first, because {stage.why}" if stage.why else "computed where it is read"
        fact("stage", f"{stage.name}: {stage.method} of {', '.join(stage.models)}; {nbytes}, {how}")
    if summary.downloads:
        nbytes = size(sum(d.nbytes for d in summary.downloads))
        fact(
            "download", f"{nbytes} in {count(len(summary.downloads), 'file')}, before the merge begins; only headers were read"
        )
    if summary.travel.needed_bytes:
        fact("stream", _travel(summary.travel))
    files = count(len(shards), "file") + (f" of at most {size(plan.max_shard_bytes)}" if len(shards) > 1 else "")
    if summary.measured:
        fact("measured", "first: what each weight is stored as, sizes and config.json are decided then")
        about = f"about {size(summary.out_bytes)}" if summary.out_bytes else "their size follows from the measurement"
        fact("output", f"{count(summary.tensors, 'tensor')}, {about}")
    else:
        fact("output", f"{count(summary.tensors, 'tensor')}, {size(summary.out_bytes)}, in {files}")
    times = f" (inputs of {size(summary.input_bytes)}, read up to {summary.passes} times)" if summary.passes > 1 else ""
    least = "; more when it is quantised then" if summary.measured else ""
    fact("read", f"{'up to ' if times else ''}{size(summary.read_bytes)}{times}{least}")
    if summary.survey_bytes:
        fact("", f"{size(summary.survey_bytes)} of them before the first tensor is merged, to see the whole model")
    if not summary.measured:
        fact("write", size(summary.file_bytes))
    memory = summary.memory
    over = "; it cannot be less" if max_memory is not None and memory.peak_bytes > max_memory else ""
    fact("memory", f"{size(memory.peak_bytes)} at most, with {count(memory.threads, 'thread')}{over}")
    if memory.calibrates:
        fact("", "and the calibration: torch and transformers, a layer in float32, and what enters it")
    _section("output tensors by op")
    ops = [(t.name, f"{t.tensors:,}", "" if summary.measured else size(t.nbytes)) for t in summary.ops]
    show_table(("op", "tensors", "" if summary.measured else "bytes"), ops, right={1, 2})
    if summary.stored:
        _section("how tensors are stored")
        show_table(
            ("stored as", "tensors", "bytes", "why", "the first"),
            [(_stored_as(s.encoding), f"{s.tensors:,}", size(s.nbytes), s.why, s.first) for s in summary.stored],
            right={1, 2},
        )
    _section("modules")
    rows = [
        (m.name, f"{m.tensors:,}", ", ".join(f"{p}0 to {n - 1}" for p, n in m.stacks), ", ".join(m.aliases))
        for m in summary.modules
    ]
    show_table(("module", "tensors", "layers", "also called"), rows, right={1})
    if summary.dropped:
        _section("not in the output")
        show_table(
            ("tensors", "of model", "why", "the first"),
            [(f"{d.tensors:,}", d.model, d.reason, d.first) for d in summary.dropped],
            right={0},
        )
    if summary.changes and not summary.measured:
        from weightsmith.cli.summary import short

        _section("config.json")
        show_table(("key", "was", "becomes"), [(c.key, short(c.old), short(c.new)) for c in summary.changes])
    if plan.vocabulary is not None:
        _vocabulary(plan.vocabulary)
    if plan.files:
        _section("written")
        say(printable(", ".join(plan.files)))
    if plan.lacking:
        _section("files not in the output")
        show_table(("of model", "files"), [(model, ", ".join(files)) for model, files in plan.lacking.items()])
    if plan.carried:
        _section(f"copied from {plan.models[plan.donor].ref}")
        say(printable(", ".join(plan.carried)))


def _travel(travel: Travel) -> str:
    """What is read where it is."""
    text = f"{size(travel.network_bytes)} in {count(travel.requests, 'request')}, while the merge runs"
    if travel.passes < 2:
        return text
    again = travel.network_bytes - travel.needed_bytes
    if not again:
        return f"{text}; later passes read the spool"
    return f"{text}; {size(again)} of them for later passes, which the spool has no room for (--max-spool)"


def _vocabulary(found: Mapping[str, Any]) -> None:
    """Whose tokenizer the output has, and where the rows of its tokens come from."""
    _section("vocabulary")
    if found.get("shared"):
        fact("tokens", f"those of {found['tokenizer']}, whose tokenizer all models share")
        return
    new = found.get("new", [])
    added = f", and {count(len(new), 'token')} added: {', '.join(new[:6])}{', ...' if len(new) > 6 else ''}" if new else ""
    fact("tokens", f"{found['tokens']:,}, of {found['tokenizer']}{added}")
    rows = f" instead of {found['rows_before']:,}" if found["rows"] != found["rows_before"] else ""
    fact("rows", f"{found['rows']:,}{rows}")
    show_table(("rows come from", "tokens"), [(name, f"{n:,}") for name, n in found["sources"].items()], right={1})
    for name, n in found.get("left_out", {}).items():
        say(printable(f"{count(n, 'token')} of {name} {'is' if n == 1 else 'are'} not in the output"))


def _section(title: str) -> None:
    result()
    result(heading(printable(title)))


def _to_json(plan: Plan, summary: Summary) -> dict[str, Any]:
    """The plan's own JSON with each tensor's place, and the sums under `summary`."""
    data = plan.to_json()
    shards, places = plan.layout.shards, plan.layout.places
    data["places"] = {
        name: {"file": shards[place.shard].name, "offset": place.offset, "bytes": place.nbytes}
        for name, place in places.items()
    }
    data["hash"] = plan.hash
    data["files"] = [{"name": s.name, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in shards]
    data["summary"] = {
        "tensors": summary.tensors,
        "measured_first": summary.measured,
        "bytes": summary.out_bytes,
        "write_bytes": None if summary.measured else summary.file_bytes,
        "input_bytes": summary.input_bytes,
        "read_bytes_at_most": None if summary.measured else summary.read_bytes,
        "survey_bytes": summary.survey_bytes,
        "download_bytes": sum(d.nbytes for d in summary.downloads),
        "downloads": [{"model": d.model, "file": d.file, "bytes": d.nbytes} for d in summary.downloads],
        "stream": {
            "needed_bytes": summary.travel.needed_bytes,
            "network_bytes": summary.travel.network_bytes,
            "requests": summary.travel.requests,
            "passes": summary.travel.passes,
        },
        "peak_memory_bytes": summary.memory.peak_bytes,
        "calibrates": summary.memory.calibrates,
        "threads": summary.memory.threads,
        "stages": [
            {"name": s.name, "method": s.method, "models": list(s.models), "tensors": s.tensors, "bytes": s.nbytes}
            for s in summary.stages
        ],
        "ops": [{"op": t.name, "tensors": t.tensors, "bytes": t.nbytes} for t in summary.ops],
        "stored": [
            {"encoding": s.encoding, "why": s.why, "tensors": s.tensors, "bytes": s.nbytes, "first": s.first}
            for s in summary.stored
        ],
        "modules": [
            {
                "name": m.name,
                "tensors": m.tensors,
                "stacks": [{"prefix": p, "layers": n} for p, n in m.stacks],
                "aliases": list(m.aliases),
            }
            for m in summary.modules
        ],
        "dropped": [{"model": d.model, "reason": d.reason, "tensors": d.tensors, "first": d.first} for d in summary.dropped],
        "config_changes": [{"key": c.key, "old": c.old, "new": c.new} for c in summary.changes],
    }
    return data


def _explain(prepared: Prepared, pattern: str, *, as_json: bool) -> None:
    from weightsmith.quantisation.calibration.weights import by_weight

    prepared = replace(prepared, plan=by_weight(prepared.plan))
    arrays = {out.name: step.out.name for step in prepared.plan.steps for out in step.outs}
    names = [step.out.name for step in prepared.plan.steps]
    found = [pattern] if pattern in names else [arrays[pattern]] if pattern in arrays else fnmatch.filter(names, pattern)
    if not found:
        prepared.explain(pattern)  # raises
    if as_json:
        data = [_explanation(prepared, name) for name in found]
        show_json(data[0] if pattern in (*names, *arrays) else data)
        return
    for number, name in enumerate(found):
        if number:
            result()
        _show_tensor(prepared, name)


def _explanation(prepared: Prepared, tensor: str) -> dict[str, Any]:
    from weightsmith.quantisation.calibration.weights import calibrated_weights

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
        "calibrated": tensor in calibrated_weights(plan),
        "inputs": [{"model": refs[model], "tensor": name} for model, name in _inputs(step)],
        "pieces": [{"name": p.out.name, "shape": list(p.out.shape), "op": p.op} for p in step.pieces],
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
    if step.pieces:
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
    """What else is known of a tensor: how it is stored, that it is the base's, or no linear weight to a method of such."""
    from weightsmith import methods
    from weightsmith.planner.encode import stored_plain
    from weightsmith.plans import PLAIN
    from weightsmith.quantisation.calibration.weights import CALIBRATED, calibrated_weights

    if plan.then is not None:
        yield f"the model is measured first, for {plan.then['format']}: what this is stored as is decided then"
    if step.out.name in calibrated_weights(plan):
        yield CALIBRATED
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
