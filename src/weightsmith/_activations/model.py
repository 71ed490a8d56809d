"""The products of a text that runs through a model, for a plan. Planning reads headers, the text and the tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from weightsmith._activations.decoder import Base
from weightsmith._activations.gradients import shapes_of as gradient_shapes
from weightsmith._activations.own_text import (
    TEMPERATURE,
    VERSION,
    OwnTextWork,
    Starts,
    TemplateStarts,
    starts_of,
    template_starts,
)
from weightsmith._activations.rows import OWN, OWN_ROWS, OWN_TOKENS, TOKENIZER, TOKENS, rows_of, text_source
from weightsmith._activations.scored_rows import Cutter, cutter_of
from weightsmith._activations.statistic import shapes_of
from weightsmith._activations.statistics import find_statistic
from weightsmith._activations.work import GradientWork, LayerWork, StatisticWork, TextRowsWork, Work
from weightsmith._base.errors import NotFound, ParameterError, PlanError, Unsupported, WeightsmithError, as_plan_error, noting
from weightsmith._base.files import read_bounded
from weightsmith._base.idioms import grouped
from weightsmith._base.installation import absent_packages, package_version
from weightsmith._base.options import option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import count
from weightsmith._engine.products import find_kind
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.configs import count_of
from weightsmith._models.structure.projections import role_of, site_of
from weightsmith._models.structure.vocabulary import is_embedding, is_head
from weightsmith._plans import (
    FileRead,
    PlanDraft,
    Product,
    Read,
    StatisticRequest,
    Step,
    TextSource,
    arrays_of,
    needs_of,
)

PACKAGES = ("torch", "transformers", "tokenizers")

Labels = Literal["drawn", "text"]
"""Where the labels of gradients come from: the model's own predictions, or the next tokens of the text."""

OF_LABELS: Mapping[Labels, str] = {"drawn": "gradients", "text": "slopes of the text"}
"""Names of the products of gradients."""


@dataclass(frozen=True)
class TextModel:
    """A model that text runs through: steps of a plan for its tensors, and the checkpoint whose tokenizer it has.

    label       as the user named it
    number      index of the checkpoint in the plan
    config      its config.json
    structure   of its tensors
    needs       (step) → the products that must be finished before it
    tokenizes   whether the checkpoint's tokenizer is the model's
    instead     what else the user may do, for errors: `; or use …`
    files       that the plan makes in place of the checkpoint's
    """

    label: str
    number: int
    checkpoint: Checkpoint
    config: Mapping[str, Any] | None
    steps: tuple[Step, ...]
    structure: Structure
    needs: Callable[[Step], Collection[str]] = lambda step: ()
    tokenizes: bool = True
    instead: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return next((step.out.shape[0] for step in self.steps if is_embedding(step.out)), 0)

    @property
    def bos(self) -> int | None:
        """The token that begins a text, by config.json."""
        tokens = (config.get("bos_token_id") for config in self.configs)
        return next((token for token in tokens if type(token) is int), None)

    @property
    def positions(self) -> int:
        """The most tokens that a row may have, by config.json."""
        return next(filter(None, (count_of(config, "max_position_embeddings") for config in self.configs)), 1 << 30)

    @property
    def hidden(self) -> int:
        """The size of a hidden state."""
        sizes = [count_of(config, "hidden_size") for config in self.configs]
        return next(filter(None, sizes), next((step.out.shape[1] for step in self.steps if is_embedding(step.out)), 0))

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        """config.json, and its section of the layers: what a model with images says of its text model."""
        config, stack = self.config or {}, self.structure.main
        return [config] if stack is None or not stack.config_paths else [config, stack.section(config)]

    @cached_property
    def cutter(self) -> Cutter:
        """The tokenizer and chat template. Raises as `cutter_of`."""
        return cutter_of(self.checkpoint, self.files, self.vocabulary, self.label)

    @cached_property
    def template_starts(self) -> TemplateStarts:
        """What rows of its own text begin with, by its chat template. Cost: a process that renders the template."""
        return template_starts(self.cutter, self.label)

    def own_starts(self, tokens: int) -> Starts:
        """What rows of its own text begin with. Those of a chat template may take half of a row.

        Raises ParameterError for rows without room behind a start; NotFound, FormatError, Unsupported for a bad tokenizer.
        """
        starts = starts_of(
            self.cutter, self.template_starts, tokens // 2, f"at most half of the {tokens:,} in a row are for it"
        )
        fitting = tuple(ids for ids in starts.ids if len(ids) < tokens)
        if not fitting:
            what = f"a row of {count(tokens, 'token')} has no space for one behind its start"
            raise ParameterError(what, where=self.label, fix="use more tokens for a row")
        return replace(starts, ids=fitting)


