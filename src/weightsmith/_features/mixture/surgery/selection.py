"""A recipe's choice of experts, as groups for every block. Pruning is a merge with groups of one expert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import LayerError, NotFound, ParameterError, WeightsmithError
from weightsmith._base.files import expand_user, show
from weightsmith._base.strict_json import read_object
from weightsmith._features.mixture.surgery.experts import ExpertLayer
from weightsmith._planning.recipe import Surgery

MAX_SALIENCY_BYTES = 64 << 20  # a million experts' numbers


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts averaged into one new expert, and their weights. A single expert is copied."""

    experts: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)


Groups = tuple[ExpertGroup, ...]


class ExpertSelection:
    """The groups of each block, and all problems.

    folder  base for a relative path of the saliency file
    """

    def __init__(self, recipe: Surgery, blocks: Sequence[ExpertLayer], folder: Path) -> None:
        self.blocks = blocks
        self.folder = folder
        self.problems: list[WeightsmithError] = []
        section = recipe.prune or recipe.merge
        assert section is not None
        self.section = section
        key = "keep" if recipe.prune is not None else "groups"
        self.where = section.at(self._key(key))  # the key that determines how many experts remain
        self.groups: dict[str, Groups] = self._pruned() if recipe.prune is not None else self._merged()
        self._check_counts()

    # --- prune_experts -----------------------------------------------------------------------------------------------

    def _pruned(self) -> dict[str, Groups]:
        values = self.section.values
        if "saliency" not in values and "experts" in values:
            self._problem("'experts' has no effect without 'saliency'", "experts", "Remove it.")
        kept = self._most_salient() if "saliency" in values else self._by_layer("keep")
        for _, experts, where in self._entries(kept, "keep"):
            self._check_numbers(experts, "keep", where, "is listed twice")
        return {layer: tuple(ExpertGroup((e,)) for e in experts) for layer, experts in kept.items()}

    def _most_salient(self) -> dict[str, tuple[int, ...]]:
        n_kept = self.section.values.get("experts")
        n = self.blocks[0].experts
        if n_kept is None:
            what = "'saliency' requires 'experts', the number of experts to keep in each layer"
            self._problem(what, "saliency", "Write experts: 32.")
            return {}
        if n_kept > n:
            self._problem(f"cannot keep {n_kept} experts in each layer: there are {n}", "experts", f"Write at most {n}.")
            return {}
        kept = {}
        for layer, numbers in self._saliency().items():
            ranked = sorted(range(n), key=lambda e: (-numbers[e], e))
            kept[layer] = tuple(sorted(ranked[:n_kept]))
        return kept

    @property
    def saliency_path(self) -> Path | None:
        """The recipe's saliency file, if it names one."""
        name = self.section.values.get("saliency")
        return None if name is None else self.folder / expand_user(name)

    def _saliency(self) -> dict[str, tuple[float, ...]]:
        """Layer → one number per expert, from the file; {} after problems."""
        path = self.saliency_path
        assert path is not None
        where = self.section.at("saliency")
        fix = 'write {"0": [one number for each expert of layer 0], "1": ...}'
        try:
            numbers_of_layer = read_object(path, MAX_SALIENCY_BYTES, "a saliency file", fix)
        except NotFound:
            self.problems.append(NotFound("no such saliency file", where=f"{where}: {path}"))
            return {}
        except WeightsmithError as error:
            self.problems.append(error)
            return {}
        n, before = self.blocks[0].experts, len(self.problems)
        for layer, numbers in numbers_of_layer.items():
            bad = [k for k, x in enumerate(numbers) if not _is_number(x)] if isinstance(numbers, list) else [0]
            if bad or len(numbers) != n:
                shown = f"{len(numbers)} values" if isinstance(numbers, list) else type(numbers).__name__
                if isinstance(numbers, list) and len(numbers) == n:
                    shown = f"{show(numbers[bad[0]])} for expert {bad[0]}"
                what = f"layer {layer} needs one finite number for each of its {n} experts, not {shown}"
                self.problems.append(ParameterError(what, where=str(path), fix=fix))
        known = self._known(numbers_of_layer, "saliency", str(path))
        return {layer: tuple(map(float, numbers)) for layer, numbers in known.items()} if len(self.problems) == before else {}

    # --- merge_experts -----------------------------------------------------------------------------------------------

    def _merged(self) -> dict[str, Groups]:
        groups = self._by_layer("groups")
        weights = self._weights(groups)
        n = self.blocks[0].experts
        for _, listed, where in self._entries(groups, "groups"):
            experts = [e for group in listed for e in group]
            valid = self._check_numbers(experts, "groups", where, "is in two groups, or twice in one")
            if valid and len(experts) < n:
                missing = next(e for e in range(n) if e not in experts)
                fix = f"Write [{missing}] to keep it unchanged; to remove experts, use prune_experts."
                self._problem(f"expert {missing} is in no group{where}", self._key("groups"), fix)
        shares = {layer: tuple((1.0,) * len(group) for group in listed) for layer, listed in groups.items()} | dict(weights)
        return {layer: tuple(map(ExpertGroup, listed, shares[layer])) for layer, listed in groups.items()}

    def _weights(self, groups: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights of each layer that has them, checked against its groups."""
        values = self.section.values
        keys = [key for key in ("weights", "weights_by_layer") if key in values]
        fits = "weights" if "groups" in values else "weights_by_layer"
        if not keys:
            return {}
        if keys != [fits]:
            wrong = next(key for key in keys if key != fits)
            self._problem(f"'{wrong}' cannot be combined with '{self._key('groups')}'", wrong, f"Write {fits}.")
            return {}
        weights = self._by_layer("weights")
        for layer, listed, where in self._entries(weights, "weights"):
            sizes = [len(group) for group in groups.get(layer, ())]
            if [len(weights_of_group) for weights_of_group in listed] != sizes and layer in groups:
                problem = f"groups of {sizes} experts have {[len(weights_of_group) for weights_of_group in listed]} weights"
                self._problem(f"{problem}{where}", fits, "Write one weight for each expert of each group.")
            for weights_of_group in listed:
                if min(weights_of_group) < 0 or sum(weights_of_group) <= 0:
                    what = f"invalid weights {list(weights_of_group)}{where}: they must be non-negative, and not all 0"
                    self._problem(what, fits)
        return weights

    # --- both --------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        """The key that the recipe uses: `keep` or `keep_by_layer`."""
        values = self.section.values
        return next((key for key in (name, f"{name}_by_layer", "saliency") if key in values), name)

    def _by_layer(self, name: str) -> dict[str, Any]:
        """The recipe's value for each layer."""
        values = self.section.values
        if name in values:
            return {block.layer: values[name] for block in self.blocks}
        return self._known(values[f"{name}_by_layer"], f"{name}_by_layer", "")

    def _known(self, entries: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
        """The entries of the layers with experts, in order. Unknown and missing layers are problems."""
        layers = [block.layer for block in self.blocks]
        where = file or self.section.at(key)
        strange = [layer for layer in entries if layer not in layers]
        missing = [layer for layer in layers if layer not in entries]
        if strange:
            what = f"layer {strange[0]} has no experts, or does not exist"
            self.problems.append(LayerError(what, where=where, fix=f"write layers that have experts: {_runs(layers)}"))
        if missing:
            one = len(missing) == 1
            what = f"layer{'' if one else 's'} {_runs(missing)} {'has' if one else 'have'} experts and {'is' if one else 'are'}"
            self.problems.append(
                LayerError(f"{what} not in '{key}'", where=where, fix="write an entry for every layer that has experts")
            )
        return {layer: entries[layer] for layer in layers if layer in entries}

    def _entries(self, by_layer: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any, str]]:
        """Layer, value and place, for messages, of the entries to check: a single one if all layers share it."""
        shared = name in self.section.values
        for layer, value in list(by_layer.items())[: 1 if shared else None]:
            yield layer, value, "" if shared else f" in layer {layer}"

    def _check_numbers(self, experts: Sequence[int], name: str, where: str, repeated: str) -> bool:
        """Whether the experts exist, each once. repeated: what an expert that is named twice does"""
        n, key = self.blocks[0].experts, self._key(name)
        if beyond := [e for e in experts if e >= n]:
            there = "there is 1 expert" if n == 1 else f"there are {n} experts, 0 to {n - 1}"
            self._problem(f"there is no expert {beyond[0]}{where}: {there}", key)
        twice = [e for k, e in enumerate(experts) if e in experts[:k]]
        if twice and (not beyond or name == "keep"):
            self._problem(f"expert {twice[0]} {repeated}{where}", key, "Write each expert once.")
        return not beyond and not twice

    def _check_counts(self) -> None:
        """config.json has one number of experts for all layers."""
        counts = {layer: len(groups) for layer, groups in self.groups.items()}
        if len(set(counts.values())) > 1:
            first, n = next(iter(counts.items()))
            other, m = next((layer, k) for layer, k in counts.items() if k != n)
            what = f"layer {first} would have {n} experts, but layer {other} {m}"
            fix = "keep the same number in each layer, because config.json has one for all"
            self.problems.append(LayerError(what, where=self.where, fix=fix))

    @property
    def experts(self) -> int:
        """Experts of each layer in the output; 0 if unknown."""
        return len(next(iter(self.groups.values()), ()))

    def _problem(self, what: str, key: str, fix: str = "") -> None:
        self.problems.append(ParameterError(what, where=self.section.at(key), fix=fix))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _runs(layers: Sequence[str]) -> str:
    """Names of layers, abbreviated if there are many."""
    return ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
