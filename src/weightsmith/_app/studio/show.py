"""What the studio shows, as HTML. Names and texts are escaped here: models and recipes bring them."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from weightsmith import Inspection, Preview, Report, WeightsmithError
from weightsmith._app.studio.check import Checked, Mend, Note, notes_of
from weightsmith._app.studio.kept import StudioRun
from weightsmith._app.studio.places import reference
from weightsmith._app.studio.work import PAGE_NAME, Status, unfinished
from weightsmith.plugin import (
    Method,
    count,
    describe_method,
    duration,
    finite_or_mark,
    first_line,
    how_far,
    many,
    safe,
    size,
    written,
)

_SHOWN = 20
"""Problems that are listed."""


def notes(checked: Checked) -> str:
    """The problems of a recipe, each with its place; or what it will make."""
    head = ""
    if checked.plan is not None:
        outs = [out for step in checked.plan.steps for out in step.outs]
        tensors, nbytes = count(len(outs), "tensor"), size(sum(out.nbytes for out in outs))
        head = f'<p class="ws-good">The recipe is correct: {tensors}, {nbytes}.</p>'
    elif checked.errors:
        head = f'<p class="ws-bad">{count(checked.errors, "problem")}.</p>'
    else:
        head = f'<p class="ws-hint">{safe(checked.reason)}</p>'
    return f"{head}{_listed(checked.notes)}"


def _listed(problems: Sequence[Note]) -> str:
    items = "".join(map(_note, problems[:_SHOWN]))
    rest = f"<p>… and {len(problems) - _SHOWN:,} more.</p>" if len(problems) > _SHOWN else ""
    return f"<ul class='ws-notes'>{items}</ul>{rest}"


def _note(note: Note) -> str:
    finding = note.finding
    place = (
        f'<button type="button" data-line={note.line}>{safe(note.where)}</button>'
        if note.line
        else f"<b>{safe(note.where)}</b>"
        if note.where
        else ""
    )
    parts = [f'<li class="ws-{note.level}">{place} {safe(finding.what)}']
    if note.excerpt and note.level != "open":  # what is not chosen yet is no mistake to look at
        parts.append(f"<pre>{safe_lines(note.excerpt)}</pre>")
    parts += [f'<div class="ws-detail">{safe(line)}</div>' for line in finding.details[:6]]
    if finding.fix:
        parts.append(f'<div class="ws-fix">→ {safe(finding.fix)}</div>')
    parts += map(_mend, note.mends)
    return "".join([*parts, "</li>"])


def _mend(mend: Mend) -> str:
    """The button of a control that mends a problem."""
    return f'<button type="button" data-mend="{safe(mend.control)}" data-value="{safe(mend.value)}">{safe(mend.label)}</button>'


def safe_lines(lines: Iterable[str]) -> str:
    """Lines as they are."""
    return "\n".join(map(safe, lines))


def error(problem: Exception) -> str:
    """An error, in the page's words."""
    if not isinstance(problem, WeightsmithError):
        reason = f"{type(problem).__name__}: {first_line(problem)}"
        if isinstance(problem, OSError) and problem.strerror:
            reason = problem.strerror + (f": {problem.filename}" if problem.filename else "")
        return f'<div class="ws-problem"><p>{safe(reason)}</p></div>'
    state = f"<p class='ws-soft'>{safe(problem.state)}</p>" if problem.state else ""
    return f'<div class="ws-problem">{_listed(notes_of(problem))}{state}</div>'


def named(text: str) -> str:
    """The name of a model. Where there is no room, its folder is cut first, then its middle: its end says most."""
    folder = text.rstrip("/").rfind("/") + 1
    end = max(folder, len(text) - _END)
    parts = (
        f"<span class='ws-dir'>{safe(text[:folder])}</span><span>{safe(text[folder:end])}</span><span>{safe(text[end:])}</span>"
    )
    return f"<span class='ws-mid' title='{safe(text)}'>{parts}</span>"


