"""The `own_text` product: rows of tokens that a model writes by itself, in place of a text.

Each row begins with a start (`starts.py`), and the model continues it until the row is full: tokens are drawn from its
predictions, with random numbers of the row. Statistics are then of what the model would say, without a text of its domain
(Williams and Aletras 2024, self-calibration, https://arxiv.org/abs/2410.17170). Rows are tokens from the beginning: nothing is
decoded, and cut again in another way.

The product does not depend on the number of threads, or on whether the whole model is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.rows import OWN
from weightsmith._activations.work import Work
from weightsmith._base.errors import Finding, PlanError, WeightsmithError
from weightsmith._base.process import memory_bytes
from weightsmith._base.report import Facts
from weightsmith._base.report.blocks import Block
from weightsmith._base.text import count
from weightsmith._engine.products import ProductContext, ProductKind, ProductReport, find_kind
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._plans import Product, TextSource
from weightsmith.abc.product import Arrays

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
    unused_template  as of `Starts`
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
