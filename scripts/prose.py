"""Check the English of pages, help texts, messages and public docstrings.

python scripts/prose.py    # what is wrong, a line each; then the status is 1

Two kinds of rules: phrases that read as translated, with what to write instead (`PHRASES`), and sentences of more than
`MAX_WORDS` words. Code, in blocks and between backquotes, is not read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "weightsmith"
MAX_WORDS = 30

PHRASES: dict[str, str] = {
    r"(?:^|[.;] )Of [^.:;|]{1,40}: ": "name the condition: 'EXL2 only:', 'when merging adapters'",
    r"\bif not given\b": "[default: ...]",
    r"\bmay be given (?:several|many) times\b": "repeatable",
    r"\bwhat [\w ]{1,24} differs? in\b": "differences",
    r"\bdiffers? in from\b": "differs from ... in",
    r"\bwhat (?:that|this|it) (?:probably )?means\b": "a noun: summary, meaning",
    r"\bwhat is (?:known|left|asked|wanted) of\b": "name the thing",
    r"\bbound of\b": "limit of",
    r"\bspool(?:s|ed|ing)?\b": "temporary cache",
    r"\btravel(?:s|ed|led|ling)?\b": "transfer",
    r"\bnothing but\b": "only",
    r"\b(?:all )?but for\b": "except for",
    r"\bbut where\b": "except where",
    r"\bends it\b": "is the bottleneck",
    r"\b(?:is|are) answered\b": "is ignored, is rejected, gets a response",
    r"(?:^|[.;:] )(?:Last|Next|First|Then) comes?\b": "subject first: 'The last table lists ...'",
    r"\b(?:takes?|needs?|no|leaves?|of the|its|the) rooms?\b": "space, memory; package",
    r"\bby heart\b": "overfitted",
    r"\bmodels? elsewhere\b": "remote model",
    r"\bread (?:it |them |a model |models )?where (?:it|they) (?:is|are)\b": "stream, read remotely",
    r"\b[Aa] reading\b": "summary, label",
    r"\bmakes? of (?:it|them)\b": "creates, returns",
    r"\bhad (?:it|them) to say\b": "reported",
    r"\bnone is there\b": "there is none",
    # The words of docs/glossary.md, spelled one way.
    r"\b(?:the|a|any|one|other) hub\b": "the Hub",
    r"\bhub (?:models?|ids?)\b": "Hub model, Hub id",
    r"\b[Tt]okeni[s]er": "tokenizer",
    r"\b[Ff]inetun": "fine-tune",
    r"(?<!weightsmith )\b[Qq]uanti[z](?:e[ds]?|ation|ing)\b": "quantise, quantisation",
    r"\b[Mm]o[Ee] models?\b": "mixture of experts",
}
# The Hub is told from the hub by its capital alone.
_COMPILED = {re.compile(phrase, 0 if "hub" in phrase else re.IGNORECASE): better for phrase, better in PHRASES.items()}


@dataclass(frozen=True)
class Text:
    """A paragraph, a cell of a table, a message or a sentence of a help text, and where it is."""

    place: str
    line: int
    text: str


@dataclass(frozen=True)
class Problem:
    """A phrase or a long sentence. words: of a long sentence; 0 for a phrase."""

    text: Text
    phrase: str
    better: str
    words: int = 0

    def __str__(self) -> str:
        what = f"a sentence of {self.words} words" if self.words else f"'{self.phrase.strip()}'"
        return f"{self.text.place}:{self.text.line}: {what} -> {self.better}"


def problems(text: Text) -> Iterator[Problem]:
    """What the rules find in a text.

    >>> [str(problem) for problem in problems(Text("a.md", 3, "Limit of memory, half if not given."))]
    ["a.md:3: 'if not given' -> [default: ...]"]
    """
    plain = _plain(text.text)
    if " " not in plain:  # a heading or a cell that is a name: `### quantize`
        return
    for pattern, better in _COMPILED.items():
        for match in pattern.finditer(plain):
            yield Problem(text, match[0], better)
    for sentence in re.split(r"(?<=[.!?]) +|: +(?=\x00|[A-Z])", plain):
        words = len(re.findall(r"[^\s\x00]*[^\W\x00][^\s\x00]*|\x00", sentence))
        names = re.fullmatch(r"\w+(?:, \w+)*", sentence) or 2 * sentence.count("\x00") >= words
        if words > MAX_WORDS and not names:
            start = " ".join(sentence.replace("\x00", "...").split()[:6])
            yield Problem(text, sentence, f"write two: {start} ...", words)


def _plain(text: str) -> str:
    """A text without code, links and marks; each piece of code is one character."""
    text = re.sub(r"``.+?``|`[^`]*`|(?<!\w)--[a-z][\w-]*", "\x00", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>\s][^>]*>", r"\1", text)
    return " ".join(re.sub(r"[*_]{2}", "", text).split())


# ---- where prose is


def page_texts(page: Path, *, until: str = "") -> Iterator[Text]:
    """The paragraphs, list entries and cells of a Markdown page. until: the beginning of the line at which to stop."""
    lines, start, fenced = list[str](), 0, False
    place = page.relative_to(ROOT).as_posix()

    def done() -> Iterator[Text]:
        if lines:
            yield Text(place, start, " ".join(lines))
        lines.clear()

    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if until and line.startswith(until) and number > 5:
            break
        if line.startswith("```"):
            fenced = not fenced
            yield from done()
        elif fenced or line.startswith("<") or (line.startswith("    ") and not lines):
            yield from done()
        elif line.startswith("|"):
            yield from done()
            for cell in re.split(r"(?<!\\)\|", line.strip("|")):
                yield Text(place, number, cell.strip())
        else:
            stripped = line.strip()
            entry = re.match(r"(?:[*+-]|\d+\.|#+|>) +", stripped)
            if not stripped or entry:
                yield from done()
                stripped = stripped[entry.end() :] if entry else stripped
            if stripped:
                start = start if lines else number
                lines.append(stripped)
    yield from done()


def pages() -> Iterator[Text]:
    """README, the pages of docs/, and the newest part of the changelog."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield from page_texts(page)
    yield from page_texts(ROOT / "CHANGELOG.md", until="## ")


