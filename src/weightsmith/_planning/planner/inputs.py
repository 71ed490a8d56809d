"""The models that a recipe names: each numbered once, and opened."""

from __future__ import annotations

import copy
import glob
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from weightsmith._base.errors import Finding, NotFound, ShapeError, SyntaxProblem, Unsupported, WeightsmithError, nearest
from weightsmith._base.files import exists, expand_user, is_folder, real_path, show
from weightsmith._base.installation import install
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._files.copied import is_weights
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import Checkpoint, ModelFolder, locate, open_checkpoint
from weightsmith._models.formats.opening import choose_kind, suffixes
from weightsmith._models.lora.forms import find_factors
from weightsmith._models.sources.composed import renamed
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.parts import DIFFUSION, EMA_PREFIX
from weightsmith._models.structure.vocabulary import is_other_head, is_task_head
from weightsmith._planning.planner.loading import built_names, installed
from weightsmith._planning.recipe import SCHEDULED, Input, ModelRef, Recipe, Schedule, Slice

if TYPE_CHECKING:
    from weightsmith._models.formats.gguf.ollama import Manifest
    from weightsmith._models.lora import Names

Result = TypeVar("Result")


def number_models(recipe: Recipe) -> tuple[dict[ModelRef, int], list[ModelRef]]:
    """The index of every reference, and the models by index: the base first, then in the recipe's order.

    Two spellings of one local path (`./a`, `a/`) are one model.
    """
    models: dict[ModelRef, int] = {}
    firsts: list[ModelRef] = []
    places: dict[tuple[str, ...], int] = {}
    for ref in recipe.references:
        if ref not in models:
            place = (ref.path, *map(str, filter(None, [ref.lora]))) if ref.path in recipe.stages else _place(ref)
            models[ref] = places.setdefault(place, len(firsts))
            if models[ref] == len(firsts):
                firsts.append(ref)
    return models, firsts


def pinned_names(models: Mapping[ModelRef, int], checkpoints: Sequence[Checkpoint | None]) -> dict[str, str]:
    """Each reference as it was written → the same model, on the Hub at the commits that were opened.

    models       index of every reference, see `number_models`
    checkpoints  by index
    """
    opened = {str(ref): checkpoints[number] for ref, number in models.items()}
    return {name: os.fspath(checkpoint) for name, checkpoint in opened.items() if checkpoint is not None}


def find_model(models: Mapping[ModelRef, int], ref: ModelRef) -> int | None:
    """The index of a reference that may be spelled otherwise than in the recipe; None if it is not a model of it."""
    if ref in models:
        return models[ref]
    return next((number for other, number in models.items() if _place(other) == _place(ref)), None)


def open_models(
    refs: Sequence[ModelRef],
    stack: ExitStack,
    results: Mapping[str, Checkpoint | None] = MappingProxyType({}),
    plain: bool = False,
) -> tuple[list[Checkpoint | None], list[WeightsmithError]]:
    """Open every model; `stack` closes them. None for one that cannot be used, whose problem is in the list.

    results  of other recipes of the file, by `ModelRef.path`; None: of one that has problems of its own
    plain    see `open_checkpoint` → ignore_quantization_config
    """
    opened: list[Checkpoint | None] = []
    problems: list[WeightsmithError] = []
    for ref in refs:
        opened.append(None)
        if ref.path in results and results[ref.path] is None:
            continue
        try:
            checkpoint = _open(ref, stack, results, plain)
        except WeightsmithError as error:
            problems.append(at(_with_nearest(error, ref, results), ref.where))
            continue
        if checkpoint.quantised is None:
            opened[-1] = checkpoint
            continue
        problems.append(_quantised(ref, checkpoint))
    return opened, problems


