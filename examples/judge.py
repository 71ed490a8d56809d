"""What transformers thinks of a checkpoint: does it load whole, what does it write, how well does it predict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._reports.judge import Judge

DOMAINS = ("fr", "de", "py", "en")


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
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Load `folder` on the CPU and try it on `texts`/{fr,de,py,en}.txt, or some of these domains.

    rows    of 384 tokens taken from the beginning of each text; None: all
    prompt  gets a greedy continuation of `new_tokens` tokens
    told    called with how much is done, and of how much: the model loaded, each text read, the prompt continued

    Raises CheckpointError if a tensor is missing, unexpected or of another shape than config.json says.
    """
    total = len(domains) + 2
    told(0, total)
    model = Judge.of_folder(folder)
    perplexity = {}
    for domain in domains:
        told(1 + len(perplexity), total)
        perplexity[domain] = model.perplexity((texts / f"{domain}.txt").read_text(encoding="utf-8"), rows)
    told(total - 1, total)
    verdict = Verdict(model.model.config.num_hidden_layers, perplexity, model.continuation(prompt, new_tokens))
    told(total, total)
    return verdict


def routing(folder: Path, texts: Path, rows: int | None = None) -> dict[str, list[float]]:
    """For each text the share of router weight that each expert gets, over all layers and tokens; the shares sum to 1.

    Taken from the routers themselves while the mixture of experts in `folder` reads `texts`/{fr,de,py,en}.txt.
    """
    import torch

    judged = Judge.of_folder(folder)
    routers = [module for name, module in judged.model.named_modules() if type(module).__name__.endswith("Router")]
    by_domain: dict[str, list[float]] = {}
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
            for row in judged.rows((texts / f"{domain}.txt").read_text(encoding="utf-8"), rows):
                judged.model(input_ids=row[None])
            by_domain[domain] = (total / total.sum()).tolist()
    return by_domain
