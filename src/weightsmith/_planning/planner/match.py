"""Which tensor of each model feeds which output tensor. Output names are the donor's names on disk.

Models whose names differ by a prefix (a bare decoder and one inside a vision-language model, a file of an older
transformers) are matched by the stacks that play the same part, and outside the layers by the end of the name. What is left
of both is matched by its contents, if all of it fits: the state dict of a training run has other names than the Hub's files.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure import Stack, Structure
from weightsmith._models.structure.parts import other_spelling
from weightsmith._models.structure.stacks import overlap, words
from weightsmith._models.structure.vocabulary import in_head, is_model_head, is_other_head, is_task_head

_BUFFERS = ("rotary_emb.inv_freq", ".num_batches_tracked", "rotary_pos_emb.inv_freq")
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def home_module(donor: Structure) -> str:
    """The module of what the donor has not (a head): that of its main stack, else its first."""
    return donor.main.module if donor.main is not None else next(iter(donor.modules))


def is_buffer(spec: TensorSpec) -> bool:
    """True for a tensor that the model computes for itself: old files store it, new ones do not.

    >>> from weightsmith._base.tensors import DTYPES
    >>> is_buffer(TensorSpec("h.0.attn.bias", DTYPES["F32"], (1, 1, 8, 8)))
    True
    >>> is_buffer(TensorSpec("h.0.attn.bias", DTYPES["F32"], (8,)))  # a parameter
    False
    """
    name = spec.name
    if name.endswith(_MASKS):  # a causal mask [1, 1, n, n], or the number it masks with
        return len(spec.shape) in (0, 4)
    return name.endswith(_BUFFERS) or (name.endswith("position_ids") and not spec.dtype.floating)


class ModelNames:
    """One model's tensors by place: the layers of each stack, and the rest, all under the donor's names.

    layers  donor's stack prefix → layer → name inside the layer → the model's own name
    depth   donor's stack prefix → number of layers
    rest    donor's name → the model's own name; layers that the donor does not have are here too
    outer   the reverse of `rest`
    paired  the model's stack prefix → donor's
    unmatched  what the donor has no counterpart of, and what the model has none of: both are empty unless each has something
    lookalikes  modules of `unmatched` with equal contents, the model's and the donor's
    renamed  modules that were paired by their contents, the model's and the donor's
    """

    def __init__(
        self,
        structure: Structure,
        specs: Mapping[str, TensorSpec],
        donor: Structure,
        donor_specs: Mapping[str, TensorSpec],
        *,
        one_class: bool = False,
    ) -> None:
        """one_class: the two are of one class of models, so a part that both have under other names may be one."""
        self.structure = structure
        self.specs = specs
        prefixes = structure.parts.renamed_in(donor.parts) if structure.parts and donor.parts else ()
        self.paired = pair_stacks(structure.stacks, donor.stacks, specs, donor_specs, prefixes)
        counts = {s.prefix: s.n_layers for s in donor.stacks}
        self.layers: dict[str, dict[int, dict[str, str]]] = {prefix: defaultdict(dict) for prefix in counts}
        self.depth = {self.paired[s.prefix]: s.n_layers for s in structure.stacks if self.paired[s.prefix] in counts}
        roots = sorted({_roots(a, b) for a, b in self.paired.items() if a != b} | {*prefixes}, key=lambda r: -len(r[0]))
        self._seen: dict[str, tuple[str, int]] = {}
        self.unmatched: tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]] = {}, {}
        self.lookalikes: list[tuple[str, str]] = []
        self.renamed: list[tuple[str, str]] = []
        donor_names: dict[str, str] = {}  # own → donor's
        extras: dict[str, str] = {}
        for name in specs:
            place = structure.locate(name)
            prefix = self.paired[place[0].prefix] if place is not None else ""
            spelled = _spelled(name, specs, donor_specs)
            if place is not None and prefix in counts:
                suffix = spelled[len(place[0].prefix) + len(str(place[1])) + 1 :]
                self.layers[prefix][place[1]][suffix] = name
                continue
            extra = structure.extra(name)
            if extra is None or self.paired[extra[0].prefix] not in counts:
                donor_names[name] = _renamed(spelled, roots, donor_specs)
            else:
                prefix = self.paired[extra[0].prefix]
                extras[name] = f"{prefix}{counts[prefix] + extra[1]}.{structure.suffix(name)}"
        if structure is not donor:
            donor_names |= _by_ending(donor_names, specs, donor, donor_specs)
            donor_names = self._as_donor_sees(donor_names, donor)
            if one_class:
                donor_names = self._by_contents(donor_names, extras.values(), donor, donor_specs)
        donor_names |= extras
        self.rest = {theirs: mine for mine, theirs in donor_names.items()}
        self.outer = donor_names
        self._modules: set[str] | None = None

    def _by_contents(
        self, donor_names: dict[str, str], extras: Collection[str], donor: Structure, donor_specs: Mapping[str, TensorSpec]
    ) -> dict[str, str]:
        """Pair modules that have equal contents under different names, if nothing is left of both models then. Heads stay out:
        two classifiers of one size need not be one.
        """
        mine = {name: self.specs[name] for name, theirs in donor_names.items() if theirs not in donor_specs}
        mine = {name: spec for name, spec in mine.items() if not (is_buffer(spec) or _is_head(name))}
        if not mine:
            return donor_names
        taken = {*donor_names.values(), *extras}
        theirs = {n: spec for n, spec in donor_specs.items() if n not in taken and not (is_buffer(spec) or _is_head(n))}
        places = {name: donor.locate(name) for name in theirs}
        theirs = {n: spec for n, spec in theirs.items() if (place := places[n]) is None or place[0].prefix not in self.depth}
        if not theirs:
            return donor_names
        modules = equal_modules(mine, theirs)
        certain = [pair for pair in modules if _is_one_module(*pair, sum(n.startswith(pair[0]) for n in mine))]
        pairs = {n: other for n in mine if (other := _renamed(n, certain, theirs)) in theirs}
        if len({*pairs.values()}) == len(mine) == len(theirs) and all(
            self._plays(n, other, donor) for n, other in pairs.items()
        ):
            self.renamed = certain
            return self._as_donor_sees(donor_names | pairs, donor)
        self.unmatched = mine, theirs
        self.lookalikes = [pair for pair in modules if sum(n.startswith(pair[0]) for n in mine) >= _TELLING]
        return donor_names

    def _plays(self, name: str, other: str, donor: Structure) -> bool:
        """Whether a tensor and one of the donor's are in stacks of one kind, or both in none."""
        places = self.structure.locate(name), donor.locate(other)
        return None in places or len({place[0].kind for place in places if place is not None}) == 1

    def _as_donor_sees(self, donor_names: Mapping[str, str], donor: Structure) -> dict[str, str]:
        """Remove tensors that are layers for the donor but not for the model's own config (a layer number is missing)."""
        rest: dict[str, str] = {}
        for mine, theirs in donor_names.items():
            place = donor.locate(theirs)
            if place is None:
                rest[mine] = theirs
                continue
            prefix, layer = place[0].prefix, place[1]
            self.layers[prefix][layer].setdefault(donor.suffix(theirs) or "", mine)
            self._seen[mine] = prefix, layer
            self.depth[prefix] = max(self.depth.get(prefix, 0), layer + 1)
        return rest

    def of_twin(self, specs: Mapping[str, TensorSpec]) -> ModelNames:
        """The same for a model with equal names and structure."""
        twin = copy.copy(self)
        twin.specs = specs
        return twin

    def all(self) -> dict[str, str]:
        """Donor's name of each tensor → the model's own, layers too."""
        names = dict(self.rest)
        for prefix, layers in self.layers.items():
            names |= {f"{prefix}{i}.{suffix}": name for i, parts in layers.items() for suffix, name in parts.items()}
        return names

    def place(self, tensor: str) -> tuple[str, int] | None:
        """Donor's stack prefix and layer of a tensor of the model; None for one that is in `rest`."""
        if tensor in self.outer:
            return None
        place = self._seen.get(tensor)
        if place is None:
            stack, layer = self.structure.locate(tensor) or (None, 0)
            place = (self.paired[stack.prefix], layer) if stack is not None else None
        return place

    def has_module_of(self, name: str) -> bool:
        """True when the model has anything of the module that the tensor `name` (donor's name) is in."""
        if self._modules is None:
            self._modules = {n.rpartition(".")[0] for n in self.rest}
        return name.rpartition(".")[0] in self._modules