def result_of(draft: PlanDraft, inputs: Sequence[Checkpoint], steps: Sequence[Step], instead: str = "") -> TextModel:
    """The model that a plan makes. steps: for its plain tensors, with the names of the model that transformers builds."""
    donor, structure, maker = (
        inputs[draft.donor],
        analyse([step.out for step in steps], draft.config),
        arrays_of(draft.products),
    )
    label, has_own_tokenizer, needs = (
        draft.models[draft.donor].ref,
        TOKENIZER not in draft.files,
        partial(needs_of, maker=maker),
    )
    of_plan = structure, needs, has_own_tokenizer, instead, draft.files
    return TextModel(label, draft.donor, donor, draft.config, tuple(steps), *of_plan)


def input_of(inputs: Sequence[Checkpoint], number: int, instead: str = "") -> TextModel:
    """An input of a plan, by its index."""
    checkpoint = inputs[number]
    specs = checkpoint.specs
    steps = [Step.copy(kept, Read(number, name), specs[name].dtype) for name, kept in checkpoint.kept_specs.items()]
    structure = analyse([step.out for step in steps], checkpoint.config)
    return TextModel(checkpoint.ref, number, checkpoint, checkpoint.config, tuple(steps), structure, instead=instead)


def text_for(
    model: TextModel,
    path: str | None,
    rows: int | None,
    tokens: int | None,
    seed: int,
    most_rows: int | None = None,
    option: str = "calibration",
) -> TextSource:
    """A text for a model: checked, with the number of its rows.

    path       of the file; None or `built-in`: the built-in text; `own`: what the model writes by itself
    rows       None: as many as the text has, at most `rows.MAX_ROWS`
    tokens     of a row; None: `rows.TOKENS`, or as many as the model has positions
    most_rows  that are used, if `rows` or the text allow more
    option     that names the file, for messages; "" for none

    Raises PlanError: packages that are missing, a text that cannot be read or is too short, a model without a tokenizer.
    """
    if path == OWN:
        if os.path.lexists(OWN):
            raise PlanError([own_file_problem(f"--{option} {OWN}" if option else "")])
        return own_text_for(model, rows, tokens, seed, most_rows)
    problems = absent_packages(PACKAGES, "texts", "calibration", model.instead)
    finding_list = [] if model.structure.main is not None and model.config is not None else [_no_decoder(model)]
    text = TextSource("", "", 0, 0, 0)
    with noting(problems):
        text = text_source(path, rows, _row_tokens(model, tokens, TOKENS), seed, option)
    with noting(finding_list):
        text = replace(text, tokenizer=tokenizer_hash(model))
    if problems := [*problems, *finding_list]:
        raise PlanError(problems)
    with as_plan_error():
        count = len(rows_of(text, model.checkpoint.folder, model.vocabulary, model.bos, option))
    return replace(text, rows=min(count, most_rows or count))


def own_text_problems(source: str, kinds: Iterable[str]) -> list[WeightsmithError]:
    """Statistics that say nothing of a text that the model writes by itself. source: of the text."""
    what = "a model's own text does not become likelier in any direction, so its {} are zero, except for chance"
    fix = "name a text of what the model is to learn"
    blind = [kind for kind in kinds if source == OWN and find_statistic(kind).labels == "text"]
    return [ParameterError(what.format(kind), fix=fix) for kind in blind]


