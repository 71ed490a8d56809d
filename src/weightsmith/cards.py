"""The model card: README.md with the front matter that the hub reads."""

from __future__ import annotations

import re

import yaml

from weightsmith import methods
from weightsmith._version import __version__
from weightsmith.distance import Moved, to_markdown
from weightsmith.planner.steps import COMPUTED, MERGED_EXPERTS, MOE, PRUNED, Plan

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


_SURGERY = {
    PRUNED: ("Mixture of experts from which experts were left out", "What is left is as it was; it was not trained since."),
    MERGED_EXPERTS: ("Mixture of experts of which some were averaged into one", "The result was not trained since."),
}
"""Plan method → what was done, and what to know of it."""


def model_card(plan: Plan, name: str, distance: tuple[Moved, ...] = (), section: str = "") -> str:
    """The card of a merged model: tags, inputs, method, the recipe word for word, and how far it is from its base.

    name      of the model, as its title
    distance  the whole first, then layer by layer; () when it has no base
    section   more, in Markdown; "" for nothing
    """
    hub_ids = [part.split("@")[0] for m in plan.models for part in m.ref.split("+") if _is_hub_id(part)]
    front: dict[str, object] = {"library_name": "transformers", "tags": ["merge", "weightsmith"]}
    if hub_ids:
        front = {"base_model": list(dict.fromkeys(hub_ids)), "base_model_relation": "merge", **front}
    made, source = _made(plan)
    models = "\n".join(
        f"* {_linked(m.ref)}{f' at {m.revision}' if m.revision else ''}" for m in plan.models if m.ref != COMPUTED
    )
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", plan.recipe)), default=0))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}

{made}

{source}

## Models

{models}

## Recipe

{fence}yaml
{plan.recipe.strip()}
{fence}
{_moved(plan, distance)}{section}"""


def _made(plan: Plan) -> tuple[str, str]:
    """How the model was made, and where that comes from."""
    if plan.method == MOE:
        name = (plan.config or {}).get("model_type", "")
        what = f"Mixture of experts ({name}) made of dense models with weightsmith {__version__}."
        seed = f"\n\nRandom numbers follow from seed {plan.seed}." if plan.seed else ""
        return what, f"Its router was not trained: train it on text like that which the experts are for.{seed}"
    if plan.method in _SURGERY:
        what, source = _SURGERY[plan.method]
        return f"{what} with weightsmith {__version__}.", source
    method = methods.get(plan.method)
    return f"Merged with weightsmith {__version__}, method `{method.name}` ({method.title}).", method.source


def _moved(plan: Plan, distance: tuple[Moved, ...]) -> str:
    if not distance:
        return ""
    of = ", over the tensors that a merge made on the way and that merge's base" if plan.method == MOE else ""
    return f"\n## Distance from the base\n\nFrobenius norms of merged - base{of}.\n\n{to_markdown(distance)}\n"


def _is_hub_id(ref: str) -> bool:
    return bool(_HUB_ID.fullmatch(ref)) and not ref.startswith(("./", "../", "~"))


def _linked(ref: str) -> str:
    return f"[{ref}](https://huggingface.co/{ref.split('@')[0]})" if _is_hub_id(ref) else f"`{ref}`"
