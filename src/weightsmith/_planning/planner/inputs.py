"""The models that a recipe names: each numbered once, and opened."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from weightsmith._base.errors import Finding, NotFound, ShapeError, Unsupported, WeightsmithError, nearest
from weightsmith._base.files import exists, expand_user, real_path
from weightsmith._base.installation import install
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.checkpoint import Checkpoint, locate, open_checkpoint
from weightsmith._models.lora.forms import find_factors
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.vocabulary import is_other_head, is_task_head
from weightsmith._planning.planner.loading import built_names, installed
from weightsmith._planning.planner.patterns import is_pattern
from weightsmith._planning.recipe import ModelRef, Recipe

if TYPE_CHECKING:
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
    found, hint = error.finding, nearest(ref.path, names)
    if not isinstance(error, NotFound):
        return error
    if not ref.revision and (folder := _recipe_folder(ref)) is not None and exists(folder / ref.path):
        fix = f"run weightsmith in {folder}: relative paths start in the current folder, not in that of the recipe"
        return changed(error, fix=fix)
    if not hint or hint in found.what:
        return error
    return changed(error, what=f"{found.what}; no recipe of the file has this name{hint}")


def _recipe_folder(ref: ModelRef) -> Path | None:
    """The folder of the recipe that names a model; None without a file, or if it is the current folder."""
    file, *place = ref.where.rsplit(":", 2)
    folder = Path(file).parent
    return folder if len(place) == 2 and folder != Path() else None


def _open(ref: ModelRef, stack: ExitStack, results: Mapping[str, Checkpoint | None], plain: bool) -> Checkpoint:
    """A model with its adapter, after one that it holds; `stack` closes what was opened, also when the rest fails."""
    made, revision = results.get(ref.path), ref.revision or None
    checkpoint = made or open_checkpoint(ref.path, revision=revision, download=False, ignore_quantization_config=plain)
    stack.callback(checkpoint.close)
    if checkpoint.quantised is not None:
        return checkpoint
    if find_factors(checkpoint.specs):
        from weightsmith._models.lora import with_inner_adapter

        checkpoint = with_inner_adapter(checkpoint, built_names)
    if ref.lora is None:
        return checkpoint
    from weightsmith._models.lora import apply_adapter, open_adapter

    adapter = open_adapter(ref.lora.path, revision=ref.lora.revision or None)
    stack.callback(adapter.checkpoint.close)
    return asking(checkpoint, partial(apply_adapter, checkpoint, adapter, str(ref)))


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
    found: list[Structure | None] = []
    for k, checkpoint in enumerate(opened):
        if checkpoint is None:
            found.append(None)
            continue
        twin = next((i for i, other in enumerate(opened[:k]) if other is not None and _alike(checkpoint, other)), None)
        fresh = twin is None or found[twin] is None
        found.append(analyse(checkpoint.specs.values(), checkpoint.config) if fresh else found[twin or 0])
    return found


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
    found = error.finding
    return changed(error, where=f"{where}: {found.where}" if found.where and where else where or found.where)


def changed(error: WeightsmithError, *, what: str = "", where: str = "", fix: str = "") -> WeightsmithError:
    """The same error with another text, place or next step."""
    made, found = copy.copy(error), error.finding
    made.finding = replace(found, what=what or found.what, where=where or found.where, fix=fix or found.fix)
    return made


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
    more = ", ".join((kinds[best] - kinds[0]).elements())
    what = f"config.json, tokenizer and other files are {labels[best]}'s, not {labels[0]}'s: only it has {more} layers"
    return best, [Finding(what)]


def choose_classifier(specs: Sequence[Mapping[str, TensorSpec]], base: int, labels: Sequence[str]) -> tuple[int, list[Finding]]:
    """The index of the donor where models are classifiers and the base is not, and a warning of what that means."""
    owners = [k for k, own in enumerate(specs) if any(map(is_task_head, own))]
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
