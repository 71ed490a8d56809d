"""The jobs of steps other than merging: a cast, one number, noise, the perturbed matrices of upcycled experts. The engine
itself copies bytes and joins pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.tensors import BY_CODE
from weightsmith._kernels.codecs import BLOCK, Encoded
from weightsmith._kernels.randomness import Neurons, Noise, NoiseScratch, Redraw, chosen_sums, perturb, random_words
from weightsmith._methods.jobs.combination import CombinationJob
from weightsmith._plans import CAST, FILL, PERTURB
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class FillJob(Job):
    """Fills with the shared parameter `value`, rounded to the output's dtype."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        value = np.float32(matrix.shared["value"])
        self._element = np.array([value]).astype(BY_CODE[matrix.out_code].numpy).view(np.uint8)

    def apply(self, tile: Tile, out: Bytes) -> None:
        out.reshape(-1, len(self._element))[:] = self._element


_NOWHERE = Neurons(np.empty(0, np.uint8), by_rows=True, cols=1)
_ALL = 1 << 32
"""The limit of random words below which all are."""


class NoiseJob(Job):
    """The one input + normal noise. It depends only on the seed, the name of the tensor and the element.

    deviation  standard deviation of the noise
    """

    def __init__(self, matrix: Matrix, deviation: float) -> None:
        super().__init__(matrix)
        key = np.uint64(xxhash.xxh3_64_intdigest(f"{matrix.name}\0noise".encode(), matrix.seed & (2**64 - 1)))
        self._noise = Noise(key, np.uint64(0), _ALL, deviation)
        self._redraw = Redraw(np.uint64(0), _NOWHERE, 0.0, 0.0)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        weight, encoded = Encoded(tile.raw[0], int(m.codes[0])), Encoded(out, m.out_code)
        perturb(weight, tile.start, tile.size, self._noise, self._redraw, 1.0, encoded, _noise_scratch(tile))


class PerturbedJob(Job):
    """factor · (W + noise), with a share of the neurons reinitialised from a normal distribution like theirs.

    An expert's gate, up and down have the same reinitialised neurons: rows of the first two, columns of the last. Their choice
    and all random numbers depend only on the seed, the layer and the expert's number.

    The matrix's shared parameters:

    expert          its number; for shared experts, "shared" and the number
    part            gate, up or down
    noise_scale     standard deviation of the noise
    noise_fraction  share of the elements, chosen at random, that get noise
    drop_fraction   share of the neurons to reinitialise, rounded to whole ones: from N(μ, σ²) with mean and standard deviation
                    of the elements they replace (Drop-Upcycling: Nakamura et al. 2025, arXiv 2502.19261)
    factor          on the result
    """

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        p = matrix.shared
        self._expert = f"{matrix.layer}expert {p['expert']}"
        self._by_rows = p["part"] != "down"
        limit = round(matrix.number("noise_fraction") * 2.0**32)
        self._noise = (self._key("noise"), self._key("noisy"), limit, matrix.number("noise_scale"))
        self._factor = matrix.number("factor")
        self._chosen = self._choose(matrix.number("drop_fraction"))
        self._mean = self._deviation = 0.0

    def _key(self, what: str, part: str | None = None) -> Any:
        """uint64: the key of one kind of random numbers for this expert's part; part "" for all parts."""
        part = str(self.matrix.shared["part"]) if part is None else part
        return np.uint64(xxhash.xxh3_64_intdigest(f"{self._expert}\0{part}\0{what}".encode(), self.matrix.seed & (2**64 - 1)))

    def _choose(self, fraction: float) -> npt.NDArray[np.uint8]:
        """1 for each neuron to reinitialise; [0] if there are none."""
        m = self.matrix
        neurons = m.size // m.cols if self._by_rows else m.cols
        count = round(fraction * neurons)
        if not count:
            return np.empty(0, np.uint8)
        words = np.empty(neurons + 512, np.uint32)
        begin = random_words(self._key("neurons", ""), 0, neurons, words)
        chosen = np.zeros(neurons, np.uint8)
        chosen[np.argsort(words[begin : begin + neurons], kind="stable")[:count]] = 1
        return chosen

    def passes(self) -> int:
        return 1 if self._chosen.size else 0

    def statistics(self, number: int, tile: Tile) -> npt.NDArray[np.float64]:
        m, row = self.matrix, tile.scratch.sums(1)[0]
        out = np.empty((tile.grains(m.grain), 2))
        weight, neurons = Encoded(tile.raw[0], int(m.codes[0])), Neurons(self._chosen, self._by_rows, m.cols)
        chosen_sums(weight, tile.start, tile.size, m.grain, neurons, out, row)
        return out

    def finish_pass(self, number: int, results: list[Any]) -> None:
        m = self.matrix
        count = int(self._chosen.sum()) * (m.cols if self._by_rows else m.size // m.cols)
        total, squares = np.cumsum(np.concatenate(results), axis=0)[-1]  # adds sequentially
        self._mean = float(total / count)
        self._deviation = float(np.sqrt(max(squares / count - self._mean**2, 0.0)))

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        neurons = Neurons(self._chosen, self._by_rows, m.cols)
        redraw = Redraw(self._key("redrawn"), neurons, self._mean, self._deviation)
        weight, encoded = Encoded(tile.raw[0], int(m.codes[0])), Encoded(out, m.out_code)
        perturb(weight, tile.start, tile.size, Noise(*self._noise), redraw, self._factor, encoded, _noise_scratch(tile))


def _noise_scratch(tile: Tile) -> NoiseScratch:
    return NoiseScratch(tile.scratch.sums(1)[0], np.empty((2, BLOCK + 512), np.uint32))


OPERATIONS: Mapping[str, Callable[[Matrix], Job]] = {
    CAST: lambda matrix: CombinationJob(matrix, np.ones(1)),
    FILL: FillJob,
    PERTURB: PerturbedJob,
}
"""Name of the op → function that creates the job of one logical matrix."""
