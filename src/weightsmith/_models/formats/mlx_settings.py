"""The settings of each module of an MLX model: those of the whole model, or its own.

config.json names modules with settings of their own as the program that wrote it does, which may put its model into another
one: `language_model.model.layers.0…` for `model.layers.0…`. Codes of 4 bits in groups of 64 have the shapes of 8 bits in groups
of 32. So settings that belong to no module are an error, and widths are compared with those that must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._models.formats.decoded import QuantisedModel
from weightsmith._models.structure.configs import text_sections, whole_number
from weightsmith._models.structure.projections import GATED, JOINED

_WRAPPERS = ("model", "language_model")
"""Modules that hold the others, in any order and number."""
_VOCABULARY = ("embed_tokens", "lm_head", "wte")
_LAYER_INPUTS = ("qkv", "gate_up")
"""Values of `JOINED` of projections whose input is the hidden state."""
_OTHER_TOWERS = ("vision", "visual", "audio", "speech", "image")
"""Parts of names of modules with hidden states of other sizes."""
_OTHER_WIDTHS = ("attention_hidden_size", "word_embed_proj_dim", "embedding_size", "embedding_dim")
"""Keys of config.json that say that inputs of some modules are not the hidden state, which they then are no check of."""
_DOWN = {down: (gate, up) for gate, up, down in GATED.values()} | {"w2": ("w1", "w3")}
_DEFAULTS: Mapping[str, Any] = {"group_size": 64, "bits": 4}
"""Of MLX's layers, where a module's own settings leave something out."""
_FIX = "Repair the settings of the modules in config.json: mlx_lm.convert and mlx_vlm.convert write them."


def own_settings(model: QuantisedModel) -> dict[str, Mapping[str, Any]]:
    """The settings of modules that have their own. Raises FormatError for settings of no module, and for two of one."""
    modules = {name.rpartition(".")[0] for name in model.specs}
    found: dict[str, Mapping[str, Any]] = {}
    names: dict[str, str] | None = None
    for key, value in model.entry.items():
        if not isinstance(value, Mapping):
            continue
        if key not in modules and names is None:
            names = _unwrapped(modules)
        module = key if key in modules else (names or {}).get(_unwrap(key), "")
        settings = {**_DEFAULTS, **value}
        if module and found.setdefault(module, settings) != settings:
            raise FormatError(f"config.json has two settings of the module {show(module)}", where=model.where, fix=_FIX)
        if not module and not _equal(settings, model.entry):
            what = f"config.json has settings of the module {show(key)}, and the model has no such module"
            raise FormatError(what, where=model.where, fix=_FIX)
    return found


def _equal(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(settings.get(key) == others.get(key) for key in ("group_size", "bits")) and (
        settings.get("mode", "affine") == others.get("mode", "affine")
    )


def _unwrap(name: str) -> str:
    """The name of a module without those that hold the whole model.

    >>> _unwrap("language_model.model.layers.0.mlp"), _unwrap("language_model.lm_head")
    ('layers.0.mlp', 'lm_head')
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _unwrapped(modules: Iterable[str]) -> dict[str, str]:
    """Name without wrappers → module; without names that are those of several modules."""
    found: dict[str, str] = {}
    for module in modules:
        name = _unwrap(module)
        found[name] = "" if name in found else module
    return found


@dataclass(frozen=True, slots=True)
class Width:
    """The shape of a weight as its settings give it.

    name    of the module
    others  the inputs that its codes and scales would have with other settings
    """

    name: str
    outputs: int
    inputs: int
    others: tuple[int, ...]


def check_widths(model: QuantisedModel, widths: Iterable[Width]) -> None:
    """Raise FormatError for a weight that has the right width only with other settings than config.json's."""
    by_name = {width.name: width for width in widths}
    hidden = 0
    if not any(key in model.config for key in _OTHER_WIDTHS) and not any(
        key.endswith("decoder_config") for key in model.config
    ):
        hidden = next((n for part in text_sections(model.config) if (n := whole_number(part.get("hidden_size")))), 0)
    for width in by_name.values():
        for inputs, why in _known_inputs(width.name, by_name, hidden):
            if inputs != width.inputs and inputs in width.others:
                what = f"tensor {show(width.name + '.weight')} has {width.inputs:,} inputs by its settings in config.json"
                raise FormatError(f"{what}, and {why}: the settings are not its own", where=model.where, fix=_FIX)


def _known_inputs(name: str, widths: Mapping[str, Width], hidden: int) -> Iterator[tuple[int, str]]:
    """What is known of a module's inputs from elsewhere, each with the words that say where."""
    parent, _, leaf = name.rpartition(".")
    joined = JOINED.get(leaf, "")
    if hidden and (leaf in _VOCABULARY or joined in _LAYER_INPUTS) and not any(tower in name for tower in _OTHER_TOWERS):
        yield hidden, f"hidden_size is {hidden:,}"
    for other in JOINED if joined else ():
        sibling = widths.get(f"{parent}.{other}")
        if sibling is not None and JOINED[other] == joined:
            yield sibling.inputs, f"{show(sibling.name)} has {sibling.inputs:,}"
    for before in _DOWN.get(leaf, ()):
        if (sibling := widths.get(f"{parent}.{before}")) is not None:
            yield sibling.outputs, f"{show(sibling.name)} has {sibling.outputs:,} outputs"
