"""What router weights are made from: the settings of a `router` product, as records and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightsmith.mixture.routing.gates import MODES
from weightsmith.mixture.routing.prompts import Texts
from weightsmith.plans import Product
from weightsmith.tensors import DTYPES, DType, TensorSpec


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """An expert that gets a row.

    name   of its model, as the recipe has it
    where  position of its entry in the recipe; copies of one entry have the same
    texts  what it is for
    """

    name: str
    where: str
    texts: Texts


@dataclass(frozen=True, slots=True)
class Base:
    """The model that is shown the prompts.

    label   as the user named it
    model   its number in the plan: whose tokenizer is used
    config  its config.json
    prefix  before the layer number: `model.layers.`
    layers  how many
    hidden  size of a hidden state
    """

    label: str
    model: int
    config: Mapping[str, Any]
    prefix: str
    layers: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Gating:
    """What router weights are made from, beside tensors and the tokenizer's files.

    mode           of `gates.MODES`
    experts        that get a row, shared ones last
    routed         experts that tokens are routed to; those after them are shared
    seed           of what is random
    scale          factor on all rows
    sigmoid        the router's scores are sigmoids
    groups         experts that have the same row
    per_token      experts that a token is sent to, before they are cut into groups
    prompt_tokens  of a row of a text file; None: a paragraph is a prompt
    report         where the rows send the prompts is counted
    where          position of the gate mode in the recipe
    packages       versions of the programs that hidden states depend on
    lenient        rows that cannot tell the experts apart are written, with a warning
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
        """The groups of texts of the report: expert, and whether they are its held-out texts."""
        routed = list(enumerate(self.experts[: self.routed]))
        prompts = [(e, False) for e, expert in routed if expert.texts.has_prompts]
        return prompts + [(e, True) for e, expert in routed if expert.texts.has_held_out]

    def to_json(self) -> dict[str, Any]:
        """As the settings of a product."""
        return asdict(self)

    @classmethod
    def of(cls, product: Product) -> Gating:
        """From the settings of a product."""
        data = dict(product.settings)
        experts = tuple(GatedExpert(e["name"], e["where"], Texts(**_tuples(e["texts"]))) for e in data["experts"])
        return cls(**data | {"experts": experts, "base": Base(**data["base"])})


def _tuples(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in texts.items()}


def uses_states(mode: str, *, report: bool) -> bool:
    """The base is run on the prompts: for the rows, or for the report."""
    return MODES[mode].needs in ("entering", "mlp_input") or report


def outs_of(gating: Gating, routers: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The arrays of a router product. routers: the stored tensors of each layer; a report's shares and token counts follow."""
    outs = [spec for layer in routers for spec in layer]
    if gating.report:
        shape = gating.base.layers, len(gating.counted), gating.routed
        outs += [TensorSpec(f"routing: {what}", DTYPES["F64"], shape) for what in ("first", "sent")]
        outs.append(TensorSpec("routing: tokens", DTYPES["I64"], (len(gating.counted),)))
    return tuple(outs)


def router_dtype(product: Product) -> DType:
    """The dtype that the rows are stored in."""
    return product.outs[0].dtype
