"""FourierFT: the update is the inverse Fourier transform of a sparse matrix (Gao et al. 2024, arXiv 2405.03003).

The file does not say where the numbers of that matrix stand. A seed does, by torch's random permutation: the shuffle of Fisher
and Yates with the Mersenne Twister. Only its first steps are needed.
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes, full_rank

_SHORT = (2**32 - 1) // 20  # with more elements torch draws 64 bits for each step


def shapes(module: AdapterModule) -> Shapes:
    """[n_frequency]."""
    number = module.whole("n_frequency", 1000)
    if len(module.shape) != 2 or number > module.inputs * module.outputs:
        raise ValueError(f"{number} frequencies do not fit a weight {list(module.shape)}")
    return {"fourierft_spectrum": (number,)}


def permutation(seed: int, size: int, count: int) -> np.ndarray:
    """The first `count` of torch.randperm(size) with a generator of this seed, int64.

    >>> permutation(777, 10, 4).tolist()
    [5, 9, 0, 3]
    """
    twister = np.random.RandomState(seed % 2**32)._bit_generator
    draws = twister.random_raw(count if size < _SHORT else 2 * count).astype(np.uint64)
    if size >= _SHORT:
        draws = (draws[0::2] << np.uint64(32)) | draws[1::2]
    moved, first = dict[int, int](), np.empty(count, np.int64)
    for i, draw in enumerate(draws.tolist()):
        j = i + draw % (size - i)
        first[i] = moved.get(j, j)
        moved[j] = moved.get(i, i)
    return first


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Row and column of each number, and the numbers times the scaling."""
    numbers = arrays["fourierft_spectrum"]
    seed = module.whole("random_loc_seed", 777)
    places = permutation(seed, module.outputs * module.inputs, len(numbers))
    scaling = module.number("scaling", 150.0)
    return (places // module.inputs).astype(float), (places % module.inputs).astype(float), numbers * scaling


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add these rows of the transform: over rows number by number, over columns by a fast transform of each row."""
    down, across, numbers = arrays
    for i in range(len(rows)):
        angles = 2 * np.pi * np.mod(down * (first + i), module.outputs) / module.outputs
        spectrum = np.zeros(module.inputs, complex)
        np.add.at(spectrum, across.astype(int), numbers * np.exp(1j * angles))
        rows[i] += np.fft.ifft(spectrum).real / module.outputs


KIND: AdapterKind = AdapterKind(
    title="FourierFT",
    types=("FOURIERFT",),
    parts=("fourierft_spectrum",),
    shapes=shapes,
    prepare=prepare,
    exact=full_rank(lambda: KIND),
    change=change,
    used=frozenset({"n_frequency", "scaling", "random_loc_seed"}),
    patterns={"n_frequency": "n_frequency_pattern"},
)