_END = 12
"""Characters at the end of a name that are always shown."""


def sentence(text: str) -> str:
    """A message that begins with a capital.

    >>> sentence("the merge moves"), sentence("./models/fr moves")
    ('The merge moves', './models/fr moves')
    """
    return text[:1].upper() + text[1:]


def hint(text: str) -> str:
    """What to do first."""
    return f'<p class="ws-hint">{safe(text)}</p>'


def empty(text: str) -> str:
    """What the preview says while there is none."""
    icon = '<svg class="i" aria-hidden="true"><use href="#i-preview"/></svg>'
    return f'<div class="ws-empty">{icon}<p>{safe(text)}</p></div>'


def marked(text: str) -> str:
    """Running text of a method's documentation: code between backquotes, and links."""
    html = safe(" ".join(text.split()))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    return re.sub(r"https://[^\s,;)]+", r'<a href="\g<0>" target="_blank" rel="noreferrer">\g<0></a>', html)


def about(method: Method) -> str:
    """The documentation of a method: what `weightsmith methods NAME` says."""
    described = describe_method(method)
    rows = "".join(
        f"<tr><td><code>{safe(p.name)}</code></td><td>{safe(p.values)}</td><td>{safe(p.default)}</td>"
        f"<td>{safe(p.scope)}</td><td>{marked(p.doc)}</td></tr>"
        for p in described.parameters
    )
    return (
        f"<div class='ws-about'><h3>{safe(method.name)}: {marked(method.title)}</h3><p>{marked(method.use)}</p>"
        f"<pre>{safe(method.formula)}</pre><details><summary>How it works, parameters, source</summary>"
        f"<p>{marked(method.summary)}</p><p><b>Models</b> {safe(described.inputs)}.</p>"
        f"<p><b>Source</b> {marked(method.source)}</p>"
        "<div class='ws-scroll'><table><thead><tr><th>parameter</th><th>value</th><th>default</th><th>for</th><th></th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div></details></div>"
    )


def card(inspection: Inspection) -> dict[str, Any]:
    """What a model is, for its card."""
    layers = sum(stack.layers for stack in inspection.stacks)
    return {
        "kind": inspection.architecture or ("adapter" if inspection.adapter else "no config.json"),
        "parameters": many(inspection.elements),
        "layers": layers,
        "dtype": "/".join(amount.name for amount in inspection.dtypes[:3]),
        "bytes": size(sum(nbytes for _, nbytes in inspection.files)),
        "licence": inspection.licence,
        "quantised": inspection.quantised,
    }


def preview(result: Preview) -> tuple[str, list[dict[str, Any]]]:
    """What a merge will do: what survives of each model, warnings, heat maps and curves by layer; and the charts as JSON."""
    html, charts = result.report().charts()
    warnings = "".join(f'<li class="ws-warning">{safe(sentence(finding.what))}</li>' for finding in result.warnings)
    share = written(finite_or_mark(result.total.share), "share")
    moved = f"<p class='ws-verdict'>The merge is <b>{share}</b> away from its base, {named(result.base)}.</p>"
    sample = f"<p class='ws-soft'>From a sample of {result.looked_at / max(1, result.elements):.1%} of the weights.</p>"
    return f"{moved}{_bars(result)}<ul class='ws-notes'>{warnings}</ul>{html}{sample}", charts


def preview_numbers(result: Preview) -> dict[str, str]:
    """The numbers of a preview, by name."""
    numbers = {"distance from the base": written(finite_or_mark(result.total.share), "share")}
    for name, kept in zip(result.names, result.total.models, strict=True):
        if kept is not None and not math.isnan(kept.survives):
            numbers[f"survives of {name}"] = written(kept.survives, "share")
    return numbers


