"""Updates config.json after layers are dropped, repeated or reordered.

Sets every key that holds the layer count, re-indexes per-layer lists and maps, and checks and, if possible, rewrites numbers
that imply a layer's kind (`perlayer.py`). Finally compares with the tensors: if layers differ, the new config
must imply at each position the kind of layer that is placed there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from weightsmith._base.errors import LayerError, UnknownName, nearest
from weightsmith._models.structure.configs import MAX_DEPTH, Path, section_at, sections, whole_number, whole_numbers
from weightsmith._models.structure.model import Structure
from weightsmith._models.structure.perlayer import (
    Remap,
    first_number,
    has_all_layers,
    is_indices,
    is_per_layer,
    is_stages,
    move_indices,
    move_map,
    move_names,
    move_sources,
    move_stages,
    rules_for,
)
from weightsmith._models.structure.stacks import INDEX, TOWERS, Stack, find_counts, is_count_key, multiples, words

Place = Callable[[int, int], Hashable]
"""What counts of the position of a layer, given that and the number of layers."""

Explained = list[tuple[Hashable, ...]]
"""Kinds of the old layers, one tuple per list or number of the config that distinguishes layers."""


def resize_config(
    config: Mapping[str, Any], structure: Structure, layers: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of a model whose stacks consist of other layers of the same model, and notes on the changes.

    config     the donor's config.json; not modified
    structure  the donor's structure
    layers     for each changed stack, by prefix, the donor's layer number of each new layer

    Raises LayerError if no config can express the stack, UnknownName for an unknown prefix.

    >>> from weightsmith._models.structure import analyse
    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> config = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    >>> specs = [TensorSpec(f"model.layers.{i}.mlp.w.weight", DTYPES["F32"], (2, 2)) for i in range(2)]
    >>> resize_config(config, analyse(specs, config), {"model.layers.": [0, 1, 1]})[0]
    {'num_hidden_layers': 3, 'layer_types': ['sliding_attention', 'full_attention', 'full_attention']}
    """
    new, notes = copy.deepcopy(dict(config)), []
    by_prefix = {stack.prefix: stack for stack in structure.stacks}
    for prefix, source in layers.items():
        stack = by_prefix.get(prefix)
        if stack is None:
            raise UnknownName(f"the model has no layers named {prefix!r}{nearest(prefix, by_prefix)}")
        remap = Remap(tuple(source), stack.n_layers, _extra_counts(config, stack))
        if remap.source == tuple(range(stack.n_layers)):
            continue
        _check_source(stack, remap)
        _check_siblings(structure, stack, layers)
        _check_outside(structure, stack)
        _check_taps(config, stack, remap)
        _check_owner(config, structure, stack)
        if prefix in structure.tapered:
            raise _immovable(f"the layers of {prefix} have different widths, so they cannot be dropped, repeated or moved")
        notes += _Resize(config, new, structure, stack, remap).run()
    return new, tuple(dict.fromkeys(notes))


def stated_kinds(config: Mapping[str, Any], structure: Structure, stack: Stack) -> list[Hashable]:
    """What lists and numbers of config.json say of each layer of a stack; equal for layers of which they say the same."""
    unmoved = Remap(tuple(range(stack.n_layers)), stack.n_layers, _extra_counts(config, stack))
    resize = _Resize(config, copy.deepcopy(dict(config)), structure, stack, unmoved)
    with contextlib.suppress(LayerError):  # of a config that contradicts itself
        resize.move_settings()
    return resize.stated()


def follows(kinds: Sequence[Hashable], stated: Sequence[Hashable]) -> bool:
    """Whether the kinds of layers follow from what config.json states (`stated_kinds`), or from their positions alone."""
    unsaid = [()] * len(kinds)
    return any(_expected(kinds, stated, place) is not None for place in _PLACES) or any(
        _expected(kinds, unsaid, place) is not None for place in _remainders(len(kinds))
    )