def _quantised(ref: ModelRef, checkpoint: Checkpoint) -> Unsupported:
    """The error of a model whose weights are codes that are not read, or plain although config.json says otherwise."""
    if checkpoint.stale:
        what = f"the weights of {ref} are plain, and config.json says that they are quantised: {checkpoint.stale}"
        option = "--ignore-quantization-config (ignore_quantization_config=True)"
        fix = f"remove that from its config.json, or go on with {option}; weightsmith dequantize writes a copy without it"
        return Unsupported(what, where=ref.where, fix=fix)
    what = f"{ref} is quantised ({checkpoint.quantised}), and its codes cannot be merged as numbers"
    return Unsupported(what, where=ref.where, fix="name an unquantised checkpoint of the same model")


def is_adapter(ref: ModelRef) -> bool:
    """Whether a model is a local folder with an adapter in it, or a file of factors."""
    if ref.lora is not None:
        return False
    try:
        place = locate(ref.path, ref.revision or None)
    except WeightsmithError:
        return False
    if not isinstance(place, Path) or exists(place / "config.json"):
        return False
    from weightsmith._models.lora.opening import is_adapter

    return is_adapter(place)


def missing_models(refs: Iterable[ModelRef]) -> list[WeightsmithError]:
    """Problems of the models of a broken recipe: names that are neither a local path nor a Hub id."""
    problems = []
    for ref in refs:
        try:
            if not is_pattern(ref):
                locate(ref.path, ref.revision or None)
        except WeightsmithError as error:
            problems.append(at(error, ref.where))
    return problems


def _with_nearest(error: WeightsmithError, ref: ModelRef, names: Iterable[str]) -> WeightsmithError:
    """The error of a model that is nowhere, with the recipe that may have been meant."""
    finding, hint = error.finding, nearest(ref.path, names)
    if not isinstance(error, NotFound):
        return error
    if not ref.revision and (folder := _recipe_folder(ref)) is not None and exists(folder / ref.path):
        fix = f"run weightsmith in {folder}: relative paths start in the current folder, not in that of the recipe"
        return changed(error, fix=fix)
    if not hint or hint in finding.what:
        return error
    return changed(error, what=f"{finding.what}; no recipe of the file has this name{hint}")


def _recipe_folder(ref: ModelRef) -> Path | None:
    """The folder of the recipe that names a model; None without a file, or if it is the current folder."""
    file, *place = ref.where.rsplit(":", 2)
    folder = Path(file).parent
    return folder if len(place) == 2 and folder != Path() else None


def _open(ref: ModelRef, stack: ExitStack, results: Mapping[str, Checkpoint | None], plain: bool) -> Checkpoint:
    """A model with its adapter, after one that it holds; `stack` closes what was opened, also when the rest fails."""
    result, revision = results.get(ref.path), ref.revision or None
    if result is None and (manifest := _ollama_manifest(ref)) is not None:
        checkpoint = _with_adapters(manifest, ref, stack)
    else:
        checkpoint = result or open_checkpoint(ref.path, revision=revision, download=False, ignore_quantization_config=plain)
        stack.callback(checkpoint.close)
    if checkpoint.quantised is not None:
        return checkpoint
    if find_factors(checkpoint.specs):
        from weightsmith._models.lora import with_inner_adapter

        checkpoint = with_inner_adapter(checkpoint, built_names)
    if ref.lora is None:
        return checkpoint
    if not ref.lora.revision and names_ema(ref.lora.path):
        return choose_ema(checkpoint, ref.lora.path, str(ref))
    from weightsmith._models.lora import apply_adapter, open_adapter

    adapter = open_adapter(ref.lora.path, revision=ref.lora.revision or None)
    stack.callback(adapter.checkpoint.close)
    return asking(checkpoint, partial(apply_adapter, checkpoint, adapter, str(ref)))


def _ollama_manifest(ref: ModelRef) -> Manifest | None:
    """The manifest of a model of Ollama's that has adapters. Other names cost nothing."""
    if "manifests" not in ref.path:
        return None
    from weightsmith._models.formats.gguf.ollama import manifest_with_adapters

    return manifest_with_adapters(ref.path)