def _bars(result: Preview) -> str:
    rows = []
    for letter, name, kept in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", result.names, result.total.models, strict=False):
        if kept is None or math.isnan(kept.survives):
            why = "does not differ from the base" if kept is not None and kept.norm == 0 else "cannot be measured"
            rows.append(f"<tr><th scope=row><b>{letter}</b> {named(name)}</th><td colspan=2>{why}</td></tr>")
            continue
        width = 100 * min(1.0, max(0.0, kept.survives))
        rows.append(
            f"<tr><th scope=row><b>{letter}</b> {named(name)}</th>"
            f"<td><div class='ws-bar'><i style='width:{width:.1f}%'></i></div></td>"
            f"<td><b>{kept.survives:.1%}</b> survives, {kept.against:.1%} opposed, {kept.dropped:.1%} dropped</td></tr>"
        )
    return f"<table class='ws-bars'><tbody>{''.join(rows)}</tbody></table>"


def status(now: Status) -> str:
    """How far a merge is."""
    if now.state == "idle":
        return ""
    name = safe(now.out.name if now.out else "")
    if now.state == "running":
        reading = now.reading
        words = [now.doing]
        share = 0.0
        if reading is not None:
            share = reading.share
            words += how_far(reading, now.speed, now.seconds_left)
        bar = f"<div class='ws-bar ws-run' role='progressbar' aria-label='progress' aria-valuenow='{100 * share:.0f}'>"
        bar += f"<i style='width:{100 * share:.1f}%'></i></div>"
        return f"<div class='ws-status'><p><b>{name}</b> {safe(' · '.join(words))}</p>{bar}</div>"
    if now.state == "cancelled":
        return f"<p class='ws-warn'>Cancelled. Finished tensors of <b>{name}</b> are kept: press Resume.</p>"
    if now.state == "interrupted":
        if now.out is not None and unfinished(now.out):
            return f"<p class='ws-warn'><b>{name}</b> was interrupted. Finished tensors are kept: press Resume.</p>"
        return f"<p class='ws-warn'><b>{name}</b> was interrupted before a tensor was finished: press Merge again.</p>"
    if now.state == "published":
        report = safe(reference(now.out / PAGE_NAME)) if now.out is not None else ""
        return f"<p class='ws-good'><b>{name}</b> is merged. The studio ended just then. Its report: {report}</p>"
    if now.state == "failed":
        return f"<p class='ws-bad'><b>{name}</b> was not merged. {_mend(Mend('why', 'Why?'))}</p>"
    merged = now.merged
    assert merged is not None
    words = [duration(merged.seconds)]
    words += [f"{merged.resumed:,} by an earlier run"] if merged.resumed else []
    words += [f"{merged.distance[0].percent()} away from its base"] if merged.distance else []
    warnings = "".join(f'<li class="ws-warning">{safe(sentence(finding.what))}</li>' for finding in merged.warnings[:_SHOWN])
    done = f"<p class='ws-good'>Done: <b>{safe(reference(Path(str(merged.out))))}</b> · {safe(' · '.join(words))}</p>"
    return f"{done}<ul class='ws-notes'>{warnings}</ul>"


def samples(results: Sequence[Sample], prompt: str) -> str:
    """What models wrote, and how well they predict."""
    if not results:
        return ""
    known = [sample.perplexity for sample in results if sample.perplexity is not None]
    best = min(known, default=None)
    rows = []
    for sample in results:
        if sample.problem:
            cells = f"<td colspan=2 class='ws-error'>{safe(sample.problem)}</td>"
            rows.append(f"<tr><th scope=row>{named(sample.model)}</th>{cells}</tr>")
            continue
        number = "" if sample.perplexity is None else f"{sample.perplexity:.2f}"
        number = f"<b>{number}</b>" if best is not None and sample.perplexity == best and len(known) > 1 else number
        said = f"<div tabindex=0><span class='ws-soft'>{safe(prompt[-80:])}</span>{_text(sample.continuation)}</div>"
        cells = f"<td class='ws-n'>{number}</td><td class='ws-text'>{said}</td>"
        rows.append(f"<tr><th scope=row>{named(sample.model)}</th>{cells}</tr>")
    head = "<thead><tr><th>model</th><th>perplexity</th><th>continuation</th></tr></thead>"
    return f"<div class='ws-scroll'><table class='ws-samples'>{head}<tbody>{''.join(rows)}</tbody></table></div>"


