"""`weightsmith.write`: a model writes a text file by itself."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from weightsmith._activations.rows import encoded
from weightsmith._activations.running import workers
from weightsmith._activations.scored_rows import Cutter, rendered
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    NonFinite,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    Unsupported,
    WeightsmithError,
    first_line,
)
from weightsmith._base.files import expand_user, write_whole
from weightsmith._base.options import lists_options, read_options
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.local import MemoryOutput, run
from weightsmith._engine.resources import Workload
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.progress import Meter, Reading, Silent, watched_meter
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.prepared import download, missing_files, stream
from weightsmith._reports.auto.options import WriteSettings
from weightsmith._reports.evaluate.opening import Named, Opened, name_of, opened, prepare_named
from weightsmith._reports.keywords import WriteKeywords
from weightsmith.abc.product import WholeTensor

NEWLINES = ("\n", "\n\n")
"""Starts beside the tokens that begin and end texts: each makes a model begin in another way."""


@dataclass(frozen=True, slots=True)
class OwnText:
    """`weightsmith.write` makes it.

    out     the file
    model   that wrote it, as it was named
    rows    number of lines
    tokens  drawn in all
    starts  texts that rows begin with, in turn; they are not in the file
    unused_template  why no row begins as the model's chat template does; "" if rows do, or the model has no template
    """

    out: Path
    model: str
    rows: int
    tokens: int
    starts: tuple[str, ...] = ()
    unused_template: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {"rows": self.rows, "tokens": self.tokens}
        starts = {"starts": list(self.starts), "unused_template": self.unused_template}
        return {"out": str(self.out), "model": self.model, **counts, **starts}


@lists_options("write", WriteSettings, RunOptions)
def write(
    model: Named, out: str | os.PathLike[str], *, progress: bool | Meter = True, **options: Unpack[WriteKeywords]
) -> OwnText:
    """Let a model write text by itself, into a .jsonl file with one row of text on each line.

    model     folder, Hub id or `base+adapter`, stored in any format that weightsmith reads; or a recipe, whose result is not
              written
    out       a new .jsonl file, which everything that reads a text takes
    progress  True: a bar in terminals and notebooks, False: none
    options   see `weightsmith._base.options`: `WriteSettings` and `RunOptions`

    Tokens are drawn from the model's predictions, beginning with a start token. With a chat template, rows also begin where the
    template lets a user speak, and where it lets the model answer an empty question (Xu et al. 2024, Magpie,
    https://arxiv.org/abs/2406.08464). A fine-tune writes text of its domain if its training was long enough; look at the file.
    The same seed gives the same text on one machine, for any number of threads.

    Raises PlanError for a model that is not a decoder with a tokenizer.json; OutputExists; NonFinite.

    Memory: the whole model in float32.

    >>> weightsmith.write("fr", "fr.jsonl", rows=20, tokens=128).rows  # doctest: +SKIP
    20
    """
    settings, running = read_options("write", options, WriteSettings, RunOptions)
    meter = progress if isinstance(progress, Meter) else watched_meter() if progress else Silent()
    return written(model, os.fspath(out), settings, running, meter)


def written(model: Named, out: str, settings: WriteSettings, running: RunOptions, shown: Meter) -> OwnText:
    """See `write`."""
    path = _check_output(out, overwrite=running.overwrite)
    name = name_of(model)
    with prepare_named(model) as prepared:
        model_writer = writer(name, prepared, running)
        rows, starts = model_writer(settings, shown), model_writer.starts(settings)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows]
    try:
        write_whole(path, "".join(lines).encode(errors="surrogatepass"))
    except OSError as error:
        raise StoreError(f"the text cannot be written: {error.strerror}", where=out) from error
    cutter, tokens = model_writer.cutter, settings.rows * settings.tokens
    texts = tuple(cutter.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in starts.ids[: settings.rows])
    return OwnText(path, name, len(rows), tokens, texts, starts.unused_template)


def writer(name: str, prepared: Prepared, running: RunOptions) -> Writer:
    """A model in memory, which draws texts. Raises PlanError."""
    if running.stream:
        stream(prepared.inputs)
    if missing_files(prepared.inputs):
        download(prepared.inputs)
    one = opened(name, prepared)
    resources = resources_of(prepared, running)
    device = usable_device(resources.device)
    return Writer(one, _module(one, running, device), resources.workers, device)


class Writer:
    """A model in memory that draws texts."""

    def __init__(self, model: Opened, module: Any, threads: int, device: str) -> None:
        """module: transformers' causal language model, on the device."""
        self._model, self._module, self._threads, self._device = model, module, threads, device
        self._template: _TemplateStarts | None = None

    @property
    def cutter(self) -> Cutter:
        """The model's tokenizer and chat template."""
        return self._model.cutter

    def starts(self, settings: WriteSettings) -> Starts:
        """What rows begin with, in turn. Raises Unsupported for a tokenizer that is not the model's."""
        if settings.start:
            starts, unused_template = tuple(_encoded(self.cutter, settings.start)), ""
        else:
            self._template = self._template or _template_starts(self.cutter, self._model.name)
            room = self._model.positions - settings.tokens
            fitting = tuple(ids for ids in self._template.ids if len(ids) <= room)
            starts, unused_template = (*_plain_starts(self.cutter), *fitting), self._template.problem
            if self._template.ids and not fitting:
                shortest = min(map(len, self._template.ids))
                unused_template = f"it takes {shortest:,} tokens, and {settings.tokens:,} more do not fit into a row"
        if not starts or not all(starts):
            fix = "use --start TEXT (start), with a text of at least one token"
            raise ParameterError("rows have no token to begin with", where=self._model.name, fix=fix)
        if (last := max(map(max, starts))) >= self.cutter.vocabulary:
            what = f"the tokenizer produces token {last}, but the embedding has {self.cutter.vocabulary} rows"
            raise Unsupported(what, where=self._model.name, fix="use the model's own tokenizer")
        return Starts(tuple(dict.fromkeys(starts)), unused_template)

    def __call__(self, settings: WriteSettings, shown: Meter) -> list[str]:
        """The texts of the rows, without their starts.

        Raises ParameterError for rows that are longer than the model takes; and as `starts` and `draw` do.
        """
        name = self._model.name

        def tell(done: int, total: int) -> None:
            shown.show(Reading(f"{name} writes", done, total, None))

        sampling = _sampling(self._model, self.starts(settings).ids, settings)
        rows = draw(self._module, sampling, self._threads, self._device, tell, name)
        decoded: list[str] = self.cutter.tokenizer.decode_batch(rows, skip_special_tokens=False)
        return decoded


def _check_output(out: str, *, overwrite: bool) -> Path:
    path = expand_user(out).absolute()
    if path.suffix != ".jsonl":
        raise ParameterError(
            "the output is a text file, whose name ends in .jsonl", where=out, fix=f"write {out}.jsonl", state=NOTHING_WRITTEN
        )
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent}", where=out, fix="create it", state=NOTHING_WRITTEN)
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise OutputExists("the output exists", where=out, fix="name another file, or remove this one", state=NOTHING_WRITTEN)
    return path


