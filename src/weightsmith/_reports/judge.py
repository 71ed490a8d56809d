"""What transformers makes of a model, or of a merge that is not written: perplexity on a text, continuation of a prompt."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._base.errors import CheckpointError, Unsupported
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import size
from weightsmith._execution.execute import check_computable
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._files.copied import is_weights
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import download
from weightsmith._planning.recipe import Source
from weightsmith._plans import PLAIN, PlanDraft
from weightsmith._reports.look.models import opened

if TYPE_CHECKING:
    import torch

ROW_TOKENS = 384
"""Tokens of the rows that a text is cut into."""
BYTES_PER_WEIGHT = 10
"""That loading takes: 1.23 GB were measured for 134.5 million weights, with torch and transformers."""
_MERGE = "the merge"


class Judge:
    """A model on the CPU, as transformers runs it, to try it: `of_model`, or `of_recipe` for a merge that is not written.

    Code that a model brings is never run. Needs torch and transformers, and about 10 bytes of memory for each weight.

    It computes in float32: many CPUs have no bf16 arithmetic, and take ten times as long to imitate it. Perplexities differ by
    some tenths of a percent at most.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def of_folder(cls, folder: Path) -> Judge:
        """Load a folder as transformers does. Raises CheckpointError if it does not load it whole."""
        import torch
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        return cls(_whole(model, report, str(folder)), _tokenizer(folder))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], folder: Path, name: str) -> Judge:
        """Load some tensors. folder: of config.json and tokenizer. Raises CheckpointError if they are not the whole model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
        return cls(_whole(model, report, name), _tokenizer(folder))

    @classmethod
    def of_model(cls, model: str | os.PathLike[str]) -> Judge:
        """Load a model as a recipe names it; one on the Hub is downloaded.

        Raises CheckpointError for a model that transformers cannot run here, Unsupported for one too large for the memory.
        """
        with opened(model, stream=False) as (checkpoint,):
            _check(checkpoint.ref, checkpoint.config, checkpoint.specs)
            checkpoint.download()
            return cls.of_tensors(_tensors(checkpoint), checkpoint.folder, checkpoint.ref)

    @classmethod
    def of_recipe(cls, recipe: Source) -> Judge:
        """Merge a recipe in memory, with the bytes of a written merge, and load the result.

        Raises as `of_model`, and PlanError.

        >>> weightsmith.Judge.of_recipe("ties.yml").continuation("Bonjour", 24)  # doctest: +SKIP
        """
        from weightsmith._engine.local import open_merge

        with prepare_any(recipe, RecipeOptions(), QuantizeSettings()) as prepared:
            check_computable(prepared)
            draft = PlanDraft.of(prepared.plan)
            draft.steps = [replace(step, encoding=PLAIN, stored=(), weighted=-1) for step in draft.steps]
            plan = draft.finish(stored=False)
            _check(_MERGE, plan.config, {step.out.name: step.out for step in plan.steps})
            download(prepared.inputs)
            merged = Checkpoint(_MERGE, open_merge(plan, prepared.inputs, _MERGE))
            with _folder(plan.config or {}, plan.files, prepared.inputs[plan.donor]) as folder:
                return cls.of_tensors(_tensors(merged), folder, _MERGE)

    def perplexity(self, text: str, rows: int | None = None) -> float:
        """exp of the mean cross-entropy over rows of 384 tokens; what is left over at the end is dropped.

        Each row begins with the BOS token if the tokenizer puts one before texts: Gemma predicts badly without it.

        rows  from the beginning of the text; None: all. A text of fewer tokens is one row
        """
        losses = self.losses(text, rows)
        return math.exp(sum(losses) / len(losses))

    def losses(self, text: str, rows: int | None = None) -> list[float]:
        """The mean cross-entropy of each row, in nats; see `perplexity`. Pairs of models are compared row by row."""
        import torch

        with torch.inference_mode():
            return [self.model(input_ids=row[None], labels=row[None]).loss.item() for row in self.rows(text, rows)]

    def rows(self, text: str, rows: int | None = None) -> torch.Tensor:
        """The tokens of a text as rows, int64 [rows, 384 or fewer]; see `perplexity`.

        Raises ValueError for fewer than two tokens.
        """
        import torch

        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 2:
            raise ValueError("a text of fewer than two tokens has no perplexity")
        bos = self.tokenizer.bos_token_id
        first = [] if bos is None or self.tokenizer("a")["input_ids"][:1] != [bos] else [bos]
        width = min(ROW_TOKENS - len(first), len(ids))
        cut = torch.tensor(ids[: len(ids) // width * width]).view(-1, width)[:rows]
        return torch.cat([torch.tensor(first, dtype=cut.dtype).expand(len(cut), -1), cut], 1)

    def continuation(self, prompt: str, new_tokens: int) -> str:
        """The greedy continuation of a prompt."""
        import torch

        inputs = self.tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        return self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _whole(model: Any, report: Mapping[str, Any], name: str) -> Any:
    bad = {what: sorted(map(str, names)) for what, names in report.items() if names}
    if bad:
        raise CheckpointError(f"transformers did not load it whole: {bad}", where=name)
    return model


@contextmanager
def _folder(config: Mapping[str, Any], files: Mapping[str, bytes], donor: Checkpoint) -> Iterator[Path]:
    """The files of a result besides its weights, as transformers reads them."""
    with tempfile.TemporaryDirectory(prefix="weightsmith-") as name:
        folder = Path(name)
        carried = [file for file in donor.files if not is_weights(file) and "/" not in file and not file.endswith(".py")]
        donor.fetch([file for file in carried if file not in files])
        for file in carried:
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
        raise Unsupported(what, where=name, fix="try smaller models here")


def _tensors(model: Checkpoint) -> dict[str, Any]:
    """All tensors as torch's, floating-point ones in float32."""
    import torch

    def tensor(spec: TensorSpec) -> Any:
        array = np.asarray(model.read(spec.name))
        return torch.from_numpy(array.astype(np.float32) if spec.dtype.floating else np.array(array))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(model.specs, pool.map(tensor, model.specs.values()), strict=True))
