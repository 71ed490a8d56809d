"""Orthogonal matching pursuit (OMP) for many targets, with atoms as they are (omp) or rotated as RoPE rotates positions
(mp_rope); and sums of few rows, which other approximations make too.

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
from weightsmith.abc.approximation import Approximated, Approximation, Floats, Problem

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
"""Bytes of the candidates in a batch, by type of device: on a CPU they should fit in the cache of one core."""
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


def _pursued_rows(problem: Problem) -> Approximated:
    sums = pursue(problem.targets(), problem.atoms(), problem.choices.k, problem)
    return Approximated(sums.of(problem.values()), sums.errors)


omp = Approximation(
    "omp",
    "A sum of `k` shared tokens that approximates the donor's row; the same sum of the model's rows.",
    "Training-free tokenizer transplantation by OMP: https://arxiv.org/abs/2506.06607",
    _pursued_rows,
    donor=True,
    torch=True,
    reads=("k",),
)


BATCH = 16
"""Targets that are computed at once."""


def _turned_rows(problem: Problem) -> Approximated:
    """Each of `k` atoms is rotated to the position that brings it nearest to what is missing. All coefficients are then the
    least-squares solution, and the model's rows are rotated to the same positions."""
    import torch

    tables = problem.targets(), problem.atoms(), problem.values()
    targets, atoms, values = (torch.from_numpy(rows).to(problem.device) for rows in tables)
    k = min(problem.choices.k, len(atoms))
    m = candidates_of(len(targets), len(atoms), atoms.shape[1], k)
    (model_heads, heads), (model_base, base) = problem.choices.heads, problem.choices.rope_bases
    turning = _frequencies(atoms.shape[1], heads, base), _frequencies(values.shape[1], model_heads, model_base)
    turning = turning[0].to(atoms), turning[1].to(values)
    rows = np.empty((len(targets), values.shape[1]), np.float32)
    errors = np.empty(len(targets), np.float32)

    def work(batch: slice) -> None:
        few = targets[batch]
        best = screened(few, atoms, m)
        chosen, places = _pursue(few, atoms if best is None else atoms[best], k, heads, turning[0])
        numbers = chosen if best is None else best.gather(1, chosen)
        turned = _turned(atoms[numbers], places, heads, turning[0]).double()
        inverse = torch.linalg.pinv(turned @ turned.transpose(1, 2), hermitian=True)
        wide = few.double()
        coefficients = (inverse @ (turned @ wide[:, :, None]))[:, :, 0]
        errors[batch] = relative(wide - (coefficients[:, None] @ turned)[:, 0], wide).float().cpu().numpy()
        ours = _turned(values[numbers], places, model_heads, turning[1])
        rows[batch] = (coefficients.float()[:, None] @ ours)[:, 0].cpu().numpy()

    in_parallel(work, len(targets), problem, BATCH)
    return Approximated(rows, errors)


def _pursue(targets: Tensor, candidates: Tensor, k: int, heads: int, turning: Tensor) -> tuple[Tensor, Tensor]:
    """Which candidates, and their positions: [b, k]. candidates [b, m, D], or [m, D] for all targets"""
    import torch

    b = len(targets)
    rest, used = targets.clone(), torch.zeros(b, candidates.shape[-2], dtype=torch.bool, device=targets.device)
    chosen, places = torch.zeros(b, k, dtype=torch.int64, device=targets.device), targets.new_zeros(b, k)
    for step in range(k):
        chosen[:, step], atom = largest(candidates, rest, used)
        there, back = (_position(atom, sign * rest, heads, turning) for sign in (1, -1))
        place = torch.where(there.abs() < back.abs(), there, back)
        atom, places[:, step] = _turned(atom, place, heads, turning), place
        share = (rest * atom).sum(1) / atom.square().sum(1).clamp_min(1e-30)
        rest = rest - share[:, None] * atom
    return chosen, places


def _frequencies(width: int, heads: int, base: float) -> Tensor:
    """Angles for a step of one position: [width / heads / 2]."""
    import torch

    size = width // heads
    return 1 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)


def _halves(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The first and second halves of each head, which RoPE rotates as pairs: [..., heads, size / 2]."""
    split = rows.unflatten(-1, (heads, -1))
    first, second = split.chunk(2, -1)
    return first, second


def _turned(rows: Tensor, places: Tensor, heads: int, turning: Tensor) -> Tensor:
    """The rows at some positions."""
    import torch

    first, second = _halves(rows, heads)
    angles = places[..., None, None] * turning
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def _position(rows: Tensor, targets: Tensor, heads: int, turning: Tensor) -> Tensor:
    """The position at which rows are nearest to others: the least-squares fit of the angles of all pairs. [b]."""
    import torch

    (a, b), (c, d) = _halves(rows, heads), _halves(targets, heads)
    angles = torch.atan2(a * d - b * c, a * c + b * d)
    return (angles * turning).sum((-1, -2)) / (heads * turning.square().sum())


mp_rope = Approximation(
    "mp_rope",
    "As `omp`, but each shared token is also rotated, as RoPE rotates positions.",
    "mergekit's matching pursuit with RoPE",
    _turned_rows,
    donor=True,
    torch=True,
    reads=("k", "heads", "rope_bases"),
)
