"""Orthogonal matching pursuit (OMP) for many targets, and sums of few rows.

Each target is approximated by `k` of many atoms, chosen greedily: the atom that has the largest inner product with what is
still missing, then the best coefficients of all atoms chosen so far (Pati, Rezaiifar and Krishnaprasad 1993).

Where there are many atoms, looking at all of them in each of k steps would take nearly all of the time. So the targets are then
screened: one matrix product gives the inner products of a target with all atoms, and only its best `CANDIDATES` · k take part.
The errors are larger: an atom that is needed for what the first ones leave may have a small product with the target itself.

**Determinism.** A batch of targets has a fixed size, and one thread computes it. So the result is the same for any number of
threads, as long as processor, device and torch are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.torch_use import one_thread
from weightsmith.abc.approximation import Floats, Problem

Tensor = Any  # torch is optional, so mypy cannot use its type

CANDIDATES = 8
"""Candidates of a target for each atom that it gets, if targets are screened."""

FEW = 8
"""With no more than so many times the candidates, all atoms take part: one product for all targets of a batch then takes about
as long as one for each target with its own candidates."""

OPERATIONS = 2e12
"""With more atoms, all take part if their inner products need no more operations: about a minute of one core."""

SCREENED = 128
"""Targets that are screened at once."""

TOGETHER = 32
"""Targets that are compared with all atoms at once: enough for one product to be as fast as it gets."""

BATCH_BYTES = {"cpu": 2 << 20}
"""Of candidates in a batch, by type of device: on a CPU they should stay in the cache of one core."""
OTHER_BATCH_BYTES = 1 << 30

DEPENDENT = 1e-5
"""An atom of which a smaller share is new adds nothing."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sums of few atoms.

    indices       int64 [n, k]
    coefficients  float32 [n, k]
    errors        float32 [n]: |target - sum| / |target|; 0 for a target of zeros
    """

    indices: npt.NDArray[np.int64]
    coefficients: Floats
    errors: Floats

    @classmethod
    def zeros(cls, n: int, k: int) -> Sparse:
        """Arrays to be filled: sums of `k` atoms for each of n targets."""
        return cls(np.zeros((n, k), np.int64), np.zeros((n, k), np.float32), np.zeros(n, np.float32))

    def of(self, values: Floats) -> Floats:
        """The same sums of other rows: float32 [n, M]. values: float32 [N, M]."""
        out = np.empty((len(self.indices), values.shape[1]), np.float32)
        step = max(1, (4 << 20) // max(1, self.indices.shape[1] * values.shape[1]))
        for start in range(0, len(out), step):
            batch = slice(start, start + step)
            out[batch] = (self.coefficients[batch, None] @ values[self.indices[batch]])[:, 0]
        return out


def pursue(targets: Floats, atoms: Floats, k: int, problem: Problem) -> Sparse:
    """The OMP of each target.

    targets  float32 [n, D]
    atoms    float32 [N, D]; of a length that matters: longer ones are chosen more easily
    k        atoms for each target, at most all

    All atoms take part, or the best candidates of each target; see `candidates_of`.

    Cost: 2·n·N·D·k operations without screening, 2·n·N·D for the screening and 16·n·k²·D for the rest with it; memory for the
    inner products of `SCREENED` targets with all atoms, for each thread.
    """
    import torch

    k = min(k, len(atoms))
    m = candidates_of(len(targets), len(atoms), atoms.shape[1], k)
    device = torch.device(problem.device)
    points, rows = torch.from_numpy(atoms).to(device), torch.from_numpy(targets)
    limit = BATCH_BYTES.get(device.type, OTHER_BATCH_BYTES)
    batch = TOGETHER if m == len(atoms) else max(1, min(SCREENED, limit // (4 * m * atoms.shape[1])))
    sums = Sparse.zeros(len(targets), k)

    def work(part: slice) -> None:
        few = rows[part].to(device)
        best = screened(few, points, m)
        for first in range(0, len(few), batch):
            some = slice(first, first + batch)
            candidates = points if best is None else points[best[some]]
            chosen, coefficients, errors = _omp(few[some], candidates, k, problem.check)
            place = slice(part.start + first, part.start + first + len(few[some]))
            sums.indices[place] = (chosen if best is None else best[some].gather(1, chosen)).cpu().numpy()
            sums.coefficients[place], sums.errors[place] = coefficients.cpu().numpy(), errors.cpu().numpy()

    in_parallel(work, len(targets), problem)
    return sums


def candidates_of(n: int, atoms: int, width: int, k: int) -> int:
    """How many atoms take part for each of n targets: all, or those with the largest inner products with it.

    >>> candidates_of(3000, 4096, 576, 64), candidates_of(3000, 40000, 576, 64), candidates_of(300, 40000, 576, 64)
    (4096, 512, 40000)
    """
    few = max(CANDIDATES * k, 64)
    if atoms <= FEW * few or 2.0 * n * atoms * width * k <= OPERATIONS:
        return atoms
    return few


def screened(targets: Tensor, atoms: Tensor, m: int) -> Tensor | None:
    """The m atoms with the largest inner products with each target, ascending: [b, m]; None if all atoms take part."""
    if m == len(atoms):
        return None
    scores = (targets @ atoms.T).abs_()
    return scores.topk(m, 1).indices.sort(1).values  # sorted, so that equal products do not depend on topk


def largest(candidates: Tensor, rest: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """For each target the candidate, not used yet, with the largest inner product with what is missing; and that atom.

    candidates  [b, m, D], or [m, D] for all targets
    used        bool [b, m]; the one that is found is used after that
    """
    import torch

    targets = torch.arange(len(rest), device=rest.device)
    shared = candidates.dim() == 2
    scores = rest @ candidates.T if shared else torch.bmm(candidates, rest[:, :, None])[:, :, 0]
    best = scores.abs_().masked_fill_(used, -1).argmax(1)
    used[targets, best] = True
    return best, candidates[best] if shared else candidates[targets, best]


def in_parallel(work: Callable[[slice], None], n: int, problem: Problem, size: int = SCREENED) -> None:
    """Call `work` for n targets, up to `size` at once, in as many threads as there are; on a GPU, in one."""
    threads = problem.threads if problem.device == "cpu" else 1

    def alone(start: int) -> None:
        problem.check()
        with one_thread():
            work(slice(start, min(n, start + size)))

    with one_thread(), ThreadPoolExecutor(max(1, threads)) as pool:
        for _ in pool.map(alone, range(0, n, size)):
            pass


def relative(rest: Tensor, targets: Tensor) -> Tensor:
    """The norms of residuals relative to those of their targets; 0 for a target of zeros."""
    import torch

    sizes = targets.norm(dim=1)
    return torch.where(sizes > 0, rest.norm(dim=1) / sizes.clamp_min(1e-30), torch.zeros_like(sizes))


def _omp(targets: Tensor, candidates: Tensor, k: int, check: Callable[[], None]) -> tuple[Tensor, Tensor, Tensor]:
    """Which candidates, their coefficients and the errors. targets [b, D], candidates [b, m, D] or [m, D].

    The chosen atoms are kept as an orthonormal basis and its triangular factor, which the coefficients follow from at the end.
    """
    import torch

    b, width = targets.shape
    basis, factor = targets.new_zeros(b, k, width), targets.new_zeros(b, k, k)
    products, rest = targets.new_zeros(b, k), targets.clone()
    used = torch.zeros(b, candidates.shape[-2], dtype=torch.bool, device=targets.device)
    chosen = torch.zeros(b, k, dtype=torch.int64, device=targets.device)
    for step in range(k):
        check()
        chosen[:, step], atom = largest(candidates, rest, used)
        new = atom
        for _ in range(2 if step else 0):  # twice: once leaves rounding errors of the size of what is new
            along = torch.bmm(basis[:, :step], new[:, :, None])
            new = new - torch.bmm(along.transpose(1, 2), basis[:, :step])[:, 0]
            factor[:, :step, step] += along[:, :, 0]
        length = new.norm(dim=1)
        useful = length > DEPENDENT * atom.norm(dim=1)
        new = torch.where(useful[:, None], new / length.clamp_min(1e-30)[:, None], torch.zeros_like(new))
        factor[:, step, step] = torch.where(useful, length, torch.ones_like(length))
        basis[:, step], products[:, step] = new, (new * rest).sum(1)
        rest = rest - products[:, step, None] * new
    coefficients = torch.linalg.solve_triangular(factor, products[:, :, None], upper=True)[:, :, 0]
    return chosen, coefficients, relative(rest, targets)
