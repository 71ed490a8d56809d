"""Totals of a plan, for `weightsmith plan`. Pure: it reads only the headers of the inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightsmith._activations.work import EmbeddingWork
from weightsmith._base.groups import grouped
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.computed import Computed
from weightsmith._engine.passes import visits, whole_passes
from weightsmith._engine.product_graph import most_bytes
from weightsmith._engine.reader import Reader
from weightsmith._engine.results import Results
from weightsmith._engine.tiles import peak_memory_bytes
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import resources_of
from weightsmith._features.quantisation.calibration.weights import (
    CALIBRATED,
    by_weight,
    calibrated_weights,
    of_calibration,
    steps_read,
)
from weightsmith._files.remote.ahead import TransferEstimate, estimate
from weightsmith._models.structure import analyse
from weightsmith._models.structure.roles import role_of
from weightsmith._models.structure.vocabulary import is_head, is_vocabulary
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.encode import stored_plain
from weightsmith._plans import PLAIN, Plan, Product, Read, Step
from weightsmith._reports.look.models import Change, changes

TORCH_BYTES = 250 << 20
"""Memory of torch, imported and at work, measured with the CPU build."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Tensors of one op: their number, and their bytes in the output."""

    op: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Output tensors with one encoding, or stored plain for one reason.

    why     reason; also that they are calibrated
    nbytes  in the output
    """

    encoding: str
    why: str
    tensors: int
    nbytes: int
    first: str


@dataclass(frozen=True, slots=True)
class KindFacts:
    """The weights of one kind in a quantised output: attention, MLP, the head.

    elements  numbers that they hold
    """

    kind: str
    tensors: int
    nbytes: int
    elements: int


@dataclass(frozen=True, slots=True)
class StackFacts:
    """A stack of layers: the prefix of their names, and their number."""

    prefix: str
    layers: int


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One module, as `modules:` in a recipe names it.

    tensors  output tensors
    aliases  mergekit's names for it
    """

    name: str
    stacks: tuple[StackFacts, ...]
    tensors: int
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DroppedFacts:
    """Input tensors of one model that the output lacks for one reason."""

    model: str
    reason: str
    tensors: int
    first: str


