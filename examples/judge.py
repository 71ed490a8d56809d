"""What transformers thinks of a checkpoint: does it load whole, what does it write, how well does it predict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOMAINS = ("fr", "de", "py", "en")
ROW_TOKENS = 384


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one model did.

    layers        decoder layers
    perplexity    domain -> perplexity on its held-out text
    continuation  greedy, of the prompt that all models get
    """

    layers: int
    perplexity: dict[str, float]
    continuation: str

    @property
    def mean(self) -> float:
        """Geometric mean of the perplexities."""
        return math.exp(sum(map(math.log, self.perplexity.values())) / len(self.perplexity))


def judge(
    folder: Path,
    texts: Path,
    prompt: str,
    rows: int | None = None,
    new_tokens: int = 32,
    domains: tuple[str, ...] = DOMAINS,
) -> Verdict:
    """Load `folder` on the CPU and try it on `texts`/{fr,de,py,en}.txt, or some of these domains.

    The weights are taken as they are stored and computed with in float32: many CPUs have no bf16 arithmetic and take
    ten times as long to imitate it, and the perplexities differ by some tenths of a percent at most.

    rows    of 384 tokens taken from the beginning of each text; None: all
    prompt  gets a greedy continuation of `new_tokens` tokens

    Raises SystemExit if a tensor is missing, unexpected or of another shape than config.json says.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    bad = {what: sorted(map(str, names)) for what, names in report.items() if names}
    if bad:
        raise SystemExit(f"{folder}: transformers did not load it whole: {bad}")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    with torch.inference_mode():
        perplexity = {domain: _perplexity(model, tokenizer, texts / f"{domain}.txt", rows) for domain in domains}
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    continuation = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return Verdict(model.config.num_hidden_layers, perplexity, continuation)


def routing(folder: Path, texts: Path, rows: int | None = None) -> dict[str, list[float]]:
    """For each text the share of router weight that each expert gets, over all layers and tokens; the shares sum to 1.

    Taken from the routers themselves while the mixture of experts in `folder` reads `texts`/{fr,de,py,en}.txt.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    routers = [module for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    found: dict[str, list[float]] = {}
    total = torch.zeros(0)

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal total
        logits, weights, chosen = output
        total = total if len(total) else torch.zeros(logits.shape[-1])
        total.index_add_(0, chosen.reshape(-1), weights.reshape(-1).float())

    for router in routers:
        router.register_forward_hook(note)
    with torch.inference_mode():
        for domain in DOMAINS:
            total = torch.zeros(0)
            for row in _rows(tokenizer, texts / f"{domain}.txt", rows):
                model(input_ids=row[None])
            found[domain] = (total / total.sum()).tolist()
    return found


def _rows(tokenizer: Any, text: Path, max_rows: int | None) -> Any:
    """The text as rows of 384 tokens; what is left over at the end is dropped."""
    import torch

    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS]).view(-1, ROW_TOKENS)[:max_rows]


def _perplexity(model: Any, tokenizer: Any, text: Path, max_rows: int | None) -> float:
    """exp of the mean cross-entropy over the rows."""
    rows = _rows(tokenizer, text, max_rows)
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    return math.exp(sum(losses) / len(losses))
