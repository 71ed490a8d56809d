"""The models that are looked at: opened, and each tensor with its place, under the names of the first model."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from weightsmith._base.errors import PlanError, UnknownName, WeightsmithError, nearest
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.copied import is_tokenizer
from weightsmith._files.hf_folder import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.structure.model import OUTSIDE as OUTSIDE
from weightsmith._models.structure.model import LayerPlace as LayerPlace
from weightsmith._models.structure.model import place_of as place_of
from weightsmith._models.structure.projections import fused_parts, role_of
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._models.tokenizers.files import settings_of, template_of
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary
from weightsmith._planning.planner.inputs import analyse_all, open_models
from weightsmith._planning.planner.match import ModelNames
from weightsmith._planning.planner.steps import split_fused
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import COPY, Block, Read, Step
from weightsmith._plans.summary import ConfigChange, config_changes


@contextmanager
def opened(*names: str | os.PathLike[str], stream: bool) -> Iterator[tuple[Checkpoint, ...]]:
    """Open models as a recipe names them: folder, file, Hub id, address, `base+adapter`. Raises PlanError with all problems.

    stream  read weights of hub models where they are
    """
    problems: list[WeightsmithError] = []
    refs: list[ModelRef] = []
    for name in names:
        reference = parse_reference(os.fspath(name), "")
        if isinstance(reference, ModelRef):
            refs.append(reference)
        else:
            problems.append(reference)
    with ExitStack() as stack:
        checkpoints, unopened = open_models(refs, stack, plain=True)  # a look writes no weights, and shows the note
        problems += unopened
        if problems:
            raise PlanError(problems)
        models = tuple(checkpoint for checkpoint in checkpoints if checkpoint is not None)
        for model in models if stream else ():
            model.stream()
        yield models


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the globs matches a tensor's name; without any, all do."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise UnknownName for a glob that matches no tensor."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            what = f"no tensor matches '{pattern}'{nearest(pattern, names)}"
            raise UnknownName(what, where=where, fix="write a glob of tensor names, such as '*.mlp.*'")


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """A logical matrix that several models have.

    step   its reads: of each model in order. Its name and role are those in the first
    place  in the first model
    rows   of an embedding whose models have different numbers of tokens: how many are compared; else 0
    """

    step: Step
    place: LayerPlace
    rows: int


@dataclass(frozen=True, slots=True)
class Matching:
    """What several models have in common.

    matrices   in the order of the first model
    missing    for each model, the first one's tensors that it does not have
    strange    for each model, its tensors that the first one does not have
    different  tensors whose shapes, or dtypes of integers, differ: name, and what each has
    """

    matrices: tuple[MatchedTensor, ...]
    missing: tuple[tuple[str, ...], ...]
    strange: tuple[tuple[str, ...], ...]
    different: tuple[tuple[str, tuple[str, ...]], ...]


def match(models: Sequence[Checkpoint], patterns: Sequence[str] = ()) -> Matching:
    """Pair the tensors of some models, of which the first gives the names. Raises UnknownName for a pattern without a match."""
    first, *others = models
    check_patterns(patterns, list(first.specs), first.ref)
    structures = [structure for structure in analyse_all(models) if structure is not None]
    first_structure = structures[0]
    theirs_and_own = zip(others, structures[1:], strict=True)
    names_of = [ModelNames(structure, other.specs, first_structure, first.specs).all() for other, structure in theirs_and_own]
    missing: list[list[str]] = [[] for _ in names_of]
    different: list[tuple[str, tuple[str, ...]]] = []
    matrices: list[MatchedTensor] = []
    for spec in first.specs.values():
        if not matches(spec.name, patterns):
            continue
        theirs = [names.get(spec.name) for names in names_of]
        for lacking, name in zip(missing, theirs, strict=True):
            lacking += [spec.name] if name is None else []
        if any(name is None for name in theirs):
            continue
        specs = [spec, *(other.specs[name] for other, name in zip(others, theirs, strict=True) if name is not None)]
        rows = min(s.shape[0] for s in specs) if is_vocabulary(spec) and len({s.shape[1:] for s in specs}) == 1 else 0
        if not rows and (len({s.shape for s in specs}) > 1 or not _comparable(specs)):
            different.append((spec.name, tuple(f"{list(s.shape)} {s.dtype}" for s in specs)))
            continue
        if spec.size:
            matrices += _matrices(specs, rows if len({s.shape for s in specs}) > 1 else 0, first, first_structure)
    strange = [
        tuple(mine for theirs, mine in names.items() if theirs not in first.specs and matches(mine, patterns))
        for names in names_of
    ]
    return Matching(tuple(matrices), tuple(map(tuple, missing)), tuple(strange), tuple(different))


def _comparable(specs: Sequence[TensorSpec]) -> bool:
    return all(spec.dtype.floating for spec in specs) or len({spec.dtype for spec in specs}) == 1


def _matrices(specs: Sequence[TensorSpec], rows: int, first: Checkpoint, structure: Structure) -> Iterator[MatchedTensor]:
    """The logical matrices of a tensor; its expert and fused matrices each by itself."""
    floating = all(s.dtype.floating for s in specs)
    spec, plain = specs[0], DTYPES["BF16"]  # rows are float32, unless an input is F64
    if floating and spec.dtype is not plain:
        spec = replace(spec, dtype=plain)
    if rows:
        shape = (rows, *spec.shape[1:])
        block = Block(0, rows, shape[1], shape[1])
        step = Step(replace(spec, shape=shape), COPY, tuple(Read(k, s.name, block) for k, s in enumerate(specs)))
    else:
        step = Step(spec, COPY, tuple(Read(k, s.name) for k, s in enumerate(specs)))
    place = place_of(structure, spec.name)
    for leaf in split_fused(step, fused_parts(specs[0], first.specs, structure, first.config)).leaves:
        role = role_of(leaf.out) if floating else "other"
        at = (
            place
            if leaf.out.name == spec.name
            else replace(place_of(structure, leaf.out.name), stack=place.stack, layer=place.layer)
        )
        yield MatchedTensor(replace(leaf, role=role), at, rows)


def is_floating(step: Step, models: Sequence[Checkpoint]) -> bool:
    """Whether all inputs of a step are floating-point numbers. models: its reads are of these."""
    return all(models[read.model].specs[read.tensor].dtype.floating for read in step.inputs)


class HasPlace(Protocol):
    """Something in a tensor."""

    @property
    def place(self) -> LayerPlace: ...


Item = TypeVar("Item", bound=HasPlace)


def by_layer_and_part(items: Iterable[Item]) -> tuple[dict[str, list[Item]], dict[str, list[Item]]]:
    """The tensors of each layer, and of each part across all layers, in order of first appearance."""
    layers: dict[str, list[Item]] = {}
    parts: dict[str, list[Item]] = {}
    for item in items:
        layers.setdefault(item.place.group, []).append(item)
        parts.setdefault(item.place.part, []).append(item)
    return layers, parts


def json_of(result: object, names: str, **others: Any) -> dict[str, Any]:
    """Attributes of a result as JSON values; null for each float that is not finite.

    names   of the attributes, with spaces between them
    others  values in place of attributes of these names

    >>> json_of(TokenizerDifference((3, 2), 0, ("a",), ()), "sizes same gone", gone=math.nan)
    {'sizes': [3, 2], 'same': False, 'gone': None}
    """
    return {name: finite(others[name] if name in others else getattr(result, name)) for name in names.split()}


def finite(value: Any) -> Any:
    """JSON values with null for each float that is not finite. Records are their fields, or what `to_json` says."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        to_json = getattr(value, "to_json", None)
        value = asdict(value) if to_json is None else to_json()  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


