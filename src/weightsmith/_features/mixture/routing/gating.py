"""The settings of a `router` product, as records and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsmith._activations.decoder import Base
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._features.mixture.routing.gates import MODES
from weightsmith._features.mixture.routing.prompts import Texts
from weightsmith._plans import Product
from weightsmith._plans.forms import ProductSettings


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """An expert with a router row.

    name   of its model, as in the recipe
    where  position of its entry in the recipe; copies of an entry share it
    texts  its prompts and held-out texts
    """

    name: str
    where: str
    texts: Texts


@dataclass(frozen=True, slots=True)
class Gating(ProductSettings):
    """What router weights depend on, besides tensors and the tokenizer's files.

    mode           a key of `gates.MODES`
    experts        experts with a row, shared ones last
    routed         number of routed experts; the rest are shared
    seed           random seed
    scale          factor on all rows
    sigmoid        whether the router's scores are sigmoids
    groups         number of experts that share a row
    per_token      experts per token, before virtual groups
    prompt_tokens  tokens per row of a text file; None: one prompt per paragraph
    report         whether to report where the rows route the prompts
    where          position of the gate mode in the recipe
    packages       versions of the packages that hidden states depend on
    lenient        warn about rows that cannot distinguish the experts, instead of raising
    """

    mode: str
    experts: tuple[GatedExpert, ...]
    routed: int
    base: Base
    seed: int
    scale: float
    sigmoid: bool
    groups: int
    per_token: int
    prompt_tokens: int | None
    report: bool
    where: str
    packages: Mapping[str, str]
    lenient: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts, hidden."""
        return self.base.layers, len(self.experts), self.base.hidden

    @property
    def counted(self) -> list[tuple[int, bool]]:
        """The report's groups of texts: expert, and whether these are its held-out texts."""
        routed = list(enumerate(self.experts[: self.routed]))
        prompts = [(e, False) for e, expert in routed if expert.texts.has_prompts]
        return prompts + [(e, True) for e, expert in routed if expert.texts.has_held_out]


def uses_states(mode: str, *, report: bool) -> bool:
    """Whether the base must run on the prompts, for the rows or for the report."""
    return MODES[mode].needs in ("entering", "mlp_input") or report


def outs_of(gating: Gating, routers: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The arrays of a router product: the stored tensors of each layer (routers), then the report's shares and counts."""
    outs = [spec for layer in routers for spec in layer]
    if gating.report:
        shape = gating.base.layers, len(gating.counted), gating.routed
        outs += [TensorSpec(f"routing: {what}", DTYPES["F64"], shape) for what in ("first", "sent")]
        outs.append(TensorSpec("routing: tokens", DTYPES["I64"], (len(gating.counted),)))
    return tuple(outs)


def router_dtype(product: Product) -> DType:
    """The dtype of the stored rows."""
    return product.outs[0].dtype
