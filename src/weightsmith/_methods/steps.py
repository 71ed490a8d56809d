"""Steps after a merge: the merged delta of each tensor is measured and scaled before it is added to the base, or its singular
values are changed.

Every method that needs a base has them as parameters. On language models the length of merged - base decides whether a merge
works (https://arxiv.org/abs/2511.21437; the card of a merge lists it), and most methods leave it to chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.torch_use import needs_torch
from weightsmith._kernels.codecs import F32, F64, Encoded, EncodedInputs
from weightsmith._kernels.combine import copy_rows, delta_squares, rescale_delta
from weightsmith._methods.jobs.decompose import transform
from weightsmith._methods.jobs.matrix import MatrixJob, write_with
from weightsmith._methods.method import Bounds, Method, Requirement, bound, parameters_of
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


def _job(
    matrix: Matrix,
    make: Callable[[Matrix], Job],
    spectrum: Annotated[
        Literal["none", "flatten", "floor", "calibrate"],
        "Change the singular values S of each linear layer's merged delta. `flatten` moves them towards their mean (Iso-C, "
        "arXiv 2502.04959). `floor` raises small values to the one at which S sums to the share `spectrum_strength` (subspace "
        "boosting, arXiv 2506.16506). `calibrate` divides by how often the models repeat a direction (SVC, arXiv 2602.05536). "
        "Requires torch.",
    ] = "none",
    spectrum_strength: Annotated[
        float | None,
        "`flatten`: (1 - strength) S + strength · mean S, 0.1 by default. `floor`: the share, 0.01 by default. `calibrate`: "
        "the minimum repetition to assume, 1/K for K models by default; 1 only weakens.",
        Bounds(0.0, 1.0),
    ] = None,
    aim: Annotated[
        float | None,
        "Scale down the columns of each linear layer's merged delta whose inputs are large in the base model, to this share "
        "for the largest. The factor is 1 - (1 - aim) a / max a, where a is the mean magnitude of an input on the base's text "
        "(AIM, arXiv 2502.02421; 0.4 there). The recipe names the text.",
        Bounds(0.0, 1.0),
    ] = None,
    norm_match: Annotated[
        Literal["none", "mean", "max", "task_arithmetic"],
        "Rescale each tensor's merged delta to a Frobenius norm: the `mean` or the `max` of the inputs' deltas, or that of "
        "their plain weighted sum (`task_arithmetic`).",
    ] = "none",
    delta_scale: Annotated[
        float, "Factor on the merged delta, applied last. A gradient over the layers is LiNeS: shallow layers change less."
    ] = 1.0,
) -> Job:
    """The job that `make` makes, with the steps after it that are asked for; `spectrum` and `aim` only of a linear layer."""

    def spectral(matrix: Matrix) -> Job:
        if spectrum == "none" or matrix.role != "linear":
            return make(matrix)
        return SpectrumJob(matrix, make, spectrum, spectrum_strength)

    def changed(matrix: Matrix) -> Job:
        if aim is None or MAGNITUDES.kind not in matrix.statistics:
            return spectral(matrix)
        sizes = np.array(matrix.statistics[MAGNITUDES.kind][0], np.float64)
        return ColumnsJob(matrix, spectral, 1.0 - (1.0 - aim) * sizes / max(sizes.max(), np.finfo(np.float64).tiny))

    if norm_match == "none" and delta_scale == 1.0:
        return changed(matrix)
    return ScaledJob(matrix, changed, norm_match, delta_scale)


MAGNITUDES = Requirement("magnitudes", of="base")

PARAMETERS = parameters_of(_job, skip=("matrix", "make"))


def with_steps(method: Method) -> Method:
    """The method with the steps' parameters, and a job that carries them out where they ask for something.

    As it is when it needs no base, or has a parameter by the name of one of the steps': that is then its own.
    """
    if method.base != "required" or not {p.name for p in PARAMETERS}.isdisjoint(p.name for p in method.parameters):
        return method
    job = bound(_job, PARAMETERS, skip=("matrix", "make"))
    check = bound(lambda spectrum: needs_torch() if spectrum != "none" else "", PARAMETERS)
    decomposed = bound(lambda spectrum: spectrum != "none", PARAMETERS)
    aims = bound(lambda aim: aim is not None, PARAMETERS)
    unchanged = bound(lambda spectrum, aim, norm_match: spectrum == norm_match == "none" and aim is None, PARAMETERS)
    return replace(
        method,
        parameters=method.parameters + PARAMETERS,
        job=lambda matrix: job(matrix, method.job, shared=matrix.shared),
        check=lambda shared, models: method.check(shared, models) or check(shared=shared),
        elementwise=lambda shared: method.elementwise(shared) and unchanged(shared=shared),
        on_device=lambda shared: method.on_device(shared) or decomposed(shared=shared),
        requires=lambda shared: (*method.requires(shared), *([MAGNITUDES] if aims(shared=shared) else ())),
    )


# ---- jobs that wrap that of the method


class FollowingJob(Job):
    """Takes the result of another job in float32 (float64 for outputs of 32 bits or more).

    inner     the other job
    measures  whether there is a pass over its result
    """

    measures = False

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job]) -> None:
        """make: makes the other job, for the matrix with that output dtype."""
        super().__init__(matrix)
        self.code, self._width = (F64, 8) if matrix.wide else (F32, 4)
        self.inner = make(replace(matrix, out_code=self.code))
        self.sequential = self.inner.sequential
        self.resident_bytes = self.inner.resident_bytes
        self.portable = self.inner.portable

    def passes(self) -> int:
        return self.inner.passes() + self.measures

    def statistics(self, number: int, tile: Tile) -> Any:
        return self.inner.statistics(number, tile) if number < self.inner.passes() else self.measure(tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        if number < self.inner.passes():
            self.inner.finish_pass(number, results)
        else:
            self.finish_measuring(results)

    def merged(self, tile: Tile) -> Bytes:
        """The tile as the other job merges it."""
        out = np.empty(tile.size * self._width, np.uint8)
        self.inner.apply(tile, out)
        return out

    def appended(self, raw: Bytes, merged: Bytes) -> Bytes:
        """Inputs [models, bytes] and the result of the other job, as one more of them."""
        width = -(-max(raw.shape[1], merged.size) // 64) * 64  # rows are views of wider elements
        rows = np.zeros((len(raw) + 1, width), np.uint8)
        rows[:-1, : raw.shape[1]] = raw
        rows[-1, : merged.size] = merged
        return rows

    def measure(self, tile: Tile) -> Any:
        """Statistics of one tile in the last pass."""

    def finish_measuring(self, results: list[Any]) -> None:
        """Process the statistics of all tiles, in tile order."""


class ScaledJob(FollowingJob):
    """Scales the delta of another job: by `scale`, after it has got the `norm` that is asked for, if any."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], norm: str, scale: float) -> None:
        super().__init__(matrix, make)
        self.measures = norm != "none"
        self._norm = norm
        self.factor = scale
        weights = [m.get("weight") for m in matrix.models[1:]]
        self._weights = np.array([1.0 if w is None else float(w) for w in weights])

    def measure(self, tile: Tile) -> npt.NDArray[np.float64]:
        """float64 [grains, 2 + models]: squared norms of the merged delta, the weighted sum, and each model's delta."""
        m, scratch = self.matrix, tile.scratch
        merged = self.merged(tile)
        out = np.empty((tile.grains(m.grain), 2 + len(self._weights)))
        rows, sums = scratch.rows(2, m.codes, self.code), scratch.sums(out.shape[1] + 1)
        inputs, result = EncodedInputs(tile.raw, m.codes), Encoded(merged, self.code)
        delta_squares(inputs, tile.size, m.grain, self._weights, result, out, rows, sums)
        return out

    def finish_measuring(self, results: list[Any]) -> None:
        totals = np.sqrt(np.cumsum(np.concatenate(results), axis=0)[-1])
        merged, summed, models = totals[0], totals[1], totals[2:]
        target = {"mean": models.mean(), "max": models.max(), "task_arithmetic": summed}[self._norm]
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            if merged > 0:
                self.factor *= float(target / merged)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        merged = self.merged(tile)
        rows, sums = scratch.rows(2, m.codes, self.code), scratch.sums(1)
        inputs, result = EncodedInputs(tile.raw, m.codes), Encoded(merged, self.code)
        rescale_delta(inputs, result, tile.size, self.factor, Encoded(out, m.out_code), rows, sums)


