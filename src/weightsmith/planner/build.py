"""Recipe and headers in, Plan out; or every problem at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith import methods
from weightsmith import recipe as recipes
from weightsmith.checkpoint import Checkpoint, open_checkpoint
from weightsmith.errors import (
    Finding,
    FormatError,
    LayerError,
    MismatchError,
    PlanError,
    ShapeError,
    TensorLost,
    UnknownName,
    Unsupported,
    WeightsmithError,
)
from weightsmith.methods.base import Method
from weightsmith.planner.config import main_dtype, output_config
from weightsmith.planner.match import ModelNames, comes_first, is_buffer, is_head, ties
from weightsmith.planner.parameters import Origin, Resolver, check_names
from weightsmith.planner.placement import Block, Placement, Placer
from weightsmith.planner.steps import Dropped, ModelInput, Plan, Source, Step
from weightsmith.recipe import ModelRef, Recipe
from weightsmith.structure import Structure, analyse
from weightsmith.tensors import MAX_STACKED, DType, TensorSpec, promote


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan and the open checkpoints it reads from; close it, or use it as a context manager."""

    plan: Plan
    inputs: tuple[Checkpoint, ...]
    structure: Structure
    origins: Mapping[str, tuple[Block, tuple[str, ...], float]]
    resolver: Resolver

    def explain(self, tensor: str) -> list[Origin]:
        """The value of every parameter of one output tensor, and where the recipe says so. Raises UnknownName."""
        if tensor not in self.origins:
            from weightsmith.errors import nearest

            names = [s.out.name for s in self.plan.steps]
            if tensor in names:
                return []
            raise UnknownName(f"the output has no tensor '{tensor}'{nearest(tensor, names)}")
        block, names_in_models, t = self.origins[tensor]
        return self.resolver.explain(block, tensor, names_in_models, t)

    def close(self) -> None:
        """Close the checkpoints."""
        for checkpoint in self.inputs:
            checkpoint.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def prepare(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    out_dtype: DType | None = None,
    max_shard_bytes: int = 5_000_000_000,
    seed: int = 0,
    lenient: bool = False,
    copy_only: Sequence[str] = (),
) -> Prepared:
    """Read a recipe and its models' headers and plan the merge.

    source           path of a YAML file, YAML text (with a newline), or a mapping
    out_dtype        overrides the recipe's
    max_shard_bytes  upper bound of a weight file
    seed             of random masks
    lenient          settings that mergekit ignores are warnings, not errors

    Raises PlanError with all problems. No tensor data is read. Cost: headers, and about 20 µs a tensor.
    """
    names = {p.name for m in methods.all_methods() for p in m.parameters}
    if isinstance(source, os.PathLike):
        source = Path(source)
    recipe, found = recipes.load(source, lenient=lenient, parameter_names=sorted(names))
    problems: list[WeightsmithError] = list(found)
    method = None
    if recipe is not None and recipe.merge_method:
        try:
            method = methods.get(recipe.merge_method)
        except UnknownName as error:
            finding = error.finding
            problems.append(UnknownName(finding.what, where=recipe.at("merge_method"), fix=finding.fix))
    if recipe is None or (method is None and not problems):
        raise PlanError(problems)
    with ExitStack() as stack:
        models, inputs = _open(recipe, problems, stack)
        if method is None or inputs is None:
            raise PlanError(problems)
        builder = _Builder(recipe, method, models, inputs, problems, out_dtype)
        prepared = builder.build(max_shard_bytes=max_shard_bytes, seed=seed, lenient=lenient)
        stack.pop_all()
        return prepared


def _references(recipe: Recipe) -> Iterator[ModelRef]:
    """Every model the recipe names, the base first."""
    if recipe.base_model is not None:
        yield recipe.base_model
    for part in (recipe, *recipe.modules):
        yield from (i.model for i in part.models)
        for s in part.slices:
            yield from (i.model for i in s.sources)
            if s.base_model is not None:
                yield s.base_model