@dataclass(frozen=True, slots=True)
class Download:
    """A file of a Hub model that a merge would download."""

    model: str
    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak of resident memory, and its causes.

    calibrates  plus a calibration: torch, transformers, a layer and its inputs
    """

    peak_bytes: int
    threads: int
    tile_bytes: int
    calibrates: bool = False


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The result of another recipe that the plan reads.

    name    name of the recipe or of its result
    why     why it is written before it is read; "" if it is computed on the fly
    """

    name: str
    method: str
    models: tuple[str, ...]
    tensors: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class TextFacts:
    """A text that a model is measured on, for the merge method.

    text    or the folder of its statistics
    rows    0 for statistics in a folder
    nbytes  statistics of all layers
    """

    model: str
    text: str
    rows: int
    tokens: int
    kinds: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a plan.

    tensors      output weights, however many arrays each is stored as
    measured     the model is measured first, which decides the storage; `out_bytes` is an estimate then, 0 for unknown
    ops          output tensors by op, most bytes first
    stored       output tensors by encoding, if some are encoded
    kinds        output tensors by kind, if some are encoded; an estimate like `out_bytes`
    input_bytes  input tensors, each use counted once
    read_bytes   all passes; an upper bound, as a pass may prove needless
    survey_bytes the part of read_bytes before the first tensor is merged, for statistics of the whole model
    passes       maximum number of times that a tensor is read
    downloads    files of Hub models that are neither cached nor streamed
    transfer     streamed bytes
    texts        what models are measured on first, for the merge method
    product_bytes  the most that the values computed before tensors take beside the output, at a time
    measuring_bytes  memory for the largest layer that is measured, in float32, and its statistics
    stages       other recipes whose results it reads, in the order of their dependencies
    """

    tensors: int
    measured: bool
    ops: tuple[Tally, ...]
    stored: tuple[StoredFacts, ...]
    kinds: tuple[KindFacts, ...]
    out_bytes: int
    file_bytes: int
    input_bytes: int
    read_bytes: int
    survey_bytes: int
    passes: int
    modules: tuple[ModuleFacts, ...]
    dropped: tuple[DroppedFacts, ...]
    changes: tuple[Change, ...]
    memory: Memory
    transfer: TransferEstimate
    downloads: tuple[Download, ...] = ()
    stages: tuple[StageFacts, ...] = ()
    texts: tuple[TextFacts, ...] = ()
    product_bytes: int = 0
    measuring_bytes: int = 0


def summarise(prepared: Prepared, options: RunOptions) -> Summary:
    """Totals of a prepared plan. options: as for `merge`."""
    plan, reader = prepared.plan, Reader(prepared.plan, prepared.inputs, Results(prepared.plan))
    shown = by_weight(plan)
    ops: dict[str, tuple[int, int]] = {}
    input_bytes = read_bytes = survey_bytes = most = 0
    streamed = whole_passes(plan.products)
    leaves = [leaf for step in plan.steps for leaf in step.leaves]
    inner = {i: c.source for i, c in enumerate(prepared.inputs) if c.plan is not None and isinstance(c.source, Computed)}
    once: dict[tuple[int, str], int] = {}

    def nbytes_of(read: Read, size: int) -> int:
        """Bytes of models that are read for a number of elements."""
        if read.model not in inner:
            return size * reader.dtype(read).itemsize
        each, once[read.model, read.tensor] = inner[read.model].read_bytes(read.tensor)
        return each * size // max(1, reader.source(read).specs[read.tensor].size)

    for step in shown.steps:
        nbytes = sum(out.nbytes for out in step.outs)
        tensors, total = ops.get(step.made_by, (0, 0))
        ops[step.made_by] = tensors + 1, total + nbytes
    calibrating = [step for product in plan.products if of_calibration(product) for step in steps_read(product)]
    leaves += [leaf for step in calibrating for leaf in step.leaves]
    for step in (*(() if plan.then else plan.steps), *calibrating):
        for leaf in step.leaves:
            leaf_bytes = sum(nbytes_of(read, leaf.out.size) for read in leaf.inputs)
            times = 1 + reader.job_facts(leaf)[0]
            most = max(most, times)
            input_bytes += leaf_bytes
            read_bytes += leaf_bytes * times
            survey_bytes += leaf_bytes * sum(streamed.get(name, 0) for name in leaf.needs)
    then = shown.steps if plan.then is None else _expected_steps(prepared)
    tallies = sorted((Tally(op, *sums) for op, sums in ops.items()), key=lambda t: -t.nbytes)
    return Summary(
        tensors=len(shown.steps),
        measured=plan.then is not None,
        ops=tuple(tallies),
        stored=_stored(shown),
        kinds=_kinds(then) if plan.encodings or plan.then is not None else (),
        out_bytes=sum(out.nbytes for step in then for out in step.outs),
        file_bytes=plan.layout.total_bytes,
        input_bytes=input_bytes,
        read_bytes=read_bytes + survey_bytes + sum(once.values()),
        survey_bytes=survey_bytes,
        passes=most,
        modules=_modules(prepared, shown),
        dropped=_dropped(plan),
        changes=tuple(changes(prepared.inputs[plan.donor].config or {}, plan.config or {})),
        transfer=estimate(visits(reader, plan.steps, plan.products), options.stream_cache_bytes),
        downloads=_downloads(prepared),
        stages=_stages(prepared),
        texts=_texts(plan),
        product_bytes=most_bytes(plan),
        measuring_bytes=max((_measuring_bytes(product) for product in plan.products if product.op == "statistic"), default=0),
        memory=_memory(plan, options, [reader.job_facts(leaf)[1] for leaf in leaves]),
    )


def _expected_steps(prepared: Prepared) -> Sequence[Step]:
    from weightsmith._features.quantisation.formats import expected_steps

    return expected_steps(prepared)


def _kinds(steps: Sequence[Step]) -> tuple[KindFacts, ...]:
    facts = [
        KindFacts(kind, len(own), sum(out.nbytes for step in own for out in step.outs), sum(step.out.size for step in own))
        for kind, own in grouped((_kind(step.out), step) for step in steps).items()
    ]
    return tuple(sorted(facts, key=lambda each: -each.nbytes))


def _kind(spec: TensorSpec) -> str:
    """The kind of a weight, by its name.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj", "model.norm")
    >>> [_kind(TensorSpec(f"{name}.weight", DTYPES["BF16"], (8, 8))) for name in names]
    ['head', 'attention', 'experts', 'norms, biases, routers and others']
    """
    if is_vocabulary(spec):
        return "head" if is_head(spec) else "embedding"
    parts = spec.name.split(".")
    if "experts" in parts and len(spec.shape) > 1:
        return "experts"
    if role_of(spec) != "linear":
        return "norms, biases, routers and others"
    return "attention" if any("attn" in part or "attention" in part for part in parts) else "MLPs"


def _stages(prepared: Prepared) -> tuple[StageFacts, ...]:
    found = {stage.path: stage for stage in prepared.stages}.values()
    return tuple(
        StageFacts(
            stage.label,
            stage.plan.made.name,
            tuple(model.ref for model in stage.plan.models),
            len(stage.plan.steps),
            sum(step.out.nbytes for step in stage.plan.steps),
            stage.why,
        )
        for stage in found
    )


def _texts(plan: Plan) -> tuple[TextFacts, ...]:
    wanted = {plan.maker[each.read.tensor] for step in plan.steps for leaf in step.leaves for each in leaf.statistics}
    found: dict[str, TextFacts] = {}
    chain: dict[str, str] = {}
    for product in plan.products:  # a model's states come from one embedding, layer after layer
        chain[product.name] = next((chain[need] for need in product.needs if need in chain), product.name)
        if product.op == "embedding":
            work = EmbeddingWork.of(product)
            text, label = work.text, plan.models[work.base.model].ref
            found[product.name] = TextFacts(label, text.source, text.rows, text.tokens, (), 0)
        elif product.op == "stored_statistic":
            label, folder = plan.models[product.settings["model"]].ref, product.settings["folder"]
            chain[product.name] = f"{label} in {folder}"
            found.setdefault(chain[product.name], TextFacts(label, folder, 0, 0, (), 0))
        if product.name in wanted:
            own, kind = found[chain[product.name]], product.settings["kind"]
            kinds, nbytes = tuple(dict.fromkeys((*own.kinds, kind))), sum(out.nbytes for out in product.outs)
            found[chain[product.name]] = replace(own, kinds=kinds, nbytes=own.nbytes + nbytes)
    return tuple(facts for facts in found.values() if facts.kinds)


def _measuring_bytes(product: Product) -> int:
    return 4 * sum(step.out.size for step in product.steps) + sum(out.nbytes for out in product.outs)


def _downloads(prepared: Prepared) -> tuple[Download, ...]:
    repositories = [repository for checkpoint in prepared.inputs for repository in checkpoint.repositories]
    found = {r.folder / name: Download(r.name, name, nbytes) for r in repositories for name, nbytes in r.missing.items()}
    return tuple(found.values())


def _modules(prepared: Prepared, shown: Plan) -> tuple[ModuleFacts, ...]:
    """Modules of the output, with aliases of the donor's modules. shown: the plan by weight."""
    structure = analyse([step.out for step in shown.steps], prepared.plan.config)
    return tuple(
        ModuleFacts(
            name,
            tuple(StackFacts(s.prefix, s.n_layers) for s in structure.stacks_of(name)),
            len(tensors),
            tuple(alias for alias, owner in prepared.structure.aliases.items() if owner == name),
        )
        for name, tensors in structure.modules.items()
    )


