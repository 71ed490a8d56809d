"""Re-indexes per-layer lists and maps of config.json after layers are dropped, repeated or reordered.

Five forms:

* a list (or a string such as Nemotron-H's "M-M*") with one entry per layer: `layer_types`, `block_configs`
* a list of layer numbers: `mlp_only_layers`, `cross_attention_layers`; from 0, or from 1 (Kimi-Linear's `kda_layers`)
* a list of the source layer that each layer shares with: `kv_source_layers`
* a map keyed by layer number: `{"0": ..., "1": ...}`

* a backbone's list of stages, starting with the stem: `stage_names`, with `out_features` and `out_indices` selected from it

Length, values and name determine the form of a list. Lists that have the right length by chance (`eos_token_id`,
`mrope_section`, `id2label` of a 12-class, 12-layer model) are excluded by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import LayerError
from weightsmith._models.structure.configs import whole_numbers

_NEVER = re.compile(
    r"label|token|architectures|auto_map|factor|section|mean|std|(^|_)(?<!^intermediate_)(size|sizes|stride|strides|kernel|dim|dims)$"
    r"|image|out_features|stage_names|bos|eos|pad_|betas|range|tags|languages|grid|pinpoints|bins|^(conv|upsample|downsample)_|resolution"
)
_NEVER_MAP = re.compile(r"label|token|task_specific_params|generation_config|auto_map|^rope_(scaling|parameters)$")
_INDICES = re.compile(r"(layers?|idxs?|indices|indexes|layer_ids|block_ids|blocks_enum|layers_enum|block_indices)$")
_TAPS = re.compile(r"deepstack|out_indices|intermediate_layers_indices|extract_layers|feature_layers?$|tap_layers")
_NOT_INDICES = re.compile(r"_source_layers$|summary|target")
_ALL_LAYERS = re.compile(
    r"(^|[._])per_layer_|_per_layer\.|(^|\.)(contact_head|decoder_order_head|mid_position_embeddings|layer_weights|attn_res)(\.|$)"
)
_FROM_ONE = frozenset({"ple_layer_ids"})
_FLAGS = re.compile(r"^no_rope_layers$|_types?$|_freq$")


def has_all_layers(name: str) -> bool:
    """True if the shape of a tensor outside the layers depends on their number, judged by its name.

    >>> has_all_layers("model.embed_tokens_per_layer.weight"), has_all_layers("esm.contact_head.regression.weight")
    (True, True)
    """
    return _ALL_LAYERS.search(name) is not None


@dataclass(frozen=True, slots=True)
class Remap:
    """The source of each layer of the new stack.

    source   for each new layer, the old layer
    n_old    layers of the old stack
    extra    possible numbers of prediction layers after them, which some lists include
    """

    source: tuple[int, ...]
    n_old: int
    extra: frozenset[int] = frozenset()

    @property
    def n_new(self) -> int:
        """Layers of the new stack."""
        return len(self.source)

    def copies(self, layer: int) -> list[int]:
        """The new layers that come from an old one."""
        return [new for new, old in enumerate(self.source) if old == layer]

    def moved(self, values: Sequence[Any]) -> list[Any]:
        """A per-layer sequence for the new stack; entries of extra layers stay at the end."""
        return [values[i] for i in self.source] + list(values[self.n_old :])


def _is_ints(value: Any) -> bool:
    return isinstance(value, list) and len(whole_numbers(value)) == len(value)


def is_per_layer(key: str, value: Any, remap: Remap) -> bool:
    """True for a list or string with one entry per layer."""
    if isinstance(value, str):
        return key.endswith("pattern") and len(value) == remap.n_old > 1
    if not isinstance(value, list) or _NEVER.search(key):
        return False
    if key == "attn_layers" and len(value) > remap.n_old:  # Reformer's
        return True
    if len(value) != remap.n_old and len(value) - remap.n_old not in remap.extra:
        return False
    return not is_indices(key, value, remap)


def is_indices(key: str, value: Any, remap: Remap) -> bool:
    """True for a list of layer numbers.

    An ambiguous list (n distinct ints below n) holds layer numbers unless its name suggests flags. Some
    numbers may exceed the stack, because a config may keep the numbers of dropped layers.
    """
    if not _is_ints(value) or not (_INDICES.search(key) or _TAPS.search(key)) or _NOT_INDICES.search(key):
        return False
    distinct = len(set(value)) == len(value)
    inside = all(v >= 0 for v in value) and (not value or min(value) <= remap.n_old)
    return distinct and inside and not (_FLAGS.search(key) and len(value) == remap.n_old)


def first_number(key: str, value: Sequence[int], siblings: Mapping[str, Any], n_old: int) -> int:
    """Whether a list of layer numbers counts from 0 or from 1.

    1 if its name says so (Qwen4-Exp), if the list or its siblings contain n, or together are exactly 1..n.

    >>> first_number("ple_layer_ids", [1], {}, 4), first_number("mlp_only_layers", [1], {}, 4)
    (1, 0)
    """
    if key in _FROM_ONE:
        return 1
    lists = [v for k, v in siblings.items() if _INDICES.search(k) and _is_ints(v) and v]
    together = sorted(v for part in lists for v in part)
    if max(value, default=0) == n_old or together == list(range(1, n_old + 1)):
        return 1
    return 0


def move_indices(key: str, value: Sequence[int], remap: Remap, first: int) -> list[int]:
    """A list of layer numbers for the new stack. `first` is the number of the first layer.

    A list of taps (layers whose output is used elsewhere, `deepstack_visual_indexes`) keeps its length: each entry
    becomes the last copy of its layer. Raises LayerError if a tapped layer was dropped.
    """
    if not _TAPS.search(key):
        listed = {v - first for v in value}
        return [new + first for new, old in enumerate(remap.source) if old in listed]
    taps = []
    for v in value:
        copies = remap.copies(v - first)
        if not copies:
            raise LayerError(
                f"{key} of config.json uses the output of layer {v - first}, which the new stack does not have",
                fix="keep that layer",
            )
        taps.append(copies[-1] + first)
    return taps


def is_stages(config: Mapping[str, Any], remap: Remap) -> bool:
    """True for a backbone's section whose stages are its layers: `stage_names` is stem, stage1, stage2, …"""
    stages, features = _stage_names(remap.n_old), config.get("out_features")
    if "stage_names" in config:
        return bool(config["stage_names"] == stages)
    return isinstance(features, list) and bool(features) and all(feature in stages for feature in features)


