"""Validates a recipe and its dense models, and chooses the output layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, ParameterError, ShapeError, Unsupported, WeightsmithError
from weightsmith._features.mixture.assembly import Dense
from weightsmith._features.mixture.gates import MODES
from weightsmith._features.mixture.layouts import LAYOUTS
from weightsmith._features.mixture.layouts.dense_config import neutral_factors, rope_scaling, rotary_share, semantics
from weightsmith._features.mixture.prompts import ExpertTexts, read_texts
from weightsmith._features.mixture.router import missing_packages
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._planning.recipe import Expert, Upcycling
from weightsmith.abc.layout import ExpertLayout

_AS_WARNING = "; --mergekit-lenient makes this a warning"


_SAME_SIZES = "take experts with the depth and widths of the base"


class Checks:
    """Collects problems and warnings.

    folder   base for relative paths of text files
    lenient  report different vocabularies and equal prompts as warnings
    """

    def __init__(self, recipe: Upcycling, folder: Path, problems: Sequence[WeightsmithError], *, lenient: bool) -> None:
        self.recipe = recipe
        self.folder = folder
        self.lenient = lenient
        self.problems = list(problems)
        self.warnings: list[Finding] = list(recipe.findings)

    def check_recipe(self) -> None:
        """Check `experts_per_token` and `router_scale`."""
        recipe, n = self.recipe, len(self.recipe.experts) * self.recipe.virtual_groups
        if recipe.experts_per_token > n:
            what = f"experts_per_token is {recipe.experts_per_token}, but there {'is 1 expert' if n == 1 else f'are {n}'}"
            fix = f"write a number from 1 to {n}"
            self.problems.append(ParameterError(what, where=recipe.section.at("experts_per_token"), fix=fix))
        if recipe.router_scale == 0:
            what = "router_scale is 0, so the router cannot distinguish the experts"
            fix = "write a number above 0, or remove it"
            self.problems.append(ParameterError(what, where=recipe.section.at("router_scale"), fix=fix))

    def read_texts(self) -> list[ExpertTexts]:
        """The prompts of every expert, shared ones last."""
        texts = []
        for expert in (*self.recipe.experts, *self.recipe.shared_experts):
            texts_of_expert, problems = read_texts(expert, self.folder, self.recipe.prompt_tokens)
            texts.append(texts_of_expert)
            self.problems += problems
        return texts

    def check_prompts(self, mode: str, texts: Sequence[ExpertTexts]) -> None:
        """Check that every expert has prompts of its own if the gate mode needs them."""
        recipe = self.recipe
        if MODES[mode].needs == "nothing":
            return
        self.problems += missing_packages()
        experts = list(zip(recipe.experts, texts, strict=False))
        for expert, texts_of_expert in experts:
            if not texts_of_expert.has_prompts and not expert.prompts_file:  # an unreadable file has its own error
                what = f"gate_mode {mode} requires prompts, but {expert.model} has none"
                fix = "write positive_prompts with typical inputs of this expert, or gate_mode: random"
                self.problems.append(ParameterError(what, where=expert.section.where, fix=fix))
        seen: dict[object, int] = {}
        for e, (expert, texts_of_expert) in enumerate(experts):
            first = seen.setdefault(texts_of_expert.said, e)
            if texts_of_expert.has_prompts and recipe.experts[first].section is not expert.section:  # else: intended copies
                what = f"experts {first} and {e} have the same prompts, so their router weights would be the same"
                fix = "give each expert different prompts, or write gate_mode: random"
                self._lenient(ParameterError(what, where=expert.section.where, fix=f"{fix}{_AS_WARNING}"))

    def warn_of_silent(self, texts: Sequence[ExpertTexts]) -> None:
        """Warn about shared experts that have a gate but no prompts for it."""
        for expert, texts_of_expert in zip(self.recipe.shared_experts, texts, strict=True):
            if not texts_of_expert.has_prompts:
                what = f"the shared expert {expert.model} has no prompts, so its gate is 0.5 for every token"
                self.warnings.append(Finding(what, expert.section.where, fix="add positive_prompts"))

    def check_expert(self, base: Dense, donor: Dense, expert: Expert) -> None:
        """Check that an expert has the base's sizes, activation and vocabulary, and is a plain MLP."""
        where, label = expert.section.at("source_model"), base.donor.label
        if len(donor.layers) != len(base.layers):
            what = f"{expert.model} has {len(donor.layers)} layers, but {label} has {len(base.layers)}"
            self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
            return
        for i, (expert_layer, base_layer) in enumerate(zip(donor.layers, base.layers, strict=True)):
            for part, block in expert_layer.mlp.items():
                if block.shape != base_layer.mlp[part].shape:
                    what = f"{block.tensor} of {expert.model} is {list(block.shape)}, but layer {i} of {label} has"
                    what += f" {list(base_layer.mlp[part].shape)}"
                    self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
                    return
        if donor is not base and (extra := sorted({n for layer in donor.layers for n in layer.rest if n.startswith("mlp.")})):
            what = f"{expert.model} has {extra[0]} in its layers, which an expert cannot hold"
            self.problems.append(ShapeError(what, where=where, fix="use a model whose MLPs are gate, up and down projections"))
        configs = [semantics(dense.donor.config, dense.donor.label) for dense in (donor, base)]
        acts = [str(config["hidden_act"]).replace("swish", "silu") for config in configs]
        if acts[0] != acts[1]:
            what = f"{expert.model} uses the activation {acts[0]}, but {label} uses {acts[1]}; a mixture has only one"
            self.problems.append(ShapeError(what, where=where, fix="use experts with the base's activation"))
        ours, theirs = _vocabulary(base), _vocabulary(donor)
        if ours != theirs:
            what = f"{expert.model} has {theirs} tokens, but {label}, whose tokenizer the mixture uses, has {ours}"
            self._lenient(ShapeError(what, where=where, fix=f"use experts with the base's tokenizer{_AS_WARNING}"))

    def _lenient(self, problem: WeightsmithError) -> None:
        """Add a problem, or with --mergekit-lenient a warning."""
        if self.lenient:
            finding = problem.finding
            self.warnings.append(replace(finding, fix=finding.fix.removesuffix(f"{_AS_WARNING}.")))
        else:
            self.problems.append(problem)


