"""Validates a recipe and its dense models, as far as that does not depend on the output layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weightsmith._base.errors import Finding, ParameterError, ShapeError, WeightsmithError
from weightsmith._features.mixture.dense import Dense
from weightsmith._features.mixture.layouts.dense_config import semantics
from weightsmith._features.mixture.routing.gates import MODES
from weightsmith._features.mixture.routing.product import missing_packages
from weightsmith._features.mixture.routing.prompts import Texts, read_texts
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._planning.recipe import Expert, Upcycling

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

    def read_texts(self) -> list[Texts]:
        """The prompts of every expert, shared ones last."""
        texts = []
        for expert in (*self.recipe.experts, *self.recipe.shared_experts):
            own, problems = read_texts(expert, self.folder, self.recipe.prompt_tokens)
            texts.append(own)
            self.problems += problems
        return texts

    def check_prompts(self, mode: str, texts: Sequence[Texts]) -> None:
        """Check that every expert has prompts of its own if the gate mode needs them."""
        recipe = self.recipe
        if MODES[mode].needs == "nothing":
            return
        self.problems += missing_packages()
        experts = list(zip(recipe.experts, texts, strict=False))
        for expert, own in experts:
            if not own.has_prompts and not expert.prompts_file:  # an unreadable file has its own error
                what = f"gate_mode {mode} requires prompts, but {expert.model} has none"
                fix = "write positive_prompts with typical inputs of this expert, or gate_mode: random"
                self.problems.append(ParameterError(what, where=expert.section.where, fix=fix))
        seen: dict[object, int] = {}
        for e, (expert, own) in enumerate(experts):
            first = seen.setdefault(own.said, e)
            if own.has_prompts and recipe.experts[first].section is not expert.section:  # else: intended copies
                what = f"experts {first} and {e} have the same prompts, so their router weights would be the same"
                fix = "give each expert different prompts, or write gate_mode: random"
                self._lenient(ParameterError(what, where=expert.section.where, fix=f"{fix}{_AS_WARNING}"))

    def warn_of_silent(self, texts: Sequence[Texts]) -> None:
        """Warn about shared experts that have a gate but no prompts for it."""
        for expert, own in zip(self.recipe.shared_experts, texts, strict=True):
            if not own.has_prompts:
                what = f"the shared expert {expert.model} has no prompts, so its gate is 0.5 for every token"
                self.warnings.append(Finding(what, expert.section.where, fix="add positive_prompts"))

    def check_expert(self, base: Dense, donor: Dense, expert: Expert) -> None:
        """Check that an expert has the base's sizes, activation and vocabulary, and is a plain MLP."""
        where, label = expert.section.at("source_model"), base.donor.label
        if len(donor.layers) != len(base.layers):
            what = f"{expert.model} has {len(donor.layers)} layers, but {label} has {len(base.layers)}"
            self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
            return
        for i, (own, wanted) in enumerate(zip(donor.layers, base.layers, strict=True)):
            for part, block in own.mlp.items():
                if block.shape != wanted.mlp[part].shape:
                    what = f"{block.tensor} of {expert.model} is {list(block.shape)}, but layer {i} of {label} has"
                    what += f" {list(wanted.mlp[part].shape)}"
                    self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
                    return
        if donor is not base and (more := sorted({n for layer in donor.layers for n in layer.rest if n.startswith("mlp.")})):
            what = f"{expert.model} has {more[0]} in its layers, which an expert cannot hold"
            self.problems.append(ShapeError(what, where=where, fix="use a model whose MLPs are gate, up and down projections"))
        configs = [semantics(each.donor.config, each.donor.label) for each in (donor, base)]
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
            found = problem.finding
            self.warnings.append(replace(found, fix=found.fix.removesuffix(f"{_AS_WARNING}.")))
        else:
            self.problems.append(problem)


def _vocabulary(dense: Dense) -> int:
    """Rows of the embedding; 0 if there is none."""
    specs = [dense.donor.steps[name].out for name in dense.outside]
    return next((spec.shape[0] for spec in specs if is_embedding(spec)), 0)
