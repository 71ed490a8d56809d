"""What a merge must know of each tensor before it runs: its dtype, what it is to the method, and what it waits for.

A step waits for the product of its method, and for what the method knows of its models from a text. A method says which
statistics it looks at (`Method.requires`), and the recipe names the texts. Statistics are of the linear layers of a decoder;
a tensor of which a text tells nothing is merged without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import Finding, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.files import expand_user
from weightsmith._base.tensors import DType, TensorSpec, promote
from weightsmith._methods.method import Method, Requirement
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.forms import find_factors
from weightsmith._models.structure.projections import SubMatrix, role_of
from weightsmith._planning.planner.inputs import at
from weightsmith._planning.recipe import ModelRef, Recipe, TextRef
from weightsmith._plans import (
    CAST,
    COPY,
    JOIN,
    PRODUCTS,
    Block,
    Product,
    Read,
    Settings,
    StatisticRead,
    StatisticRequest,
    Step,
    TextSource,
)

if TYPE_CHECKING:
    from weightsmith._activations.model import TextModel


def with_needs(steps: Sequence[Step], settings: Sequence[Settings], method: Method) -> tuple[list[Step], tuple[Product, ...]]:
    """The steps with their roles and needs, and the product of the method, if it has one for these parameters."""
    waiting = [
        (leaf, settings[leaf.settings])
        for step in steps
        for leaf in step.leaves
        if leaf.op == method.name and leaf.out.size and method.needs(settings[leaf.settings].shared)
    ]
    product = method.product(waiting) if waiting else None
    needing = {id(leaf) for leaf, _ in waiting} if product is not None else set()

    def needing_product(leaf: Step) -> Step:
        if not leaf.merges:
            return leaf
        needs = (product.name,) if product is not None and id(leaf) in needing else ()
        return replace(leaf, role=role_of(leaf.out), needs=needs)

    return [step.with_leaves(needing_product) for step in steps], () if product is None else (product,)


def factor_problems(steps: Sequence[Step], where: str, fix: str) -> list[WeightsmithError]:
    """The error for steps that would combine factors of adapters: a mean of factors is not that of what they add.

    where  for the message
    fix    what to do instead
    """
    names = [
        step.out.name
        for step in steps
        if any(leaf.merges and len({read.model for read in leaf.inputs}) > 1 for leaf in step.leaves)
    ]
    factors = find_factors(names)
    if not factors.modules and not factors.kinds:
        return []
    return [Unsupported(f"{factors} would be merged as weights, and their product is not merged then", where=where, fix=fix)]


# ---- A merged tensor that holds several matrices is split into pieces, each merged like a separate tensor.


def operation(method: Method, settings: Settings, n_inputs: int, places: Sequence[int], *, base: bool, same: bool) -> str:
    """The operation of a tensor: it is copied, or cast, where the base alone takes part, or the method leaves its only input.

    n_inputs  number of inputs
    places    of those that take part
    same      the first of these has the output's dtype
    """
    if (base and len(places) == 1) or (n_inputs == 1 and method.copies(settings.models)):
        return COPY if same else CAST
    return method.name


def split_fused(step: Step, parts: Sequence[SubMatrix]) -> Step:
    """The step as a join of one piece for each part; as it is when there are none.

    A piece has the name that its matrix has in an unfused model, so that it gets the random masks of that model too.
    """
    if not parts:
        return step
    pieces = []
    for part in parts:
        out = TensorSpec(part.name, step.out.dtype, part.shape)
        inputs = tuple(replace(read, view=Block(part.offset, 1, out.size, out.size)) for read in step.inputs)
        pieces.append(replace(step, out=out, inputs=inputs))
    return Step(step.out, JOIN, (), settings=step.settings, pieces=tuple(pieces))


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


# ---- what the method knows of its models from a text


Requirements = dict[int, dict[Requirement, None]]
"""Model → the statistics of it that its merge looks at, in order."""
Requests = dict[tuple[int, Requirement], StatisticRequest]
"""Model and statistic → what is measured, and on which text."""

INSTEAD = "; or use a merge method that looks at no text"


@dataclass(slots=True)
class MeasuredSteps:
    """Steps with what their method knows of the models.

    products  that measure
    files     texts that are read, besides the built-in one
    """

    steps: list[Step]
    products: tuple[Product, ...] = ()
    files: list[Path] = field(default_factory=list)
    problems: list[WeightsmithError] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def with_statistics(
    method: Method,
    recipe: Recipe,
    models: Mapping[ModelRef, int],
    inputs: Sequence[Checkpoint],
    labels: Sequence[str],
    steps: Sequence[Step],
    settings: Sequence[Settings],
    seed: int,
) -> MeasuredSteps:
    """The steps of a merge with the statistics that its method looks at.

    models  index of each reference
    labels  of the models, by index
    steps   with their roles
    seed    of the rows that are chosen, and of the labels that are drawn

    Cost: tokenizes each text with the tokenizer of each model.
    """
    measured = MeasuredSteps(list(steps))
    texts = own_texts(recipe, models, measured.problems)
    required = [method.requires(values.shared) for values in settings]
    requirements = _requirements_of(steps, required)
    _refuse_unread(method, recipe, texts, requirements, labels, measured)
    missing = [number for number in requirements if texts.get(number, recipe.measured) is None]
    if missing:
        measured.problems.append(_no_text(method, recipe, [labels[number] for number in missing], len(requirements)))
    if measured.problems or not requirements:
        return measured
    if any(requirement.merged for of_model in requirements.values() for requirement in of_model):
        measured.problems += _unmergeable(recipe)
    refs = {number: ref for number in sorted(requirements) if (ref := texts.get(number) or recipe.measured) is not None}
    _add_statistics(measured, required, requirements, refs, inputs, seed)
    return measured


def _add_statistics(
    measured: MeasuredSteps,
    required: Sequence[Sequence[Requirement]],
    requirements: Requirements,
    refs: Mapping[int, TextRef],
    inputs: Sequence[Checkpoint],
    seed: int,
) -> None:
    """Give the steps what is measured, by new products or earlier; only problems where a text cannot be read.

    required  of each of the settings
    refs      the text of each model
    """
    from weightsmith._activations.model import input_of, linear_weights, measured_weights, merged_products, statistic_products

    text_models = {number: input_of(inputs, number, INSTEAD) for number in sorted(requirements)}
    requests, from_folders, stored = _read_texts(refs, text_models, requirements, seed, measured)
    if measured.problems:
        return
    plain = [request for request in requests.values() if not request.merged]
    through = [request for request in requests.values() if request.merged]
    measured.products = (*statistic_products(text_models.__getitem__, plain), *stored)
    measured.files += _text_files(request.text for request in requests.values())
    weights = measured_weights(measured.products)
    for request in through:
        weights |= linear_weights(text_models[request.model])
    reads = _StatisticReads(required, inputs, requests | from_folders, weights)
    measured.steps = [step.with_leaves(reads.measured) for step in measured.steps]
    if through:
        measured.products += merged_products(text_models.__getitem__, through, measured.steps)
    if reads.without:
        measured.findings.append(_without(reads.without))


def _read_texts(
    refs: Mapping[int, TextRef],
    text_models: Mapping[int, TextModel],
    requirements: Requirements,
    seed: int,
    measured: MeasuredSteps,
) -> tuple[Requests, Requests, list[Product]]:
    """The statistics that a plan computes, those that a folder has, and the products that read these.

    Adds to the problems and files of `measured`.
    """
    from weightsmith._activations.model import own_text_problems, text_for
    from weightsmith._activations.stored import is_stored

    requests: Requests = {}
    from_folders: Requests = {}
    stored: list[Product] = []
    for number, ref in refs.items():
        model, of_model = text_models[number], requirements[number]
        try:
            if is_stored(ref.path):
                text, products = _stored(ref, model, of_model)
                stored += products
                measured.files.append(expand_user(ref.path))
                from_folders |= {(number, one): StatisticRequest(one.kind, number, text) for one in of_model}
            else:
                text = text_for(model, ref.path, ref.rows, ref.tokens, seed, option="")
                measured.problems += [at(p, ref.where) for p in own_text_problems(text.source, [one.kind for one in of_model])]
                requests |= {(number, one): StatisticRequest(one.kind, number, text, one.merged) for one in of_model}
        except PlanError as error:
            measured.problems += [at(problem, ref.where) for problem in error.problems]
    return requests, from_folders, stored


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


def _requirements_of(steps: Sequence[Step], required: Sequence[Sequence[Requirement]]) -> Requirements:
    requirements: Requirements = {}
    for leaf in (leaf for step in steps for leaf in step.leaves if any(required)):
        for requirement, i in _required(leaf, required):
            requirements.setdefault(leaf.inputs[i].model, {})[requirement] = None
    return requirements


def _required(leaf: Step, required: Sequence[Sequence[Requirement]]) -> list[tuple[Requirement, int]]:
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
    measured: MeasuredSteps,
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
    fix = "write text: and a file, text: built-in, or text: own, at the top level"
    fix += "" if every else " or in the entry of the model"
    what = f"merge_method {method.name} measures the models on a text, and the recipe names none"
    if not every:
        what = f"merge_method {method.name} measures {' and '.join(labels)} on a text, and the recipe names none"
    return ParameterError(what, where=recipe.at("merge_method"), fix=fix)


def _without(names: Sequence[str]) -> Finding:
    what = "a weight of a linear layer is" if len(names) == 1 else f"{len(names):,} weights of linear layers are"
    why = "a text tells nothing of experts that are one tensor, or of layers outside the decoder"
    return Finding(f"{what} merged without statistics", names[0], (why,))


def _text_files(texts: Iterable[TextSource]) -> list[Path]:
    from weightsmith._activations.rows import BUILT_IN, OWN

    return [Path(source) for source in dict.fromkeys(text.source for text in texts) if source not in (BUILT_IN, OWN)]


class _StatisticReads:
    """Says which arrays a step reads.

    without  tensors that would read some, and of which the text tells nothing
    """

    def __init__(
        self,
        required: Sequence[Sequence[Requirement]],
        inputs: Sequence[Checkpoint],
        requests: Requests,
        weights: Collection[tuple[int, str]],
    ) -> None:
        self.without: list[str] = []
        self._required, self._inputs, self._requests, self._weights = required, inputs, requests, weights

    def measured(self, leaf: Step) -> Step:
        """The leaf with its statistics; as it is if one of them is missing."""
        requirements = _required(leaf, self._required)
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
