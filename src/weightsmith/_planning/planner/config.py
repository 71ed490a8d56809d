"""config.json of the output: the donor's, made to say what the tensors are."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding, LayerError, ShapeError
from weightsmith._base.tensors import DType, TensorSpec, promote
from weightsmith._models.structure import Stack, Structure, resize_config, vocabulary
from weightsmith._models.structure.configs import of_diffusers, replace_value, sections, whole_number
from weightsmith._models.structure.perlayer import Remap, is_per_layer
from weightsmith._models.structure.rules import rules_for
from weightsmith._planning.planner.match import ModelNames, Models, is_buffer
from weightsmith._plans import Read

_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    config: Mapping[str, Any],
    structure: Structure,
    layers: Mapping[str, Sequence[int]],
    outputs: Sequence[TensorSpec],
    *,
    stored: Mapping[str, TensorSpec],
    asked: DType | None,
    untie: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The donor's config with layer counts, dtype, tying, vocabulary and quantisation as the output tensors are.

    layers  for each stack prefix that changes: the donor's layer behind each output layer
    stored  the donor's own tensors
    asked   dtype that all tensors were to have
    untie   the output holds a head of its own

    Returns the config, and notes on what follows the layers. Raises LayerError when the config cannot express the stack,
    ShapeError when it cannot express the vocabulary.
    """
    notes: tuple[str, ...] = ()
    if layers:
        new, notes = resize_config(config, structure, layers)
    else:
        new = copy.deepcopy(dict(config))
    dtype = main_dtype(outputs)
    if dtype is not None:
        _set_dtype(new, dtype, everywhere=asked is not None)
    new.pop("quantization_config", None)
    if untie:
        vocabulary.untie(new)
    _set_vocabulary(new, outputs, stored)
    return new, notes


def _set_dtype(config: dict[str, Any], dtype: DType, *, everywhere: bool) -> None:
    """Sub-configs follow where they said what the whole said; a vision tower kept in float32 keeps saying so.

    everywhere  all tensors were cast, towers too
    """
    said = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), None)
    for _, part in sections(config):
        for key in _DTYPE_KEYS:
            if isinstance(part.get(key), str) and (everywhere or part is config or said is None or part[key] == said):
                part[key] = dtype.torch
    if said is None and not of_diffusers(config):  # its classes take no such setting
        config["dtype"] = dtype.torch


def _set_vocabulary(config: dict[str, Any], outputs: Sequence[TensorSpec], stored: Mapping[str, TensorSpec]) -> None:
    """vocab_size follows an embedding that has more or fewer rows than the donor's own (it came from another model)."""
    rows = vocabulary.count_rows(stored.values(), config)
    tokens = [(stored[s.name], s) for s in outputs if s.name in stored and _has_tokens(stored[s.name], rows)]
    per_layer = [(donors, s) for donors, s in tokens if vocabulary.module_of(s.name) == vocabulary.PER_LAYER]
    for donors, s in per_layer:
        replace_value(config, vocabulary.PER_LAYER_SIZE_KEY, _rows(donors), _rows(s))
    tokens = [pair for pair in tokens if pair not in per_layer]
    changes = {s.name: (_rows(donors), _rows(s)) for donors, s in tokens if donors.shape != s.shape}
    if not changes:
        return
    kept = {s.name: _rows(s) for donors, s in tokens if donors.shape == s.shape}
    old, new = next(iter(changes.values()))
    if len(set(changes.values())) > 1 or old in kept.values():
        counts = {**{name: n for name, (_, n) in changes.items()}, **kept}
        what = "tables of the vocabulary would have different numbers of rows, which config.json cannot express"
        fix = "give all models the same tokenizer and number of rows first"
        raise ShapeError(what, where=next(iter(changes)), details=[f"{name}: {n} rows" for name, n in counts.items()], fix=fix)
    for key in vocabulary.SIZE_KEYS:
        replace_value(config, key, old, new)


def _has_tokens(spec: TensorSpec, rows: int) -> bool:
    return vocabulary.is_vocabulary(spec) or vocabulary.has_tokens(spec, rows)


def _rows(spec: TensorSpec) -> int:
    """Tokens of a tensor that has some; the final_logits_bias of an encoder-decoder is [1, tokens]."""
    return spec.shape[-1] if spec.name.endswith("final_logits_bias") else spec.shape[0]


# ---- Which layer of the donor describes each output layer in config.json.

Shapes = Mapping[str, tuple[int, ...]]


