"""Models that hold an adapter which was never merged: saved while PEFT had wrapped their modules.

The weights of a wrapped module are in `….base_layer.weight`, its factors in `….lora_A.default.weight` beside it. Such a model
is read as its base with the adapter applied. What the factors are multiplied with is not in the file: an adapter_config.json
beside the weights says it, or the model is refused.

Files of factors alone are no models, and are refused here: factors are never averaged or converted as weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.files import exists, show
from weightsmith._base.strict_json import read_object
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.lora.adapter import CONFIG_NAME, MAX_CONFIG_BYTES, PREFIX, sort_tensors
from weightsmith._models.lora.apply import apply_adapter
from weightsmith._models.lora.forms import BASE_LAYER, DORA, Factored, find_factors, other_kind, split_factor, unnamed
from weightsmith._models.lora.keys import check_config
from weightsmith._models.sources.selected import Selected

_SAVED, _REPLACED = ".modules_to_save.default.", ".original_module."
_MERGE_FIRST = "merge the adapter first, with the program that saved it: PEFT's merge_and_unload, then save_pretrained"
_REPAIR = "Repair it, or copy it again from the adapter that was trained."


def with_inner_adapter(checkpoint: Checkpoint, names: Callable[[Checkpoint], Mapping[str, str]]) -> Checkpoint:
    """The model itself; if it holds an adapter, its base with that applied. Closing it closes the model.

    names  asks transformers for the names of a model's tensors; see `apply_adapter`

    Raises Unsupported for what is an adapter alone, and for one whose scale is not known.
    """
    factored = find_factors(checkpoint.specs)
    if not factored or _is_its_own(factored, checkpoint):
        return checkpoint
    if problem := refusal(factored, checkpoint.specs, checkpoint.ref):
        raise problem
    path = checkpoint.folder / CONFIG_NAME
    if checkpoint.alone or not exists(path):
        what = f"it holds an adapter that was never merged, and lora_alpha / r, which is part of it, is in no file: {factored}"
        fix = f"put the adapter's {CONFIG_NAME} into the folder of the weights and name the folder, or {_MERGE_FIRST}"
        raise Unsupported(what, where=checkpoint.ref, fix=fix)
    config = read_object(path, MAX_CONFIG_BYTES, CONFIG_NAME, _REPAIR)
    check_config(config, str(path))
    base, adapter = _split(checkpoint)
    inner = sort_tensors(Checkpoint(checkpoint.ref, adapter, ModelFolder(path.parent, config=config)), config)
    model = apply_adapter(base, inner, checkpoint.ref, lambda: names(base))
    what = f"it holds an adapter that was never merged, and is read with it applied: {factored}"
    model.notes = (*model.notes, Finding(what, checkpoint.ref))
    return model


def refusal(factored: Factored, names: Container[str], where: str) -> Unsupported | None:
    """The error for tensors that are no model, or that do more than LoRA; None for a model with an adapter in it."""
    if others := [kind for kind in factored.kinds if kind != DORA]:
        return Unsupported(f"it holds an adapter that is {' and '.join(others)}, not plain LoRA", where=where, fix=_MERGE_FIRST)
    if len(factored.adapters) > 1:
        titles = [name or "default" for name in factored.adapters]
        what = f"it holds {count(len(titles), 'adapter')} that were never merged: {', '.join(map(show, titles))}"
        return Unsupported(what, where=where, fix=_MERGE_FIRST)
    if not factored.modules:
        what = f"it was saved with an adapter, whose factors are not in it: {factored}"
        fix = "save the model again with merge_and_unload, or, without the adapter, with unload"
        return Unsupported(what, where=where, fix=fix)
    if not factored.layers and not factored.has_base_in(names):
        what = f"an adapter (LoRA), not a model: {factored}"
        fix = f"write its base in front of it, BASE+{where}; to merge adapters, all models of the recipe must be adapters"
        return Unsupported(what, where=where, fix=fix)
    return None


_PARAMETRIZED = ".parametrizations."
"""In names of what torch computes a weight from: jina-embeddings-v3 adds its factors itself."""


def _is_its_own(factored: Factored, checkpoint: Checkpoint) -> bool:
    """Whether the adapters belong to the architecture: config.json describes them, and the model chooses among them at work."""
    if factored.modules and not factored.kinds and all(_PARAMETRIZED in module for module in factored.modules):
        return True
    config = checkpoint.config or {}
    described = bool(factored.adapters) and all(isinstance(config.get(f"{name}_lora"), Mapping) for name in factored.adapters)
    return described and not factored.kinds


def _split(checkpoint: Checkpoint) -> tuple[Checkpoint, Selected]:
    """The model without its adapter, and the adapter's tensors."""
    base: dict[str, str] = {}
    factors: dict[str, str] = {}
    prefix = PREFIX if all(name.startswith(PREFIX) for name in checkpoint.specs) else ""
    for name in checkpoint.specs:
        plain = unnamed(name.removeprefix(prefix))
        if split_factor(plain) or other_kind(plain) or _SAVED in plain:
            factors[plain] = name
            continue
        key = plain.replace(BASE_LAYER, ".").replace(_REPLACED, ".")
        if key in base or ".lora_" in key:
            what = "two tensors of it are one of the base" if key in base else "a tensor of its adapter is not understood"
            raise Unsupported(what, where=checkpoint.ref, details=[show(name)], fix=_MERGE_FIRST)
        base[key] = name
    model = Checkpoint(
        checkpoint.ref,
        Selected(checkpoint.source, base, checkpoint.ref),
        ModelFolder(
            checkpoint.folder,
            checkpoint.revision,
            checkpoint.config,
            checkpoint.files,
            tuple(name for name in checkpoint.left_out if name != CONFIG_NAME),
            checkpoint.ignored,
            repositories=checkpoint.repositories,
        ),
        metadata=checkpoint.metadata,
        notes=checkpoint.notes,
        decoded=checkpoint.decoded,
    )
    return model, Selected(checkpoint.source, factors, checkpoint.ref)