def _with_adapters(manifest: Manifest, ref: ModelRef, stack: ExitStack) -> Checkpoint:
    """The model of a manifest with its adapters applied; `stack` closes them."""
    from weightsmith._models.lora import apply_adapter, open_adapter

    checkpoint = open_checkpoint(manifest.model)
    stack.callback(checkpoint.close)
    for path in manifest.adapters:
        adapter = open_adapter(str(path))
        stack.callback(adapter.checkpoint.close)
        checkpoint = asking(checkpoint, partial(apply_adapter, checkpoint, adapter, ref.path))
    what = f"the model is read with {count(len(manifest.adapters), 'adapter')} applied, as Ollama does"
    checkpoint.notes = (*checkpoint.notes, *manifest.notes, Finding(what, ref.path))
    return checkpoint


def asking(base: Checkpoint, fit: Callable[[Names], Result]) -> Result:
    """What fits an adapter to a base, with the names of the model that transformers builds where it asks for them.

    Raises ShapeError with the advice to install transformers, if that is missing.
    """
    try:
        return fit(partial(built_names, base))
    except ShapeError as error:
        if installed() or base.config is None:
            raise
        fix = f"{error.finding.fix} If it is, run {install('lora')}: PEFT has the names that transformers gives "
        raise changed(error, fix=f"{fix}to modules, and without it only names on disk are known.") from None


def analyse_all(opened: Sequence[Checkpoint | None]) -> list[Structure | None]:
    """The structure of each model. Twins, as fine-tunes of one base are, share one object: the look at 100,000 names counts."""
    structures: list[Structure | None] = []
    for k, checkpoint in enumerate(opened):
        if checkpoint is None:
            structures.append(None)
            continue
        twin = next((i for i, other in enumerate(opened[:k]) if other is not None and _alike(checkpoint, other)), None)
        fresh = twin is None or structures[twin] is None
        structures.append(analyse(checkpoint.specs.values(), checkpoint.config) if fresh else structures[twin or 0])
    return structures


def _alike(a: Checkpoint, b: Checkpoint) -> bool:
    """True when two models have the same tensor names and shapes, and configs that differ in no number or list."""
    if len(a.specs) != len(b.specs) or _telling(a.config) != _telling(b.config) or list(a.specs) != list(b.specs):
        return False
    return all(x.shape == y.shape for x, y in zip(a.specs.values(), b.specs.values(), strict=True))


def _telling(config: Mapping[str, Any] | None) -> Any:
    """What a structure may depend on: texts at the top level (`torch_dtype`, `_name_or_path`) are left out."""
    return None if config is None else {k: v for k, v in config.items() if not isinstance(v, str)}


def at(error: WeightsmithError, where: str) -> WeightsmithError:
    """The same error, with the position in the recipe in front of its own place."""
    finding = error.finding
    return changed(error, where=f"{where}: {finding.where}" if finding.where and where else where or finding.where)


def changed(error: WeightsmithError, *, what: str = "", where: str = "", fix: str = "") -> WeightsmithError:
    """The same error with another text, place or next step."""
    error_copy, finding = copy.copy(error), error.finding
    error_copy.finding = replace(finding, what=what or finding.what, where=where or finding.where, fix=fix or finding.fix)
    return error_copy


def _place(ref: ModelRef) -> tuple[str, ...]:
    adapter = () if ref.lora is None else _place(ref.lora)
    path = expand_user(ref.path)
    return str(real_path(path)) if exists(path) else ref.path, ref.revision, *adapter


# ---- The donor: the model that gives the output its names, config.json, tokenizer and all other files.