class Counterparts:
    """Finds the donor's layer for a layer of another model."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.names, self.configs, self.donor, self.labels = models.names, models.configs, models.donor, models.labels
        self._shapes: dict[tuple[int, str], list[Shapes]] = {}
        self._kinds: dict[tuple[int, str], list[Hashable]] = {}
        self._found: dict[tuple[int, str, int], int] = {}

    def find(self, prefix: str, model: int, layer: int) -> int:
        """The donor's layer that is like `layer` of `model` under the donor's stack `prefix`; the nearest by number.

        Raises LayerError when there is none.
        """
        if model == self.donor:
            return layer
        key = (model, prefix, layer)
        if key not in self._found:
            self._found[key] = self._find(prefix, model, layer)
        return self._found[key]

    def _find(self, prefix: str, model: int, layer: int) -> int:
        theirs, mine = self._shapes_of(self.donor, prefix), self._shapes_of(model, prefix)[layer]
        alike = [i for i, shapes in enumerate(theirs) if shapes == mine]
        if not alike:
            raise self._unlike(prefix, model, layer, theirs[min(layer, len(theirs) - 1)], mine)
        kind, kinds = self._kinds_of(model, prefix)[layer], self._kinds_of(self.donor, prefix)
        same = [i for i in alike if kinds[i] == kind]
        if not same:
            label, donors = self.labels[model], self.labels[self.donor]
            what = f"layer {layer} of {label} is of a kind that no layer of {donors} has, whose config.json the output takes"
            fix = "take layers that both models have, or name the other model as base_model"
            raise LayerError(what, details=[f"{label}: {kind}", f"{donors}: {kinds[alike[0]]}"], fix=fix)
        return min(same, key=lambda i: (abs(i - layer), i))

    def _unlike(self, prefix: str, model: int, layer: int, theirs: Shapes, mine: Shapes) -> LayerError:
        differing = next(n for n in dict.fromkeys([*theirs, *mine]) if theirs.get(n) != mine.get(n))
        here, there = (list(s[differing]) if differing in s else "missing" for s in (mine, theirs))
        label, donors = self.labels[model], self.labels[self.donor]
        what = f"the config.json of {donors} cannot express layer {layer} of {label}: "
        what += "none of its own layers has these tensors and shapes"
        details, fix = [f"{label}: {here}", f"{donors}: {there}"], "take layers of models of one architecture and size"
        return LayerError(what, where=f"{prefix}{layer}.{differing}", details=details, fix=fix)

    def _shapes_of(self, model: int, prefix: str) -> list[Shapes]:
        key = (model, prefix)
        if key not in self._shapes:
            names = self.names[model]
            tables = [used_in(self.models, model, prefix, i) for i in range(names.depth.get(prefix, 0))]
            self._shapes[key] = [
                {suffix: names.specs[name].shape for suffix, name in table.items() if not is_buffer(names.specs[name])}
                for table in tables
            ]
        return self._shapes[key]

    def _kinds_of(self, model: int, prefix: str) -> list[Hashable]:
        """What a model's config says of each of its layers, in the terms that the donor's config has too."""
        key = (model, prefix)
        if key not in self._kinds:
            n = self.names[model].depth.get(prefix, 0)
            mine, theirs = self._home(model, prefix), self._home(self.donor, prefix)
            n_donor = self.names[self.donor].depth.get(prefix, 0)
            said: list[tuple[Hashable, ...]] = []
            for name, value in theirs.items():
                if _per_layer(name, value, n_donor) and _per_layer(name, mine.get(name), n):
                    said.append(tuple(f"{name} = {v!r}" for v in mine[name][:n]))
            if not said:  # model code reads the list, if there is one; numbers next to it may be stale
                said = [tuple(rule.kinds(mine, n)) for rule in rules_for(theirs) if rule.applies(mine)]
            self._kinds[key] = list(zip(*said, strict=True)) if said else [()] * n
        return self._kinds[key]

    def _home(self, model: int, prefix: str) -> Mapping[str, Any]:
        """The part of a model's config that describes a stack."""
        names, config = self.names[model], self.configs[model] or {}
        stack: Stack | None = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
        return stack.section(config) if stack is not None else config


def _per_layer(name: str, value: Any, n_layers: int) -> bool:
    return isinstance(value, list | str) and is_per_layer(name, value, Remap(tuple(range(n_layers)), n_layers))


# ---- tensors that files hold although the model never uses them


NEVER_USED = "its layer uses the keys and values of an earlier one"