_ERRORS = re.compile(
    r"(?:Error|Problem|Finding|NotFound|Unsupported|Corrupt|NoSpace|Busy|NonFinite|CannotResume|OutputExists|PushFailed)$"
)
_NAMES = ("what", "fix", "why", "help", "more", "unset", "epilog")


@cache
def source_texts() -> tuple[Text, ...]:
    """Messages, help texts and public docstrings."""
    return tuple(_source_texts())


def _source_texts() -> Iterator[Text]:
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        public = place.startswith(("src/weightsmith/abc/", "src/weightsmith/testing/"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                values = [keyword.value for keyword in node.keywords if keyword.arg in _NAMES]
                if _ERRORS.search(name):
                    values += node.args
                elif name in ("option", "Key"):
                    values += node.args[1:]
                for value in values:
                    yield from _literals(place, value)
            elif isinstance(node, ast.Assign) and {getattr(target, "id", "") for target in node.targets} & {*_NAMES}:
                yield from _literals(place, node.value)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and (public or _is_public(file, node.name)):
                text = ast.get_docstring(node)
                for paragraph in (text or "").split("\n\n"):
                    if not paragraph.lstrip().startswith(">>>") and not re.search(r"^\S.* {2,}\S", paragraph, re.MULTILINE):
                        yield Text(place, node.lineno, paragraph)


def _literals(place: str, value: ast.expr) -> Iterator[Text]:
    """The text of a literal; what an f-string inserts is one word."""
    for node in ast.walk(value):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values]
            yield Text(place, node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(place, node.lineno, node.value)


_PUBLIC = re.findall(r"^from (\S+) import (\w+) as", (SOURCE / "__init__.pyi").read_text(encoding="utf-8"), re.MULTILINE)


def _is_public(file: Path, name: str) -> bool:
    module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    return (module, name) in _PUBLIC


def all_problems() -> list[Problem]:
    """Everything that the rules find, once each."""
    texts = dict.fromkeys([*pages(), *source_texts()])
    return list(dict.fromkeys(problem for text in texts for problem in problems(text)))


if __name__ == "__main__":
    for problem in (problems_found := all_problems()):
        print(problem)
    sys.exit(bool(problems_found))
