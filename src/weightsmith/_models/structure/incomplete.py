"""What a model seems to lack: tensors of single layers, whole layers, its last norm, its embedding, its head.

Loaders fill missing weights with random values, some of them silently. A merge detects missing tensors by comparing its models.
A single model can only be checked against itself: its layers should be alike, and config.json gives their number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from weightsmith._models.structure.configs import text_sections, whole_number
from weightsmith._models.structure.model import Structure
from weightsmith._models.structure.resize import follows, stated_kinds
from weightsmith._models.structure.stacks import TOWERS, Stack
from weightsmith._models.structure.vocabulary import names_embedding, names_head, tie_flag

_MANY_KINDS = 64
"""With more kinds of layers, nothing is compared: models have a handful, and comparing every pair is quadratic."""

_ONE_OF = 8
"""Layers that are alike may lack something if they are one of so many, or fewer. A quarter of Jamba's layers, and an eighth of
other hybrids', are of another kind."""

_LANGUAGE = ("ForCausalLM", "ForConditionalGeneration")
_OF_DRAFTS = ("fc.", "eh_proj.", "enorm.", "hnorm.", "model.fc.")
"""Prefixes of names that only draft models have. They use the norm, embedding or head of the model that they draft for."""

_LAST_NORM = ("norm", "ln_f")
_PRE_NORM = "input_layernorm.weight"
"""Decoders with this norm in their layers, such as Llama, also have one after the last layer."""


def seems_to_lack(structure: Structure, names: Iterable[str], config: Mapping[str, Any] | None) -> Iterator[str]:
    """What a model seems to lack, each as the end of a sentence that begins with the model and "has no".

    A layer is compared with a kind that more layers share. Differences by design are ignored:

    * in the first layer (ModernBERT has no first norm), and in the last one, unless it lacks one module of a language model
    * of layers that are alike, unless these are few and neither config.json nor their positions tell them apart
    * in models that describe each layer (`block_configs`), and in the number of experts

    Draft models need no head, nor do models saved from the base class (`layers.` instead of `model.layers.`).

    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> from weightsmith._models.structure.model import analyse
    >>> names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(4) for part in ("up", "down")]
    >>> del names[2]
    >>> config = {"num_hidden_layers": 4}
    >>> list(seems_to_lack(analyse([TensorSpec(name, DTYPES["BF16"], (4, 4)) for name in names], config), names, config))
    ['model.layers.1.mlp.up_proj.weight, which 3 other layers have']
    """
    names, config = tuple(names), config or {}
    if "block_configs" in config:
        return
    for stack in structure.stacks:
        # Layers that are all alike lack nothing; most models end here, and no name is looked at.
        if stack.config_path is not None and len(set(structure.signatures[stack.prefix])) > 1:
            layers = _suffixes(structure, stack, names)
            yield from _of_layers(stack, layers, cache(partial(stated_kinds, config, structure, stack)))
    main, classes = structure.main, config.get("architectures")
    if main is None or not isinstance(classes, list) or not any(str(one).endswith(_LANGUAGE) for one in classes):
        return
    yield from _uncounted(main, config)
    if 2 * sum(name.startswith(main.prefix) and name.endswith(_PRE_NORM) for name in names) > main.n_layers:
        prefixes = tuple(stack.prefix for stack in structure.stacks)
        loose = [name for name in names if not name.startswith(prefixes)]
        if not any(name.startswith(_OF_DRAFTS) for name in loose):
            yield from _around(main, loose, config)


def _suffixes(structure: Structure, stack: Stack, names: Iterable[str]) -> list[frozenset[str]]:
    """The names inside each layer."""
    layers: list[set[str]] = [set() for _ in range(stack.n_layers)]
    for name in names:
        if name.startswith(stack.prefix) and (place := structure.locate(name)) is not None and place[0] is stack:
            layers[place[1]].add(structure.suffix(name) or "")
    return [frozenset(layer) for layer in layers]


def _of_layers(stack: Stack, layers: Sequence[frozenset[str]], stated: Callable[[], Sequence[Hashable]]) -> Iterator[str]:
    """What single layers lack. stated: gives what config.json says of each."""
    kinds, prefix, last = Counter(layers), stack.prefix, len(layers) - 1
    if len(kinds) > _MANY_KINDS:
        return
    few_are_empty = 4 * sum(not layer for layer in layers) <= len(layers)  # in blocks of convolutions every other one is
    damaged = {kind for kind, count in kinds.items() if count == 1 or _is_irregular(kind, layers, stated)}
    for i, layer in enumerate(layers):
        larger = [kind for kind, count in kinds.items() if count > max(1, kinds[layer]) and layer < kind]
        if not layer and larger and few_are_empty:
            yield f"layer {i} under {prefix}, of {len(layers)}"
        elif larger and layer in damaged and i > 0:
            missing = sorted(_without_more_experts(min(larger, key=len) - layer, layer))
            if i == last and kinds[layer] == 1 and (stack.kind in TOWERS or not _of_one_module(missing)):
                continue
            for suffix in missing:
                yield f"{prefix}{i}.{suffix}, which {sum(suffix in other for other in layers)} other layers have"


def _of_one_module(suffixes: Iterable[str]) -> bool:
    return len({suffix.rpartition(".")[0] for suffix in suffixes}) == 1


def _is_irregular(kind: frozenset[str], layers: Sequence[frozenset[str]], stated: Callable[[], Sequence[Hashable]]) -> bool:
    """Whether layers of a kind are so few, and in such places, that no design seems to be behind it."""
    places = [i for i, layer in enumerate(layers) if layer == kind]
    at_an_end = places[-1] - places[0] == len(places) - 1 and not {0, len(layers) - 1}.isdisjoint(places)
    if _ONE_OF * len(places) > len(layers) or at_an_end:
        return False
    return not follows([layer == kind for layer in layers], stated())


_EXPERT = re.compile(r"experts\.(\d{1,9})\.")


def _without_more_experts(missing: frozenset[str], layer: frozenset[str]) -> Iterator[str]:
    """Leave out experts beyond the layer's last one: a layer may have fewer, by design or because some were pruned."""
    last = max((int(match[1]) for suffix in layer if (match := _EXPERT.search(suffix))), default=-1)
    for suffix in missing:
        match = _EXPERT.search(suffix)
        if match is None or int(match[1]) <= last:
            yield suffix


def _uncounted(stack: Stack, config: Mapping[str, Any]) -> Iterator[str]:
    """Layers that config.json counts, beyond the last one in the model."""
    numbers = [whole_number(section.get("num_hidden_layers")) for section in text_sections(config)]
    number = next(filter(None, numbers), 0)
    if stack.config_path is None and number > stack.n_layers and number % stack.n_layers:  # a multiple counts parts of layers
        missing = f"layer {stack.n_layers}" if number == stack.n_layers + 1 else f"layers {stack.n_layers} to {number - 1}"
        yield f"{missing} under {stack.prefix}: config.json counts {number:,} layers"


def _around(main: Stack, loose: Sequence[str], config: Mapping[str, Any]) -> Iterator[str]:
    """What a language model has before and after its layers."""
    if not any(part in name for name in loose for part in _LAST_NORM):
        yield "norm behind its last layer"
    if not any(map(names_embedding, loose)):
        yield "embedding of its tokens"
    is_causal = any(str(one).endswith("ForCausalLM") for one in config["architectures"])  # others name heads in many ways
    of_base_class = main.prefix.count(".") == 1  # as embedding models are saved
    if is_causal and not of_base_class and tie_flag(config) is False and not any(map(names_head, loose)):
        yield "head (lm_head), and tie_word_embeddings is false"
