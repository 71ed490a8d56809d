"""What is wrong with a recipe of dense models, and with the models together, that needs no layout to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weightsmith.errors import Finding, ParameterError, ShapeError, WeightsmithError
from weightsmith.mixture.dense import Dense
from weightsmith.mixture.layouts.dense_config import semantics
from weightsmith.mixture.routing.gates import MODES
from weightsmith.mixture.routing.prompts import Texts, read_texts
from weightsmith.mixture.routing.route import missing_packages
from weightsmith.recipe import Expert, Upcycling
from weightsmith.structure.vocabulary import is_embedding

_AS_WARNING = "; --mergekit-lenient makes this a warning"


_SAME_SIZES = "take experts with the depth and widths of the base"


class Checks:
    """Collects problems and warnings.

    folder   where the recipe's text files start
    lenient  other vocabularies and equal prompts are a warning
    """

    def __init__(self, recipe: Upcycling, folder: Path, *, lenient: bool) -> None:
        self.recipe = recipe
        self.folder = folder
        self.lenient = lenient
        self.problems: list[WeightsmithError] = []
        self.warnings: list[Finding] = []

    def check_recipe(self) -> None:
        """More experts a token than there are, and a router that cannot route."""
        recipe, n = self.recipe, len(self.recipe.experts) * self.recipe.virtual_groups
        if recipe.experts_per_token > n:
            there = "there is 1 expert" if n == 1 else f"there are {n} experts"
            what = f"experts_per_token is {recipe.experts_per_token}, and {there}"
            self.problems.append(ParameterError(what, where=recipe.section.at("experts_per_token"), fix=f"write at most {n}"))
        if recipe.router_scale == 0:
            what = "router_scale is 0: to such a router all experts are the same"
            fix = "write a number above 0, or leave it out"
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
        """Prompts that the gate mode needs and that are missing, or say nothing, are problems."""
        recipe = self.recipe
        if MODES[mode].needs == "nothing":
            return
        self.problems += missing_packages()
        experts = list(zip(recipe.experts, texts, strict=False))
        for expert, own in experts:
            if not own.has_prompts and not expert.prompts_file:  # a file that cannot be read is a problem of its own
                what = f"gate_mode {mode} needs prompts, and {expert.model} has none"
                fix = "write positive_prompts, texts that the expert is for; or gate_mode: random"
                self.problems.append(ParameterError(what, where=expert.section.where, fix=fix))
        seen: dict[object, int] = {}
        for e, (expert, own) in enumerate(experts):
            first = seen.setdefault(own.said, e)
            if own.has_prompts and recipe.experts[first].section is not expert.section:  # else: copies, which are meant
                what = f"experts {first} and {e} have the same prompts, so their router weights would be the same"
                fix = "write prompts of its own for each expert, or gate_mode: random"
                self._lenient(ParameterError(what, where=expert.section.where, fix=f"{fix}{_AS_WARNING}"))

    def warn_of_silent(self, texts: Sequence[Texts]) -> None:
        """Shared experts that have a gate and no prompts to make it of."""
        for expert, own in zip(self.recipe.shared_experts, texts, strict=True):
            if not own.has_prompts:
                what = f"the shared expert {expert.model} has no prompts: its gate is one half, for every token"
                self.warnings.append(Finding(what, expert.section.where, fix="give it positive_prompts"))

    def check_expert(self, base: Dense, donor: Dense, expert: Expert) -> None:
        """An expert that is no MLP of the base's sizes, activation and vocabulary."""
        where, label = expert.section.at("source_model"), base.donor.label
        if len(donor.layers) != len(base.layers):
            what = f"{expert.model} has {len(donor.layers)} layers, and {label} has {len(base.layers)}"
            self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
            return
        for i, (own, wanted) in enumerate(zip(donor.layers, base.layers, strict=True)):
            for part, block in own.mlp.items():
                if block.shape != wanted.mlp[part].shape:
                    what = f"{block.tensor} of {expert.model} is {list(block.shape)}, and layer {i} of {label} has"
                    what += f" {list(wanted.mlp[part].shape)}"
                    self.problems.append(ShapeError(what, where=where, fix=_SAME_SIZES))
                    return
        if donor is not base and (more := sorted({n for layer in donor.layers for n in layer.rest if n.startswith("mlp.")})):
            what = f"{expert.model} has {more[0]} in its layers, for which an expert has no place"
            self.problems.append(ShapeError(what, where=where, fix="take an expert of gate, up and down projections alone"))
        configs = [semantics(each.donor.config, each.donor.label) for each in (donor, base)]
        acts = [str(config["hidden_act"]).replace("swish", "silu") for config in configs]
        if acts[0] != acts[1]:
            what = f"{expert.model} has the activation {acts[0]}, and {label} has {acts[1]}: the experts of a mixture have one"
            self.problems.append(ShapeError(what, where=where, fix="take experts with the base's activation"))
        ours, theirs = _vocabulary(base), _vocabulary(donor)
        if ours != theirs:
            what = f"{expert.model} has {theirs} tokens, and {label} has {ours}, which are the mixture's"
            self._lenient(ShapeError(what, where=where, fix=f"take an expert that reads the base's tokens{_AS_WARNING}"))

    def _lenient(self, problem: WeightsmithError) -> None:
        """A problem that --mergekit-lenient makes a warning."""
        if self.lenient:
            found = problem.finding
            self.warnings.append(replace(found, fix=found.fix.removesuffix(f"{_AS_WARNING}.")))
        else:
            self.problems.append(problem)


def _vocabulary(dense: Dense) -> int:
    """Rows of the embedding; 0 when it has none."""
    specs = [dense.donor.steps[name].out for name in dense.outside]
    return next((spec.shape[0] for spec in specs if is_embedding(spec)), 0)
