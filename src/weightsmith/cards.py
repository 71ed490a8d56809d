"""The model card: README.md with the front matter that the hub reads."""

from __future__ import annotations

import re

import yaml

from weightsmith.distance import Moved, to_markdown
from weightsmith.plans import PLAIN, Plan

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


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
    models = "\n".join(f"* {_linked(m.ref)}{f' at {m.revision}' if m.revision else ''}" for m in plan.models)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", plan.recipe)), default=0))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}

{plan.made.title}

{plan.made.source}
{_quantised(plan)}
## Models

{models}

## Recipe

{fence}yaml
{plan.recipe.strip()}
{fence}
{_moved(plan, distance)}{section}"""


def _quantised(plan: Plan) -> str:
    if not plan.encodings:
        return ""
    number = sum(step.encoding != PLAIN for step in plan.steps)
    return f"\nQuantised: {', '.join(plan.encodings)} ({number:,} of {len(plan.steps):,} tensors).\n"


def _moved(plan: Plan, distance: tuple[Moved, ...]) -> str:
    if not distance:
        return ""
    return f"\n## Distance from the base\n\nFrobenius norms of merged - base{plan.made.distance}.\n\n{to_markdown(distance)}\n"


def _is_hub_id(ref: str) -> bool:
    return bool(_HUB_ID.fullmatch(ref)) and not ref.startswith(("./", "../", "~"))


def _linked(ref: str) -> str:
    return f"[{ref}](https://huggingface.co/{ref.split('@')[0]})" if _is_hub_id(ref) else f"`{ref}`"
