"""What rows begin with that a model writes by itself: the tokens that begin texts, and the first turns of its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightsmith._activations.rows import encoded
from weightsmith._activations.scored_rows import Cutter, rendered
from weightsmith._base.errors import ParameterError, Unsupported, WeightsmithError

NEWLINES = ("\n", "\n\n")
"""Starts beside the tokens that begin and end texts: each makes a model begin in another way."""


@dataclass(frozen=True, slots=True)
class Starts:
    """What rows begin with.

    ids              tokens of each start
    unused_template  why no row begins as the model's chat template does; "" if rows do, or the model has no template
    """

    ids: tuple[tuple[int, ...], ...]
    unused_template: str


def starts_of(cutter: Cutter, template: TemplateStarts, room: int, full: str) -> Starts:
    """The starts of a model: tokens that begin and end texts, line breaks, and those of its chat template.

    room    the most tokens that a start of the template may have
    full    why none fits, if none does: `64 more do not fit into a row`

    Raises as `checked_starts`.
    """
    fitting = tuple(ids for ids in template.ids if len(ids) <= room)
    unused_template = template.problem
    if template.ids and not fitting:
        unused_template = f"it takes {min(map(len, template.ids)):,} tokens, and {full}"
    return checked_starts(cutter, (*plain_starts(cutter), *fitting), unused_template)


def checked_starts(cutter: Cutter, starts: Sequence[tuple[int, ...]], unused_template: str = "") -> Starts:
    """The starts, each once. Raises ParameterError if there is none; Unsupported for a tokenizer that is not the model's."""
    if not starts or not all(starts):
        fix = "use weightsmith write with --start TEXT (start), a text of at least one token"
        raise ParameterError("rows have no token to begin with", where=cutter.where, fix=fix)
    if (last := max(map(max, starts))) >= cutter.vocabulary:
        what = f"the tokenizer produces token {last}, but the embedding has {cutter.vocabulary} rows"
        raise Unsupported(what, where=cutter.where, fix="use the model's own tokenizer")
    return Starts(tuple(dict.fromkeys(starts)), unused_template)


def encoded_starts(cutter: Cutter, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Starts that the user gives, after the tokens that the tokenizer puts before a text."""
    before = cutter.before
    for text in texts:
        yield (*before, *encoded(cutter.tokenizer, text, cutter.where).ids)


def plain_starts(cutter: Cutter) -> Iterator[tuple[int, ...]]:
    """The tokens that begin and end texts, and line breaks."""
    before = cutter.before
    if before:
        yield before
    else:
        for name in ("bos_token", "eos_token"):
            token = cutter.tokenizer.token_to_id((cutter.names or {}).get(name, ""))
            if token is not None:
                yield (token,)
    for ids in encoded_starts(cutter, NEWLINES):
        if len(ids) > len(before):
            yield ids


@dataclass(frozen=True, slots=True)
class TemplateStarts:
    """Starts of a chat template. problem: why there are none; "" where there are, or there is no template."""

    ids: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


MOST_START_CHARACTERS = 1 << 16
"""A template may write a system prompt, or a book."""

_QUESTION, _ANSWER = "weightsmith-question", "weightsmith-answer"  # no template has these words


def template_starts(cutter: Cutter, name: str) -> TemplateStarts:
    """A conversation up to the user's first word, and up to the answer to an empty question.

    As in transformers, only the template says which tokens begin the text. A template that refuses one of the two conversations
    may still give the other start.
    """
    if not cutter.template:
        return TemplateStarts()
    texts, problem = list[str](), ""
    talks = [[{"role": "user", "content": question}, {"role": "assistant", "content": _ANSWER}] for question in (_QUESTION, "")]
    try:
        for (question, *_), (whole, answers, _) in zip(
            talks, rendered(talks, cutter.template, cutter.names or {}, name), strict=True
        ):
            if question["content"]:
                texts += [whole[: whole.index(_QUESTION)]] if _QUESTION in whole else []
            else:
                texts += [whole[:first] for first, _ in answers]
    except WeightsmithError as error:
        problem = error.finding.what.removeprefix("the chat template failed: ")
    short = [text for text in texts if len(text) <= MOST_START_CHARACTERS]
    try:
        starts = tuple(ids for text in short if (ids := tuple(encoded(cutter.tokenizer, text, cutter.where).ids)))
    except WeightsmithError as error:
        starts, problem = (), error.finding.what
    if starts:
        return TemplateStarts(starts)
    if len(short) < len(texts):
        problem = f"it writes more than {MOST_START_CHARACTERS:,} characters before the first turn"
    return TemplateStarts((), problem or "it does not show where a turn begins")