def choose_donor(structures: Sequence[Structure | None], labels: Sequence[str]) -> tuple[int, list[Finding]]:
    """The index of the donor, and a warning when it is not the first model.

    It is the base, else the first model (which is index 0); unless another has all its kinds of layers and more: a plain
    language model merged with a vision-language model gives a vision-language model, which only the config of that one
    can describe.
    """
    first = structures[0] if structures else None
    if first is None:
        return 0, []
    kinds = [_kinds(s) for s in structures]
    larger = [i for i, k in enumerate(kinds) if k > kinds[0]]
    if not larger:
        return 0, []
    best = max(larger, key=lambda i: (kinds[i].total(), -i))
    kinds_added = ", ".join((kinds[best] - kinds[0]).elements())
    what = f"config.json, tokenizer and other files are {labels[best]}'s, not {labels[0]}'s: only it has {kinds_added} layers"
    return best, [Finding(what)]


def choose_classifier(specs: Sequence[Mapping[str, TensorSpec]], base: int, labels: Sequence[str]) -> tuple[int, list[Finding]]:
    """The index of the donor where models are classifiers and the base is not, and a warning of what that means."""
    owners = [k for k, tensors in enumerate(specs) if any(map(is_task_head, tensors))]
    head = [name for name in specs[owners[0]] if is_task_head(name)]
    what = f"{labels[base]} has no {', '.join(head)}: no difference from it can be merged"
    if len(owners) == 1:
        what += f", so {labels[owners[0]]}'s is copied"
    else:
        what += f", so it is averaged over {' and '.join(labels[k] for k in owners)} by their weights"
    lost = [name for name in specs[base] if is_other_head(name)]
    details = [f"config.json and other files are {labels[owners[0]]}'s", *([f"left out: {', '.join(lost)}"] if lost else [])]
    return owners[0], [Finding(what, details=tuple(details))]


def _kinds(structure: Structure | None) -> Counter[str]:
    """How many stacks of each kind a model has; those of heads, projectors and prediction layers do not count."""
    return Counter(s.kind for s in structure.stacks if s.kind != "other") if structure is not None else Counter()


# ---- the folders that a pattern such as `./run/checkpoint-*` matches


_SHOWN = 8  # names that a message lists


def match_patterns(recipe: Recipe, base: ModelRef | None) -> tuple[Recipe, list[WeightsmithError], list[Finding]]:
    """The recipe with its patterns replaced by what they match, the problems with them, and warnings.

    base  never one of the matches: the model that is the base of the merge by a method that has one

    Of an entry that takes the mean of the last few (`weight: {lawa: 5}`) only these stay: the others, with a weight of 0, would
    be read for nothing. Left out with a warning: a folder without weights (an optimizer's state, logs), and a link to another
    match. A folder whose weights cannot be used is not left out: opening it says why.
    """
    matcher = _Matcher(base)
    matched = replace(
        recipe,
        models=matcher.inputs(recipe.models),
        slices=matcher.slices(recipe.slices),
        modules=tuple(replace(m, models=matcher.inputs(m.models), slices=matcher.slices(m.slices)) for m in recipe.modules),
    )
    if recipe.base_model is not None:
        matcher.single(recipe.base_model)
    return matched, matcher.problems, matcher.findings


def is_pattern(ref: ModelRef) -> bool:
    """True if a reference is a pattern for folders."""
    if not glob.has_magic(ref.path) or "://" in ref.path:
        return False
    try:
        os.lstat(expand_user(ref.path))
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # a name too long, a NUL: no possible path, and no possible pattern
        pass
    return False