def _module(one: Opened, running: RunOptions, device: str) -> Any:
    """transformers' module with the weights of the model, float32, on a device. Raises PlanError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    plan = one.prepared.plan
    arrays = {step.out.name: np.empty(step.out.shape, np.float32) for step in plan.steps}
    targets = {step.out.name: WholeTensor(step.out, arrays[step.out.name]) for step in plan.steps}
    folders = [model.folder for model in one.prepared.inputs]
    work = Workload(folders=folders, allow_nonfinite=running.allow_nonfinite)
    run(plan, one.prepared.inputs, MemoryOutput(targets), resources_of(one.prepared, running), work)
    settings = dict(one.base.config)
    kind = settings.pop("model_type", "")
    bars = logging.is_progress_bar_enabled()
    if bars:
        logging.disable_progress_bar()
    try:
        config = AutoConfig.for_model(kind, **settings)
        module, report = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={name: torch.from_numpy(array) for name, array in arrays.items()},
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # a bad config can raise anything in transformers
        what = f"transformers cannot build a model of type '{kind}': {type(error).__name__}: {error}"
        raise PlanError([Unsupported(what[:300], where=one.name, fix="give a text of your own")]) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        what = f"transformers finds no weights for {len(missing):,} of its tensors, such as {missing[0]}"
        raise PlanError([Unsupported(what, where=one.name, fix="check its config.json")])
    return module.eval().to(device)


def _sampling(one: Opened, starts: tuple[tuple[int, ...], ...], settings: WriteSettings) -> Sampling:
    longest = max(map(len, starts))
    if longest + settings.tokens > one.positions:
        what = (
            f"a row has at most {one.positions:,} tokens, and a start of {longest:,} and {settings.tokens:,} more are asked for"
        )
        raise ParameterError(what, where=one.name, fix=f"use --tokens {max(1, one.positions - longest)} (tokens)")
    return Sampling(starts, settings.rows, settings.tokens, settings.temperature, settings.seed)


@dataclass(frozen=True, slots=True)
class Starts:
    """What rows begin with.

    ids              tokens of each start
    unused_template  as of `OwnText`
    """

    ids: tuple[tuple[int, ...], ...]
    unused_template: str


def _encoded(cutter: Cutter, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Starts that the user gives, after the tokens that the tokenizer puts before a text."""
    before = cutter.before
    for text in texts:
        yield (*before, *encoded(cutter.tokenizer, text, cutter.where).ids)


def _plain_starts(cutter: Cutter) -> Iterator[tuple[int, ...]]:
    """The tokens that begin and end texts, and line breaks."""
    before = cutter.before
    if before:
        yield before
    else:
        for name in ("bos_token", "eos_token"):
            token = cutter.tokenizer.token_to_id((cutter.names or {}).get(name, ""))
            if token is not None:
                yield (token,)
    for ids in _encoded(cutter, NEWLINES):
        if len(ids) > len(before):
            yield ids