def own_file_problem(where: str) -> WeightsmithError:
    """A file or folder has the name of the text that a model writes."""
    what = f"{OWN} is the text that the model writes by itself, and there is a file or folder of this name"
    return ParameterError(what, where=where, fix=f"write ./{OWN} for that, or rename it")


def own_text_for(model: TextModel, rows: int | None, tokens: int | None, seed: int, most_rows: int | None = None) -> TextSource:
    """The text that a model writes by itself. As `text_for`, but no file can be meant."""
    from weightsmith._activations.running import decoder_of

    if problems := absent_packages(PACKAGES, "texts", "calibration", model.instead):
        raise PlanError(problems)
    decoder_of(base_of(model))  # refuses what transformers cannot build
    with as_plan_error():
        tokens = _row_tokens(model, tokens, OWN_TOKENS)
        text = TextSource(OWN, "", min(rows or OWN_ROWS, most_rows or rows or OWN_ROWS), tokens, seed, tokenizer_hash(model))
        if seed < 0:
            raise option_error("seed", f"must be at least 0 for a text that a model writes, not {seed}")
        model.own_starts(tokens)
    return text


def _row_tokens(model: TextModel, tokens: int | None, most: int) -> int:
    """The tokens of a row. most: unless a number is asked for. Raises ParameterError for more than the model has positions."""
    if tokens is not None and tokens > model.positions:
        what = f"a row has at most {model.positions:,} tokens, not {tokens:,}"
        raise ParameterError(what, where=model.label, fix=f"use fewer tokens for a row{model.instead}")
    return tokens or min(most, model.positions)


def base_of(model: TextModel) -> Base:
    """Config and names that a model's decoder is built from. Raises PlanError for a model that is not a decoder."""
    stack, config = model.structure.main, model.config
    if stack is None or config is None:
        raise PlanError([_no_decoder(model)])
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    return Base(model.label, model.number, config, stack.prefix, stack.n_layers, model.hidden, model.instead)


def _no_decoder(model: TextModel) -> WeightsmithError:
    return Unsupported("it is not a decoder with a config.json", where=model.label, fix=f"choose a decoder{model.instead}")


def tokenizer_hash(model: TextModel) -> str:
    """sha256 of the model's tokenizer.json. Raises Unsupported, NotFound."""
    if not model.tokenizes:
        fix = f"merge first, and use the result{model.instead}"
        raise Unsupported("a text cannot run through a merge that changes the tokenizer", where=model.label, fix=fix)
    checkpoint = model.checkpoint
    if TOKENIZER not in checkpoint.files:
        fix = f"put the model's tokenizer.json next to its weights{model.instead}"
        raise NotFound("a text needs the model's tokenizer.json", where=checkpoint.ref, fix=fix)
    checkpoint.fetch([TOKENIZER])
    return hashlib.sha256(read_bounded(checkpoint.folder / TOKENIZER, MAX_COPIED_BYTES)).hexdigest()