@dataclass(frozen=True, slots=True)
class InputModels:
    """The input models, by index.

    base       index of the base, if there is one
    tokenizes  the donor has a tokenizer
    as_stored  whether a model's file holds these bytes of a tensor, which is not made from others
    """

    labels: Sequence[str]
    configs: Sequence[Mapping[str, Any] | None]
    names: Sequence[ModelNames]
    donor: int
    base: int | None
    tokenizes: bool = False
    as_stored: Callable[[int, str], bool] = lambda _model, _tensor: True


def pair_stacks(
    stacks: Sequence[Stack],
    donor: Sequence[Stack],
    specs: Mapping[str, TensorSpec],
    donor_specs: Mapping[str, TensorSpec],
    prefixes: Sequence[tuple[str, str]] = (),
) -> dict[str, str]:
    """For each stack the donor's prefix that plays the same part; its own where the donor has no such stack.

    specs     all the model's tensors: none is under two of the donor's names
    prefixes  of whole parts, the model's and the donor's

    Of several that might, it is the one with the longer common end of the name, then with equal tensors, then with more words.
    """
    paired = {}
    for stack in stacks:
        name = _renamed(stack.prefix, prefixes)
        if any(name == d.prefix for d in donor):
            paired[stack.prefix] = name

    def likeness(stack: Stack, other: Stack) -> tuple[int, bool, int]:
        alike = contents_of(specs, stack.prefix) == contents_of(donor_specs, other.prefix)
        return _common_tail(other.prefix, stack.prefix), alike, overlap(words(stack.prefix), words(other.prefix))

    waiting = [stack for stack in stacks if stack.prefix not in paired]
    while True:
        before = len(paired)
        for stack in waiting:
            part = stack.prefix.rpartition("/")[0]  # of a pipeline
            free = [d for d in donor if d.kind == stack.kind and d.prefix not in paired.values()]
            free = [d for d in free if d.prefix.rpartition("/")[0] == part]
            free = [d for d in free if not any(name.startswith(d.prefix) for name in specs)]
            ranked = sorted(((likeness(stack, d), d.prefix) for d in free), reverse=True) if len(free) > 1 else []
            if len(free) == 1 or (ranked and ranked[0][0] > ranked[1][0]):
                paired[stack.prefix] = ranked[0][1] if ranked else free[0].prefix
        waiting = [stack for stack in waiting if stack.prefix not in paired]
        if len(paired) == before or not waiting:
            return paired | {stack.prefix: stack.prefix for stack in waiting}