@dataclass(frozen=True, slots=True)
class _TemplateStarts:
    """Starts of a chat template. problem: why there are none; "" where there are, or there is no template."""

    ids: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


MOST_START_CHARACTERS = 1 << 16
"""A template may write a system prompt, or a book."""

_QUESTION, _ANSWER = "weightsmith-question", "weightsmith-answer"  # no template has these words


def _template_starts(cutter: Cutter, name: str) -> _TemplateStarts:
    """A conversation up to the user's first word, and up to the answer to an empty question.

    As in transformers, only the template says which tokens begin the text. A template that refuses one of the two conversations
    may still give the other start.
    """
    if not cutter.template:
        return _TemplateStarts()
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
        return _TemplateStarts(starts)
    if len(short) < len(texts):
        problem = f"it writes more than {MOST_START_CHARACTERS:,} characters before the first turn"
    return _TemplateStarts((), problem or "it does not show where a turn begins")


ROWS_TOGETHER = 16
"""Rows that run together: a step reads all weights once for them. The same for any number of threads."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text is drawn.

    starts       tokens that rows begin with, in turn; they are not part of the text
    rows         number of rows
    tokens       drawn for each row
    temperature  divisor of the logits
    seed         of the random numbers
    """

    starts: tuple[tuple[int, ...], ...]
    rows: int
    tokens: int
    temperature: float
    seed: int


def draw(
    module: Any, sampling: Sampling, threads: int, device: str, progress: Callable[[int, int], None], where: str
) -> list[list[int]]:
    """The drawn tokens of each row, without its start.

    module    transformers' causal language model, on the device; its generation settings are removed
    progress  called with tokens done and in all, on any thread
    where     the model, for errors

    Raises NonFinite for predictions that are NaN; Unsupported if transformers cannot generate with the module.
    Memory: the module's, and keys and values of `ROWS_TOGETHER` rows for each thread.
    """
    from transformers import GenerationConfig

    module.generation_config = GenerationConfig()  # the model's own would end a row at its end of text, or forbid tokens
    groups = _groups(sampling)
    done = itertools.count(1)
    total = len(groups) * sampling.tokens

    def run(rows: Sequence[int]) -> list[list[int]]:
        starts = [sampling.starts[row % len(sampling.starts)] for row in rows]
        choose = _Choose(rows, sampling, lambda: progress(min(total, next(done)), total), where)
        with torch.inference_mode():
            drawn = _generated(module, torch.tensor(starts, device=device), sampling.tokens, choose, where)
        written: list[list[int]] = drawn[:, len(starts[0]) :].tolist()
        return written

    by_row = dict[int, list[int]]()
    with workers(threads, device) as pool:
        for rows, drawn in zip(groups, pool.map(run, groups), strict=True):
            by_row |= zip(rows, drawn, strict=True)
    return [by_row[row] for row in range(sampling.rows)]


def _groups(sampling: Sampling) -> list[list[int]]:
    """Rows that run together: those whose starts are equally long, so that none is padded."""
    by_length: dict[int, list[int]] = {}
    for row in range(sampling.rows):
        by_length.setdefault(len(sampling.starts[row % len(sampling.starts)]), []).append(row)
    return [rows[at : at + ROWS_TOGETHER] for rows in by_length.values() for at in range(0, len(rows), ROWS_TOGETHER)]


def _generated(module: Any, ids: Tensor, tokens: int, choose: _Choose, where: str) -> Tensor:
    """ids with so many tokens more. transformers' own loop, which knows the caches of all architectures."""
    from transformers import GenerationConfig, LogitsProcessorList

    settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, use_cache=True)
    try:
        token_ids: Tensor = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([choose]),
        )
    except NonFinite:
        raise
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        what = f"transformers cannot generate text with this model: {first_line(error)}"
        raise Unsupported(what, where=where, fix="give a text of your own") from error
    return token_ids


class _Choose:
    """Draws a token for each row, and leaves it alone to transformers' greedy choice.

    transformers' own sampling uses one random state for all threads.
    """

    def __init__(self, rows: Sequence[int], sampling: Sampling, step: Callable[[], None], where: str) -> None:
        keys = [np.array([sampling.seed, row], np.uint64) for row in rows]
        self._uniform = np.stack([np.random.Generator(np.random.Philox(key=key)).random(sampling.tokens) for key in keys])
        self._temperature, self._step, self._where = sampling.temperature, step, where
        self._at = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        shares = torch.softmax(scores.double() / self._temperature, 1).cumsum(1)
        ends = shares[:, -1:]
        if not bool(torch.isfinite(ends).all()):
            raise NonFinite(
                "the prediction of the next token is NaN", where=self._where, fix="check the model: weightsmith inspect"
            )
        uniform = torch.from_numpy(self._uniform[:, self._at, None].copy()).to(scores.device)
        self._at += 1
        self._step()
        # The first token whose share of the whole reaches beyond the number. Rounding may leave the last share below 1.
        tokens = torch.searchsorted(shares, uniform * ends, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