def _open(
    recipe: Recipe, problems: list[WeightsmithError], stack: ExitStack
) -> tuple[dict[ModelRef, int], list[Checkpoint] | None]:
    """Open every model once; problems with them join the others, and then there are no inputs."""
    models: dict[ModelRef, int] = {}
    inputs: list[Checkpoint] = []
    complete = True
    for ref in _references(recipe):
        if ref in models:
            continue
        models[ref] = len(models)
        try:
            checkpoint = open_checkpoint(ref.path, revision=ref.revision or None)
        except WeightsmithError as error:
            finding = error.finding
            where = f"{ref.where}: {finding.where}" if finding.where else ref.where
            problems.append(type(error)(finding.what, where=where, details=finding.details, fix=finding.fix))
            complete = False
            continue
        stack.callback(checkpoint.close)
        inputs.append(checkpoint)
        if checkpoint.quantised is not None:
            complete = False
            problems.append(
                Unsupported(
                    f"{ref} is quantised ({checkpoint.quantised}), and its codes cannot be merged as numbers",
                    where=ref.where,
                    fix="name an unquantised checkpoint of the same model",
                )
            )
    return models, inputs if complete else None


class _Builder:
    def __init__(
        self,
        recipe: Recipe,
        method: Method,
        models: dict[ModelRef, int],
        inputs: list[Checkpoint],
        problems: list[WeightsmithError],
        out_dtype: DType | None,
    ) -> None:
        self.recipe = recipe
        self.method = method
        self.inputs = inputs
        self.problems = problems
        self.models = models
        self.labels = [str(ref) for ref in models]
        self.warnings: list[Finding] = list(recipe.findings)
        self.dtype = out_dtype or recipe.out_dtype or recipe.dtype
        self.specs = [{name: t.spec for name, t in c.tensors.items()} for c in inputs]
        self.structures = [analyse(specs.values(), c.config) for specs, c in zip(self.specs, inputs, strict=True)]
        # Models that share their names share the donor's structure object, so that equal layouts cost once.
        self.donor = 0
        donor = self.structures[self.donor]
        self.names = [
            ModelNames(s, donor, specs) for s, specs in zip(self.structures, self.specs, strict=True)
        ]
        self.main_dtypes = [main_dtype(specs.values()) for specs in self.specs]
        self.resolver = Resolver(method, self.labels)
        self.steps: list[Step] = []
        self.origins: dict[str, tuple[Block, tuple[str, ...], float]] = {}
        self.used: list[set[str]] = [set() for _ in inputs]
        self.reasons: list[dict[str, str]] = [{} for _ in inputs]
        self.layers: dict[str, list[int]] = {}
        self.untie = False
        self.copied: list[list[str]] = [[] for _ in inputs]
        self._parents: list[set[str]] | None = None
        self._wide: list[str] = []

    def build(self, *, max_shard_bytes: int, seed: int, lenient: bool) -> Prepared:
        donor = self.structures[self.donor]
        placer = Placer(self.recipe, self.method, self.models, self.structures, self.donor)
        placements = placer.place()
        self.problems += placer.problems
        blocks = [block for p in placements for block in p.blocks]
        problems, warnings = check_names(blocks, self.method, lenient=lenient)
        self.problems += problems
        self.warnings += warnings
        if placer.problems:
            raise PlanError(self.problems)
        for placement in placements:
            self._module(placement)
        self._others(placements)
        problems, warnings = self.resolver.finish(self.recipe.at("merge_method"))
        self.problems += problems
        self.warnings += warnings
        dropped = self._dropped()
        config = self._config(donor)
        if self.problems:
            raise PlanError(self.problems)
        self._note_copies()
        checkpoint = self.inputs[self.donor]
        plan = Plan(
            method=self.method.name,
            models=tuple(ModelInput(label, c.revision, c.header_hash) for label, c in zip(self.labels, self.inputs, strict=True)),
            steps=tuple(self.steps),
            settings=tuple(self.resolver.settings),
            dropped=dropped,
            config=config,
            donor=self.donor,
            carried=tuple(f for f in checkpoint.files if f != "config.json"),
            max_shard_bytes=max_shard_bytes,
            seed=seed,
            warnings=tuple(self.warnings),
            recipe=self.recipe.text,
        )
        plan.layout  # noqa: B018  names that cannot be stored show here
        return Prepared(plan, tuple(self.inputs), donor, self.origins, self.resolver)

    # ---- tensors -------------------------------------------------------------------------------------------------------

    def _module(self, placement: Placement) -> None:
        """The output tensors of one module."""
        donor = self.structures[self.donor]
        stacks = donor.stacks_of(placement.module)
        blocks = placement.blocks
        if not blocks:
            if not self.recipe.slices:
                self.warnings.append(
                    Finding(
                        f"module '{placement.module}' is not mentioned; it is copied from {self.labels[self.donor]}",
                        self.recipe.at("modules"),
                        fix="mergekit leaves such a module out of the output",
                    )
                )
            for name in donor.modules[placement.module]:
                self._copy(name, self.donor, name)
            return
        for name in self._rest_names(placement):
            block = blocks[0] if comes_first(name) else blocks[-1]
            self._outside(name, block)
        for stack in stacks:
            at = 0
            sources: list[int] = []
            for block in blocks:
                length = block.length
                if length is None:
                    length = self._common_length(block, stack.prefix, stack.n_layers)
                for i in range(length):
                    self._layer(stack.prefix, block, at + i, i, i / (length - 1) if length > 1 else 1.0)
                    sources.append(self._donor_layer(block, i))
                at += length
            if placement.sliced and sources != list(range(stack.n_layers)):
                self.layers[stack.prefix] = sources

    def _donor_layer(self, block: Block, i: int) -> int:
        feed = next((f for f in block.feeds if f.model == self.donor), block.feeds[0])
        return feed.first + i

    def _common_length(self, block: Block, prefix: str, n_layers: int) -> int:
        counts = {f.model: len(self.names[f.model].layers.get(prefix, ())) for f in block.feeds}
        present = {m: n for m, n in counts.items() if n}
        if len(set(present.values())) > 1:
            self.problems.append(
                LayerError(
                    f"the models have different numbers of layers under {prefix}",
                    where=block.where,
                    details=[f"{self.labels[m]}: {n} layers" for m, n in present.items()],
                    fix="choose layers of each with 'slices'",
                )
            )
            return 0
        return n_layers

    def _rest_names(self, placement: Placement) -> list[str]:
        """Tensors of the module outside its layers, under the donor's names: the donor's first, then the others'."""
        donor = self.structures[self.donor]
        found = dict.fromkeys(n for n in donor.modules[placement.module] if donor.locate(n) is None)
        for model in dict.fromkeys(f.model for b in placement.blocks for f in b.feeds):
            if model != self.donor:
                for name in self.names[model].rest:
                    if name not in found and name not in self.names[self.donor].rest and self._belongs(name, placement):
                        found[name] = None
        return list(found)

    def _belongs(self, name: str, placement: Placement) -> bool:
        """Tensors that the donor has not are taken with the module of its main stack (a head), or the first one."""
        donor = self.structures[self.donor]
        home = donor.main.module if donor.main is not None else next(iter(donor.modules))
        return placement.module == home

    def _outside(self, name: str, block: Block) -> None:
        """One tensor outside the layers."""
        sources = [self.names[f.model].rest.get(name) for f in block.feeds]
        spec = next(
            (self.specs[f.model][s] for f, s in zip(block.feeds, sources, strict=True) if s is not None), None
        )
        if spec is None:  # only models of another slice have it
            return
        if any(s is None for s in sources):
            if is_buffer(name):
                self._drop(name, "a buffer that the model computes for itself, and not all inputs store it")
                return
            sources = self._complete(name, spec, block, sources)
            if all(s is None for s in sources):
                return
            owners = [(f, s) for f, s in zip(block.feeds, sources, strict=True) if s is not None]
            if len(owners) == 1:
                feed, source = owners[0]
                assert source is not None
                self.copied[feed.model].append(name)
                self._copy(name, feed.model, source)
                return
            if len(owners) < len(sources):
                self._missing(name, block, sources)
                return
        self._merge(name, block, [s for s in sources if s is not None], 0.0)

    def _complete(
        self, name: str, spec: TensorSpec, block: Block, sources: list[str | None]
    ) -> list[str | None]:
        """Fill in what tied models do not store; all None when every model ties and the tensor need not be written."""
        filled: list[str | None] = []
        for feed, source in zip(block.feeds, sources, strict=True):
            filled.append(source or self.names[feed.model].tied_source(spec))
        if all(s is not None for s in filled) and is_head(spec):
            tied = [
                ties(self.inputs[f.model].config, stores_head=s is not None)
                for f, s in zip(block.feeds, sources, strict=True)
            ]
            if all(tied):
                self._drop(name, "equal to the embedding it is tied to, and not all inputs store it")
                return [None] * len(sources)
            self.untie = True
        elif any(s is None for s in filled):
            return [s if t is not None else None for s, t in zip(sources, sources, strict=True)]
        return filled

    def _missing(self, name: str, block: Block, sources: Sequence[str | None]) -> None:
        self.problems.append(
            MismatchError(
                "not all the models have this tensor",
                where=name,
                details=[
                    f"{self.labels[f.model]}: {self.specs[f.model][s] if s is not None else 'missing'}"
                    for f, s in zip(block.feeds, sources, strict=True)
                ],
                fix="a tensor that only one model has is copied; one that some lack cannot be merged",
            )
        )

    def _layer(self, prefix: str, block: Block, layer: int, i: int, t: float) -> None:
        """The tensors of one output layer."""
        found = [self.names[f.model].layers.get(prefix) for f in block.feeds]
        owners = [k for k, layers in enumerate(found) if layers]
        if len(owners) == 1 and len(found) > 1 and block.length is None:
            feed = block.feeds[owners[0]]  # a whole stack that one model alone has: a vision tower
            for suffix, source in found[owners[0]][feed.first + i].items():  # type: ignore[index]
                name = f"{prefix}{layer}.{suffix}" if suffix else f"{prefix}{layer}"
                self.copied[feed.model].append(name)
                self._copy(name, feed.model, source)
            return
        tables = [
            layers.get(f.first + i, {}) if layers else {} for f, layers in zip(block.feeds, found, strict=True)
        ]
        for suffix in dict.fromkeys(s for table in tables for s in table):
            name = f"{prefix}{layer}.{suffix}"
            sources = [table.get(suffix) for table in tables]
            if None in sources:
                if is_buffer(name):
                    for f, s in zip(block.feeds, sources, strict=True):
                        if s is not None:
                            self.reasons[f.model][s] = "a buffer that the model computes for itself"
                else:
                    self._missing(name, block, sources)
                continue
            self._merge(name, block, sources, t)  # type: ignore[arg-type]

    def _merge(self, name: str, block: Block, sources: Sequence[str], t: float) -> None:
        """One merged output tensor."""
        feeds = block.feeds
        specs = [self.specs[f.model][s] for f, s in zip(feeds, sources, strict=True)]
        first = specs[0]
        inputs = tuple(Source(f.model, s) for f, s in zip(feeds, sources, strict=True))
        for source in inputs:
            self.used[source.model].add(source.tensor)
        for spec in specs:
            if spec.shape != first.shape:
                self._unequal(name, feeds, specs)
                return
        if not first.dtype.floating or not all(s.dtype.floating for s in specs):
            self._integers(name, inputs, specs)
            return
        settings = self.resolver.index(block, name, sources, t)
        self.origins[name] = (block, tuple(sources), t)
        dtype = self._out_dtype(inputs, specs)
        op = self.method.name
        resolved = self.resolver.settings[settings]
        if len(specs) == 1 and self.method.copies(resolved.models):
            op = "copy" if dtype == first.dtype else "cast"
        stacked = self.structures[feeds[0].model].experts(first) if len(first.shape) == 3 else 1
        matrices = stacked if stacked <= MAX_STACKED else 1
        self.steps.append(Step(TensorSpec(name, dtype, first.shape), op, inputs, block.base, settings, matrices))

    def _out_dtype(self, inputs: Sequence[Source], specs: Sequence[TensorSpec]) -> DType:
        dtype = specs[0].dtype
        for spec in specs[1:]:
            dtype = promote(dtype, spec.dtype)
        if self.dtype is None:
            return dtype
        # A tensor that every model keeps in float32 though its other weights are 16-bit is kept so on purpose
        # (router biases, state-space decays): a cast to the asked dtype would change how the model routes.
        if dtype.name == "F32" and all(
            s.dtype.name == "F32" and (self.main_dtypes[i.model] or dtype).itemsize < 4
            for i, s in zip(inputs, specs, strict=True)
        ):
            self._wide.append(inputs[0].tensor)
            return dtype
        return self.dtype

    def _unequal(self, name: str, feeds: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        rows = [s.shape[0] for s in specs if s.shape]
        vocabulary = is_head(specs[0]) or comes_first(name)
        fix = ""
        if vocabulary and len({s.shape[1:] for s in specs}) == 1 and len(set(rows)) > 1:
            fix = "the vocabularies differ in size: give all models the same tokenizer and number of rows first"
        self.problems.append(
            ShapeError(
                f"'{self.method.name}' needs equal shapes",
                where=name,
                details=[
                    f"{self.labels[f.model]}: {list(s.shape)} {s.dtype} in {self.inputs[f.model].tensors[s.name].file.name}"
                    for f, s in zip(feeds, specs, strict=True)
                ],
                fix=fix,
            )
        )

    def _integers(self, name: str, inputs: tuple[Source, ...], specs: Sequence[TensorSpec]) -> None:
        """Integers and booleans are not merged: the base's (else the first model's) are copied."""
        if any(s.dtype != specs[0].dtype for s in specs):
            self.warnings.append(
                Finding(
                    f"dtypes differ and are not all floating; taken from {self.labels[inputs[0].model]}",
                    name,
                    tuple(f"{self.labels[i.model]}: {s}" for i, s in zip(inputs, specs, strict=True)),
                )
            )
            inputs = inputs[:1]
        self.steps.append(Step(TensorSpec(name, specs[0].dtype, specs[0].shape), "copy", inputs))

    def _copy(self, name: str, model: int, source: str) -> None:
        """One output tensor that is another's bytes, or a cast of it."""
        spec = self.specs[model][source]
        inputs = (Source(model, source),)
        dtype = self._out_dtype(inputs, [spec]) if spec.dtype.floating else spec.dtype
        self.used[model].add(source)
        op = "copy" if dtype == spec.dtype else "cast"
        self.steps.append(Step(TensorSpec(name, dtype, spec.shape), op, inputs))

    def _others(self, placements: Sequence[Placement]) -> None:
        """Stacks and extra layers that only other models than the donor have."""
        if self.recipe.slices or self.recipe.modules:
            return
        donor = self.names[self.donor]
        done = {s.out.name for s in self.steps}
        for model, names in enumerate(self.names):
            for prefix, layers in names.layers.items():
                if donor.has_stack(prefix):
                    continue
                owners = [m for m, n in enumerate(self.names) if n.has_stack(prefix)]
                if owners[0] != model:
                    continue
                if len(owners) > 1:
                    self.problems.append(
                        MismatchError(
                            f"the layers under {prefix} are in some models and not in {self.labels[self.donor]}",
                            where=prefix,
                            details=[f"{self.labels[m]} has them" for m in owners],
                            fix="name one of these models as base_model, or list it first",
                        )
                    )
                    continue
                for layer in layers.values():
                    for source in layer.values():
                        if source not in done:
                            self.copied[model].append(source)
                            self._copy(source, model, source)

    # ---- the account ---------------------------------------------------------------------------------------------------

    def _drop(self, name: str, reason: str) -> None:
        for names, reasons in zip(self.names, self.reasons, strict=True):
            if name in names.rest:
                reasons[names.rest[name]] = reason

    def _dropped(self) -> tuple[Dropped, ...]:
        """Every input tensor that is not used, with its reason; one without a reason is a problem."""
        dropped = []
        lost: Counter[int] = Counter()
        example: dict[int, str] = {}
        sliced = bool(self.recipe.slices or any(m.slices for m in self.recipe.modules))
        modular = bool(self.recipe.modules or self.recipe.slices)
        for model, specs in enumerate(self.specs):
            structure, reasons = self.structures[model], self.reasons[model]
            for name in specs.keys() - self.used[model] if len(specs) > len(self.used[model]) else ():
                reason = reasons.get(name, "")
                if not reason and sliced and structure.locate(name) is not None:
                    reason = "its layer is in no slice"
                elif not reason and modular and model != self.donor:
                    reason = f"taken from {self.labels[self.donor]} or from another slice"
                elif not reason and sliced:
                    reason = "taken from the models of another slice"
                if reason:
                    dropped.append(Dropped(model, name, reason))
                elif not self.problems:
                    lost[model] += 1
                    example.setdefault(model, name)
        for model, n in lost.items():
            self.problems.append(
                TensorLost(
                    f"{n} tensor{'s' if n > 1 else ''} of {self.labels[model]} would not be in the output",
                    where=example[model],
                    fix="please report this recipe: every tensor must be used, or be left out for a stated reason",
                )
            )
        order = [{name: i for i, name in enumerate(specs)} for specs in self.specs]
        return tuple(sorted(dropped, key=lambda d: (d.model, order[d.model][d.tensor])))

    def _config(self, donor: Structure) -> dict[str, Any] | None:
        config = self.inputs[self.donor].config
        if config is None:
            return None
        try:
            return output_config(config, donor, self.layers, [s.out for s in self.steps], untie=self.untie)
        except (LayerError, FormatError) as error:
            self.problems.append(error)
            return None

    def _note_copies(self) -> None:
        for model, names in enumerate(self.copied):
            if names:
                self.warnings.append(
                    Finding(
                        f"{len(names)} tensors that only {self.labels[model]} has are copied from it",
                        names[0],
                    )
                )
        if self._wide:
            self.warnings.append(
                Finding(
                    f"{len(self._wide)} tensors stay F32, as every model keeps them beside 16-bit weights", self._wide[0]
                )
            )
