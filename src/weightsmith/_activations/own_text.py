"""The `own_text` product: rows of tokens that a model writes by itself, in place of a text.

Each row begins with a start: the tokens that begin texts, or the first turn of a chat template. The model continues it until
the row is full: tokens are drawn from its predictions, with random numbers of the row. Statistics are then of what the
model would say, without a text of its domain (Williams and Aletras 2024, self-calibration, https://arxiv.org/abs/2410.17170).
Rows are tokens from the beginning: nothing is decoded, and cut again in another way.

The product does not depend on the number of threads, or on whether the whole model is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.rows import OWN, encoded
from weightsmith._activations.work import Work
from weightsmith._base.errors import Finding, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.process import memory_bytes
from weightsmith._base.report.blocks import Block, Facts
from weightsmith._base.text import count
from weightsmith._engine.products import find_kind
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._plans import Product, TextSource
from weightsmith.abc.product import Arrays, ProductContext, ProductKind, ProductReport

if TYPE_CHECKING:
    from weightsmith._activations.scored_rows import Cutter

# ---- starts


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
    from weightsmith._activations.scored_rows import rendered

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


# ---- the product


TEMPERATURE = 1.0
"""Divisor of the logits."""

VERSION = 1
"""Version of the sampling. A change that draws other tokens gets a new one."""

_SHARE = 0.8
"""Share of the free memory that the model, its keys and its values may take. Programs and layers need the rest."""


@dataclass(frozen=True, slots=True)
class OwnTextWork(Work):
    """Settings of the product.

    text    with the number of rows, their tokens, and the seed
    starts  tokens that rows begin with, in turn
    temperature  divisor of the logits
    version      of the way in which tokens are drawn
    unused_template  as in `Starts`
    """

    text: TextSource
    starts: tuple[tuple[int, ...], ...]
    temperature: float
    version: int
    unused_template: str

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        shape = self.text.rows, self.text.tokens
        vocabulary = next((step.out.shape[0] for step in product.steps if is_embedding(step.out)), 0)
        if self.text.source != OWN or self.text.seed < 0 or self.temperature <= 0:
            return "its text is not one that a model writes"
        if self.version != VERSION:
            return f"it draws tokens in another way: version {self.version}, and this weightsmith has {VERSION}"
        if min(shape) < 1 or [(out.dtype.name, out.shape) for out in product.outs] != [("I32", shape)]:
            return "its rows are not those of its text"
        if not self.starts or not all(0 < len(ids) < shape[1] for ids in self.starts):
            return "its rows have no start, or no room behind it"
        tokens = [token for ids in self.starts for token in ids]
        return "" if 0 <= min(tokens) and max(tokens) < vocabulary else "a start has a token without a row of the embedding"


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.decoder.forward import Turns, build
    from weightsmith._activations.running import device_of
    from weightsmith._activations.sampling import Sampling, draw, groups_of

    work, device = OwnTextWork.of(context.product), device_of(context)
    decoder = build(work.base, {})  # a module that no other product uses
    if isinstance(decoder, WeightsmithError):
        raise PlanError([decoder])
    text = work.text
    sampling = Sampling(work.starts, text.rows, text.tokens, work.temperature, text.seed, with_start=True)
    groups = groups_of(sampling)
    turns = None if _fits(context, device, max(map(len, groups))) else Turns(len(groups))
    with decoder.generating(context, device, turns) as module:
        drawn = draw(module, sampling, context.threads, device, context.progress, work.base.label, turns)
    starts = [work.starts[row % len(work.starts)] for row in range(text.rows)]
    return [np.array([[*start, *row] for start, row in zip(starts, drawn, strict=True)], np.int32)]


def _fits(context: ProductContext, device: str, rows: int) -> bool:
    """Whether the whole model has room in memory. rows: that a thread runs together, whose keys and values are kept."""
    import torch

    from weightsmith._activations.running import on_cpu

    if not on_cpu(device):
        free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else None
    else:
        free = memory_bytes()[1] if context.memory_bytes is None else context.memory_bytes
    tokens = context.product.outs[0].shape[1]
    cached = sum(s.out.shape[0] for s in context.product.steps if s.out.name.endswith((".k_proj.weight", ".v_proj.weight")))
    threads = context.threads if on_cpu(device) else 1
    needed = 4 * (sum(step.out.size for step in context.product.steps) + threads * rows * tokens * cached)
    return free is None or needed <= _SHARE * free


@dataclass(frozen=True, slots=True)
class OwnTextReport:
    """What is said of a text that a model wrote.

    model   as the user named it
    sha256  of its tokens: int32, row by row, little endian
    """

    model: str
    rows: int
    tokens: int
    seed: int
    sha256: str
    unused_template: str

    @classmethod
    def of(cls, product: Product, arrays: Sequence[npt.NDArray[Any]]) -> OwnTextReport:
        """The report on a finished product."""
        work = OwnTextWork.of(product)
        digest = hashlib.sha256(np.ascontiguousarray(arrays[0], "<i4").tobytes()).hexdigest()
        return cls(work.base.label, work.text.rows, work.text.tokens, work.text.seed, digest, work.unused_template)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the manifest."""
        size = {"rows": self.rows, "tokens": self.tokens, "seed": self.seed}
        return {"model": self.model, **size, "sha256": self.sha256}

    @property
    def _size(self) -> str:
        return f"{count(self.rows, 'row')} of {self.tokens:,} tokens"

    def files(self) -> Mapping[str, bytes]:
        """None."""
        return {}

    def section(self) -> str:
        """A section for the model card."""
        written = f"{self.model} wrote {self._size} by itself, with seed {self.seed}; sha256 of the tokens: `{self.sha256}`."
        return f"\n## Text of {self.model}\n\n{written}\n"

    def blocks(self) -> Sequence[Block]:
        """Size and hash of the text."""
        facts = ("rows", self.rows), ("tokens of a row", self.tokens), ("seed", self.seed), ("sha256", self.sha256)
        return [Facts(f"Text that {self.model} wrote", facts)]

    def warnings(self, where: str) -> list[Finding]:
        """A warning if the model's chat template could not be used."""
        if not self.unused_template:
            return []
        what = f"no row of its own text begins as its chat template does: {self.unused_template}"
        return [Finding(what, self.model, fix="use a text of conversations, if the model is for these")]


def own_text_reports(products: Iterable[Product], arrays: Mapping[str, Arrays]) -> dict[str, ProductReport]:
    """What is said of the texts among some products, by their names. arrays: of the products, by name."""
    texts = [product for product in products if product.op == "own_text"]
    reports = {product.name: find_kind(product.op).report(product, arrays[product.name]) for product in texts}
    return {name: report for name, report in reports.items() if report is not None}


KIND = ProductKind("writing a text", compute=_compute, check=OwnTextWork.check, report=OwnTextReport.of, device=True)
