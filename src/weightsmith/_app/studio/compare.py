"""Continuations and perplexities of models, side by side, with transformers. Recipes are merged in memory."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._app.studio import words
from weightsmith._app.studio.check import allowed, first_finding, model_allowed
from weightsmith._app.studio.places import Places
from weightsmith._base.errors import CheckpointError, Unsupported, WeightsmithError, first_line
from weightsmith._base.installation import install
from weightsmith._base.text import size
from weightsmith._execution.stages import check_computable
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._files.copied import is_weights
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import download
from weightsmith._plans import PLAIN, PlanDraft
from weightsmith._reports.judge import Judge
from weightsmith._reports.look.models import opened

if TYPE_CHECKING:
    from weightsmith._base.tensors import TensorSpec

MERGE = "the merge"
"""The name of a recipe's result."""
MAX_CHARACTERS = 100_000
"""The most characters of a text or a prompt."""
MAX_NEW_TOKENS = 256
MAX_MODELS = 12
ROWS = 8
"""Rows of the text to use, of 384 tokens each."""
BYTES_PER_WEIGHT = 10
"""That loading takes: 1.23 GB were measured for 134.5 million weights, with torch and transformers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt to continue greedily, by `new_tokens` tokens, and the text for the perplexity. Either may be ""."""

    prompt: str = ""
    text: str = ""
    new_tokens: int = 48

    def check(self, models: int) -> None:
        """Raise Unsupported for too much of anything, or without transformers."""
        if not available():
            raise Unsupported("trying needs torch and transformers", fix=f"run {install('moe')}")
        long = max(len(self.prompt), len(self.text)) > MAX_CHARACTERS
        if models > MAX_MODELS or long or not 0 < self.new_tokens <= MAX_NEW_TOKENS:
            what = f"at most {MAX_MODELS} models, {MAX_CHARACTERS:,} characters and {MAX_NEW_TOKENS} new tokens"
            raise Unsupported(f"too much to compare: {what}", fix="ask for less")


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


def compare(models: Sequence[str], places: Places, asked: Asked) -> Iterator[Sample]:
    """What each model does with a prompt and a text; one model in memory at a time, in float32.

    models  as a recipe names them. Raises Unsupported; see `Asked.check`.
    """
    asked.check(len(models))
    for name in models:
        yield _sample(name, lambda name=name: _load(model_allowed(name, places)), asked)  # type: ignore[misc]


def tried(recipe: str, places: Places, asked: Asked, name: str = MERGE) -> Sample:
    """What the result of a recipe does. It is merged in memory, and has the bytes of a written merge."""
    asked.check(1)
    return _sample(name, lambda: _merged(allowed(recipe, places)), asked)


def _sample(name: str, load: Callable[[], Judge], asked: Asked) -> Sample:
    try:
        judge = load()
        said = judge.continuation(asked.prompt, asked.new_tokens) if asked.prompt.strip() else ""
        found = Sample(name, said, judge.perplexity(asked.text, ROWS) if asked.text.strip() else None)
        del judge
    except WeightsmithError as error:
        found = Sample(name, problem=str(words.said(first_finding(error)).finding))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # what transformers raises for such models
        found = Sample(name, problem=f"transformers cannot run it: {first_line(error)}")
    gc.collect()
    return found


def _load(name: str) -> Judge:
    with opened(name, stream=False) as (model,):
        _check(name, model.config, model.specs)
        model.download()
        return Judge.of_tensors(_tensors(model), model.folder, name)


def _merged(recipe: str) -> Judge:
    from weightsmith._engine.local import open_merge

    with prepare_any(recipe, RecipeOptions(), QuantizeSettings()) as prepared:
        check_computable(prepared)
        draft = PlanDraft.of(prepared.plan)
        draft.steps = [replace(step, encoding=PLAIN, stored=(), weighted=-1) for step in draft.steps]
        plan = draft.finish(stored=False)
        _check(MERGE, plan.config, {step.out.name: step.out for step in plan.steps})
        download(prepared.inputs)
        with _folder(plan.config or {}, plan.files, prepared.inputs[plan.donor]) as folder:
            return Judge.of_tensors(_tensors(Checkpoint(MERGE, open_merge(plan, prepared.inputs, MERGE))), folder, MERGE)


@contextmanager
def _folder(config: Mapping[str, Any], files: Mapping[str, bytes], donor: Checkpoint) -> Iterator[Path]:
    """The files of a result besides its weights, as transformers reads them."""
    with tempfile.TemporaryDirectory(prefix="weightsmith-") as name:
        folder = Path(name)
        own = [file for file in donor.files if not is_weights(file) and "/" not in file and not file.endswith(".py")]
        donor.fetch([file for file in own if file not in files])
        for file in own:
            if (donor.folder / file).is_file():
                (folder / file).symlink_to((donor.folder / file).resolve())
        for file, data in {**files, "config.json": json.dumps(config).encode()}.items():
            path = folder / file
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield folder


def _check(name: str, config: Mapping[str, Any] | None, specs: Mapping[str, TensorSpec]) -> None:
    if config is None or "auto_map" in config:
        what = "it brings code of its own" if config else "it has no config.json"
        raise CheckpointError(f"transformers cannot run it here: {what}", where=name)
    needed = sum(spec.size for spec in specs.values()) * BYTES_PER_WEIGHT
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        what = f"running it in float32 takes about {size(needed)} of memory, and this machine has {size(memory)}"
        raise Unsupported(what, where=name, fix="compare smaller models here")


def _tensors(model: Checkpoint) -> dict[str, Any]:
    """All tensors as torch's, floating-point ones in float32."""
    import torch

    def tensor(spec: TensorSpec) -> Any:
        array = np.asarray(model.read(spec.name))
        return torch.from_numpy(array.astype(np.float32) if spec.dtype.floating else np.array(array))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(model.specs, pool.map(tensor, model.specs.values()), strict=True))
