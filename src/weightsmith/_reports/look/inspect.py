"""`weightsmith inspect MODEL`: what a model is, from headers and small files, and on request what its tensors hold."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NotFound, PlanError, Unsupported
from weightsmith._base.files import is_folder
from weightsmith._base.idioms import grouped
from weightsmith._base.report.blocks import Report, Reported, report_by
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.subfolders import PIPELINE
from weightsmith._kernels.codecs import BLOCK, Encoded
from weightsmith._kernels.combine import LANES
from weightsmith._kernels.differences import STATISTICS, statistics
from weightsmith._models.checkpoint import Checkpoint, locate, open_checkpoint
from weightsmith._models.formats.gguf.reading import GgufMovedTensors, GgufTensors
from weightsmith._models.lora import open_adapter
from weightsmith._models.lora.adapter import Adapter
from weightsmith._models.lora.opening import is_adapter
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.configs import EXPERT_COUNTS, text_sections, whole_number
from weightsmith._models.structure.vocabulary import is_embedding, is_head, ties
from weightsmith._models.tokenizers.files import settings_of, template_of
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import COPY, Product, Read, Step
from weightsmith._reports.look.models import (
    LayerPlace,
    check_patterns,
    fetch_small,
    finite,
    licence,
    lineage,
    matches,
    opened,
    place_of,
    vocabulary_of,
)
from weightsmith._reports.look.surveys import (
    POWERS,
    NonFiniteCounts,
    Survey,
    Watching,
    added,
    keep_largest,
    magnitudes,
    sampled,
    survey,
    survey_kind,
    survey_product,
)
from weightsmith.abc.job import Matrix, Tile

# ---- The `statistics` product: what some tensors of one model hold. It streams, in one pass; its steps have one input.

OP = "statistics"

LARGEST = 4
"""Rows of a matrix that are listed: those with the largest norm."""


def statistics_product(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with one input, of floating numbers.

    Its arrays have a row for each step: `sums` float64 [steps, STATISTICS] (see `kernels.differences`), `rows` float64
    [steps, LARGEST, 2] (row number, or -1, and its squared norm), `spread` float64 [steps, 2]: Σ and Σ² of the norms of rows,
    `magnitudes` int64 [steps, POWERS] (of a sample of the elements that are not zero).
    """
    shapes: dict[str, tuple[int, ...]] = {"sums": (STATISTICS,), "rows": (LARGEST, 2), "spread": (2,), "magnitudes": (POWERS,)}
    return survey_product(name, OP, steps, shapes, integers=("magnitudes",))


@dataclass(slots=True)
class _TileStatistics:
    name: str
    first_row: int
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    magnitudes: npt.NDArray[np.int64]


