"""What a method knows of its models from a text: the products of a plan that measure them, and what each step reads of these.

A method says which statistics it looks at (`Method.requires`), and the recipe names the texts. Statistics are of the linear
layers of a decoder; a tensor of which a text tells nothing is merged without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import Finding, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.files import expand_user
from weightsmith._methods.base import Method, Requirement
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.planner.inputs import at
from weightsmith._planning.recipe import ModelRef, Recipe, TextRef
from weightsmith._plans import PRODUCTS, Block, Product, Read, Settings, StatisticRead, Step
from weightsmith._plans.statistics import StatisticRequest, TextSource

if TYPE_CHECKING:
    from weightsmith._activations.model import TextModel

INSTEAD = "; or use a merge method that looks at no text"


@dataclass(slots=True)
class Measured:
    """Steps with what their method knows of the models.

    products  that measure
    files     texts that are read, besides the built-in one
    """

    steps: list[Step]
    products: tuple[Product, ...] = ()
    files: list[Path] = field(default_factory=list)
    problems: list[WeightsmithError] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def measure(
    method: Method,
    recipe: Recipe,
    models: Mapping[ModelRef, int],
    inputs: Sequence[Checkpoint],
    labels: Sequence[str],
    steps: Sequence[Step],
    settings: Sequence[Settings],
    seed: int,
) -> Measured:
    """The steps of a merge with the statistics that its method looks at.

    models  index of each reference
    labels  of the models, by index
    steps   with their roles
    seed    of the rows that are chosen, and of the labels that are drawn

    Cost: tokenizes each text with the tokenizer of each model.
    """
    measured = Measured(list(steps))
    texts = own_texts(recipe, models, measured.problems)
    required = [method.requires(requirement.shared) for requirement in settings]
    requirements: dict[int, dict[Requirement, None]] = {}
    for leaf in (leaf for step in steps for leaf in step.leaves if any(required)):
        for requirement, i in _wanted(leaf, required):
            requirements.setdefault(leaf.inputs[i].model, {})[requirement] = None
    _refuse_unread(method, recipe, texts, requirements, labels, measured)
    missing = [number for number in requirements if texts.get(number, recipe.measured) is None]
    if missing:
        measured.problems.append(_no_text(method, recipe, [labels[number] for number in missing], len(requirements)))
    if measured.problems or not requirements:
        return measured
    from weightsmith._activations.model import (
        input_of,
        linear_weights,
        measured_weights,
        merged_products,
        statistic_products,
        text_for,
    )
    from weightsmith._activations.stored import is_stored

    known: dict[int, TextModel] = {}
    stored = list[Product]()
    requests: dict[tuple[int, Requirement], StatisticRequest] = {}
    from_folders: dict[tuple[int, Requirement], StatisticRequest] = {}
    merged = [requirement for of_model in requirements.values() for requirement in of_model if requirement.merged]
    if merged:
        measured.problems += _unmergeable(recipe)
    for number, of_model in sorted(requirements.items()):
        text_ref = texts.get(number) or recipe.measured
        assert text_ref is not None
        known[number] = input_of(inputs, number, INSTEAD)
        try:
            if is_stored(text_ref.path):
                text, products = _stored(text_ref, known[number], of_model)
                stored += products
                measured.files.append(expand_user(text_ref.path))
                from_folders |= {
                    (number, requirement): StatisticRequest(requirement.kind, number, text) for requirement in of_model
                }
                continue
            text = text_for(known[number], text_ref.path, text_ref.rows, text_ref.tokens, seed, option="")
        except PlanError as error:
            measured.problems += [at(problem, text_ref.where) for problem in error.problems]
            continue
        requests |= {
            (number, requirement): StatisticRequest(requirement.kind, number, text, requirement.merged)
            for requirement in of_model
        }
    if measured.problems:
        return measured
    plain = [request for request in requests.values() if not request.merged]
    measured.products = (*statistic_products(known.__getitem__, plain), *stored)
    measured.files += _files(request.text for request in requests.values())
    weights = measured_weights(measured.products)
    for request in requests.values():
        weights |= linear_weights(known[request.model]) if request.merged else set()
    reader = _Reader(required, inputs, requests | from_folders, weights)
    measured.steps = [step.with_leaves(reader.measured) for step in steps]
    if merged:
        through = [request for request in requests.values() if request.merged]
        measured.products += merged_products(known.__getitem__, through, measured.steps)
    if reader.without:
        measured.findings.append(_without(reader.without))
    return measured


def _unmergeable(recipe: Recipe) -> list[WeightsmithError]:
    """Why no text can run through the merge while it is made."""
    obstacles = {"slices": recipe.slices, "tokenizer": recipe.tokenizer}
    keys = [key for key, value in obstacles.items() if value]
    what = "texts cannot run through the layers of a merge with '{}': its layers or tokens are not those of the models"
    fix = "remove it, or write through: model in the parameters"
    return [Unsupported(what.format(key), where=recipe.at(key), fix=fix) for key in keys]


def _stored(text_ref: TextRef, model: TextModel, requirements: Collection[Requirement]) -> tuple[TextSource, Sequence[Product]]:
    """The text of statistics in a folder, and the products that read them. Raises PlanError with all problems."""
    from weightsmith._activations.model import tokenizer_hash
    from weightsmith._activations.stored import check_stored, read_stored, stored_products

    try:
        stored = read_stored(text_ref.path)
        kinds = list(dict.fromkeys(requirement.kind for requirement in requirements))
        problems = check_stored(stored, model, tokenizer_hash(model), kinds)
        if any(requirement.merged for requirement in requirements):
            what = "statistics in a folder are of the model alone, and this merge measures what enters its own layers"
            problems.append(ParameterError(what, fix="name the text, or write through: model in the parameters"))
        if text_ref.rows or text_ref.tokens:
            problems.append(ParameterError("statistics have the rows they were made of", fix="remove 'rows' and 'tokens'"))
        if problems:
            raise PlanError(problems)
        return stored.text, stored_products(stored, model, kinds)
    except PlanError:
        raise
    except WeightsmithError as error:
        raise PlanError([error]) from error


def own_texts(recipe: Recipe, models: Mapping[ModelRef, int], problems: list[WeightsmithError]) -> dict[int, TextRef]:
    """The texts of single models, by index."""
    texts: dict[int, TextRef] = {}
    for entry in (*recipe.models, *(entry for module in recipe.modules for entry in module.models)):
        if entry.measured is None:
            continue
        first = texts.setdefault(models[entry.model], entry.measured)
        if first != entry.measured:
            what = f"{entry.model} has two texts, {first.path} and {entry.measured.path}"
            problems.append(ParameterError(what, where=entry.measured.where, fix="write the same text in each entry"))
    return texts


def _wanted(leaf: Step, required: Sequence[Sequence[Requirement]]) -> list[tuple[Requirement, int]]:
    """The statistics that a leaf's merge looks at, each with the number of the input. required: by settings."""
    if not leaf.merges or leaf.role != "linear" or not leaf.out.size:
        return []
    return [
        (requirement, i)
        for requirement in required[leaf.settings]
        for i in requirement.inputs(len(leaf.inputs), base=leaf.base)
    ]


