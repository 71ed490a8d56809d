"""Tokens that a model draws from its own predictions, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsmith._activations.decoder.forward import Turns
from weightsmith._activations.running import together, workers
from weightsmith._base.errors import NonFinite, Unsupported, WeightsmithError, first_line

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
    with_start   `tokens` counts those of the start, too
    """

    starts: tuple[tuple[int, ...], ...]
    rows: int
    tokens: int
    temperature: float
    seed: int
    with_start: bool = False

    def start(self, row: int) -> tuple[int, ...]:
        """What a row begins with."""
        return self.starts[row % len(self.starts)]

    def count(self, row: int) -> int:
        """The tokens that are drawn for a row."""
        return self.tokens - len(self.start(row)) * self.with_start


def draw(
    module: Any,
    sampling: Sampling,
    threads: int,
    device: str,
    progress: Callable[[int, int], None],
    where: str,
    turns: Turns | None = None,
) -> list[list[int]]:
    """The drawn tokens of each row, without its start.

    module    transformers' causal language model, on the device; its generation settings are removed
    progress  called with tokens done and in all, on any thread
    where     the model, for errors
    turns     of as many threads as there are groups (`groups_of`), which then all run at the same time: if the module has one
              layer in memory at a time

    Raises NonFinite for predictions that are NaN; Unsupported if transformers cannot generate with the module.
    Memory: the module's, and keys and values of `ROWS_TOGETHER` rows for each thread; with turns, those of all rows.
    """
    from transformers import GenerationConfig

    module.generation_config = GenerationConfig()  # the model's own would end a row at its end of text, or forbid tokens
    groups = groups_of(sampling)
    done = itertools.count(1)
    total = sum(sampling.count(rows[0]) for rows in groups)

    def run(rows: Sequence[int]) -> list[list[int]]:
        starts = [sampling.start(row) for row in rows]
        choose = _Choose(rows, sampling, lambda: progress(min(total, next(done)), total), where)
        with torch.inference_mode(), _ending(turns):
            drawn = _generated(module, torch.tensor(starts, device=device), sampling.count(rows[0]), choose, where)
        return drawn[:, len(starts[0]) :].tolist()

    by_row = dict[int, list[int]]()
    with workers(threads, device) if turns is None else together(len(groups)) as pool:
        for rows, drawn in zip(groups, pool.map(run, groups), strict=True):
            by_row |= zip(rows, drawn, strict=True)
    return [by_row[row] for row in range(sampling.rows)]


@contextmanager
def _ending(turns: Turns | None) -> Iterator[None]:
    """Tell the other threads when this one ends."""
    if turns is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        turns.end(error)
        raise
    turns.end()


def groups_of(sampling: Sampling) -> list[list[int]]:
    """Rows that run together: those whose starts are equally long, so that none is padded."""
    by_length: dict[int, list[int]] = {}
    for row in range(sampling.rows):
        by_length.setdefault(len(sampling.start(row)), []).append(row)
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
    except WeightsmithError:
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
