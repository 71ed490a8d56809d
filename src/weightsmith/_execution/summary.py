"""The totals of a plan, from the headers of its inputs: `Plan.summary`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightsmith._activations.own_text import OwnTextWork
from weightsmith._activations.work import TextRowsWork
from weightsmith._base import torch_use
from weightsmith._base.idioms import grouped
from weightsmith._base.options import read_options
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.computed import ComputedSource
from weightsmith._engine.local import visits, whole_passes
from weightsmith._engine.product_graph import most_bytes
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import PROCESS_BYTES, peak_memory_bytes
from weightsmith._engine.results import Results
from weightsmith._execution.options import RunOptions, check_processes, resources_of, tensors_bytes
from weightsmith._execution.output import other_sizes
from weightsmith._execution.progress import similar_time
from weightsmith._execution.together import TASK_FACTOR
from weightsmith._features.quantisation.calibration.weights import (
    by_weight,
    calibrated_tensors,
    of_calibration,
    steps_read,
)
from weightsmith._files.remote.ahead import estimate
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import analyse
from weightsmith._models.structure.projections import by_site, role_of
from weightsmith._models.structure.vocabulary import is_head, is_vocabulary
from weightsmith._outputs.bucket_store import CLAIM_WRITES, look_requests, put_requests
from weightsmith._outputs.hub_repository import COMMIT_REQUESTS, FILE_REQUESTS, LARGE_NAMES, LARGE_REQUESTS, REGULAR_BYTES
from weightsmith._outputs.places import place_of
from weightsmith._planning.follow_ups import follow_up_kind
from weightsmith._planning.planner.encode import COPIED, stored_plain
from weightsmith._planning.planner.prepared import Prepared, stream
from weightsmith._plans import PLAIN, PRODUCTS, Plan, Product, Read, Step
from weightsmith._plans.summary import (
    Download,
    DroppedFacts,
    KindFacts,
    Memory,
    ModuleFacts,
    OpeningEstimate,
    OpFacts,
    StackFacts,
    StageFacts,
    StoredFacts,
    Summary,
    TextFacts,
    UploadEstimate,
    config_changes,
)

if TYPE_CHECKING:
    from weightsmith.abc.output import Target


def summary_of(plan: Plan, options: Mapping[str, Any], *, allow_code: bool) -> Summary:
    """What a run of this plan reads, writes, downloads and holds. options: keywords of `RunOptions`."""
    from weightsmith._planning.planner.reopen import reopen

    (running,) = read_options("run", options, RunOptions)
    with reopen(plan, allow_code=allow_code) as prepared:
        return summarise(prepared, running)


def summarise(prepared: Prepared, options: RunOptions, out: str = "out") -> Summary:
    """The totals of a prepared plan. options: as for `merge`. out: of its run; a local folder if that is not known."""
    plan, inputs = prepared.plan, prepared.inputs
    if options.stream:
        stream(inputs)
    reader, shown = Reader(plan, inputs, Results(plan)), by_weight(plan)
    reading = _Reading(prepared, reader)
    steps = shown.steps if plan.then is None else follow_up_kind(prepared).expected(prepared)
    write_bytes = plan.layout.total_bytes
    return Summary(
        tensors=len(shown.steps),
        measured=plan.then is not None,
        out_bytes=sum(out.nbytes for step in steps for out in step.outs),
        write_bytes=write_bytes,
        input_bytes=reading.input_bytes,
        stored_bytes=reading.stored_bytes,
        read_bytes=reading.read_bytes,
        survey_bytes=reading.survey_bytes,
        passes=reading.passes,
        memory=_memory(prepared, options, place_of(out), reading.resident_bytes),
        transfer=estimate(visits(reader, plan.steps, plan.products), options.stream_cache_bytes),
        opening=_opening(prepared),
        upload=_upload(prepared, options, out),
        downloads=_downloads(prepared),
        time=None if plan.then is not None else similar_time(plan, options, reading.read_bytes + write_bytes),
        ops=_ops(shown),
        stored=_stored(shown),
        kinds=_kinds(steps) if plan.encodings or plan.then is not None else (),
        modules=_modules(prepared, shown),
        dropped=_dropped(plan),
        changes=tuple(config_changes(inputs[plan.donor].config or {}, plan.config or {})),
        stages=_stages(prepared),
        texts=_texts(plan),
        product_bytes=most_bytes(plan),
        measuring_bytes=max((_measuring_bytes(product) for product in plan.products if product.op == "statistic"), default=0),
        writing_bytes=max((_measuring_bytes(product) for product in plan.products if product.op == "own_text"), default=0),
    )


class _Reading:
    """Counts what a run reads of the models. The attributes are those of `Summary`.

    resident_bytes  the most that the job of one matrix holds of it
    """

    def __init__(self, prepared: Prepared, reader: Reader) -> None:
        plan, self._reader, self._inputs = prepared.plan, reader, prepared.inputs
        self._shares = [_stored_share(model) for model in prepared.inputs]
        self._once: dict[tuple[int, str], float] = {}
        self._streamed = whole_passes(plan.products)
        calibrating = [step for product in plan.products if of_calibration(product) for step in steps_read(product)]
        leaves = [leaf for step in (*plan.steps, *calibrating) for leaf in step.leaves]
        self.resident_bytes = max((reader.job_facts(leaf)[1] for leaf in leaves), default=0)
        self.input_bytes = self.passes = 0
        self._stored = self._read = self._survey = 0.0
        for leaf in leaves if plan.then is None else [leaf for step in calibrating for leaf in step.leaves]:
            self._add(leaf)
        self.stored_bytes, self.survey_bytes = round(self._stored), round(self._survey)
        self.read_bytes = round(self._read + self._survey + sum(self._once.values()))

    def _add(self, leaf: Step) -> None:
        sizes = [self._nbytes(read, leaf.out.size) for read in leaf.inputs]
        times = 1 + self._reader.job_facts(leaf)[0]
        stored = sum(size * self._share(read) for read, size in zip(leaf.inputs, sizes, strict=True))
        self.passes = max(self.passes, times)
        self.input_bytes += sum(sizes)
        self._stored += stored
        self._read += stored * times
        self._survey += stored * sum(self._streamed.get(name, 0) for name in leaf.needs)

    def _share(self, read: Read) -> float:
        return 1.0 if read.model == PRODUCTS else self._shares[read.model]

    def _nbytes(self, read: Read, elements: int) -> int:
        """Decoded bytes that are read for a number of elements: of the models behind a result that is computed on the way."""
        source = None if read.model == PRODUCTS else self._inputs[read.model].source
        if not isinstance(source, ComputedSource):
            return elements * self._reader.dtype(read).itemsize
        again, once = source.read_bytes(read.tensor)
        self._once[read.model, read.tensor] = once * self._share(read)
        return again * elements // max(1, source.specs[read.tensor].size)


def _stored_share(model: Checkpoint) -> float:
    """`Checkpoint.stored_share`; of a merge that is computed on the way, that of its models."""
    if isinstance(model.source, ComputedSource):
        models = model.source.inputs
        nbytes = [one.nbytes for one in models]
        return sum(size * _stored_share(one) for one, size in zip(models, nbytes, strict=True)) / max(1, sum(nbytes))
    return model.stored_share


def _ops(plan: Plan) -> tuple[OpFacts, ...]:
    steps_by_op = grouped((step.made_by, step) for step in plan.steps)
    facts = [OpFacts(op, len(steps), sum(step.nbytes for step in steps)) for op, steps in steps_by_op.items()]
    return tuple(sorted(facts, key=lambda op: -op.nbytes))


def _kinds(steps: Sequence[Step]) -> tuple[KindFacts, ...]:
    facts = [
        KindFacts(
            kind, len(alike), sum(out.nbytes for step in alike for out in step.outs), sum(step.out.size for step in alike)
        )
        for kind, alike in grouped((_kind(step.out), step) for step in steps).items()
    ]
    return tuple(sorted(facts, key=lambda facts_of_kind: -facts_of_kind.nbytes))


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
    stages = {stage.path: stage for stage in prepared.stages}.values()
    return tuple(
        StageFacts(
            stage.label,
            stage.plan.provenance.name,
            stage.plan.refs,
            len(stage.plan.steps),
            sum(step.out.nbytes for step in stage.plan.steps),
            stage.why,
        )
        for stage in stages
    )


def _texts(plan: Plan) -> tuple[TextFacts, ...]:
    read = {plan.maker[statistic.read.tensor] for step in plan.steps for leaf in step.leaves for statistic in leaf.statistics}
    by_chain: dict[str, TextFacts] = {}
    chain: dict[str, str] = {}
    for product in plan.products:  # a model's states come from its rows of tokens, layer after layer
        chain[product.name] = next((chain[need] for need in product.needs if need in chain), product.name)
        if product.op in ("text_rows", "own_text"):
            work = (TextRowsWork if product.op == "text_rows" else OwnTextWork).of(product)
            text, label = work.text, plan.models[work.base.model].ref
            by_chain[product.name] = TextFacts(label, text.source, text.rows, text.tokens, (), 0)
        elif product.op == "stored_statistic":
            label, folder = plan.models[product.settings["model"]].ref, product.settings["folder"]
            chain[product.name] = f"{label} in {folder}"
            by_chain.setdefault(chain[product.name], TextFacts(label, folder, 0, 0, (), 0))
        if product.name in read:
            earlier, kind = by_chain[chain[product.name]], product.settings["kind"]
            kinds, nbytes = tuple(dict.fromkeys((*earlier.kinds, kind))), sum(out.nbytes for out in product.outs)
            by_chain[chain[product.name]] = replace(earlier, kinds=kinds, nbytes=earlier.nbytes + nbytes)
    return tuple(facts for facts in by_chain.values() if facts.kinds)


def _measuring_bytes(product: Product) -> int:
    return 4 * sum(step.out.size for step in product.steps) + sum(out.nbytes for out in product.outs)


def _downloads(prepared: Prepared) -> tuple[Download, ...]:
    repositories = [repository for checkpoint in prepared.inputs for repository in checkpoint.repositories]
    downloads = {r.folder / name: Download(r.name, name, nbytes) for r in repositories for name, nbytes in r.missing.items()}
    return tuple(downloads.values())


def _opening(prepared: Prepared) -> OpeningEstimate:
    """What has been transferred so far, and the files that a run in another process brings besides."""
    folders = {r.folder: r for checkpoint in prepared.inputs for r in checkpoint.repositories}.values()
    transfers = [transfer for folder in folders for transfer in (folder.headers, folder.brought)]
    return OpeningEstimate(sum(requests for requests, _ in transfers), sum(nbytes for _, nbytes in transfers))


def _upload(prepared: Prepared, options: RunOptions, out: str) -> UploadEstimate:
    others = other_sizes(prepared, options, out)
    weights = [shard.nbytes for shard in prepared.plan.layout.shards]
    puts = sum(map(put_requests, (*weights, *others.values())))
    large = sum(nbytes > REGULAR_BYTES or name.endswith(LARGE_NAMES) for name, nbytes in others.items())
    return UploadEstimate(
        files=len(weights) + len(others),
        nbytes=sum(weights),
        bucket_writes=puts + CLAIM_WRITES,
        bucket_reads=look_requests(len(weights)),
        hub_writes=FILE_REQUESTS * len(weights) + COMMIT_REQUESTS + LARGE_REQUESTS * large + bool(large),
    )


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
    why = stored_plain(plan) | calibrated_tensors(plan) | {step.out.name: COPIED for step in plan.steps if step.verbatim}
    steps = plan.steps if plan.encodings else ()
    groups = grouped(((step.encoding, why.get(step.out.name, "")), step) for step in steps)
    facts = [
        StoredFacts(*key, len(steps), sum(out.nbytes for step in steps for out in step.outs), steps[0].out.name)
        for key, steps in groups.items()
    ]
    return tuple(sorted(facts, key=lambda fact: (fact.encoding == PLAIN, -fact.nbytes)))


def _dropped(plan: Plan) -> tuple[DroppedFacts, ...]:
    groups = grouped(((d.model, d.reason), d.tensor) for d in plan.dropped)
    return tuple(
        DroppedFacts(plan.models[model].ref, reason, len(names), names[0]) for (model, reason), names in groups.items()
    )


def _memory(prepared: Prepared, options: RunOptions, out: Target, matrix_bytes: int) -> Memory:
    """matrix_bytes: that the job of the largest matrix holds."""
    plan, resources = prepared.plan, resources_of(prepared, options)
    threads, tile_bytes = resources.workers, resources.tile_bytes
    peak = peak_memory_bytes(tile_bytes, threads, plan.widest, plan.levels)
    peak += tensors_bytes(prepared)
    n = check_processes(prepared, out, options)
    if n > 1:
        peak += (n - 1) * (PROCESS_BYTES + tensors_bytes(prepared) + _task_bytes(plan))
    if matrix_bytes:
        # Whole matrices: in each process as many as fit the bound, at least one; and torch, which is there for them alone.
        peak += n * (
            max(matrix_bytes, min(resources.resident_bytes, matrix_bytes * -(-threads // n))) + torch_use.installed_bytes()
        )
    return Memory(peak, threads, tile_bytes, any(map(of_calibration, plan.products)))


def _task_bytes(plan: Plan) -> int:
    """Memory that a process takes, torch included, to quantise weights of a calibrated layer; 0 if the plan has none."""
    calibrating = [step.out for product in plan.products if of_calibration(product) for step in product.steps]
    weights = {out.name: out for out in calibrating if len(out.shape) > 1 and role_of(out) == "linear"}
    sizes = [
        weights[names[0]].shape[-1] ** 2 + sum(math.prod(weights[name].shape[-2:]) for name in names)
        for names in by_site(weights).values()
    ]
    return torch_use.installed_bytes() + TASK_FACTOR * 4 * max(sizes) if sizes else 0
