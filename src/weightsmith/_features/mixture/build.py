"""Plans a `weightsmith moe` recipe from the headers of its models, or reports all problems; chooses the output layout."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weightsmith._activations.decoder import Base
from weightsmith._activations.model import TextModel, TextRun, own_text_for
from weightsmith._activations.rows import OWN
from weightsmith._base.errors import (
    CheckpointError,
    Finding,
    ParameterError,
    PlanError,
    ShapeError,
    Unsupported,
    WeightsmithError,
    noting,
)
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._base.installation import package_version
from weightsmith._features.mixture.assembly import Assembly, Dense, Donor, Steps, check_transforms, dense_parts, sharded
from weightsmith._features.mixture.gates import MODES
from weightsmith._features.mixture.layouts import LAYOUTS
from weightsmith._features.mixture.layouts.dense_config import config_of, neutral_factors, rope_scaling, rotary_share, semantics
from weightsmith._features.mixture.prompts import ExpertTexts, read_texts
from weightsmith._features.mixture.router import INSTEAD, GatedExpert, Gating, missing_packages, uses_states
from weightsmith._features.mixture.surgery import assemble_surgery
from weightsmith._files.copied import MAX_COPIED_BYTES, left_out_findings
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._planning import recipe as recipes
from weightsmith._planning.planner.agreement import compared, tokenizer_disagreements
from weightsmith._planning.planner.build import NOTHING, assemble_recipe
from weightsmith._planning.planner.files import Companions, carried, held_files, lacking
from weightsmith._planning.planner.inputs import at, open_models
from weightsmith._planning.planner.loading import question_of
from weightsmith._planning.planner.prepared import PlanRequest, Prepared, Stage, Written
from weightsmith._planning.planner.steps import main_dtype
from weightsmith._planning.recipe import Expert, ModelRef, Recipe, Surgery, Upcycling
from weightsmith._plans import Dropped, FileRead, Product, Provenance, Step, arrays_of, needs_of
from weightsmith._version import __version__
from weightsmith.abc.layout import ExpertLayout, Facts


def assemble_mixture(request: PlanRequest, written: Written = NOTHING) -> Prepared:
    """The draft of a mixture whose recipe has been read. Raises PlanError with all problems; no tensor data is read.

    written  folders with results of recipes that its merges read, by `Stage.path`
    """
    recipe = request.recipe
    if isinstance(recipe, Surgery):
        return assemble_surgery(recipe, request.options, request.problems, folder=request.folder)
    assert isinstance(recipe, Upcycling)
    with ExitStack() as stack:
        prepared = _Builder(recipe, request, written).assemble(stack)
        stack.pop_all()
        return prepared


class _Builder:
    def __init__(self, recipe: Upcycling, request: PlanRequest, written: Written) -> None:
        options = request.options
        self.recipe = recipe
        self.checks = Checks(recipe, request.folder, request.problems, lenient=options.lenient)
        self.problems, self.warnings = self.checks.problems, self.checks.warnings
        self.options = options
        self.asked = options.out_dtype or recipe.dtype
        self.folder = request.folder
        self.written = written
        self.stages: list[Stage] = []
        self.assembly = Assembly(Provenance("moe"))
        self.named: list[Path] = []

    def assemble(self, stack: ExitStack) -> Prepared:
        base, *experts = self._models(stack)
        checks = self.checks
        checks.check_recipe()
        mode = self.recipe.gate_mode or recipes.GATE_MODES[0]
        texts = checks.read_texts()
        checks.check_prompts(mode, texts)
        donors = [expert for expert in experts if expert is not None]
        if base is None or len(donors) < len(experts):
            raise PlanError(self.problems)
        listed = [*self.recipe.experts, *self.recipe.shared_experts]
        layout, companions = self._checked(base, donors, listed)
        if layout.shared_router and MODES[mode].needs != "nothing":
            checks.warn_of_silent(texts[len(self.recipe.experts) :])
        n, groups = len(self.recipe.experts), self.recipe.virtual_groups
        if MODES[mode].needs != "nothing" or self.options.routing_report:
            self._add_texts(base, donors, listed, texts)
        donors = [*(shard for donor in donors[:n] for shard in sharded(donor, groups)), *donors[n:]]
        facts = self._facts(base, donors[0].intermediate)
        self.warnings += [Finding(text, self.recipe.filename) for text in layout.warnings(facts)]
        makes = Steps(self.recipe, base, layout, facts, self.assembly, self.asked)
        steps = makes.make(donors)
        gated = listed if layout.shared_router else listed[: len(self.recipe.experts)]
        tokenizer = companions.opened[companions.tokenizer]
        self._add_router(mode, makes, gated, texts, tokenizer)
        if self.problems:
            raise PlanError(self.problems)
        self.warnings += [*companions.findings, *_disagreements(companions, [base, *donors])]
        self._fill(layout, facts, base, steps, companions)
        names = [name for expert in listed for name in (expert.prompts_file, expert.held_out_file) if name not in ("", OWN)]
        self.named += [self.folder / expand_user(name) for name in names]
        draft, donor, loading = self.assembly.draft, base.donor, None
        if self.options.check_loading:
            specs = [step.out for step in donor.steps.values()]
            loading = question_of(draft, donor.config, specs, donor.structure, donor.label, where=self.recipe.filename)
        inputs = self.assembly.inputs
        return Prepared(draft, inputs, donor.structure, named=self.named, stages=self.stages, loading=loading)

    def _checked(self, base: Dense, donors: Sequence[Dense], listed: Sequence[Expert]) -> tuple[ExpertLayout, Companions]:
        """The layout that holds these experts, and where tokenizer and templates come from. Raises PlanError."""
        seen: set[int] = set()
        for donor, expert in zip(donors, listed, strict=True):
            if id(donor) not in seen:
                self.checks.check_expert(base, donor, expert)
            seen.add(id(donor))
        self.problems += check_transforms(self.recipe, donors[0].intermediate)
        try:
            layout, layout_warnings = choose_layout(self.recipe, base)
        except WeightsmithError as error:
            raise PlanError([*self.problems, error]) from error
        self.warnings += layout_warnings
        companions = self._companions([base, *donors])
        if self.problems:
            raise PlanError(self.problems)
        return layout, companions

    def _facts(self, base: Dense, intermediate: int) -> Facts:
        """What the layout is told. intermediate: the width of an expert, after donors were cut into virtual groups."""
        groups = self.recipe.virtual_groups
        return Facts(
            config=semantics(base.donor.config, base.donor.label),
            present=frozenset(base.layers[0].rest),
            experts=len(self.recipe.experts) * groups,
            shared=len(self.recipe.shared_experts),
            per_token=self.recipe.experts_per_token,
            intermediate=intermediate,
            hidden=base.hidden,
            scales=(
                tuple(expert.residual_scale for expert in self.recipe.experts for _ in range(groups)),
                tuple(expert.residual_scale for expert in self.recipe.shared_experts),
            ),
        )

    def _companions(self, dense: Sequence[Dense]) -> Companions:
        """What the base lacks of tokenizer, chat template and generation_config.json, from the other models in their order."""
        donors = {id(model.donor): model.donor for model in dense}.values()
        members = [(donor.label, donor.checkpoint) for donor in donors]
        known = {id(checkpoint) for _, checkpoint in members}
        members += [(checkpoint.ref, checkpoint) for checkpoint in self.assembly.inputs if id(checkpoint) not in known]
        companions = Companions([label for label, _ in members], [checkpoint for _, checkpoint in members], 0)
        with noting(self.problems):
            fix = "put the tokenizer that the output is to have next to the weights of the base"
            companions.fill_tokenizer(self.recipe.section.at("base_model"), fix)
            companions.fill_template()
            companions.fill_generation()
            companions.add_ends(None)
            companions.note_ends(None, dense[0].donor.config or {})
        return companions

    def _add_texts(self, base: Dense, donors: Sequence[Dense], experts: Sequence[Expert], texts: Sequence[ExpertTexts]) -> None:
        """Add the products of what the models of experts write by themselves."""
        known: set[str] = set()
        vocabulary: dict[str, int] | None = None
        for dense, expert, texts_of_expert in zip(donors, experts, texts, strict=True):
            name = texts_of_expert.written
            if not name or name in known:
                continue
            known.add(name)
            where, donor = expert.section.at("prompts_file"), dense.donor
            try:
                model = self._text_model(donor)
                vocabulary = vocabulary or self._text_model(base.donor).cutter.tokenizer.get_vocab()
                if model.cutter.tokenizer.get_vocab() != vocabulary:
                    what = f"{donor.label} writes tokens of its own tokenizer, and the mixture has that of {base.donor.label}"
                    raise Unsupported(what, fix="write a file of its text: weightsmith write MODEL FILE.jsonl")
                text = own_text_for(model, None, self.recipe.prompt_tokens, self.options.seed)
                self.assembly.draft.products.append(TextRun(model, text, name.removesuffix("rows")).text_rows)
            except PlanError as error:
                self.problems += [at(problem, where) for problem in error.problems]
            except WeightsmithError as error:
                self.problems.append(at(error, where))

    def _text_model(self, donor: Donor) -> TextModel:
        needs = partial(needs_of, maker=arrays_of(self.assembly.draft.products))
        steps = tuple(donor.steps.values())
        number = self.assembly.add(donor.checkpoint)
        return TextModel(donor.label, number, donor.checkpoint, donor.config, steps, donor.structure, needs, instead=INSTEAD)

    def _add_router(
        self, mode: str, steps: Steps, gated: Sequence[Expert], texts: Sequence[ExpertTexts], tokenizer: Checkpoint
    ) -> None:
        """Add the router product. It reads the base's tensors if the gate mode needs hidden states or the embedding.

        tokenizer  the model whose tokenizer is used
        """
        recipe, routed, base = self.recipe, len(self.recipe.experts), steps.base
        report = uses_states(mode, report=False) if self.options.routing_report is None else self.options.routing_report
        report = report and any(t.has_prompts or t.has_held_out for t in texts[:routed])
        seen = report or MODES[mode].needs != "nothing"
        read = tuple(base.donor.steps.values()) if seen else ()
        number, config = self.assembly.add(tokenizer), dict(base.donor.config) if seen else {}
        gating = Gating(
            mode=mode,
            experts=tuple(
                GatedExpert(str(e.model), e.section.where, t if seen else ExpertTexts())
                for e, t in zip(gated, texts, strict=False)
            ),
            routed=routed,
            base=Base(base.donor.label, number, config, base.prefix, len(base.layers), base.hidden, INSTEAD),
            seed=self.options.seed,
            scale=recipe.router_scale,
            sigmoid=steps.layout.sigmoid,
            groups=recipe.virtual_groups,
            per_token=recipe.experts_per_token,
            prompt_tokens=recipe.prompt_tokens,
            report=report,
            where=recipe.section.at("gate_mode"),
            packages={name: package_version(name) for name in ("torch", "transformers", "tokenizers")} if seen else {},
            lenient=self.options.lenient,
        )
        written = [expert.texts.written for expert in gating.experts if expert.texts.written]
        product = Product(
            name="router",
            op="router",
            outs=gating.outs([steps.routers(i) for i in range(len(base.layers))]),
            settings=gating.to_json(),
            steps=read,
            needs=tuple(dict.fromkeys([*(name for step in read for leaf in step.leaves for name in leaf.needs), *written])),
            files=self._tokenizer_files(tokenizer) if seen else (),
        )
        self.assembly.draft.products.append(product)

    def _tokenizer_files(self, checkpoint: Checkpoint) -> tuple[FileRead, ...]:
        """The files a tokenizer may read, with their checksums."""
        number, files = self.assembly.add(checkpoint), []
        checkpoint.fetch(checkpoint.files)
        for name in checkpoint.files:
            try:
                content = read_bounded(checkpoint.folder / name, MAX_COPIED_BYTES)
            except CheckpointError as error:
                self.problems.append(error)
                continue
            files.append(FileRead(number, name, hashlib.sha256(content).hexdigest()))
        return tuple(files)

    # --- models ------------------------------------------------------------------------------------------------------

    def _models(self, stack: ExitStack) -> list[Dense | None]:
        """The base, and the model of every expert, shared ones last. Each distinct model is opened once."""
        base, base_where = self.recipe.base, self.recipe.section.at("base_model")
        experts = [*self.recipe.experts, *self.recipe.shared_experts]
        listed = [
            (base, base_where),
            *((e.model, base_where if e.model == base else e.section.at("source_model")) for e in experts),
        ]
        refs = list(dict.fromkeys(model for model, _ in listed if isinstance(model, ModelRef)))
        opened, problems = open_models(refs, stack, plain=self.options.ignore_quantization_config)
        self.problems += problems
        for ref, checkpoint in zip(refs, opened, strict=True):
            if checkpoint is not None:  # embedding and head are the base's
                self.warnings += [note for note in checkpoint.notes if ref == base or note is not checkpoint.untied]
        checkpoints = dict(zip(refs, opened, strict=True))
        parts_of_model: dict[ModelRef | str, Dense | None] = {}
        for model, where in (listed[0], *sorted(listed[1:], key=lambda entry: not isinstance(entry[0], ModelRef))):
            if isinstance(model, ModelRef):
                if model not in parts_of_model:
                    checkpoint = checkpoints[model]
                    donor = None if checkpoint is None else self.assembly.checkpoint(checkpoint, str(model))
                    parts_of_model[model] = None if donor is None else self._parts(donor, model.where)
            elif where not in parts_of_model:
                parts_of_model[where] = self._merged(model, where, stack)
        return [parts_of_model[model if isinstance(model, ModelRef) else where] for model, where in listed]

    def _merged(self, recipe: Recipe, where: str, stack: ExitStack) -> Dense | None:
        """The parts of an inline merge."""
        options = replace(self.options, out_dtype=self.asked)
        try:
            assembled = assemble_recipe(PlanRequest(recipe, options, folder=self.folder), self.written)
            stack.callback(assembled.close)
            assembled.check()
        except PlanError as error:
            self.problems += error.problems
            return None
        self.warnings += assembled.draft.warnings
        self.named += assembled.named
        self.stages += assembled.stages
        if assembled.draft.tables or (assembled.draft.files and (recipe.tokenizer is not None or recipe.chat_template)):
            what = "a merge inside a mixture cannot change the vocabulary or the chat template"
            fix = "run it with `weightsmith merge` first, and name the result here"
            self.problems.append(Unsupported(what, where=where, fix=fix))
            return None
        return self._parts(self.assembly.merge(assembled), where)

    def _parts(self, donor: Donor, where: str) -> Dense | None:
        parts = dense_parts(donor)
        if isinstance(parts, Dense):
            return parts
        self.problems.append(at(parts, where))
        return None

    # --- the rest of the plan ----------------------------------------------------------------------------------------

    def _fill(self, layout: ExpertLayout, facts: Facts, base: Dense, steps: list[Step], companions: Companions) -> None:
        """Fill the rest of the draft."""
        config, draft = config_of(layout, facts), self.assembly.draft
        dtype = main_dtype(step.out for step in steps)
        if dtype is not None:
            config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype.torch}
        checkpoint = base.donor.checkpoint
        draft.provenance, draft.config, draft.steps = self._provenance(config), config, steps
        draft.donor = self.assembly.add(checkpoint)
        draft.dropped = list(self._dropped(base, steps))
        draft.carried = list(carried(checkpoint.files, companions.files, companions.removed))
        draft.files, draft.naming = dict(companions.files), checkpoint.naming
        draft.lacking = lacking(((c.ref, c.files) for c in self.assembly.inputs), held_files(draft, checkpoint.folder))
        draft.max_shard_bytes, draft.seed, draft.recipe = self.options.shard_bytes, self.options.seed, self.recipe.text
        draft.warnings = [*self.warnings, *left_out_findings(checkpoint.left_out, checkpoint.ref)]

    def _provenance(self, config: Mapping[str, Any]) -> Provenance:
        """The text of the model card."""
        title = f"Mixture of experts ({config.get('model_type', '')}) built from dense models with weightsmith {__version__}."
        seed = f"\n\nRandom seed: {self.options.seed}." if self.options.seed else ""
        source = f"The router is not trained: train it on text from the experts' domains.{seed}"
        return Provenance("moe", title, source, ", over the tensors shared by an inline merge and its base")

    def _dropped(self, base: Dense, steps: Sequence[Step]) -> tuple[Dropped, ...]:
        """Every input tensor that no step reads, and why."""
        used = {(i.model, i.tensor) for step in steps for leaf in step.leaves for i in leaf.inputs}
        of_base = {(i.model, i.tensor) for step in base.donor.steps.values() for leaf in step.leaves for i in leaf.inputs}
        buffers = {(i.model, i.tensor) for name in base.dropped for i in base.donor.steps[name].inputs}
        dropped = []
        for number, checkpoint in enumerate(self.assembly.inputs):
            for tensor in checkpoint.specs:
                if (number, tensor) in buffers:
                    dropped.append(Dropped(number, tensor, "models compute it themselves"))
                elif (number, tensor) not in used:
                    is_of_base = (number, tensor) in of_base
                    reason = "replaced by the experts" if is_of_base else "only the MLPs of this model are used"
                    dropped.append(Dropped(number, tensor, reason))
        return tuple(dropped)


def _disagreements(companions: Companions, dense: Sequence[Dense]) -> Sequence[Finding]:
    """What differs in the tokenizers of the models that are merged, and of those that tokenizer and template come from."""
    count = max(len({id(model.donor) for model in dense}), companions.tokenizer + 1, companions.template + 1)
    members = list(zip(companions.labels, companions.opened, strict=True))[:count]
    alike = [compared(label, checkpoint) for label, checkpoint in members]
    return tokenizer_disagreements(alike, companions.tokenizer, companions.template, companions.seen)


# ---- Checks of the recipe and its dense models, and the choice of the output layout


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
