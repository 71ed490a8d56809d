"""What the studio shows, as HTML. Names and texts are escaped here: models and recipes bring them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from weightsmith._app.studio.check import Checked, Note
from weightsmith._app.studio.compare import Sample
from weightsmith._app.studio.work import Status
from weightsmith._base.pages import Curves, HeatMap, Page, to_html
from weightsmith._base.pages.svg import curves, heat_map
from weightsmith._base.pages.values import finite_or_mark, safe, written
from weightsmith._base.text import count, duration, size
from weightsmith._execution.progress import how_far
from weightsmith._methods.base import Method
from weightsmith._methods.describe import BASES, SCOPES, default, doc, models, values
from weightsmith._reports.look.inspect import Inspection
from weightsmith._reports.look.pages import preview_page
from weightsmith._reports.look.preview import GroupPreview, Preview

MARKED_LINES = 40
"""The most lines that can be marked in the editor, which draws only those in the window."""
_SHOWN = 20
"""Problems that are listed."""


def notes(checked: Checked) -> str:
    """The problems of a recipe, each with its place; or what it will make."""
    errors = [note for note in checked.notes if note.level == "error"]
    head = ""
    if checked.plan is not None:
        outs = [out for step in checked.plan.steps for out in step.outs]
        tensors, nbytes = count(len(outs), "tensor"), size(sum(out.nbytes for out in outs))
        head = f'<p class="ws-good">The recipe is correct. It makes {tensors}, {nbytes}.</p>'
    elif errors:
        head = f'<p class="ws-bad">{count(len(errors), "problem")}.</p>'
    items = "".join(map(_note, checked.notes[:_SHOWN]))
    more = f"<p>… and {len(checked.notes) - _SHOWN:,} more.</p>" if len(checked.notes) > _SHOWN else ""
    return f"{_marks(checked.notes)}{head}<ul class='ws-notes'>{items}</ul>{more}"


def _note(note: Note) -> str:
    found = note.finding
    parts = [f'<li class="ws-{note.level}"><b>{safe(note.where)}</b> {safe(found.what)}']
    if note.excerpt:
        parts.append(f"<pre>{safe_lines(note.excerpt)}</pre>")
    parts += [f'<div class="ws-detail">{safe(line)}</div>' for line in found.details[:6]]
    if found.fix:
        parts.append(f'<div class="ws-fix">→ {safe(found.fix)}</div>')
    return "".join([*parts, "</li>"])


def safe_lines(lines: Iterable[str]) -> str:
    """Lines as they are."""
    return "\n".join(map(safe, lines))


def _marks(found: Sequence[Note]) -> str:
    """A style that marks lines in the editor."""
    rules = [
        f"#ws-recipe .cm-line:nth-child({note.line}){{background:var(--ws-{note.level}-soft)}}"
        for note in reversed(found)  # errors come first, and win
        if 0 < note.line <= MARKED_LINES
    ]
    return f"<style>{''.join(rules)}</style>"


def problem(text: str) -> str:
    """An error message in full."""
    return f'<div class="ws-problem"><pre>{safe_lines(text.splitlines())}</pre></div>'


def hint(text: str) -> str:
    """What to do first."""
    return f'<p class="ws-hint">{safe(text)}</p>'


def marked(text: str) -> str:
    """Running text of a method's documentation: code between backquotes, and links."""
    found = safe(" ".join(text.split()))
    found = re.sub(r"`([^`]+)`", r"<code>\1</code>", found)
    return re.sub(r"https://[^\s,;)]+", r'<a href="\g<0>" target="_blank" rel="noreferrer">\g<0></a>', found)


def about(method: Method) -> str:
    """The documentation of a method: what `weightsmith methods NAME` says."""
    inputs = f"{models(method)}{'' if method.base == 'input' else ' besides the base'}; {BASES[method.base]}"
    rows = "".join(
        f"<tr><td><code>{safe(p.name)}</code></td><td>{safe(values(p))}</td><td>{safe(default(p))}</td>"
        f"<td>{safe(SCOPES[p.scope])}</td><td>{marked(doc(p))}</td></tr>"
        for p in method.parameters
    )
    return (
        f"<div class='ws-about'><h3>{safe(method.name)}: {marked(method.title)}</h3><p>{marked(method.use)}</p>"
        f"<pre>{safe(method.formula)}</pre><details><summary>How it works, parameters, source</summary>"
        f"<p>{marked(method.summary)}</p><p><b>Models</b> {safe(inputs)}.</p><p><b>Source</b> {marked(method.source)}</p>"
        "<div class='ws-scroll'><table><thead><tr><th>parameter</th><th>value</th><th>default</th><th>for</th><th></th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div></details></div>"
    )


def facts(found: Sequence[Inspection | str]) -> str:
    """What models are, a line each; or why one cannot be read."""
    lines = []
    for each in found:
        if isinstance(each, str):
            lines.append(f'<li class="ws-error">{safe(each)}</li>')
            continue
        layers = sum(stack.layers for stack in each.stacks)
        words = [each.architecture or ("adapter" if each.adapter else "no config.json"), f"{_short(each.elements)} parameters"]
        words += [f"{layers} layers"] if layers else []
        words += ["/".join(amount.name for amount in each.dtypes[:3])]
        words += [word for word in (each.quantised, each.licence) if word]
        lines.append(f"<li><b>{safe(each.name)}</b> {safe(' · '.join(words))}</li>")
    return f"<ul class='ws-facts'>{''.join(lines)}</ul>" if lines else ""