_TELLING = 3
"""Tensors of a module that make it out: many have a weight and a bias of one size."""


def contents_of(specs: Mapping[str, TensorSpec], prefix: str) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The tensors under a prefix: the rest of their names, and their shapes."""
    return frozenset((name[len(prefix) :], spec.shape) for name, spec in specs.items() if name.startswith(prefix))


def equal_modules(mine: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]) -> list[tuple[str, str]]:
    """Prefixes of modules of two models that hold the same under different names, the largest first.

    Modules inside them are not listed, nor are those that could be paired in several ways, or are of vision and of audio.

    >>> from weightsmith._base.tensors import DTYPES
    >>> ours, others = ("mlp_AR.linear.weight", "mlp_AR.linear.bias", "mlp_AR.norm.weight"), "model.projector."
    >>> shapes = (4, 8), (4,), (8,)
    >>> mine = {n: TensorSpec(n, DTYPES["F32"], shape) for n, shape in zip(ours, shapes, strict=True)}
    >>> equal_modules(mine, {others + n.removeprefix("mlp_AR."): spec for n, spec in mine.items()})
    [('mlp_AR.', 'model.projector.')]
    """
    by_contents = [defaultdict[frozenset[tuple[str, tuple[int, ...]]], list[str]](list) for _ in range(2)]
    for specs, modules in zip((mine, theirs), by_contents, strict=True):
        inside: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
        for name, spec in specs.items():
            at = name.find(".")
            while at >= 0:
                inside[name[: at + 1]].add((name[at + 1 :], spec.shape))
                at = name.find(".", at + 1)
        for prefix, contents in inside.items():
            modules[frozenset(contents)].append(prefix)
    pairs: list[tuple[str, str]] = []
    for equal in sorted(by_contents[0].keys() & by_contents[1].keys(), key=lambda contents: -len(contents)):
        first, second = (
            [p for p in modules[equal] if not p.startswith(tuple(pair[side] for pair in pairs))]
            for side, modules in enumerate(by_contents)
        )
        if len(first) == len(second) == 1 and not of_other_senses(first, second):
            pairs.append((first[0], second[0]))
    return pairs


_SENSES = frozenset({"vision", "audio"})
_COMMON_WORDS = frozenset("layer layers block blocks linear proj dense fc mlp module weight in out".split())
"""Words of names that say nothing of what a module is for."""


def of_other_senses(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether names are of vision and others of audio, or the reverse.

    >>> of_other_senses(["image_proj."], ["speech_proj."]), of_other_senses(["image_proj."], ["projector."])
    (True, False)
    """
    senses = words(*names) & _SENSES, words(*others) & _SENSES
    return all(senses) and senses[0].isdisjoint(senses[1])