class TextRun:
    """Makes the products of a text that runs through a model, one after the other."""

    def __init__(self, model: TextModel, text: TextSource, prefix: str = "") -> None:
        """
        text    from `text_for`
        prefix  of the names of the products and their arrays

        Raises PlanError for a model that is not a decoder.
        """
        self.text = text
        self._model = model
        self._prefix = prefix
        self.base = base_of(model)
        self.packages = {name: package_version(name) for name in PACKAGES}

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.base.layers

    def steps(self, layer: int) -> list[Step]:
        """The steps for the tensors of a layer; for the number of layers, those outside the layers."""
        where = (self._model.structure.main, layer) if layer < self.layers else None
        return [step for step in self._model.steps if self._model.structure.locate(step.out.name) == where]

    def names(self, layer: int) -> list[str]:
        """The tensors of a layer."""
        return [step.out.name for step in self.steps(layer)]

    def linear(self, layer: int) -> tuple[str, ...]:
        """The weights of the linear layers of a layer. Experts that are one tensor are not among them."""
        return tuple(step.out.name for step in self.steps(layer) if role_of(step.out) == "linear")

    @cached_property
    def text_rows(self) -> Product:
        """The rows of tokens of the text."""
        out = self.array("ids", "I32", (self.text.rows, self.text.tokens))
        if self.text.source == OWN:
            starts = self._model.own_starts(self.text.tokens)
            merged = any(leaf.merges for step in self._model.steps for leaf in step.leaves)
            label = "the merge" if merged else self.base.label
            base = replace(self.base, label=label, arithmetic="float32")
            drawn = starts.ids, TEMPERATURE, VERSION, starts.unused_template
            own_work = OwnTextWork(base, self.packages, self.text, *drawn)
            return self.product("rows", "own_text", (out,), own_work, self._model.steps)
        work = TextRowsWork(self.base, self.packages, self.text, self._model.vocabulary, self._model.bos)
        files = (FileRead(self._model.number, TOKENIZER, self.text.tokenizer),)
        return self.product("rows", "text_rows", (out,), work, (), files=files, transient=True)

    def embedding(self, rows: Product) -> Product:
        """What enters the first layer. rows: of tokens."""
        work = LayerWork(self.base, self.packages, 0, rows.name)
        steps = [step for step in self.steps(self.layers) if not is_head(step.out)]
        return self.product("states 0", "embedded_rows", (self.rows("states 0"),), work, steps, (rows,), transient=True)

    def states(self, layer: int, states: Product) -> Product:
        """What leaves a layer. states: what enters it."""
        name, work = f"states {layer + 1}", LayerWork(self.base, self.packages, layer, states.name)
        return self.product(name, "states", (self.rows(name),), work, self.steps(layer), (states,), transient=True)

    def head_gradients(self, states: Product, labels: Labels = "drawn") -> Product:
        """The gradients of what leaves the last layer. states: what leaves it."""
        name, needs = f"{OF_LABELS[labels]} {self.layers}", (states, self.text_rows) if labels == "text" else (states,)
        rows = self.text_rows.name if labels == "text" else ""
        work = GradientWork(self.base, self.packages, self.layers, states.name, "", (), self.text.seed, rows)
        return self.product(name, "gradients", (self.rows(name),), work, self.steps(self.layers), needs, transient=True)

    def gradients(
        self, layer: int, states: Product, leaving: Product, weights: tuple[str, ...] = (), labels: Labels = "drawn"
    ) -> Product:
        """The gradients of what enters a layer, and what is kept of those of its weights. leaving: of what leaves it."""
        work = GradientWork(self.base, self.packages, layer, states.name, leaving.name, weights, self.text.seed)
        name, steps = f"{OF_LABELS[labels]} {layer}", self.steps(layer)
        shapes = {step.out.name: step.out.shape for step in steps}
        gradient_rows = self.rows(name)
        norms, squares = gradient_shapes(gradient_rows.shape, [shapes[weight] for weight in weights])
        of = "of layer" if labels == "drawn" else "of the text, of layer"
        outs = (
            gradient_rows,
            self.array(f"norms {of} {layer}", "F32", norms),
            self.array(f"squares {of} {layer}", "F64", squares),
        )
        return self.product(name, "gradients", outs, work, steps, (states, leaving), transient=True)

    def statistic(
        self, kind: str, layer: int, states: Product, weights: Iterable[str], leaving: Product | None = None
    ) -> Product:
        """A statistic of linear layers of a layer.

        kind     a name of `statistics.STATISTICS`
        leaving  the gradients of what leaves the layer, for a statistic that has them
        """
        names, steps = tuple(weights), self.steps(layer)
        work = StatisticWork(self.base, self.packages, layer, states.name, kind, leaving.name if leaving else "", names)
        shapes = shapes_of(find_statistic(kind), names, {step.out.name: step.out.shape for step in steps})
        outs = tuple(self.array(f"{kind} of {key}", "F32", shape) for key, shape in shapes.items())
        needs = (states,) if leaving is None else (states, leaving)
        return self.product(f"{kind} {layer}", "statistic", outs, work, steps, needs)

    def forward(self, measure: Callable[[int, Product], Iterable[Product]]) -> tuple[Product, ...]:
        """The products of a pass from the first layer to the last. measure: (layer, what enters it) → the products to add."""
        return _needed(self._ahead(measure))

    def _ahead(self, measure: Callable[[int, Product], Iterable[Product]]) -> list[Product]:
        states = self.embedding(self.text_rows)
        products = [self.text_rows, states]
        for layer in range(self.layers):
            products += measure(layer, states)
            states = self.states(layer, states)
            products.append(states)
        return products

    def backward(
        self,
        measure: Callable[[int, Product, Product, Product], Iterable[Product]],
        weights: Callable[[int], tuple[str, ...]] = lambda layer: (),
        before: Callable[[int, Product], Iterable[Product]] = lambda layer, states: (),
        after: Callable[[Product, Product, Product], Iterable[Product]] = lambda entering, gradients, leaving: (),
        labels: Sequence[Labels] = ("drawn",),
    ) -> tuple[Product, ...]:
        """The products of a pass to the head, and back with the gradients.

        measure  (layer, what enters it, the gradients of that, those of what leaves it) → the products to add; for each of
                 `labels`
        weights  whose gradients are looked at, by layer
        before   as `measure` of `forward`
        after    (what enters the first layer, the gradients of that, what leaves the last layer) → the products to add
        """
        products = self._ahead(before)
        states = [product for product in products if product.op in ("embedded_rows", "states")]
        for label in labels:
            gradients = self.head_gradients(states[-1], label)
            products.append(gradients)
            for layer in reversed(range(self.layers)):
                leaving, gradients = gradients, self.gradients(layer, states[layer], gradients, weights(layer), label)
                measured = list(measure(layer, states[layer], gradients, leaving))
                alone = [product for product in measured if gradients.name not in product.needs]  # they may make them, too
                products += [*alone, gradients, *(product for product in measured if product not in alone)]
            products += after(states[0], gradients, states[-1])
        return _needed(products)

    def add_to(self, draft: PlanDraft, products: Iterable[Product]) -> None:
        """Add products to a draft, after those of the merge, whose own steps are then theirs alone."""
        draft.products = [*map(self._surveyed, draft.products), *products]

    def _surveyed(self, product: Product) -> Product:
        """A product of the merge, which looks at the steps that need it: these are no longer steps of the plan."""
        if product.steps or find_kind(product.op).reduce is None:
            return product
        return replace(product, steps=tuple(step for step in self._model.steps if product.name in self._model.needs(step)))

    def rows(self, name: str) -> TensorSpec:
        """The array of states or gradients: float32 [rows, tokens, hidden]."""
        return self.array(name, "F32", (self.text.rows, self.text.tokens, self.base.hidden))

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        """An array of a product."""
        return TensorSpec(self._prefix + name, DTYPES[dtype], shape)

    def product(
        self,
        name: str,
        op: str,
        outs: tuple[TensorSpec, ...],
        work: Work,
        steps: Iterable[Step],
        needs: Iterable[Product] = (),
        files: tuple[FileRead, ...] = (),
        *,
        transient: bool = False,
    ) -> Product:
        """A product of this run, which needs what the steps need."""
        steps = tuple(steps)
        merged = {need: None for step in steps for need in sorted(self._model.needs(step))}
        named = (*merged, *(product.name for product in needs))
        return Product(self._prefix + name, op, outs, work.to_json(), steps, (), named, files, transient)