def _refuse_unread(
    method: Method,
    recipe: Recipe,
    own_texts: Mapping[int, TextRef],
    numbers: Collection[int],
    labels: Sequence[str],
    measured: Measured,
) -> None:
    """A problem for a text where the method looks at none; a warning for one of a model that is not measured."""
    texts = [*own_texts.values(), *([] if recipe.measured is None else [recipe.measured])]
    if texts and not numbers:
        what = f"merge_method {method.name} looks at no text with these parameters"
        measured.problems.append(ParameterError(what, where=texts[0].where, fix="remove 'text'"))
        return
    for number, text in own_texts.items():
        if number not in numbers:
            what = f"the text of {labels[number]} is not read: {method.name} does not measure this model"
            measured.findings.append(Finding(what, text.where, fix="remove it"))


def _no_text(method: Method, recipe: Recipe, labels: Sequence[str], count: int) -> WeightsmithError:
    every = len(labels) == count
    fix = "write text: and a file, or text: built-in, at the top level" + ("" if every else " or in the entry of the model")
    what = f"merge_method {method.name} measures the models on a text, and the recipe names none"
    if not every:
        what = f"merge_method {method.name} measures {' and '.join(labels)} on a text, and the recipe names none"
    return ParameterError(what, where=recipe.at("merge_method"), fix=fix)


def _without(names: Sequence[str]) -> Finding:
    what = "a weight of a linear layer is" if len(names) == 1 else f"{len(names):,} weights of linear layers are"
    why = "a text tells nothing of experts that are one tensor, or of layers outside the decoder"
    return Finding(f"{what} merged without statistics", names[0], (why,))


def _files(texts: Iterable[TextSource]) -> list[Path]:
    from weightsmith._activations.rows import BUILT_IN

    return [Path(source) for source in dict.fromkeys(text.source for text in texts) if source != BUILT_IN]


class _Reader:
    """Says which arrays a step reads.

    without  tensors that would read some, and of which the text tells nothing
    """

    def __init__(
        self,
        required: Sequence[Sequence[Requirement]],
        inputs: Sequence[Checkpoint],
        requests: Mapping[tuple[int, Requirement], StatisticRequest],
        weights: Collection[tuple[int, str]],
    ) -> None:
        self.without: list[str] = []
        self._required, self._inputs, self._requests, self._weights = required, inputs, requests, weights

    def measured(self, leaf: Step) -> Step:
        """The leaf with its statistics; as it is if one of them is missing."""
        requirements = _wanted(leaf, self._required)
        reads = [self._read(requirement, leaf.inputs[i], i) for requirement, i in requirements]
        statistics = tuple(read for read in reads if read is not None)
        if len(statistics) < len(requirements):
            self.without.append(leaf.out.name)
            return leaf
        return replace(leaf, statistics=statistics)

    def _read(self, required: Requirement, read: Read, i: int) -> StatisticRead | None:
        """The statistic of an input; None if there is none."""
        from weightsmith._activations.model import array_name

        if (read.model, read.tensor) not in self._weights:
            return None
        kind, view = required.kind, read.view
        array = array_name(self._requests[read.model, required], read.tensor)
        if view is None:
            return StatisticRead(kind, i, Read(PRODUCTS, array))
        from weightsmith._activations.statistics import find_statistic

        shape, (n, k) = find_statistic(kind).shape, self._inputs[read.model].specs[read.tensor].shape
        if not isinstance(view, Block) or not view.whole_rows:
            return None
        if shape(1, k) == shape(n, k):  # the parts of the weight have the same input
            return StatisticRead(kind, i, Read(PRODUCTS, array))
        return StatisticRead(kind, i, Read(PRODUCTS, array, view)) if shape(n, k) == (n, k) else None