def _vocabulary(dense: Dense) -> int:
    """Rows of the embedding; 0 if there is none."""
    specs = [dense.donor.steps[name].out for name in dense.outside]
    return next((spec.shape[0] for spec in specs if is_embedding(spec)), 0)


# ---- The output layout: the one that the recipe names, else the first that can hold the models.


def choose_layout(recipe: Upcycling, base: Dense) -> tuple[ExpertLayout, list[Finding]]:
    """The layout and warnings about it. Raises Unsupported, which says why none fits, and as `Plugins.get` does."""
    where = recipe.section.at("architecture")
    named = recipe.architecture
    model_type = str(base.donor.config.get("model_type", ""))
    counts = len(recipe.experts) * recipe.virtual_groups, len(recipe.shared_experts)
    tried: dict[str, str] = {}
    for layout in _called(named, where) if named else LAYOUTS:  # those of packages are imported if none of ours fits
        reason = why_not(layout, base, *counts)
        tried[layout.name] = reason or f"not known to be equivalent to {model_type} models"
        if reason or not (named or model_type in layout.dense):
            continue
        if model_type in layout.dense:
            return layout, []
        known = f"is equivalent to {', '.join(layout.dense)} models" if layout.dense else "has no dense equivalent"
        what = f"{layout.title} {known}; it is not known to be equivalent to {model_type} models"
        return layout, [Finding(what, where, fix="compare the output with the base before you use it")]
    fits = [o.name for o in _ours() if o.name not in tried and model_type in o.dense and not why_not(o, base, *counts)]
    whose = f"experts of {base.donor.label} ({model_type or 'no model type'})"
    raise Unsupported(
        f"{named} cannot hold {whose}" if named else f"no architecture can hold {whose}",
        where=where,
        details=[f"{name}: {reason}" for name, reason in tried.items()],
        fix=f"write architecture: {' or '.join(fits)}" if fits else "",
    )


def _called(name: str, where: str) -> tuple[ExpertLayout, ...]:
    """Layouts with this name. If there are none, those of weightsmith whose names start with it, as in mergekit.

    Raises UnknownName, and PluginError for one of a package that does not work.
    """
    plain_name = _plain(name)
    if name not in LAYOUTS.builtin and name in LAYOUTS:
        return (LAYOUTS.get(name),)
    names = {o.name: {_plain(n) for n in (o.name, o.title, o.architecture, *o.aliases)} for o in _ours()}
    exact = tuple(o for o in _ours() if plain_name in names[o.name])
    return (
        exact
        or tuple(o for o in _ours() if any(n.startswith(plain_name) for n in names[o.name]))
        or (LAYOUTS.get(name, where),)
    )


