"""How models write and predict, side by side. Reads models as a merge does; transformers computes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from weightsmith._app.studio.check import first_finding, model_allowed
from weightsmith._app.studio.places import Places
from weightsmith._base.errors import CheckpointError, Unsupported, WeightsmithError, first_line
from weightsmith._base.installation import install
from weightsmith._base.text import size
from weightsmith._reports.judge import Judge
from weightsmith._reports.look.models import opened

MAX_CHARACTERS = 100_000
"""The most characters of a text or a prompt."""
MAX_NEW_TOKENS = 256
MAX_MODELS = 12
ROWS = 8
"""Rows of the text to use, of 384 tokens each."""
BYTES_PER_WEIGHT = 10
"""That loading takes: 1.23 GB were measured for 134.5 million weights, with torch and transformers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one model did. problem: why it did nothing; "" if it did."""

    model: str
    continuation: str = ""
    perplexity: float | None = None
    problem: str = ""


def available() -> bool:
    """Whether torch and transformers are installed."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def compare(models: Sequence[str], places: Places, *, prompt: str, text: str = "", new_tokens: int = 48) -> Iterator[Sample]:
    """The greedy continuation of a prompt by each model, and its perplexity on a text; one model in memory at a time, float32.

    models  as a recipe names them
    text    its first 3,072 tokens are read; "": no perplexity

    Raises Unsupported without transformers, and for too much of anything.
    """
    if not available():
        raise Unsupported("comparing needs torch and transformers", fix=f"run {install('moe')}")
    if len(models) > MAX_MODELS or max(len(prompt), len(text)) > MAX_CHARACTERS or not 0 < new_tokens <= MAX_NEW_TOKENS:
        what = f"at most {MAX_MODELS} models, {MAX_CHARACTERS:,} characters and {MAX_NEW_TOKENS} new tokens"
        raise Unsupported(f"too much to compare: {what}", fix="ask for less")
    for name in models:
        try:
            judge = _load(model_allowed(name, places))
            found = Sample(name, judge.continuation(prompt, new_tokens), judge.perplexity(text, ROWS) if text.strip() else None)
            del judge
        except WeightsmithError as error:
            found = Sample(name, problem=str(first_finding(error)))
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # what transformers raises for such models
            found = Sample(name, problem=f"transformers cannot run it: {first_line(error)}")
        gc.collect()
        yield found


def _load(name: str) -> Judge:
    import torch

    with opened(name, stream=False) as (model,):
        if model.config is None or "auto_map" in model.config:
            what = "it brings code of its own" if model.config else "it has no config.json"
            raise CheckpointError(f"transformers cannot run it here: {what}", where=name)
        needed = sum(spec.size for spec in model.specs.values()) * BYTES_PER_WEIGHT
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            what = f"running it in float32 takes about {size(needed)} of memory, and this machine has {size(memory)}"
            raise Unsupported(what, where=name, fix="compare smaller models here")
        model.download()
        tensors = {}
        for spec in model.specs.values():
            array = np.asarray(model.read(spec.name))
            tensors[spec.name] = torch.from_numpy(array.astype(np.float32) if spec.dtype.floating else np.array(array))
        return Judge.of_tensors(tensors, model.folder, name)