def _needed(products: Sequence[Product]) -> tuple[Product, ...]:
    """Without what only other products read, if none does."""
    names = {name for product in products for name in product.needs}
    return tuple(product for product in products if not product.transient or product.name in names)


def _kinds(requests: Iterable[StatisticRequest]) -> dict[tuple[int, TextSource], list[str]]:
    """The statistics of each model on each text."""
    return grouped(((request.model, request.text), request.kind) for request in dict.fromkeys(requests))


def statistic_products(models: Callable[[int], TextModel], requests: Iterable[StatisticRequest]) -> tuple[Product, ...]:
    """The products of statistics of all linear layers of a model. Requests of one model and text share its states.

    models  by index in the plan

    Their arrays are named by `array_name`. They do not depend on the number of threads.

    Raises PlanError; UnknownName for an unknown kind.
    """
    products: list[Product] = []
    for (number, text), kinds in _kinds(requests).items():
        products += _products(TextRun(models(number), text, prefix_of(number, text)), kinds)
    return tuple(products)


def merged_products(
    models: Callable[[int], TextModel], requests: Iterable[StatisticRequest], steps: Sequence[Step]
) -> tuple[Product, ...]:
    """As `statistic_products`, of requests that are `merged`: each text runs through the layers of a merge of the models.

    A layer is merged when all its statistics are known; its result is what the next layer gets. Inside a layer, the model that
    is measured has its own weights (Nguyen et al. 2025, RegMean++, https://arxiv.org/abs/2508.03121).

    steps  of the merge, with the arrays that they read

    Raises PlanError. Cost: each layer is merged once more for each text.
    """
    products: list[Product] = []
    maker: dict[str, str] = {}
    runs: list[tuple[TextRun, TextRun, list[str]]] = []
    for (number, text), own_kinds in _kinds(requests).items():
        model, prefix = models(number), prefix_of(number, text, merged=True)
        structure, needs = analyse([step.out for step in steps], model.config), partial(needs_of, maker=maker)
        merge = replace(model, label="the merge", steps=tuple(steps), structure=structure, needs=needs)
        runs.append((TextRun(model, text, prefix), TextRun(merge, text, prefix), own_kinds))
    states = [merge.embedding(run.text_rows) for run, merge, _ in runs]
    products += [run.text_rows for run, _, _ in runs]
    products += states
    for layer in range(runs[0][1].layers):
        for (run, _, kinds), entering in zip(runs, states, strict=True):
            products += [run.statistic(kind, layer, entering, run.linear(layer)) for kind in kinds]
        maker |= arrays_of(products)
        states = [merge.states(layer, entering) for (_, merge, _), entering in zip(runs, states, strict=True)]
        products += states
    return _needed(products)