_OWN_KEYS = re.compile(r"^self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_PARTS = {"self_attn.q_proj.weight", "per_layer_input_gate.weight"}


def shares_keys(names: ModelNames, config: Mapping[str, Any] | None, prefix: str, layer: int) -> bool | None:
    """Whether a layer uses the keys and values of an earlier one; None if the model has no config.json.

    prefix  the donor's, of the layer's stack
    """
    if config is None:
        return None
    stack = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
    section = config if stack is None else stack.section(config)
    sharing = whole_number(section.get("num_kv_shared_layers")) or 0
    return layer >= names.depth.get(prefix, 0) - sharing


def is_unused(models: Models, prefix: str, suffix: str, layers: Sequence[tuple[int, int]]) -> bool:
    """True for a tensor that no model with it uses. Not all models store it.

    prefix, suffix  of its name: the donor's stack, and what follows the number of the layer
    layers          each model that feeds it, and the layer in it

    A file without config.json is taken to share as another model visibly does.
    """
    if not _OWN_KEYS.match(suffix):
        return False
    stored = [(m, layer) for m, layer in layers if suffix in models.names[m].layers.get(prefix, {}).get(layer, {})]
    said = [shares_keys(models.names[model], models.configs[model], prefix, layer) for model, layer in stored]
    if None in said and not any(_lacks_keys(models.names[model], prefix, layer) for model, layer in layers):
        return False
    return False not in said


def _lacks_keys(names: ModelNames, prefix: str, layer: int) -> bool:
    """True if a Gemma with inputs for each layer has queries and no keys from a layer on."""
    tables = [names.layers.get(prefix, {}).get(i, {}) for i in range(layer, names.depth.get(prefix, 0))]
    return layer > 0 and all(_PARTS <= table.keys() and not any(map(_OWN_KEYS.match, table)) for table in tables)


def used_in(models: Models, model: int, prefix: str, layer: int) -> dict[str, str]:
    """The tensors of a layer that its model uses: name inside the layer → the model's own name."""
    names = models.names[model]
    table = names.layers.get(prefix, {}).get(layer, {})
    if not shares_keys(names, models.configs[model], prefix, layer):
        return table
    return {suffix: name for suffix, name in table.items() if not _OWN_KEYS.match(suffix)}


# ---- the dtype of each output tensor


def main_dtype(specs: Iterable[TensorSpec]) -> DType | None:
    """The floating dtype that most bytes have; None when there is none."""
    nbytes: Counter[str] = Counter()  # by name: a DType takes far longer to hash
    specs = list(specs)
    dtypes = {spec.dtype.name: spec.dtype for spec in specs if spec.dtype.floating}
    if len(dtypes) > 1:
        for spec in specs:
            nbytes[spec.dtype.name] += spec.nbytes
    return max(dtypes.values(), key=lambda d: nbytes[d.name]) if dtypes else None


class DTypes:
    """The asked dtype, else the smallest that holds all inputs. Counts the tensors that stay wider than asked.

    asked   of the recipe or the caller; None: none
    models  the tensors of each, in the dtypes that it keeps them in: not those of what an adapter adds to them
    """

    def __init__(self, asked: DType | None, models: Sequence[Mapping[str, TensorSpec]]) -> None:
        self.asked = asked
        self._models = models
        self._main: dict[int, DType | None] = {}
        self._wide: list[str] = []

    def of(self, inputs: Sequence[Read]) -> DType:
        """The dtype of the tensor merged from these."""
        specs = [self._models[i.model][i.tensor] for i in inputs]
        dtype = specs[0].dtype
        for spec in specs:
            if spec.dtype is not dtype:
                dtype = promote(dtype, spec.dtype)
        if self.asked is None or self.asked is dtype:
            return dtype
        # A tensor that is float32 in every model, though a model's other weights are 16-bit, is so on purpose (router
        # biases, state-space decays): a cast to the asked dtype would change how the model routes.
        if dtype.name == "F32" and self.asked.itemsize < 4 and all(s.dtype.name == "F32" for s in specs):
            if any((self._main_of(i.model) or dtype).itemsize < 4 for i in inputs):
                self._wide.append(inputs[0].tensor)
                return dtype
        return self.asked

    def _main_of(self, model: int) -> DType | None:
        if model not in self._main:
            self._main[model] = main_dtype(self._models[model].values())
        return self._main[model]

    def findings(self) -> list[Finding]:
        """What the user should know."""
        n = len(self._wide)
        if not n:
            return []
        kept = "1 tensor stays" if n == 1 else f"{n:,} tensors stay"
        return [Finding(f"{kept} F32 and not {self.asked}: the models store them so among 16-bit weights", self._wide[0])]
