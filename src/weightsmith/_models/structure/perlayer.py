"""What config.json says of each layer, after layers are dropped, repeated or reordered.

**Lists and maps with an entry for each layer** are re-indexed. Five forms:

* a list (or a string such as Nemotron-H's "M-M*") with one entry per layer: `layer_types`, `block_configs`
* a list of layer numbers: `mlp_only_layers`, `cross_attention_layers`; from 0, or from 1 (Kimi-Linear's `kda_layers`)
* a list of the source layer that each layer shares with: `kv_source_layers`
* a map keyed by layer number: `{"0": ..., "1": ...}`
* a backbone's list of stages, starting with the stem: `stage_names`, with `out_features` and `out_indices` selected from it

Length, values and name determine the form of a list. Lists that have the right length by chance (`eos_token_id`,
`mrope_section`, `id2label` of a 12-class, 12-layer model) are excluded by name.

**Numbers that determine the kind of each layer**: `first_k_dense_replace: 3` makes layers 0, 1, 2 dense and the others sparse.
After layers move, either another number works (2 after dropping a dense layer), or a list of the config can express the kinds
(`layer_types`), or the stack is rejected: a dense layer in the middle of a mixture of experts would be built as a sparse one.
A `Rule` gives each layer a kind. The new config is valid if every new layer has the kind of its source.

* Threshold: kind changes once, at the number (`first_k_dense_replace`, `max_window_layers`)
* Tail: the same, counted from the end (`num_kv_shared_layers`)
* Spread: a number of evenly spaced layers of one kind (`aligner_num_add_layers`)
* Last: the last layer always has a fixed kind
* Period: kind depends on the remainder (`sliding_window_pattern`, `full_attention_interval`)
* Cycle: a short list or string repeated over the layers (RecurrentGemma's `block_types`); expanded, it can express any order
* Sparse: decoder_sparse_step with mlp_only_layers; the list can express any order
* Remainder: any other number that looks like a period; every layer must keep its remainder
* Computed: not a number. The model class computes a constant for each layer from its position or from the number of layers
* Root: a number that the model class divides by the square root of the number of layers (MiniCPM's scale_depth)
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.errors import LayerError
from weightsmith._models.structure.configs import EXPERT_COUNTS, finite_number, whole_number, whole_numbers

_NEVER = re.compile(
    r"label|token|architectures|auto_map|factor|section|mean|std|(^|_)(?<!^intermediate_)(size|sizes|stride|strides|kernel|dim|dims)$"
    r"|image|out_features|stage_names|bos|eos|pad_|betas|range|tags|languages|grid|pinpoints|bins|^(conv|upsample|downsample)_|resolution"
    r"|^(time_step_limit|(mlp|ssm)_multipliers)$"
)
_NEVER_MAP = re.compile(r"label|token|task_specific_params|generation_config|auto_map|^rope_(scaling|parameters)$")
_INDICES = re.compile(r"(layers?|idxs?|indices|indexes|layer_ids|block_ids|blocks_enum|layers_enum|block_indices)$")
_TAPS = re.compile(
    r"deepstack|out_indices|intermediate_layers_indices|extract_layers|feature_layers?$|tap_layers|hidden_(layers|state_indices)$"
)
_NOT_INDICES = re.compile(r"_source_layers$|summary|target")
_ALL_LAYERS = re.compile(
    r"(^|[._])per_layer_|_per_layer\.|(^|\.)(contact_head|decoder_order_head|mid_position_embeddings|layer_weights|attn_res)(\.|$)"
)
_FROM_ONE = frozenset({"ple_layer_ids", "cat_hidden_layers"})
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

    1 if its name says so (Qwen4-Exp, Granite Speech Plus), if the list or its siblings contain n, or together are exactly 1..n.

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
    becomes the last copy of its layer. A tap before the first layer stays. Raises LayerError if a tapped layer was dropped.
    """
    if not _TAPS.search(key):
        listed = {v - first for v in value}
        return [new + first for new, old in enumerate(remap.source) if old in listed]
    taps = []
    for v in value:
        copies = remap.copies(v - first) if v >= first else [v - first]
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


# ---- Rules: numbers that determine the kind of each layer, and which stacks they can express