def _ours() -> tuple[ExpertLayout, ...]:
    return tuple(map(LAYOUTS.get, LAYOUTS.builtin))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# ---- Why a layout cannot hold a dense model, judged by names, shapes and config.json.

_PREFIX = "model.layers."
_OUTSIDE = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


def why_not(layout: ExpertLayout, base: Dense, experts: int, shared: int) -> str:
    """Why a layout cannot hold a base with these numbers of routed and shared experts; "" if it can."""
    config = semantics(base.donor.config, base.donor.label)
    problems = (*layout.check(config), *_config(layout, config), *_names(layout, base), *_shapes(layout, base, config))
    return next(iter((*problems, *_counts(layout, experts, shared))), "")


def _config(layout: ExpertLayout, config: Mapping[str, Any]) -> Iterator[str]:
    kinds = set(config["layer_types"])
    if layout.windows == "none" and "sliding_attention" in kinds:
        yield f"it has no sliding window, but the base has one of {config['sliding_window']} tokens"
    if layout.windows == "all" and len(kinds) > 1:
        yield "either all of its layers have a sliding window or none do, but only some layers of the base have one"
    if not layout.partial and (share := rotary_share(config)) != 1:
        yield f"its rotary embeddings rotate the whole head, but the base's rotate {share:g} of it"
    if any(isinstance(value, Mapping) for value in rope_scaling(config).values()):
        yield "all its layers share rope_parameters, but the base's layers have their own"
    if not all(_rotated(config)):
        yield "all its layers have rotary embeddings, but not all of the base's do"
    if not layout.multipliers:
        for key, neutral in neutral_factors(config).items():
            if not math.isclose(value := config.get(key) or neutral, neutral, rel_tol=1e-6):
                yield f"it has no {key}, but the base's is {value:g}"


def _rotated(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has rotary embeddings: some of SmolLM3's have none."""
    if (stated := config.get("no_rope_layers")) is not None:
        return [bool(one) for one in stated]
    every = config.get("no_rope_layer_interval") or 0
    return [(i + 1) % every != 0 for i in range(config["num_hidden_layers"])] if every else []


def _names(layout: ExpertLayout, base: Dense) -> Iterator[str]:
    if base.prefix != _PREFIX:
        yield f"its layers are at {_PREFIX}, but the base's are at {base.prefix}"
    if other := sorted(set(base.outside) - _OUTSIDE):
        yield f"it has no place for {other[0]}"
    for names in map(set, (layer.rest for layer in base.layers)):
        if missing := sorted(layout.layer - names - layout.fillable):
            yield f"it requires {missing[0]}, which the base lacks"
        for group in (*layout.optional, layout.fillable):
            if names & group and not group <= names:
                yield f"it requires {sorted(group - names)[0]} with {sorted(group & names)[0]}"
        if extra := sorted(names - layout.layer.union(*layout.optional)):
            yield f"it has no place for {extra[0]}"


def _shapes(layout: ExpertLayout, base: Dense, config: Mapping[str, Any]) -> Iterator[str]:
    """Attention whose shapes contradict config.json, and norms of another width."""
    heads, size, groups = (config.get(key) or 0 for key in ("num_attention_heads", "head_dim", "num_key_value_heads"))
    if "self_attn.k_proj.weight" not in layout.layer or not heads * size * groups:
        return
    wide, narrow, together = heads * size, groups * size, layout.norms == "all heads"
    shapes = {
        "self_attn.q_proj.weight": (wide, base.hidden),
        "self_attn.k_proj.weight": (narrow, base.hidden),
        "self_attn.v_proj.weight": (narrow, base.hidden),
        "self_attn.o_proj.weight": (base.hidden, wide),
        "self_attn.q_norm.weight": (wide if together else size,),
        "self_attn.k_norm.weight": (narrow if together else size,),
    }
    for layer in base.layers:
        for name, shape in shapes.items():
            if name in layer.rest and layer.rest[name].shape != shape:
                what = f" ({layout.norms} normed)" if name.endswith("_norm.weight") else ""
                yield f"its {name} is {list(shape)}{what}, but the base's is {list(layer.rest[name].shape)}"


def _counts(layout: ExpertLayout, experts: int, shared: int) -> Iterator[str]:
    low, high = layout.shared_experts
    if not low <= shared <= high:
        expected = (
            "no shared expert" if high == 0 else f"{low} to {high} shared experts" if low < high else f"{low} shared expert"
        )
        yield f"it requires {expected}, not {shared}"
    if experts < layout.min_experts:
        yield f"it requires at least {layout.min_experts} experts, not {experts}"