def _is_one_module(mine: str, theirs: str, tensors: int) -> bool:
    """Whether modules with equal contents are one: by a word of their names, or by their number of tensors.

    >>> _is_one_module("vision_projector.", "projector.", 1), _is_one_module("reward_linear.", "cost_linear.", 1)
    (True, False)
    >>> _is_one_module("mlp_AR.", "projector.", 4), _is_one_module("mm_projector.", "audio.adapter.", 4)
    (True, False)
    """
    mine_words, their_words = words(mine), words(theirs)
    if overlap(mine_words - _COMMON_WORDS, their_words - _COMMON_WORDS):
        return True
    return tensors >= _TELLING and mine_words & _SENSES == their_words & _SENSES


def _is_head(name: str) -> bool:
    return is_task_head(name) or is_other_head(name) or in_head(name)


def _common_tail(a: str, b: str) -> int:
    """Components that two prefixes have in common at their ends."""
    n = 0
    for x, y in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if x != y:
            break
        n += 1
    return n


def _roots(mine: str, theirs: str) -> tuple[str, str]:
    """What differs in front of two prefixes.

    >>> _roots("model.layers.", "model.language_model.layers.")
    ('model.', 'model.language_model.')
    >>> _roots("text_encoder/encoder.layers.", "text_encoder/text_model.encoder.layers.")
    ('text_encoder/', 'text_encoder/text_model.')
    """
    folder, slash, _ = mine.rpartition("/")
    folder += slash
    a, b = (prefix.removeprefix(folder).rstrip(".").split(".") for prefix in (mine, theirs))
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return folder + "".join(f"{x}." for x in a), folder + "".join(f"{x}." for x in b)


def _renamed(name: str, roots: Sequence[tuple[str, str]], donor_names: Collection[str] = ()) -> str:
    """The name with another beginning: (the model's, the donor's) of `roots`. donor_names: if they are known

    >>> _renamed("lm.model.norm", [("lm.", "lm.model.")])
    'lm.model.norm'
    >>> _renamed("lm.model.norm", [("lm.", "lm.model.")], ["lm.model.model.norm"])
    'lm.model.model.norm'
    """
    for mine, theirs in roots:
        if not name.startswith(mine):
            continue
        other = theirs + name[len(mine) :]
        as_donor = len(theirs) > len(mine) and name.startswith(theirs)  # its names begin with the other prefix, too
        if not as_donor or (other in donor_names and name not in donor_names):
            return other
    return name


def _spelled(name: str, specs: Collection[str], donor_specs: Collection[str]) -> str:
    """The name of a tensor as the donor's release of its library spells it."""
    if name in donor_specs:
        return name
    other = other_spelling(name)
    return other if other in donor_specs and other not in specs else name


def _by_ending(
    donor_names: Mapping[str, str], specs: Mapping[str, TensorSpec], donor: Structure, donor_specs: Mapping[str, TensorSpec]
) -> dict[str, str]:
    """Pair the remaining tensors: `language_model.lm_head.weight` with `lm_head.weight`, if the match is unique.

    donor_names  own name → supposed donor's name
    """
    taken = set(donor_names.values())
    free: dict[str, list[str]] = defaultdict(list)
    theirs = {name: None for name in donor_specs if donor.locate(name) is None}
    for name in theirs:
        if name not in taken:
            free[_ending(name)].append(name)
            if "." in name:
                free[f".{name.rpartition('.')[2]}"].append(name)
    pairs: dict[str, str] = {}
    used: set[str] = set()
    for mine, supposed in donor_names.items():
        if supposed in theirs:
            continue
        # A parameter of the model itself, with a prefix or not.
        shorter = mine.rpartition(".")[2] if "." in mine else f".{mine}"
        fits = [
            name
            for name in (*free.get(_ending(mine), ()), *free.get(shorter, ()))
            if (f".{name}".endswith(f".{mine}") or f".{mine}".endswith(f".{name}"))
            and donor_specs[name].shape == specs[mine].shape
        ]
        if len(fits) == 1 and fits[0] not in used:
            used.add(fits[0])
            pairs[mine] = fits[0]
        elif supposed != mine and not fits:
            pairs[mine] = mine  # renaming would not help: `score.weight` keeps its name
    heads = [name for name, spec in specs.items() if name in donor_names and is_model_head(spec)]
    free_heads = [name for name in theirs if name not in taken | used and is_model_head(donor_specs[name])]
    if len(heads) == len(free_heads) == 1 and pairs.get(heads[0], donor_names[heads[0]]) not in theirs:
        pairs[heads[0]] = free_heads[0]  # GPT-NeoX: `embed_out.weight` on the Hub, `lm_head.weight` while it trains
    return pairs


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])