Config = Mapping[str, Any]
Kinds = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """What a number of config.json says of each layer's kind. `old` is the old config, `new` the new one, with lists moved."""

    key: str

    def number(self, old: Config) -> int:
        """The number; 0 if it is missing or no whole number."""
        return whole_number(old.get(self.key)) or 0

    def applies(self, old: Config) -> bool:
        """True if the number is present and has an effect."""
        return self.number(old) > 0

    @abstractmethod
    def kinds(self, old: Config, n_layers: int) -> Kinds:
        """Kind of each layer by the old config."""

    @abstractmethod
    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        """Update `new` for the new stack, whose layers have the kinds `layer_kinds`.

        Returns a note on the change, or None. Raises LayerError.
        """

    def refuse(self, value: Any, layer_kinds: Kinds, names: Mapping[Any, str], why: str) -> LayerError:
        """The error of a stack that the number cannot express. names: of kinds."""
        shown = ", ".join(f"{i}:{names.get(kind, kind)}" for i, kind in enumerate(layer_kinds[:80])) + (
            ", ..." if layer_kinds[80:] else ""
        )
        return LayerError(
            f"{self.key} = {value} of config.json cannot express this stack: {why}",
            details=[f"new layers: {shown}"],
            fix="keep the layers in an order that the model class can build",
        )

    def expand(self, old: Config, new: MutableMapping[str, Any], key: str, values: list[Any]) -> str:
        """Write the kinds as a list, which the model code reads before the number."""
        new[key] = values
        return f"{key}: expanded to {len(values)} layers, because {self.key} = {old[self.key]} cannot express the new order"


def _stated(old: Config, keys: tuple[str, ...]) -> list[str]:
    """The lists that express the same: model code reads them, and they have been moved."""
    return [key for key in keys if old.get(key)]