class SpectrumJob(FollowingJob):
    """Changes the singular values of another job's delta, as the matrix methods do: with torch, in float64, in memory."""

    measures = True

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], how: str, strength: float | None) -> None:
        super().__init__(matrix, make)
        models = len(matrix.codes) - 1
        # The merged delta is passed to the matrix job as one more model.
        self._gathered = MatrixJob(
            replace(matrix, codes=np.append(matrix.codes, self.code), models=(*matrix.models, {})),
            lambda deltas: transform(deltas[models], [deltas[i] for i in range(models)], how, strength),
            np.array([1.0]),
            np.ones(models + 1),
            1.0,
        )
        self.resident_bytes += self._gathered.resident_bytes
        self.portable = False

    def measure(self, tile: Tile) -> None:
        self._gathered.statistics(0, replace(tile, raw=self.appended(tile.raw, self.merged(tile))))

    def finish_measuring(self, results: list[Any]) -> None:
        self._gathered.finish_pass(0, results)

    def apply(self, tile: Tile, out: Bytes) -> None:
        write_with(self.matrix, tile, out, np.ones(1), self._gathered.update(tile))


class ColumnsJob(FollowingJob):
    """Scales each column of another job's delta. factors: float64 [cols]."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], factors: npt.NDArray[np.float64]) -> None:
        super().__init__(matrix, make)
        self._factors = factors

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        raw, codes = self.appended(tile.raw[:1], self.merged(tile)), np.array([m.codes[0], self.code])
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        delta = np.empty((1, tile.size), rows.dtype)
        copy_rows(raw, codes, tile.size, 0, True, delta, rows)
        update = delta[0] * self._factors[(tile.start + np.arange(tile.size)) % m.cols]
        write_with(m, tile, out, np.ones(1), update)