def _text(said: str) -> str:
    """What a model wrote, with its line ends."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in said))


def sample_numbers(samples: Sequence[Sample]) -> dict[str, str]:
    """The perplexities of models, by name."""
    return {f"perplexity of {sample.model}": f"{sample.perplexity:.4g}" for sample in samples if sample.perplexity is not None}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one model did with a prompt and a text. problem: why it did nothing; "" if it did."""

    model: str
    continuation: str = ""
    perplexity: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """One value of a sweep: its preview, and what the merge did with a prompt and a text."""

    value: float
    preview: Preview
    sample: Sample | None


def sweep(name: str, rows: Sequence[Swept], prompt: str) -> str:
    """A card for each value of a parameter: distance, what survives, perplexity and an answer, on common scales."""
    if not rows:
        return ""
    known = [row.sample.perplexity for row in rows if row.sample is not None and row.sample.perplexity is not None]
    shares = [row.preview.total.share for row in rows if math.isfinite(row.preview.total.share)]
    cards = []
    for row in rows:
        share, most = row.preview.total.share, max(shares, default=0.0) or 1.0
        lines = [_small("distance", share / most if math.isfinite(share) else 0.0, written(finite_or_mark(share), "share"))]
        for model, kept in zip(row.preview.names, row.preview.total.models, strict=True):
            if kept is not None and not math.isnan(kept.survives):
                lines.append(_small(f"survives of {model}", kept.survives, f"{kept.survives:.1%}"))
        said = ""
        if row.sample is not None and row.sample.perplexity is not None:
            best = " ws-good" if row.sample.perplexity == min(known) and len(known) > 1 else ""
            said += f"<p class='ws-n{best}'>perplexity <b>{row.sample.perplexity:.2f}</b></p>"
        if row.sample is not None and row.sample.problem:
            said += f"<p class='ws-error'>{safe(row.sample.problem)}</p>"
        elif row.sample is not None and row.sample.continuation:
            words = f"<span class='ws-soft'>{safe(prompt[-40:])}</span>{_text(row.sample.continuation)}"
            said += f"<blockquote tabindex=0>{words}</blockquote>"
        head = f"<h4>{_parameter(name)} = <span>{row.value:g}</span></h4>"
        cards.append(f"<li data-value='{row.value:g}'>{head}<dl>{''.join(lines)}</dl>{said}</li>")
    return f"<ul class='ws-sweep'>{''.join(cards)}</ul>"


def _small(name: str, share: float, words: str) -> str:
    width = 100 * min(1.0, max(0.0, share))
    bar = f"<div class='ws-bar'><i style='width:{width:.1f}%'></i></div>"
    return f"<div><dt>{_parameter(name)}</dt><dd>{bar}<b>{safe(words)}</b></dd></div>"


def stages(titles: Sequence[str], now: int, detail: str, share: float | None) -> str:
    """The stages of a search: those that are done, the present one, and those to come.

    now    number of the present one, from 0 on
    share  of the present one that is done; None while it is not known
    """
    items = []
    for i, title in enumerate(titles):
        state = "done" if i < now else "now" if i == now else "next"
        details = ""
        if i == now:
            bar = "" if share is None else f"<div class='ws-bar'><i style='width:{100 * share:.1f}%'></i></div>"
            details = f"<p class='ws-soft'>{safe(detail)}</p>{bar}"
        current = " aria-current='step'" if i == now else ""
        items.append(f"<li class='{state}'{current}><span>{safe(title)}</span>{details}</li>")
    return f"<ol class='ws-stages'>{''.join(items)}</ol>"


def search_result(sentences: Sequence[str], where: str) -> str:
    """The result of a search: what was chosen and why, and where it is."""
    lines = "".join(f"<li>{safe(line)}</li>" for line in sentences[1:])
    first, *_ = sentences
    written = f"<p class='ws-good'>Written: <b>{safe(where)}</b></p>"
    return f"<p class='ws-verdict'>{safe(first)}</p>{written}<ul>{lines}</ul>{_mend(Mend('report', 'See all candidates'))}"