def _stored(plan: Plan) -> tuple[StoredFacts, ...]:
    why = stored_plain(plan) | dict.fromkeys(calibrated_weights(plan), CALIBRATED)
    steps = plan.steps if plan.encodings else ()
    found = grouped(((step.encoding, why.get(step.out.name, "")), step) for step in steps)
    facts = [
        StoredFacts(*key, len(steps), sum(out.nbytes for step in steps for out in step.outs), steps[0].out.name)
        for key, steps in found.items()
    ]
    return tuple(sorted(facts, key=lambda fact: (fact.encoding == PLAIN, -fact.nbytes)))


def _dropped(plan: Plan) -> tuple[DroppedFacts, ...]:
    found = grouped(((d.model, d.reason), d.tensor) for d in plan.dropped)
    return tuple(DroppedFacts(plan.models[model].ref, reason, len(names), names[0]) for (model, reason), names in found.items())


def _memory(plan: Plan, options: RunOptions, resident: Sequence[int]) -> Memory:
    resources = resources_of(plan, options)
    threads, tile_bytes = resources.workers, resources.tile_bytes
    peak = peak_memory_bytes(tile_bytes, threads, plan.widest, plan.levels)
    if largest := max(resident, default=0):
        # Whole matrices: as many as fit the bound, at least one; and torch, which is there for them alone.
        peak += max(largest, min(resources.resident_bytes, largest * threads)) + TORCH_BYTES
    return Memory(peak, threads, tile_bytes, any(map(of_calibration, plan.products)))


def short(value: Any, length: int = 60) -> str:
    """A config value on one line.

    >>> short([1] * 40, 12)
    '[1, 1, ... 40 items'
    """
    if value is None:
        return "-"
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= length:
        return text
    more = f" {len(value)} items" if isinstance(value, Sequence) and not isinstance(value, str) else ""
    return f"{text[: max(1, length - 4 - len(more))].rstrip()}...{more}" if not more else f"{text[:6].rstrip()} ...{more}"
