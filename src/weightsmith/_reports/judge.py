"""What transformers makes of a model: its perplexity on a text, and its greedy continuation of a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import CheckpointError

if TYPE_CHECKING:
    import torch

ROW_TOKENS = 384
"""Of the rows that a text is cut into."""


class Judge:
    """A model on the CPU, as transformers runs it. Code that a model brings is never run.

    The weights are computed with in float32: many CPUs have no bf16 arithmetic and take ten times as long to imitate it, and
    perplexities differ by some tenths of a percent at most.
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
        found: str = self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return found


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _whole(model: Any, report: Mapping[str, Any], name: str) -> Any:
    bad = {what: sorted(map(str, names)) for what, names in report.items() if names}
    if bad:
        raise CheckpointError(f"transformers did not load it whole: {bad}", where=name)
    return model