class _Matcher:
    def __init__(self, base: ModelRef | None) -> None:
        self.base = None if base is None or base.revision else _pattern_place(base.path)
        self.problems: list[WeightsmithError] = []
        self.findings: list[Finding] = []

    def inputs(self, inputs: Sequence[Input]) -> tuple[Input, ...]:
        entries: list[Input] = []
        for entry in inputs:
            if not is_pattern(entry.model):
                entries.append(entry)
                continue
            refs = self.matches(entry.model)
            refs = refs[-_wanted(entry, len(refs)) :]
            entries += [replace(entry, model=ref, matched=(k, len(refs))) for k, ref in enumerate(refs)]
        return tuple(entries)

    def slices(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        for s in slices:
            if s.base_model is not None:
                self.single(s.base_model)
        return tuple(replace(s, sources=self.inputs(s.sources)) for s in slices)

    def single(self, ref: ModelRef) -> None:
        """Refuse a pattern where one model is meant."""
        if is_pattern(ref):
            what = f"base_model is one model, and {ref} is a pattern"
            self.problems.append(SyntaxProblem(what, where=ref.where, fix="Name the folder."))

    def matches(self, ref: ModelRef) -> list[ModelRef]:
        """A reference for each model that matches, in natural order; none when there is a problem."""
        if ref.revision:
            what = f"{ref}: a pattern matches local folders, which have no revisions"
            self.problems.append(SyntaxProblem(what, where=ref.where, fix="Drop the @."))
            return []
        pattern = str(ref.path).rstrip("/")
        if pattern.startswith("~"):
            pattern = str(expand_user(pattern))
        every = glob.glob(pattern)  # noqa: PTH207  Path.glob drops the `./` in front, and refuses absolute patterns
        files = pattern.lower().endswith(suffixes())
        matches = [Path(p) for p in every]
        meant = [path.is_dir() or (files and path.is_file() and is_weights(path.name)) for path in matches]
        paths = sorted(itertools.compress(every, meant), key=lambda path: [natural_key(part) for part in Path(path).parts])
        paths = [p for p in paths if self.base is None or _pattern_place(p) != self.base]
        kept, left_out = _sort_out(paths)
        if kept:
            if left_out:
                are = "is" if len(left_out) == 1 else "are"
                what = f"{len(left_out)} of {len(paths)} folders that match {ref} {are} left out"
                self.findings.append(Finding(what, ref.where, _some(left_out)))
            return [ModelRef(path, "", path, ref.where) for path in kept]
        if left_out:
            what = f"no folder that matches {ref} holds weights"
            fix = "correct the pattern, or write the models one by one"
            self.problems.append(NotFound(what, where=ref.where, details=_some(left_out), fix=fix))
        else:
            self.problems.append(_no_match(ref, pattern))
        return []


def _wanted(entry: Input, count: int) -> int:
    """How many of the last matches of an entry can have a weight, `count` if all."""
    setting = entry.parameters.get(SCHEDULED)
    first = setting.entries[0] if setting is not None and setting.entries else None
    if first is None or first.filter not in (None, "*") or not isinstance(first.value, Schedule) or first.value.rule != "lawa":
        return count
    return min(count, int(first.value.setting))


def _sort_out(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths that are models, and why the others are not."""
    real = {_pattern_place(p): p for p in reversed(paths) if not Path(p).is_symlink()}
    kept: list[str] = []
    left_out: list[str] = []
    for path in paths:
        other = real.setdefault(_pattern_place(path), path)
        if other != path:
            left_out.append(f"{path}: a link to {other}")
        elif reason := _without_weights(Path(path)):
            left_out.append(f"{path}: {reason}")
        else:
            kept.append(path)
    return kept, left_out


def _without_weights(path: Path) -> str:
    """What a folder holds instead of weights, "" for one that has some, usable or not."""
    if not path.is_dir():
        return ""
    try:
        entries = sorted(path.iterdir())
        choose_kind([p.name for p in entries if not p.is_dir()], str(path))
    except NotFound:
        names = [p.name for p in entries]
        return f"no weights, but {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}" if names else "empty"
    except (OSError, WeightsmithError):
        pass
    return ""


def _no_match(ref: ModelRef, pattern: str) -> NotFound:
    fixed = Path(pattern)
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    where = "the current folder" if fixed == Path() else str(fixed)
    details = (f"there is no folder {where}",)
    if os.access(fixed, os.R_OK | os.X_OK) and is_folder(fixed):
        names = sorted((p.name for p in fixed.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural_key)
        shown = f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        details = (f"folders in {where}: {shown}" if names else f"{where} holds no folders",)
    fix = "" if Path(pattern).is_absolute() else f"Check the pattern: it matches local folders, relative to {Path.cwd()}."
    return NotFound(f"no folder matches {ref}", where=ref.where, details=details, fix=fix)


def _some(lines: Sequence[str]) -> tuple[str, ...]:
    return (*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more") if len(lines) > _SHOWN else tuple(lines)


def _pattern_place(path: str) -> Path:
    return real_path(expand_user(path))


# ---- The moving average of the weights that a single file of Stable Diffusion may hold beside the weights themselves.
# `model.ckpt+ema` is the model with the average in place of its diffusion model, and `model.ckpt+no-ema` the model without it.
# Training keeps the average of `model.diffusion_model.out.2.weight` as `model_ema.diffusion_modelout2weight`, without the dots.


USE, DROP = "ema", "no-ema"
_STATE = ("decay", "num_updates")
"""What training keeps beside the averages, to go on with them."""


def names_ema(path: str) -> bool:
    """Whether what follows the `+` of a model means its moving average. A folder or file of this name is an adapter.

    >>> names_ema("no-ema"), names_ema("./ema")
    (True, False)
    """
    return path in (USE, DROP) and not exists(expand_user(path))


def choose_ema(model: Checkpoint, choice: str, ref: str) -> Checkpoint:
    """The model with its moving average in place of the weights (`ema`), or without it (`no-ema`).

    choice  one of the two
    ref     the model and the choice, as the user named them

    A tensor of the diffusion model that was not averaged, because it was not trained, stays. No tensor is read. Closing the
    result closes the model. Raises Unsupported for a model without an average, ShapeError for one of another shape.
    """
    averages = {name for name in model.specs if name.startswith(EMA_PREFIX)}
    if not averages:
        what = f"it holds no moving average: no tensor is named {EMA_PREFIX}…"
        raise Unsupported(what, where=model.ref, fix=f"write {model.ref}")
    names = {name: name for name in model.specs if name not in averages}
    notes = [*model.notes]
    if choice == USE:
        chosen = {name: average for name in names if (average := _average_of(name)) in averages}
        if not chosen:
            what = f"none of the {count(len(averages), 'tensor')} under {EMA_PREFIX} is the average of one under {DIFFUSION}"
            raise Unsupported(what, where=model.ref, fix=f"write {model.ref}+{DROP} for the model without them")
        for name, average in chosen.items():
            shape, averaged = model.specs[name].shape, model.specs[average].shape
            if shape != averaged:
                what = f"the moving average has the shape {list(averaged)}, and its weight {list(shape)}"
                raise ShapeError(
                    what, where=f"{model.ref}: {show(name)}", fix=f"write {model.ref}+{DROP} for the model without it"
                )
        names |= chosen
        used = {*chosen.values()}
        unused = sorted(name for name in averages if name not in used and name.removeprefix(EMA_PREFIX) not in _STATE)
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            what = f"{count(len(unused), 'moving average')} of no weight of the diffusion model {verb} left out"
            notes.append(Finding(what, f"{ref}: {show(unused[0])}"))
        kept = [name for name in names if name.startswith(DIFFUSION) and name not in chosen]
        if kept:
            verb = "is" if len(kept) == 1 else "are"
            what = f"{count(len(kept), 'tensor')} of the diffusion model without a moving average {verb} used as stored"
            notes.append(Finding(what, f"{ref}: {show(kept[0])}"))
    source = renamed(model, names, ref)
    return Checkpoint(ref, source, ModelFolder.like(model), metadata=model.metadata, notes=tuple(notes), decoded=model.decoded)


def _average_of(name: str) -> str:
    """The name of a tensor's moving average; "" for one that is not of the diffusion model."""
    return EMA_PREFIX + name.removeprefix("model.").replace(".", "") if name.startswith(DIFFUSION) else ""