def _products(run: TextRun, kinds: Iterable[str]) -> tuple[Product, ...]:
    plain: list[str] = []
    deep: list[str] = []
    for kind in kinds:
        (deep if find_statistic(kind).gradients else plain).append(kind)

    def ahead(layer: int, states: Product) -> list[Product]:
        return [run.statistic(kind, layer, states, run.linear(layer)) for kind in plain]

    labels = list(dict.fromkeys(find_statistic(kind).labels for kind in deep))

    def back(layer: int, states: Product, gradients: Product, leaving: Product) -> list[Product]:
        measured_kinds = [kind for kind in deep if gradients.name.endswith(f"{OF_LABELS[find_statistic(kind).labels]} {layer}")]
        return [run.statistic(kind, layer, states, run.linear(layer), leaving) for kind in measured_kinds]

    return run.backward(back, before=ahead, labels=labels) if deep else run.forward(ahead)


def linear_weights(model: TextModel) -> set[tuple[int, str]]:
    """Linear layers with statistics: model index, name of the weight."""
    run = TextRun(model, TextSource("", "", 0, 0, 0))
    return {(model.number, weight) for layer in range(run.layers) for weight in run.linear(layer)}


def measured_weights(products: Iterable[Product]) -> set[tuple[int, str]]:
    """Linear layers whose statistics the products hold: model index, name of the weight."""
    weights: set[tuple[int, str]] = set()
    for product in products:
        settings = product.settings
        if product.op in ("statistic", "stored_statistic"):
            model = settings["base"]["model"] if product.op == "statistic" else settings["model"]
            weights.update((model, weight) for weight in settings["weights"])
    return weights


def array_name(request: StatisticRequest, weight: str) -> str:
    """The name of the array that a request makes for a linear layer, by the name of its weight; steps read it as a tensor."""
    key = weight if find_statistic(request.kind).gradients else site_of(weight)
    return f"{prefix_of(request.model, request.text, merged=request.merged)}{request.kind} of {key}"


def prefix_of(number: int, text: TextSource, *, merged: bool = False) -> str:
    """Prefix of the names of products and arrays of one model on one text."""
    digest = hashlib.sha256(repr(sorted(asdict(text).items())).encode()).hexdigest()[:12]
    return f"model {number}, text {digest}{', merged' * merged}: "