def trials(names: Sequence[str], rows: Sequence[tuple[int, Sequence[Any], float | None]]) -> str:
    """The candidates of a search, the best first; those that were not scored on all rows are left out.

    rows  number, values and loss of each, in nats for a token
    """
    scored = sorted((loss, number, values) for number, values, loss in rows if loss is not None)
    if not scored:
        return ""
    heads = "".join(f"<th>{_parameter(name)}</th>" for name in names)
    lines = []
    for loss, number, row in scored[:_SHOWN]:
        cells = "".join(f"<td>{value:.4g}</td>" for value in row)
        lines.append(f"<tr><td>{number}</td><td class='ws-n'>{written(loss)}</td>{cells}</tr>")
    head = f"<thead><tr><th>trial</th><th>loss, nats per token</th>{heads}</tr></thead>"
    about = f"<p class='ws-soft'>{count(len(rows), 'trial')}, {len(scored):,} of them scored on all rows.</p>"
    return f"{about}<div class='ws-scroll'><table class='ws-two'>{head}<tbody>{''.join(lines)}</tbody></table></div>"


def _parameter(name: str) -> str:
    """`weight of ./models/fr`: the model's name may be cut."""
    what, of, model = name.partition(" of ")
    return f"{safe(what)}{of}{named(model)}" if of else safe(name)


def verdict(report: Report) -> str:
    """What a report says first."""
    lines = "".join(f"<li>{safe(sentence)}</li>" for sentence in report.summary[1:])
    numbers = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(number)}</dd></div>" for name, number in report.numbers)
    first = safe(report.summary[0] if report.summary else report.title)
    return f"<p class='ws-verdict'>{first}</p><dl>{numbers}</dl><ul>{lines}</ul>"


def two_runs(first: StudioRun, second: StudioRun) -> str:
    """Two runs: their numbers side by side, and what was changed in the recipe."""
    names = [*dict.fromkeys([*first.numbers, *second.numbers])]
    pairs = (_size_of(name, [run.numbers.get(name, "") for run in (first, second)]) for name in names)
    rows = "".join(f"<tr><th scope=row>{safe(name)}</th><td>{safe(a)}</td><td>{safe(b)}</td></tr>" for name, (a, b) in pairs)
    clocks = ((run, time.strftime("%H:%M", time.localtime(run.when))) for run in (first, second))
    heads = "".join(f"<th>{run.id} · {safe(run.kind)} · {safe(run.title)} · {clock}</th>" for run, clock in clocks)
    table = f"<table class='ws-two'><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<div class='ws-scroll'>{table}</div>{recipe_diff(first.recipe, second.recipe)}"


def _size_of(name: str, numbers: Sequence[str]) -> tuple[str, list[str]]:
    """Numbers of runs, bytes in their unit.

    >>> _size_of("bytes", ["2281472", ""]), _size_of("values", ["1, 2", "3"])
    (('size', ['2.28 MB', '']), ('values', ['1, 2', '3']))
    """
    if name != "bytes":
        return name, [*numbers]
    return "size", [size(int(number)) if number.isdecimal() else number for number in numbers]


def recipe_diff(old: str, new: str) -> str:
    """What was changed in a recipe, line by line."""
    lines = [*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)][2:]
    if not lines:
        return "<p class='ws-soft'>Both have the same recipe.</p>"
    kinds = {"+": "ins", "-": "del"}
    tags = ((kinds.get(line[:1], "span"), safe(line)) for line in lines)
    return f"<pre class='ws-diff'>{''.join(f'<{tag}>{line}</{tag}>' for tag, line in tags)}</pre>"


# ---- methods


def plain(text: str) -> str:
    """A short text of a method, in one line."""
    return " ".join(text.replace("`", "").split())
