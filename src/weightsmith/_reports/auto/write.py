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

from weightsmith._activations.running import workers
from weightsmith._activations.scored_rows import Cutter
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    NonFinite,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    Unsupported,
    first_line,
)
from weightsmith._base.files import expand_user, write_whole
from weightsmith._base.options import lists_options, read_options
from weightsmith._engine.local import MemoryOutput, run
from weightsmith._engine.resources import Workload
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.progress import Meter, Reading, Silent, watched_meter
from weightsmith._methods.jobs.requires import usable_device
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
    """

    out: Path
    model: str
    rows: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"out": str(self.out), "model": self.model, "rows": self.rows, "tokens": self.tokens}


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

    Tokens are drawn from the model's predictions, beginning with a start token. A fine-tune writes text of its domain if its
    training was long enough; look at the file. The same seed gives the same text on one machine, for any number of threads.

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
        rows = writer(name, prepared, running)(settings, shown)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows]
    try:
        write_whole(path, "".join(lines).encode(errors="surrogatepass"))
    except OSError as error:
        raise StoreError(f"the text cannot be written: {error.strerror}", where=out) from error
    return OwnText(path, name, len(rows), settings.rows * settings.tokens)


Draw = Callable[[WriteSettings, Meter], list[str]]


def writer(name: str, prepared: Prepared, running: RunOptions) -> Draw:
    """A model in memory, as a function that draws texts. Raises PlanError."""
    from weightsmith._reports.auto.write import draw

    if running.stream:
        stream(prepared.inputs)
    if missing_files(prepared.inputs):
        download(prepared.inputs)
    one = opened(name, prepared)
    resources = resources_of(prepared, running)
    device = usable_device(resources.device)
    module = _module(one, running, device)

    def texts(settings: WriteSettings, shown: Meter) -> list[str]:
        def tell(done: int, total: int) -> None:
            shown.show(Reading(f"{name} writes", done, total, None))

        rows = draw(module, _sampling(one, settings), resources.workers, device, tell, name)
        decoded: list[str] = one.cutter.tokenizer.decode_batch(rows, skip_special_tokens=False)
        return decoded

    return texts


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


def _sampling(one: Opened, settings: WriteSettings) -> Sampling:
    from weightsmith._reports.auto.write import Sampling

    starts = tuple(dict.fromkeys(_starts(one.cutter, settings.start)))
    longest = max(map(len, starts))
    if longest + settings.tokens > one.positions:
        what = (
            f"a row has at most {one.positions:,} tokens, and a start of {longest:,} and {settings.tokens:,} more are asked for"
        )
        raise ParameterError(what, where=one.name, fix=f"use --tokens {max(1, one.positions - longest)} (tokens)")
    return Sampling(starts, settings.rows, settings.tokens, settings.temperature, settings.seed)


def _starts(cutter: Cutter, texts: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """What rows begin with: the texts given, or else the tokens that begin and end texts, and line breaks."""
    before = cutter.before

    def encode(text: str) -> tuple[int, ...]:
        return tuple(cutter.tokenizer.encode(text, add_special_tokens=False).ids)

    if texts:
        for text in texts:
            yield (*before, *encode(text))
        return
    if before:
        yield before
    else:
        for name in ("bos_token", "eos_token"):
            token = cutter.tokenizer.token_to_id((cutter.names or {}).get(name, ""))
            if token is not None:
                yield (token,)
    for text in NEWLINES:
        if ids := encode(text):
            yield (*before, *ids)


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
        found: list[list[int]] = drawn[:, len(starts[0]) :].tolist()
        return found

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
        found: Tensor = module.generate(
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
    return found


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