@dataclass(frozen=True, slots=True)
class Threshold(Rule):
    """Layers below the number have one kind, the others another.

    lists   keys whose presence makes the number redundant
    write   list key and its (below, above) values, for stacks the number cannot express
    active  whether the number has an effect
    below, above  names of the two kinds
    """

    below: str
    above: str
    lists: tuple[str, ...] = ()
    write: tuple[str, str, str] | None = None
    active: Callable[[Config], bool] = field(default=lambda _: True)

    def applies(self, old: Config) -> bool:
        return whole_number(old.get(self.key)) is not None and self.active(old)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(i >= self.number(old) for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        limit, count = self.number(old), layer_kinds.count(False)
        if layer_kinds == self.kinds(old, remap.n_new) and not limit == remap.n_old != remap.n_new:
            return None
        if not any(layer_kinds[:count]):
            new[self.key] = count
            return f"{self.key}: {limit} -> {count}"
        if stated := _stated(old, self.lists):
            return f"{self.key} = {limit} no longer agrees with {' / '.join(stated)}"
        if self.write is not None:
            key, low, high = self.write
            return self.expand(old, new, key, [high if kind else low for kind in layer_kinds])
        names = {False: self.below, True: self.above}
        raise self.refuse(limit, layer_kinds, names, f"the {self.below} layers must come first")


@dataclass(frozen=True, slots=True)
class Tail(Rule):
    """The number counts the last layers, which have another kind."""

    kind: str

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(i >= n_layers - self.number(old) for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        tail, count = self.number(old), layer_kinds.count(True)
        if not all(layer_kinds[remap.n_new - count :]):
            raise self.refuse(tail, layer_kinds, {True: self.kind, False: "other"}, f"{self.kind} layers must come last")
        new[self.key] = count
        return None if count == tail else f"{self.key}: {tail} -> {count}"


@dataclass(frozen=True, slots=True)
class Period(Rule):
    """The kind depends on (i + shift) modulo the number: `hit` if the remainder is 0, else `miss`.

    write  list key that can express the same, and whether it lists the hits instead of one value per layer
    """

    hit: Any
    miss: Any
    shift: int = 1
    lists: tuple[str, ...] = ()
    write: str | None = None
    numbers: bool = False
    active: Callable[[Config], bool] = field(default=lambda _: True)

    def applies(self, old: Config) -> bool:
        return self.number(old) > 0 and self.active(old)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(self.miss if (i + self.shift) % self.number(old) else self.hit for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds == self.kinds(old, remap.n_new):
            return None
        if stated := _stated(old, self.lists):
            said = " / ".join(stated)
            return f"{self.key} = {old[self.key]} no longer agrees with {said}, which has been re-indexed"
        if self.write is not None:
            values = [i for i, kind in enumerate(layer_kinds) if kind == self.hit] if self.numbers else list(layer_kinds)
            return self.expand(old, new, self.write, values)
        raise self.refuse(old[self.key], layer_kinds, {}, "a layer would change its kind")


@dataclass(frozen=True, slots=True)
class Spread(Rule):
    """A number of evenly spaced layers of one kind: `hit` if i + 1 is a multiple of layers // number (Evolla)."""

    hit: str

    def _of(self, number: int, n_layers: int) -> Kinds:
        period = max(n_layers // number, 1)
        return tuple((i + 1) % period == 0 for i in range(n_layers))

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return self._of(self.number(old), n_layers)

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        before = self.number(old)
        for number in (before, *range(1, remap.n_new + 1)):
            if layer_kinds == self._of(number, remap.n_new):
                new[self.key] = number
                return None if number == before else f"{self.key}: {before} -> {number}"
        raise self.refuse(before, layer_kinds, {True: self.hit, False: "other"}, f"{self.hit} layers must be evenly spaced")


@dataclass(frozen=True, slots=True)
class Last(Rule):
    """The model class gives the last layer the kind `kind`, whatever its list says (Gemma 4). markers: keys of such configs."""

    kind: str
    markers: tuple[str, ...]

    def applies(self, old: Config) -> bool:
        kinds = old.get(self.key)
        return isinstance(kinds, list) and self.kind in kinds and any(old.get(marker) for marker in self.markers)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(old[self.key][:n_layers])

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds[-1] != self.kind:
            raise self.refuse("[…]", layer_kinds, {}, f"the last layer must be {self.kind}")
        return None


@dataclass(frozen=True, slots=True)
class PeriodOffset(Rule):
    """Jamba's pairs: `hit` if i % period == offset. Tries other pairs before it raises."""

    offset: str
    hit: str
    lists: tuple[str, ...] = ("layer_types", "layers_block_type")

    def applies(self, old: Config) -> bool:
        return self.number(old) > 0 and whole_number(old.get(self.offset)) is not None

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(i % old[self.key] == old[self.offset] for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds == self.kinds(old, remap.n_new):
            return None
        before = old[self.key], old[self.offset]
        for period, offset in ((p, o) for p in range(1, remap.n_new + 2) for o in range(p)):
            if layer_kinds == tuple(i % period == offset for i in range(remap.n_new)):
                new[self.key], new[self.offset] = period, offset
                return f"{self.key}, {self.offset}: {before[0]}, {before[1]} -> {period}, {offset}"
        if _stated(old, self.lists):
            return f"{self.key} and {self.offset} no longer agree with the list of layer kinds"
        value = f"{before[0]} with {self.offset} = {before[1]}"
        raise self.refuse(value, layer_kinds, {True: self.hit, False: "other"}, f"{self.hit} layers must be evenly spaced")


@dataclass(frozen=True, slots=True)
class SparseStep(Rule):
    """Every `decoder_sparse_step`-th layer has experts unless `mlp_only_layers` names it."""

    key: str = "decoder_sparse_step"

    def applies(self, old: Config) -> bool:
        return self.number(old) > 0 and _has_experts(old)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        step, dense = self.number(old), set(whole_numbers(old.get("mlp_only_layers")))
        return tuple((i + 1) % step == 0 and i not in dense for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds == self.kinds(new, remap.n_new):
            return None
        if "mlp_only_layers" not in old:
            names = {True: "sparse", False: "dense"}
            raise self.refuse(old[self.key], layer_kinds, names, "the config has no mlp_only_layers")
        new[self.key] = 1
        new["mlp_only_layers"] = [i for i, sparse in enumerate(layer_kinds) if not sparse]
        return f"decoder_sparse_step: 1, mlp_only_layers: {new['mlp_only_layers']} (the dense layers of the new stack)"


@dataclass(frozen=True, slots=True)
class MoeSpan(Rule):
    """ERNIE's: experts in layers start..end (-1: the last) where (i + 1) % interval == 0."""

    key: str = "moe_layer_start_index"

    def applies(self, old: Config) -> bool:
        return whole_number(old.get(self.key)) is not None and bool(old.get("moe_num_experts", True))

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        end, step = whole_number(old.get("moe_layer_end_index")), max(whole_number(old.get("moe_layer_interval")) or 1, 1)
        last = n_layers - 1 if end is None or end == -1 else end
        return tuple(old[self.key] <= i <= last and (i + 1) % step == 0 for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds == self.kinds(old, remap.n_new):
            return None
        sparse = [i for i, kind in enumerate(layer_kinds) if kind]
        start, end = (sparse[0], sparse[-1]) if sparse else (remap.n_new, -1)
        changed = {self.key: start, "moe_layer_end_index": end}
        if layer_kinds != self.kinds({**old, **changed}, remap.n_new):
            names = {True: "sparse", False: "dense"}
            raise self.refuse(old[self.key], layer_kinds, names, "the layers with experts have a gap")
        new.update(changed)
        return f"moe_layer_start_index, moe_layer_end_index: {start}, {end}"


@dataclass(frozen=True, slots=True)
class Cycle(Rule):
    """A list or string of kinds repeated over the layers."""

    def applies(self, old: Config) -> bool:
        return isinstance(old.get(self.key), list | str) and len(old[self.key]) > 0

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        cycle = old[self.key]
        return tuple(cycle[i % len(cycle)] for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        cycle = old[self.key]
        if len(cycle) >= remap.n_old or layer_kinds == self.kinds(old, remap.n_new):
            return None  # one entry per layer: already moved as a per-layer list
        new[self.key] = "".join(layer_kinds) if isinstance(cycle, str) else list(layer_kinds)
        return f"{self.key}: expanded to {len(layer_kinds)} layers, because its cycle cannot express the new order"


@dataclass(frozen=True, slots=True)
class Remainder(Rule):
    """A number that looks like a period, with unknown meaning: every layer must keep its remainder."""

    lists: tuple[str, ...] = ("layer_types", "layers_block_type", "mlp_layer_types")

    def applies(self, old: Config) -> bool:
        return self.number(old) > 1 and not _stated(old, self.lists)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return tuple(i % self.number(old) for i in range(n_layers))

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if layer_kinds == self.kinds(old, remap.n_new):
            return None
        why = f"new layer i must come from a layer with the same i modulo {old[self.key]}"
        raise self.refuse(old[self.key], layer_kinds, {}, why)


@dataclass(frozen=True, slots=True)
class Computed(Rule):
    """The model class computes a constant for each layer, which no file holds. A layer that moves would get another one.

    what    the constant
    names   model types and classes that do so; (): models with a true value of the key
    period  positions that differ by a multiple of this have the same constant; 0: the constant depends on the number of layers
    """

    what: str
    names: tuple[str, ...] = ()
    period: int = 0

    def applies(self, old: Config) -> bool:
        if not self.names:
            return bool(old.get(self.key))
        classes = old.get("architectures")
        stated = [old.get("model_type"), *(classes if isinstance(classes, list) else ())]
        return any(name in stated for name in self.names)

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return (None,) * n_layers

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if self.period:
            places = enumerate(remap.source)
            moved = next((new for new, old in places if new != old and (self.period == 1 or (new - old) % self.period)), None)
            why = (
                "" if moved is None else f"layer {remap.source[moved]} would be layer {moved}, and {self.what} follows from it"
            )
            fix = "leave layers in their place" if self.period > 1 else "drop layers only at the end"
        else:
            why = f"{remap.n_new} layers instead of {remap.n_old}, and {self.what} follows from their number"
            why = why if remap.n_new != remap.n_old else ""
            fix = "use as many layers as before"
        if not why:
            return None
        raise LayerError(f"{self.key} = {old.get(self.key)} of config.json cannot express this stack: {why}", fix=fix)


@dataclass(frozen=True, slots=True)
class Root(Rule):
    """The model class divides the number by the square root of the number of layers. The new number keeps the quotient.

    default  the class's value if the key is missing; it counts only for the type `model_type`
    """

    model_type: str
    default: float

    def _number(self, old: Config) -> float:
        missing = self.default if old.get("model_type") == self.model_type else None
        return finite_number(old.get(self.key, missing)) or 0.0

    def applies(self, old: Config) -> bool:
        return self._number(old) != 0

    def kinds(self, old: Config, n_layers: int) -> Kinds:
        return (None,) * n_layers

    def move(self, old: Config, new: MutableMapping[str, Any], remap: Remap, layer_kinds: Kinds) -> str | None:
        if remap.n_new == remap.n_old:
            return None
        new[self.key] = self._number(old) * math.sqrt(remap.n_new / remap.n_old)
        return (
            f"{self.key}: {self._number(old):g} -> {new[self.key]:g}, because it is divided by the root of the number of layers"
        )


def _has_experts(config: Config) -> bool:
    present = [config[key] for key in EXPERT_COUNTS if key in config]
    return not present or any(present)


def _windowed(config: Config) -> bool:
    return config.get("sliding_window", True) is not None


_TYPES = ("layer_types", "layers_block_type", "attention_layers")
_MLP_TYPES = ("mlp_layer_types", "moe_layers")
_HEARING = tuple(f"granite_speech{kind}_encoder" for kind in ("", "5", "_plus"))
"""Encoders of Granite Speech, whose middle layer adds the text that they have recognised so far."""
_DECAYING = tuple(
    "minimax minimax_text_01 minimax_m1 MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM "
    "bailing_moe_linear BailingMoeLinearForCausalLM BailingMoeLinearV2ForCausalLM BailingMoeV2_5ForCausalLM".split()
)
"""Types and classes of MiniMax Text 01 and M1, Ring Linear, Ling and Ring 2.5.

transformers stores the decay, and engines compute it.
"""
_RULES: tuple[Rule, ...] = (
    *(
        Threshold(key, "dense", "sparse", _MLP_TYPES, active=_has_experts)
        for key in ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
    ),
    Threshold("num_hash_layers", "hash-routed", "routed"),
    Threshold("num_first_full_attention_layers", "full attention", "window attention"),
    Threshold(
        "max_window_layers",
        "full attention",
        "sliding attention",
        _TYPES,
        ("layer_types", "full_attention", "sliding_attention"),
        active=lambda c: bool(c.get("use_sliding_window")) and _windowed(c),
    ),
    Tail("num_kv_shared_layers", "KV-sharing"),
    Tail("num_last_full_attention_layers", "full attention"),
    Tail("num_timestamp_prediction_layers", "timestamp"),
    Spread("aligner_num_add_layers", "adapter"),
    Last("layer_types", "full_attention", ("global_head_dim", "per_layer_config")),
    *(
        Period(key, "full_attention", "sliding_attention", 1, _TYPES, "layer_types", active=_windowed)
        for key in ("sliding_window_pattern", "_sliding_window_pattern")
    ),
    Period("window_pattern", "full_attention", "sliding_attention", 0, _TYPES, "layer_types", active=_windowed),
    Period("full_attention_interval", "full_attention", "linear_attention", 1, _TYPES, "layer_types"),
    Period("no_rope_layer_interval", 0, 1, 1, ("no_rope_layers",), "no_rope_layers"),
    Period("interleave_moe_layer_step", "sparse", "dense", 1, ("moe_layers",), "moe_layers", numbers=True),
    PeriodOffset("attn_layer_period", "attn_layer_offset", "attention"),
    PeriodOffset("expert_layer_period", "expert_layer_offset", "expert", ("mlp_layer_types",)),
    Computed("scale_attn_by_inverse_layer_idx", "the scale of its attention", period=1),
    Computed("stagger_local_blocks", "where its blocks begin", period=2),
    Computed("model_type", "lambda_init of its attention", ("diffllama",), 1),
    Computed("model_type", "the scale of its residuals", ("beam",), 1),
    Computed("model_type", "the scale of their results", ("esmc",)),
    Computed("model_type", "the place where recognised text is added", _HEARING),
    Computed("model_type", "whether it adds recognised text", _HEARING, 1),
    Computed("model_type", "the decay of their attention", _DECAYING),
    Computed("model_type", "the decay of its attention", _DECAYING, 1),
    Root("scale_depth", "minicpm3", 1.4),
    SparseStep(),
    MoeSpan(),
    Cycle("block_types"),
    Cycle("sliding_window_pattern"),
)
_KNOWN = re.compile(
    r"^(_?sliding_window_pattern|window_pattern|full_attention_interval|no_rope_layer_interval|"
    r"interleave_moe_layer_step|(attn|expert)_layer_period|decoder_sparse_step|moe_layer_interval)$"
)
_PERIODIC = re.compile(
    r"(layer|attn|attention|moe|expert|block|rope|sparse|cross).*_(interval|period|freq|frequency|every_n_layers|step|"
    r"pattern|group_size)$"
)


def rules_for(old: Config) -> Iterator[Rule]:
    """The rules that apply to this (sub-)config."""
    yield from (rule for rule in _RULES if rule.applies(old))
    for key in old:
        if _PERIODIC.search(key) and not _KNOWN.match(key) and (rule := Remainder(key)).applies(old):
            yield rule