class Statistics(Survey):
    """The sums of `statistics_product`, tile by tile."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self._sums, self._rows, self._spread, self._magnitudes = self.totals
        self._sums[:, 2], self._sums[:, 3] = np.inf, -np.inf
        self._rows.fill(-1)

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _TileStatistics:
        matrices = len(matrix.shape) == 2
        row = matrix.cols if matrices else BLOCK
        sums, squares = np.empty((tile.grains(matrix.grain), STATISTICS)), np.zeros(-(-tile.size // row) + 1)
        rows = tile.scratch.rows(1, matrix.codes, matrix.out_code, row)
        data = Encoded(tile.raw[0], int(matrix.codes[0]))
        statistics(data, tile.size, row, matrix.grain, sums, squares, rows, np.empty((2, LANES)))
        squares = squares[: tile.size // row] if matrices else squares[:0]
        return _TileStatistics(matrix.name, tile.start // row, sums, squares, magnitudes(sampled(matrix, tile, 0)))

    def take(self, number: int, result: _TileStatistics) -> None:
        i = self.row[result.name]
        sums, part_sums = self._sums[i], result.sums
        low, high = min(sums[2], part_sums[:, 2].min()), max(sums[3], part_sums[:, 3].max())
        sums[:] = added(sums, part_sums)
        sums[2], sums[3] = low, high
        self._spread[i] = added(self._spread[i], np.stack([np.sqrt(result.squares), result.squares], axis=1))
        self._magnitudes[i] += result.magnitudes
        keep_largest(self._rows[i], result.first_row, result.squares)


def outliers(rows: npt.NDArray[np.float64], spread: npt.NDArray[np.float64], count: int) -> list[tuple[int, float]]:
    """Rows whose norm is more than six standard deviations above the mean: number, and norm over the mean."""
    if count < 2:
        return []
    mean = float(spread[0]) / count
    deviation = math.sqrt(max(0.0, float(spread[1]) / count - mean**2))
    norms = [(int(row), math.sqrt(max(0.0, square))) for row, square in rows.tolist() if row >= 0]
    return [(row, norm / mean) for row, norm in norms if mean > 0 and norm > mean + 6 * deviation and norm > 2 * mean]


def _problem(steps: Sequence[Step]) -> str:
    wrong = not steps or any(len(step.inputs) != 1 or not step.out.size for step in steps)
    return "its steps do not have one input each" if wrong else ""


KIND = survey_kind("measuring", Statistics, statistics_product, _problem)


_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class Amount:
    """Some tensors: how many, their elements, and their bytes.

    nbytes  in the files, or decoded for the parts of a quantised model
    """

    name: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layers:
    """A stack: its prefix, the number of its layers, and its module."""

    prefix: str
    layers: int
    module: str


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """What a tensor holds. Norm, mean, deviation and extremes are of its finite elements; nan if there are none.

    norm, mean, deviation   Frobenius norm, mean and standard deviation; nan if they are beyond what float64 holds
    low, high               smallest and largest element
    zeros, nans, infinities how many elements are
    outliers                rows whose norm is more than six standard deviations above the mean, and norm / mean
    magnitudes              elements of a sample by powers of two, from 2**-40 on; without zeros
    """

    name: str
    place: LayerPlace
    shape: tuple[int, ...]
    dtype: str
    elements: int
    norm: float
    mean: float
    deviation: float
    low: float
    high: float
    zeros: int
    nans: int
    infinities: int
    outliers: tuple[tuple[int, float], ...]
    magnitudes: tuple[int, ...] = ()

    @property
    def nonfinite(self) -> NonFiniteCounts:
        """NaN and infinities."""
        return NonFiniteCounts.of(self.nans, self.infinities)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """tokens: in the vocabulary, `added` of them added; rows: of the embedding."""

    family: str
    tokens: int
    added: int
    rows: int
    chat_template: bool


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """base: the model that its config names; ranks: how many modules have which rank; modules: their last names.

    title  its kind: "LoRA"
    """

    base: str
    ranks: Mapping[int, int]
    modules: tuple[str, ...]
    replaced: tuple[str, ...]
    title: str = "LoRA"


@dataclass(frozen=True)
class Inspection(Reported):
    """A model's architecture, size, dtypes and files. Returned by `weightsmith.inspect`.

    name         as it was given
    architecture of config.json; "" if it names none
    elements     of all tensors that match
    parts        tensors by what they are in their layers: `self_attn.q_proj`
    dtypes       tensors by their dtype in the files
    files        weight files and their bytes
    stacks       of layers
    tied         the head is the embedding; None if there is no embedding
    experts      number of routed experts, and how many of them a token uses; (0, 0) if there are none
    quantised    what the weights are quantised with; "" if they are plain
    context      the largest number of positions; 0 if config.json has none
    tokenizer    None if there is none that can be read
    adapter      if it is one
    licence, lineage   as the card says
    notes        what opening it had to say
    statistics   of the tensors; None if they were not asked for
    """

    name: str
    revision: str
    architecture: str
    model_type: str
    elements: int
    tensors: tuple[TensorSpec, ...]
    parts: tuple[Amount, ...]
    dtypes: tuple[Amount, ...]
    files: tuple[tuple[str, int], ...]
    stacks: tuple[Layers, ...]
    tied: bool | None
    experts: tuple[int, int]
    quantised: str
    context: int
    tokenizer: TokenizerFacts | None
    adapter: AdapterFacts | None
    licence: str
    lineage: tuple[str, ...]
    notes: tuple[str, ...]
    statistics: tuple[TensorStatistics, ...] | None

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every tensor."""
        kind = f"{self.architecture}, " if self.architecture else ""
        dtypes = ", ".join(amount.name for amount in self.dtypes)
        return f"<Inspection of {self.name}: {kind}{self.elements:,} parameters in {len(self.tensors):,} tensors, {dtypes}>"

    def report(self) -> Report:
        return report_by("_reports.look.reports:inspection_report", self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined."""
        values = asdict(self)
        values["tensors"] = [{"name": s.name, "dtype": s.dtype.name, "shape": list(s.shape)} for s in self.tensors]
        values["files"] = [{"name": name, "bytes": nbytes} for name, nbytes in self.files]
        values["experts"] = {"routed": self.experts[0], "active": self.experts[1]}
        if self.adapter is not None:
            values["adapter"]["ranks"] = {str(rank): modules for rank, modules in self.adapter.ranks.items()}
        return finite(values)


def inspect(
    model: str | os.PathLike[str],
    *,
    tensors: Sequence[str] = (),
    stats: bool = False,
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Inspection:
    """Summarise a model: architecture, size, dtypes, tokenizer and files.

    model     as in a recipe: a folder, a weight file, a Hub id, `base+adapter`; or the folder or Hub id of an adapter
    tensors   globs of tensor names; default: all tensors
    stats     read the tensors too, and measure them; a model on the Hub is downloaded for this, unless it is streamed
    threads   default: all available processors; does not affect the result
    stream    stream weights of Hub models that are not cached, instead of downloading them
    progress  called about ten times per second; True: a bar in terminals and notebooks, False: none

    Without `stats` only headers and small files are read. Raises PlanError for a model that cannot be opened, UnknownName for
    a glob that matches no tensor, FormatError for a damaged tokenizer.

    >>> weightsmith.inspect("base").elements  # doctest: +SKIP
    134515008
    """
    with ExitStack() as stack:
        checkpoint, adapter = _open(model, stack, stream=stream)
        check_patterns(tensors, list(checkpoint.specs), checkpoint.ref)
        structure = analyse(checkpoint.specs.values(), checkpoint.config)
        chosen = [spec for spec in checkpoint.specs.values() if matches(spec.name, tensors)]
        measured = _measure(checkpoint, structure, chosen, threads, progress) if stats else None
        return _inspection(checkpoint, structure, chosen, adapter, measured)


def _open(model: str | os.PathLike[str], stack: ExitStack, *, stream: bool) -> tuple[Checkpoint, Adapter | None]:
    """The model; or the adapter that the name stands for, and its weights."""
    try:
        (checkpoint,) = stack.enter_context(opened(model, stream=stream))
    except PlanError as error:
        ref = parse_reference(os.fspath(model), "")
        if not isinstance(ref, ModelRef) or ref.lora is not None or not all(isinstance(e, Unsupported) for e in error.problems):
            raise
        place = locate(ref.path, ref.revision or None)
        if isinstance(place, Path) and not (is_folder(place) or is_adapter(place)):
            raise  # a file of a model, which says why it is not read
        try:
            adapter = open_adapter(ref.path, revision=ref.revision or None)
        except NotFound:
            raise error from None
        stack.callback(adapter.checkpoint.close)
        return adapter.checkpoint, adapter
    fetch_small(checkpoint)
    return checkpoint, None


def _inspection(
    model: Checkpoint,
    structure: Structure,
    specs: Sequence[TensorSpec],
    adapter: Adapter | None,
    measured: tuple[TensorStatistics, ...] | None,
) -> Inspection:
    config = model.config or {}
    sections = text_sections(config)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if model.parts:
        pipeline = settings_of(model.folder, model.files, PIPELINE).get("_class_name")
        architecture = pipeline if isinstance(pipeline, str) else PIPELINE
    kind = config.get("model_type")
    embeddings, heads = [[s for s in model.specs.values() if test(s)] for test in (is_embedding, is_head)]
    parts = _amounts(specs, [place_of(structure, spec.name).part for spec in specs])
    stored = specs if not model.decoded else _stored(model, [spec.name for spec in specs])
    return Inspection(
        name=model.ref,
        revision=model.revision,
        architecture=architecture,
        model_type=kind if isinstance(kind, str) else "",
        elements=sum(spec.size for spec in specs),
        tensors=tuple(specs),
        parts=parts,
        dtypes=_amounts(stored, [spec.dtype.name for spec in stored]),
        files=_files(model),
        stacks=tuple(Layers(s.prefix, s.n_layers, s.module) for s in structure.stacks),
        tied=ties(config, stores_head=bool(heads)) if embeddings and adapter is None else None,
        experts=(_first(sections, EXPERT_COUNTS), _first(sections, _ACTIVE_EXPERTS)),
        quantised=model.decoded or model.quantised or "",
        context=_first(sections, _CONTEXT),
        tokenizer=_tokenizer(model, max((s.shape[0] for s in embeddings), default=0)),
        adapter=None if adapter is None else _adapter_facts(adapter),
        licence=licence(model),
        lineage=lineage(model),
        notes=tuple(str(note).replace("\n  ", "; ") for note in model.notes),
        statistics=measured,
    )


def _first(sections: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    """The first whole number among some keys; 0 if there is none."""
    numbers = (whole_number(section.get(key)) for section in sections for key in keys)
    return next((number for number in numbers if number is not None and number > 0), 0)


def _amounts(specs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[Amount, ...]:
    by_name = grouped(zip(names, specs, strict=True))
    return tuple(
        Amount(name, len(members), sum(s.size for s in members), sum(s.nbytes for s in members))
        for name, members in by_name.items()
    )


def _stored(model: Checkpoint, names: Sequence[str]) -> list[TensorSpec]:
    """The tensors as they are in the files: of quantised weights codes and scales."""
    if isinstance(model.source, GgufTensors | GgufMovedTensors):
        return [replace(model.specs[name], dtype=model.source.dtype_in_file(name)) for name in names]
    path = model.ref.partition("+")[0]
    with open_checkpoint(path.partition("@")[0], revision=path.partition("@")[2] or None, raw=True, download=False) as raw:
        if set(names) == set(model.specs):
            return list(raw.specs.values())
        stems = tuple(name.rpartition(".")[0] + "." for name in names)
        return [spec for spec in raw.specs.values() if spec.name in names or spec.name.startswith(stems)]


def _files(model: Checkpoint) -> tuple[tuple[str, int], ...]:
    sizes = {repo.folder / name: nbytes for repo in model.repositories for name, nbytes in repo.sizes.items()}
    return tuple((path.name, sizes[path] if path in sizes else path.stat().st_size) for path in model.paths)


def _tokenizer(model: Checkpoint, rows: int) -> TokenizerFacts | None:
    vocabulary = vocabulary_of(model, {})
    if vocabulary is None:
        return None
    return TokenizerFacts(
        vocabulary.family, len(vocabulary.ids), len(vocabulary.added), rows, bool(template_of(model.folder, model.files))
    )


def _adapter_facts(adapter: Adapter) -> AdapterFacts:
    specs, ranks = adapter.checkpoint.specs, Counter[int]()
    for factors in adapter.updates.values():
        ranks[specs[factors.a].shape[0]] += 1
    base = (adapter.checkpoint.config or {}).get("base_model_name_or_path")
    modules = dict.fromkeys(name.rpartition(".")[2] for name in (*adapter.updates, *adapter.others))
    name = base if isinstance(base, str) else ""
    return AdapterFacts(name, dict(sorted(ranks.items())), tuple(modules), tuple(adapter.replacements), adapter.title)


def _measure(
    model: Checkpoint,
    structure: Structure,
    specs: Sequence[TensorSpec],
    threads: int | None,
    progress: Watching,
) -> tuple[TensorStatistics, ...]:
    name = "statistics"
    chosen = [spec for spec in specs if spec.size and spec.dtype.floating]
    if not chosen:
        return ()
    product = statistics_product(name, [Step(spec, COPY, (Read(0, spec.name),)) for spec in chosen])
    outcome = survey("inspect", [model], [product], threads=threads, progress=progress, doing="measuring")
    sums, rows, spread, powers = outcome.results.arrays(name)
    measured = []
    for i, spec in enumerate(chosen):
        total, squares, low, high, *counts = sums[i].tolist()
        zeros, nans, infinities = map(int, counts)
        n = spec.size - nans - infinities
        mean = total / n if n and math.isfinite(squares) else math.nan
        deviation = 0.0 if low == high else math.sqrt(max(0.0, squares / n - mean**2)) if math.isfinite(mean) else math.nan
        count = spec.shape[0] if len(spec.shape) == 2 else 0
        measured.append(
            TensorStatistics(
                spec.name,
                place_of(structure, spec.name),
                spec.shape,
                model.natural_dtype(spec.name).name,
                spec.size,
                math.sqrt(squares) if math.isfinite(mean) else math.nan,
                mean,
                deviation,
                low if n else math.nan,
                high if n else math.nan,
                zeros,
                nans,
                infinities,
                tuple(outliers(rows[i], spread[i], count)),
                tuple(powers[i].tolist()),
            )
        )
    return tuple(measured)