def _short(n: int) -> str:
    """A number of parameters.

    >>> _short(134_515_008), _short(7_241_732_096), _short(512)
    ('134.5 M', '7.24 B', '512')
    """
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n:,}"


def preview(found: Preview) -> str:
    """What a merge will do: what survives of each model, warnings, heat maps and curves by layer."""
    page = preview_page(found)
    warnings = "".join(f'<li class="ws-warning">{safe(finding.what)}</li>' for finding in found.warnings)
    drawn = [block for block in page.blocks if isinstance(block, HeatMap | Curves)]
    maps = "".join(
        f"<figure{'' if isinstance(block, HeatMap) else ' class=ws-lines'}><figcaption>{safe(block.title)}</figcaption>"
        f"<div class='ws-scroll'>{heat_map(block) if isinstance(block, HeatMap) else curves(block)}</div></figure>"
        for block in drawn
    )
    share = written(finite_or_mark(found.total.share), "share")
    moved = f"<p>The merge is <b>{share}</b> away from its base, {safe(found.base)}.</p>"
    return (
        f"<div class='ws-preview'>{moved}{_bars(found.names, found.total)}<ul class='ws-notes'>{warnings}</ul>"
        f"<div class='ws-maps'>{maps}</div>"
        f"<p class='ws-soft'>From a sample of {found.looked_at / max(1, found.elements):.1%} of the weights.</p></div>"
    )


def _bars(names: Sequence[str], total: GroupPreview) -> str:
    rows = []
    for letter, name, kept in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", names, total.models, strict=False):
        if kept is None or math.isnan(kept.survives):
            why = "does not differ from the base" if kept is not None and kept.norm == 0 else "cannot be measured"
            rows.append(f"<tr><th>{letter} {safe(name)}</th><td colspan=2>{why}</td></tr>")
            continue
        width = 100 * min(1.0, max(0.0, kept.survives))
        rows.append(
            f"<tr><th>{letter} {safe(name)}</th><td><div class='ws-bar'><i style='width:{width:.1f}%'></i></div></td>"
            f"<td><b>{kept.survives:.1%}</b> survives, {kept.against:.1%} opposed, {kept.dropped:.1%} dropped</td></tr>"
        )
    return f"<table class='ws-bars'><tbody>{''.join(rows)}</tbody></table>"


def status(found: Status) -> str:
    """How far a merge is."""
    if found.state == "idle":
        return hint("Nothing is running.")
    name = safe(found.out.name if found.out else "")
    if found.state == "running":
        reading = found.reading
        words = [found.doing]
        share = 0.0
        if reading is not None:
            share = reading.share
            words += how_far(reading, found.speed, found.left)
        bar = f"<div class='ws-bar ws-run' role='progressbar' aria-label='progress' aria-valuenow='{100 * share:.0f}'>"
        bar += f"<i style='width:{100 * share:.1f}%'></i></div>"
        return f"<div class='ws-status'><p><b>{name}</b> {safe(' · '.join(words))}</p>{bar}</div>"
    if found.state == "cancelled":
        return f"<p class='ws-warn'>Cancelled. Finished tensors of <b>{name}</b> are kept: the same recipe and name resume.</p>"
    if found.state == "failed":
        return problem(found.problem)
    merged = found.merged
    assert merged is not None
    words = [count(len(merged.plan.steps), "tensor"), duration(merged.seconds)]
    words += [f"{merged.resumed:,} by an earlier run"] if merged.resumed else []
    words += [f"{merged.distance[0].percent()} away from its base"] if merged.distance else []
    warnings = "".join(f'<li class="ws-warning">{safe(finding.what)}</li>' for finding in merged.warnings[:_SHOWN])
    done = f"<p class='ws-good'>Done: <b>{safe(str(merged.out))}</b> · {safe(' · '.join(words))}</p>"
    return f"{done}<ul class='ws-notes'>{warnings}</ul>"


def samples(found: Sequence[Sample], prompt: str, waiting: str = "") -> str:
    """What models wrote, and how well they predict."""
    known = [sample.perplexity for sample in found if sample.perplexity is not None]
    best = min(known, default=None)
    rows = []
    for sample in found:
        if sample.problem:
            rows.append(f"<tr><th>{safe(sample.model)}</th><td colspan=2 class='ws-error'>{safe(sample.problem)}</td></tr>")
            continue
        number = "" if sample.perplexity is None else f"{sample.perplexity:.2f}"
        number = f"<b>{number}</b>" if best is not None and sample.perplexity == best and len(known) > 1 else number
        text = escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in sample.continuation))
        said = f"<div><span class='ws-soft'>{safe(prompt[-80:])}</span>{text}</div>"
        rows.append(f"<tr><th>{safe(sample.model)}</th><td class='ws-n'>{number}</td><td class='ws-text'>{said}</td></tr>")
    more = f"<p class='ws-soft'>running {safe(waiting)} …</p>" if waiting else ""
    head = "<thead><tr><th>model</th><th>perplexity</th><th>continuation</th></tr></thead>"
    return f"<div class='ws-scroll'><table class='ws-samples'>{head}<tbody>{''.join(rows)}</tbody></table></div>{more}"


def page(found: Page) -> str:
    """A page in a frame of its own."""
    return frame(to_html(found))


def frame(html: str) -> str:
    """A whole HTML document in a frame that can neither reach the page around it nor the network."""
    return f'<iframe class="ws-frame" title="report" sandbox="allow-scripts allow-downloads" srcdoc="{escape(html)}"></iframe>'