def _expected(kinds: Sequence[Hashable], stated: Sequence[Hashable], place: Place) -> dict[Hashable, Hashable] | None:
    """The kind for each (what is stated, place); None if layers with the same are of different kinds."""
    expected: dict[Hashable, Hashable] = {}
    keys = [(said, place(i, len(kinds))) for i, said in enumerate(stated)]
    same = all(expected.setdefault(key, kind) == kind for key, kind in zip(keys, kinds, strict=True))
    return expected if same else None


def _immovable(what: str) -> LayerError:
    return LayerError(what, fix="use the whole stack, in order")


def _extra_counts(config: Mapping[str, Any], stack: Stack) -> frozenset[int]:
    """Possible numbers of prediction layers: those found, and those in config.json (often not published)."""
    home = stack.section(config)
    said = (home.get(key) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    return frozenset({stack.n_extra, *(n for n in map(whole_number, said) if n is not None)})


def _check_source(stack: Stack, remap: Remap) -> None:
    if not remap.source:
        raise LayerError(f"{stack.prefix} would have no layers", fix="keep at least one layer")
    wrong = [i for i in remap.source if not 0 <= i < stack.n_layers]
    if wrong:
        raise LayerError(f"{stack.prefix} has layers 0 to {stack.n_layers - 1}, not {wrong[0]}", fix="correct layer_range")
    if stack.config_path is None:
        raise _immovable(
            f"no key of config.json holds the layer count of {stack.prefix} ({stack.n_layers}), so it cannot be changed"
        )


def _check_siblings(structure: Structure, stack: Stack, layers: Mapping[str, Sequence[int]]) -> None:
    """Stacks counted by one key (XLM's attentions and ffns) must change together."""
    mine = tuple(layers[stack.prefix])
    for other in structure.stacks:
        if other is not stack and other.config_path == stack.config_path and other.n_layers == stack.n_layers:
            if tuple(layers.get(other.prefix, range(other.n_layers))) != mine:
                raise LayerError(
                    f"{stack.prefix} and {other.prefix} share {'.'.join(stack.config_path or ())} of config.json",
                    fix="use the same layers of both",
                )


def _check_owner(config: Mapping[str, Any], structure: Structure, stack: Stack) -> None:
    """Raise if a section of no other stack counts as many layers as an encoder, because it may be the encoder's."""
    owned = {path[:-1] for other in structure.stacks for path in other.config_paths}
    for count in find_counts(config) if stack.kind == "encoder" else ():
        if count.path[:-1] and count.path[:-1] not in owned and count.value == stack.n_layers + stack.n_extra:
            raise _immovable(
                f"{'.'.join(stack.config_path or ())} and {'.'.join(count.path)} of config.json may both be the number of "
                f"layers of {stack.prefix}, so it cannot be changed"
            )


def _check_taps(config: Mapping[str, Any], stack: Stack, remap: Remap) -> None:
    """Layers that another section of config.json names by number must stay where they are."""
    homes = {path[:-1] for path in stack.config_paths}
    for path, section in sections(config):
        for key, value in section.items() if path not in homes else ():
            last = min(_last_named(stack, key, value), remap.n_old - 1)  # some count from 0, some from the embedding
            if last >= 0 and remap.source[: last + 1] != tuple(range(last + 1)):
                which = f"layer {last}" if last == 0 else f"layers 0 to {last}"
                raise LayerError(
                    f"{'.'.join((*path, key))} of config.json names layers of {stack.prefix} by their numbers, up to {last}, "
                    "and the new stack does not have them in their place",
                    fix=f"keep {which} as {'it is' if last == 0 else 'they are'}",
                )


def _last_named(stack: Stack, key: str, value: Any) -> int:
    """The last layer of a stack that a key of another section names; -1 if it names none."""
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []
    if stack.kind in TOWERS:  # whose outputs are used (Molmo 2, Granite 4 Vision)
        if key == "deepstack_layer_map" and pairs:
            return stack.n_layers  # any: some numbers count from the end
        return max(whole_numbers(value), default=-1) if key.endswith(("feature_layer", "feature_layers")) else -1
    if stack.kind != "decoder":
        return -1
    if key == "deepstack_visual_indexes":  # Qwen3-VL adds one after another to the outputs of its first layers
        return len(whole_numbers(value)) - 1
    if key in ("deepstack_layer_map", "spatial_target_layers"):  # inputs of layers (Granite 4 Vision)
        return max(whole_numbers([pair[1] for pair in pairs] or value), default=-1)
    if key == "accept_hidden_layer" and "thinker" in words(stack.prefix):  # the layer whose output Qwen3-Omni's talker reads
        return whole_number(value) or 0
    return -1


def _check_outside(structure: Structure, stack: Stack) -> None:
    """Raise for tensors outside the layers with a part for each layer (Gemma 3n's second embedding)."""
    for name in structure.modules.get(stack.module, ()):
        if has_all_layers(name) and structure.locate(name) is None:
            raise _immovable(
                f"{name} has a part for each layer of {stack.prefix}, so layers cannot be dropped, repeated or moved"
            )


LAYERS_UNSPECIFIED = "but config.json does not say which layers use it"
"""Marks a note on what the new config may not express. All other notes are changes."""


_ENCODER_KEYS = ("attention_window", "stagger_local_blocks")
"""Keys that describe the encoder alone, not the decoder beside it: local attention of LED and PEGASUS-X."""


class _Resize:
    """The change of one stack: `old` and `new` are whole configs, `new` is edited in place."""

    def __init__(self, old: Mapping[str, Any], new: dict[str, Any], structure: Structure, stack: Stack, remap: Remap) -> None:
        self.old, self.new, self.structure, self.stack, self.remap = old, new, structure, stack, remap
        self.notes: list[str] = []
        self.explained: Explained = []
        self.parts = {word for other in structure.stacks for word in words(other.prefix)}
        # Sub-configs of other stacks are excluded.
        self.foreign = {
            path[:-1] for other in structure.stacks for path in other.config_paths if path not in stack.config_paths
        }

    def run(self) -> list[str]:
        self.move_settings()
        for path in self.stack.config_paths:
            home = section_at(self.new, path[:-1])
            if not isinstance(home[path[-1]], int):
                continue  # a list whose length is the count: already moved
            home[path[-1]] = self.remap.n_new
            if self.remap.n_new != self.remap.n_old:
                self.notes.append(f"{'.'.join(path)}: {self.remap.n_old} -> {self.remap.n_new}")
        self._move_multiples()
        self._check_tensors()
        return self.notes

    def move_settings(self) -> None:
        """Move what describes single layers: lists, maps and numbers."""
        for path in dict.fromkeys(path[:-1] for path in self.stack.config_paths):
            old, new = section_at(self.old, path), section_at(self.new, path)
            self._walk(old, new, path)
            for rule in rules_for({key: value for key, value in old.items() if self._is_mine(key, path)}):
                kinds = rule.kinds(old, self.remap.n_old)
                self.explained.append(kinds)
                if note := rule.move(old, new, self.remap, tuple(kinds[i] for i in self.remap.source)):
                    self.notes.append(note)
            self._note_window(old)

    def stated(self) -> list[Hashable]:
        """What the settings that were moved say of each old layer."""
        return list(zip(*self.explained, strict=True)) if self.explained else [()] * self.remap.n_old

    def _move_multiples(self) -> None:
        """Set the keys that count the parts of layers. A stale one would decide the depth, if the model class reads it last."""
        count_path, remap, owned = (
            self.stack.config_paths[0],
            self.remap,
            {p for s in self.structure.stacks for p in s.config_paths},
        )
        for count in multiples(self.stack.prefix, count_path, find_counts(self.old)) if remap.n_new != remap.n_old else ():
            if count.path in owned:
                continue
            key, parts = ".".join(count.path), count.value // remap.n_old
            if parts not in self._parts():
                raise LayerError(
                    f"{'.'.join(count_path)} and {key} of config.json may both count the layers of {self.stack.prefix}, "
                    "so their number cannot be changed",
                    details=[f"{'.'.join(count_path)}: {remap.n_old}", f"{key}: {count.value}"],
                    fix=f"remove {key} from config.json if the model class does not read it, or use as many layers as before",
                )
            section_at(self.new, count.path[:-1])[count.path[-1]] = parts * remap.n_new
            self.notes.append(f"{key}: {count.value} -> {parts * remap.n_new}")

    def _parts(self) -> set[int]:
        """How many numbered parts of one kind a layer has: 2 of `layers.0.self_attn.0.` and `layers.0.self_attn.1.`."""
        numbers_of_part: dict[str, set[str]] = {}
        for name in self.structure.modules[self.stack.module]:
            inside = f".{self.structure.suffix(name) or ''}" if self.structure.locate(name) == (self.stack, 0) else ""
            if match := INDEX.search(inside):
                numbers_of_part.setdefault(inside[: match.start()], set()).add(match[1])
        return {len(numbers) for numbers in numbers_of_part.values()}

    def _walk(self, old: Mapping[str, Any], new: dict[str, Any], path: Path) -> None:
        """Move every per-layer value of a dict and of the plain dicts in it."""
        stages = move_stages(old, self.remap) if is_stages(old, self.remap) else {}
        for key, value in stages.items():
            self._set(new, key, value, None)
        for key, value in old.items():
            if key in stages or not self._is_mine(key, path):
                continue
            if isinstance(value, Mapping):
                moved = move_map(key, value, self.remap)
                if moved is not None:
                    self._set(new, key, moved, tuple(repr(value.get(str(i))) for i in range(self.remap.n_old)))
                elif self._is_plain(value, (*path, key)):
                    self._walk(value, new[key], (*path, key))
            elif isinstance(value, list | str):
                self._move_list(old, new, key)

    def _is_plain(self, value: Mapping[str, Any], path: Path) -> bool:
        """True for a dict that groups settings (`linear_attn_config`), False for the config of another part."""
        owned = self.foreign | {p[:-1] for p in self.stack.config_paths}
        counted = any(is_count_key(key) and isinstance(count, int) for key, count in value.items())
        return len(path) <= MAX_DEPTH and path not in owned and "model_type" not in value and not counted

    def _is_mine(self, key: str, path: Path) -> bool:
        """False for a key about the other side of an encoder-decoder, a tower, or extra layers."""
        about, stack_words, kind = words(key), words(self.stack.prefix), self.stack.kind
        if "decoder" in about and kind == "encoder":
            return False
        if "encoder" in about and kind == "decoder" and "encoder" not in stack_words:
            return False
        if key in _ENCODER_KEYS and kind == "decoder" and "encoder_layers" in self.old:
            return False
        if path == () and (about & {"vision", "audio"} - stack_words) & self.parts:
            return False
        return not about & {"mtp", "nextn"}

    def _move_list(self, old: Mapping[str, Any], new: dict[str, Any], key: str) -> None:
        value, remap, n_old = old[key], self.remap, self.remap.n_old
        if key == "attention_types":
            listed = _written_out(value, n_old)
            if listed and "attention_layers" in old:
                # GPT-Neo: attention_layers is this list expanded; transformers checks that the two agree.
                new[key] = [[remap.moved(listed), 1]]
            elif listed:
                self._set(new, key, [[remap.moved(listed), 1]], tuple(map(repr, listed)))
        elif is_per_layer(key, value, remap):
            kinds: tuple[Hashable, ...] = tuple(repr(v) for v in value[:n_old])
            if key.endswith("_source_layers"):
                self._set(new, key, move_sources(key, value, remap), kinds)
            else:
                moved = remap.moved(value)
                self._set(new, key, "".join(moved) if isinstance(value, str) else moved, kinds)
        elif is_indices(key, value, remap):
            first = first_number(key, value, old, n_old)
            kinds = tuple(i + first in value for i in range(n_old))
            self._set(new, key, move_indices(key, value, remap, first), kinds)
        elif isinstance(value, list):
            renamed = move_names(value, self.stack.prefix, remap)
            if renamed != value:
                self._set(new, key, renamed, None)

    def _set(self, new: dict[str, Any], key: str, value: Any, kinds: tuple[Hashable, ...] | None) -> None:
        if new[key] != value:
            new[key] = value
            self.notes.append(f"{key}: re-indexed for {self.remap.n_new} layers")
        if kinds is not None:
            self.explained.append(kinds)

    def _note_window(self, old: Mapping[str, Any]) -> None:
        """Warn if only the model's code may determine which layers use a sliding window."""
        said = ("layer_types", "layers_block_type", "attention_layers", "block_types", "max_window_layers")
        patterns = ("sliding_window_pattern", "_sliding_window_pattern", "window_pattern", "full_attention_interval")
        if old.get("sliding_window") and not any(old.get(key) for key in (*said, *patterns)):
            self.notes.append(
                f"sliding_window = {old['sliding_window']}, {LAYERS_UNSPECIFIED}; if the "
                "model's code alternates by position (Gemma 2), first save the config with a current transformers, which "
                "writes layer_types"
            )

    def _check_tensors(self) -> None:
        """Raise if a layer would be placed where the model class builds another kind, judged by the tensors.

        A layer's kind must follow from the config or from its position: first, last, or remainder modulo a small number.
        T5's first block has a tensor that the others lack, so it must stay first.
        """
        signature = self.structure.signatures.get(self.stack.prefix, ())
        if len(set(signature)) < 2:
            return
        said = self.stated()
        for place in (*_PLACES, *_remainders(self.remap.n_old)):
            expected = _expected(signature, said, place)
            if expected is None:
                continue
            for new, old in enumerate(self.remap.source):
                if expected.get((said[old], place(new, self.remap.n_new))) != signature[old]:  # what is built, or not known
                    raise self._misplaced(new, old)
            return
        # Classes may count from either end. If the last two layers are alike, it probably counts from the first.
        if self.remap.source != tuple(range(self.remap.n_new)) or signature[-1] != signature[-2]:
            raise _immovable(
                f"the layers of {self.stack.prefix} have different tensors, and no key of config.json gives the kind of "
                "each layer, so they cannot be reordered"
            )

    def _misplaced(self, new: int, old: int) -> LayerError:
        return LayerError(
            f"layer {old} of {self.stack.prefix} cannot become layer {new}: the model class builds another kind of layer "
            "there (other tensors or shapes), or an unknown kind",
            fix=f"leave layer {old} in its place, or use a layer of the kind found there",
        )


def _written_out(types: Sequence[Any], n_layers: int) -> list[Any]:
    """`[[kinds, times], ...]` expanded to one kind per layer; [] for another form or another number of layers."""
    listed: list[Any] = []
    for pair in types:
        match pair:
            case [[*kinds], int(times)] if 0 < len(kinds) * times <= n_layers:
                listed += kinds * times
            case _:
                return []
    return listed if len(listed) == n_layers else []


_PLACES: tuple[Place, ...] = (
    lambda i, n: None,
    lambda i, n: i == 0,
    lambda i, n: i == n - 1,
    lambda i, n: (i == 0, i == n - 1),
)


def _remainders(n_layers: int) -> list[Place]:
    """Remainders modulo a small number."""
    return [partial(_remainder, period) for period in range(2, min(9, n_layers // 2 + 1))]


def _remainder(period: int, i: int, _n: int) -> Hashable:
    return i % period