def move_stages(config: Mapping[str, Any], remap: Remap) -> dict[str, Any]:
    """`stage_names`, `out_features` and `out_indices` of such a section for the new stack, if present.

    Each output stage becomes the last copy of its layer; if only the last stage is output, it stays the last. Raises
    LayerError if the layer of an output stage was dropped.
    """
    names, new_names = _stage_names(remap.n_old), _stage_names(remap.n_new)
    features, numbers = config.get("out_features"), config.get("out_indices")
    if not features and not numbers:
        taps = []
    else:
        taps = [names.index(f) for f in features] if features else [n % len(names) for n in whole_numbers(numbers)]
    if taps == [remap.n_old]:
        taps = [remap.n_new]
    else:
        taps = [0 if tap == 0 else move_indices("out_indices", [tap], remap, 1)[0] for tap in taps]
    moved: dict[str, Any] = {"stage_names": new_names} if config.get("stage_names") else {}
    if features:
        moved["out_features"] = [new_names[tap] for tap in taps]
    if numbers:
        moved["out_indices"] = taps
    return moved


def _stage_names(n_layers: int) -> list[str]:
    return ["stem", *(f"stage{i}" for i in range(1, n_layers + 1))]


def move_sources(key: str, value: Sequence[int], remap: Remap) -> list[int]:
    """A list with the source layer of each layer. Raises LayerError if a source does not come before its layer."""
    moved = []
    for new, old in enumerate(remap.source):
        lenders = [n for n in range(new + 1) if remap.source[n] == value[old]]
        if not lenders:
            raise LayerError(
                f"{key} of config.json: layer {old} depends on layer {value[old]}, which does not come before it in "
                f"the new stack (new layer {new})",
                fix=f"keep layer {value[old]} before layer {old}",
            )
        moved.append(new if value[old] == old else lenders[-1])
    return moved


def move_map(key: str, value: Mapping[str, Any], remap: Remap) -> dict[str, Any] | None:
    """A map keyed by layer number for the new stack; None if the keys are not layer numbers."""
    if not value or _NEVER_MAP.search(key) or not all(re.fullmatch(r"[0-9]{1,9}", str(k)) for k in value):
        return None
    keys = {int(k) for k in value}
    if max(keys) >= remap.n_old or not (len(keys) == remap.n_old or "layer" in key or "block" in key):
        return None
    by_int = {int(k): v for k, v in value.items()}
    padded = any(len(str(k)) > 1 and str(k)[0] == "0" for k in value)  # transformers pads them so that they sort as text
    width = len(str(remap.n_new - 1)) if padded else 1
    return {f"{new:0{width}}": by_int[old] for new, old in enumerate(remap.source) if old in by_int}


def move_names(values: Sequence[Any], prefix: str, remap: Remap) -> list[Any]:
    """A list of tensor or module names, with each layer's entries repeated for its copies.

    >>> move_names(["lm_head", "model.layers.2.mlp"], "model.layers.", Remap((0, 2, 2), 3))
    ['lm_head', 'model.layers.1.mlp', 'model.layers.2.mlp']
    """
    moved: list[Any] = []
    for value in values:
        match = re.match(re.escape(prefix) + r"(\d{1,9})(?=\.|$)", value) if isinstance(value, str) else None
        if match is None or int(match[1]) >= remap.n_old:
            moved.append(value)
        else:
            copies = remap.copies(int(match[1]))
            moved += [f"{prefix}{new}{value[match.end() :]}" for new in copies]
    return moved
