"""Errors as the page says them: with its own controls in place of the command line's options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weightsmith._app.cli.app import COMMANDS
from weightsmith._base.errors import NOTHING_WRITTEN, Finding, ParameterError

TEXT_FILE = "text.txt"
"""The file that a text of the page is written to, in a folder that begins with `TEXT_FOLDER`."""
TEXT_FOLDER = "tune-"


@dataclass(frozen=True, slots=True)
class Mend:
    """A control of the page that mends a problem.

    control  its name: a key of MENDS in studio.js
    label    of the button
    value    that the control is given; "" for none
    """

    control: str
    label: str
    value: str = ""


class PageError(ParameterError):
    """A problem that a control of the page mends."""

    def __init__(self, what: str, mend: Mend, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix, state=NOTHING_WRITTEN)
        self.mend = mend


@dataclass(frozen=True, slots=True)
class Said:
    """A finding in the page's words, and the controls that mend it."""

    finding: Finding
    mends: tuple[Mend, ...] = ()


_IN_PLACE: Mapping[str, tuple[str, Mend]] = {
    "--overwrite": ("tick `replace it` beside the name", Mend("overwrite", "Replace it")),
    "--no-resume": ("tick `start over` beside the name", Mend("again", "Start over")),
    "--tokens": ("use shorter rows", Mend("tokens", "Use rows of {} tokens")),
    "weightsmith init": ("choose a base and models", Mend("models", "Choose models")),
}
"""What the page says for an option or a command, and the control that it has for it."""

_OPTION = re.compile(r"--[a-z][a-z-]*")
_COMMAND = re.compile(r"`?weightsmith ([a-z-]+)")
_SPELT = re.compile(r"(--[a-z][a-z-]*)((?: \S+)?) \((\w+)(?:=[^)]*)?\)|--([a-z][a-z-]*)")
_OWN_FILE = re.compile(rf"[^\s'\"]*{TEXT_FOLDER}\w+/{TEXT_FILE}")
_BETWEEN = re.compile(r"(?:[,;]? or |; |, and |\. )(?=\S)")


def said(finding: Finding) -> Said:
    """A finding in the page's words.

    >>> said(Finding("the text has 2 rows", "/out/.studio/tune-ab/text.txt", fix="use shorter rows: --tokens 128 (tokens=128)"))
    ... # doctest: +NORMALIZE_WHITESPACE
    Said(finding=Finding(what='the text has 2 rows', where='your text', details=(), fix='Use shorter rows.'),
         mends=(Mend(control='tokens', label='Use rows of 128 tokens', value='128'),))
    >>> said(Finding("it exists", "out", fix="name another folder, or replace this one with --overwrite (overwrite=True)"))
    ... # doctest: +NORMALIZE_WHITESPACE
    Said(finding=Finding(what='it exists', where='out', details=(),
                         fix='Name another folder, or tick `replace it` beside the name.'),
         mends=(Mend(control='overwrite', label='Replace it', value=''),))
    """
    where = "" if _OPTION.match(finding.where) else _without_options(finding.where)
    own = replace(
        finding,
        what=_without_options(finding.what),
        where=where,
        details=tuple(map(_without_options, finding.details)),
        fix="",
    )
    fix = _OWN_FILE.sub("your text", finding.fix)
    if not is_for_terminals(fix):
        return Said(replace(own, fix=fix))
    parts, mends = list[str](), list[Mend]()
    for clause in _BETWEEN.split(fix.rstrip(".")):
        if not is_for_terminals(clause):
            parts.append(clause)
            continue
        name = next((name for name in _IN_PLACE if name in clause), None)
        if name is not None:
            words, mend = _IN_PLACE[name]
            value = re.search(rf"{name} (\d+)", clause)
            if "{}" not in mend.label or value is not None:
                parts.append(words)
                given = value[1] if value else ""
                mends.append(Mend(mend.control, mend.label.format(given), given))
    return Said(replace(own, fix=", or ".join(parts)), tuple(mends))


def is_for_terminals(text: str) -> bool:
    """Whether a text names options or commands of the command line.

    >>> is_for_terminals("use --rows 4"), is_for_terminals("run `weightsmith init`"), is_for_terminals("what weightsmith wrote")
    (True, True, False)
    """
    return bool(_OPTION.search(text)) or any(name in COMMANDS for name in _COMMAND.findall(text))


def _without_options(text: str) -> str:
    """A sentence that names options by their words, and a file of ours as what it is.

    >>> _without_options("--report-text (report_text) is for texts")
    'report text is for texts'
    """
    named = _SPELT.sub(lambda found: (found[3] or found[4]).replace("_", " ").replace("-", " ") + (found[2] or ""), text)
    return _OWN_FILE.sub("your text", named)