GENERATION = "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")

NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of config.json that say nothing about what a model computes."""


@dataclass(frozen=True, slots=True)
class TokenizerDifference:
    """What two tokenizers differ in.

    sizes    tokens of each; 0 for a model without a tokenizer that can be read
    moved    tokens of both with different ids
    removed  tokens that only the first has, and `added` those that only the second has
    """

    sizes: tuple[int, int]
    moved: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Every token has the same id in both."""
        return self.sizes[0] == self.sizes[1] and not (self.moved or self.removed or self.added)


@dataclass(frozen=True, slots=True)
class FileDifference:
    """What the files of two models differ in.

    config       keys of config.json
    generation   keys of generation_config.json
    tokenizer    None if neither has one
    templates    the chat templates, "" for none; None if they are equal
    """

    config: tuple[ConfigChange, ...]
    generation: tuple[ConfigChange, ...]
    tokenizer: TokenizerDifference | None
    templates: tuple[str, str] | None


def fetch_small(model: Checkpoint) -> None:
    """Download the files of a Hub model that are read here."""
    small = [name for name in model.files if is_tokenizer(name) or name in (GENERATION, CARD_NAME, *TEMPLATES)]
    model.fetch([*small, CARD_NAME])


def compare_files(a: Checkpoint, b: Checkpoint, vocabularies: tuple[Vocabulary | None, Vocabulary | None]) -> FileDifference:
    """How the files differ. Raises FormatError for a damaged tokenizer."""
    templates = template_of(a.folder, a.files), template_of(b.folder, b.files)
    before, after = (settings_of(model.folder, model.files, GENERATION) for model in (a, b))
    return FileDifference(
        tuple(config_changes(a.config or {}, b.config or {})),
        tuple(config_changes(before, after)),
        _compare_tokenizers(*vocabularies),
        None if templates[0] == templates[1] else templates,
    )


def vocabulary_of(model: Checkpoint, seen: dict[str, Vocabulary]) -> Vocabulary | None:
    """The tokens of a model; None where there is no tokenizer that can be read."""
    return read_vocabulary(model.ref, model.folder, model.files, seen)


def _compare_tokenizers(a: Vocabulary | None, b: Vocabulary | None) -> TokenizerDifference | None:
    if a is None and b is None:
        return None
    mine, theirs = (a.ids if a is not None else {}), (b.ids if b is not None else {})
    if a is not None and a is b:  # equal files are read once
        return TokenizerDifference((len(mine), len(theirs)), 0, (), ())
    return TokenizerDifference(
        (len(mine), len(theirs)),
        sum(number != theirs.get(token, number) for token, number in mine.items()),
        tuple(token for token in mine if token not in theirs),
        tuple(token for token in theirs if token not in mine),
    )


def lineage(model: Checkpoint) -> tuple[str, ...]:
    """The models that a model was made from, as its card says."""
    named = model.card.get("base_model")
    names = named if isinstance(named, list) else [named]
    return tuple(name for name in names if isinstance(name, str) and name)


def licence(model: Checkpoint) -> str:
    """The licence that a model's card names; "" if none."""
    card = model.card
    name = card.get("license_name") or card.get("license")
    return name if isinstance(name, str) else ""


def is_merge(model: Checkpoint) -> bool:
    """Whether the card says that the model was merged: by the Hub's relation, or by the tags that merging programs write."""
    card = model.card
    tags = card.get("tags")
    return card.get("base_model_relation") == "merge" or (
        isinstance(tags, list) and not {"merge", "mergekit"}.isdisjoint(map(str, tags))
    )
