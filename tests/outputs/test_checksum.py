"""Grain checksums do not depend on how a tensor was cut."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._outputs.checksum import GrainHasher, byte_view, combine, grain_bytes, hash_bytes, hash_grains


def test_a_grain_digest_is_xxh3_64_little_endian() -> None:
    assert hash_grains(b"abc", 100) == xxhash.xxh3_64_intdigest(b"abc").to_bytes(8, "little")
    assert combine(b"12345678") == xxhash.xxh3_128_hexdigest(b"12345678")
    assert hash_bytes(b"abc") == xxhash.xxh3_128_hexdigest(b"abc")


@pytest.mark.slow
@given(st.binary(max_size=200), st.integers(1, 40), st.lists(st.integers(0, 30)))
def test_a_stream_cut_anywhere_has_the_checksum_of_the_whole(data: bytes, grain: int, cuts: list[int]) -> None:
    hasher = GrainHasher(grain)
    start = 0
    for cut in [*cuts, len(data)]:
        hasher.update(data[start : start + cut])
        start += cut
    assert hasher.checksum() == combine(hash_grains(data, grain))


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_stream_of_pieces_of_one_length_has_the_checksum_of_the_whole(cut: int) -> None:
    data = bytes(range(26))
    hasher = GrainHasher(4)
    for start in range(0, len(data), cut):
        hasher.update(data[start : start + cut])
    assert hasher.checksum() == combine(hash_grains(data, 4))


@pytest.mark.parametrize("array", [np.zeros((0, 3), "u1"), np.zeros((), "f8"), np.arange(6.0).reshape(2, 3)])
def test_any_contiguous_buffer_can_be_hashed(array: np.ndarray) -> None:
    assert hash_grains(array, 4) == hash_grains(array.tobytes(), 4)


def test_a_strided_buffer_is_refused_and_not_hashed_wrongly() -> None:
    with pytest.raises(TypeError):
        byte_view(np.arange(6.0).reshape(2, 3).T)
    with pytest.raises(TypeError):
        byte_view(np.arange(6, dtype=np.uint8)[::2])


def test_scalars_and_empty_tensors_have_a_grain_size() -> None:
    for shape in [(), (0,), (4, 0), (0, 4)]:
        assert grain_bytes(TensorSpec("x", DTYPES["F32"], shape)) > 0


def test_one_flipped_bit_changes_the_checksum() -> None:
    data = bytearray(range(100))
    before = combine(hash_grains(data, 16))
    data[63] ^= 4
    assert combine(hash_grains(data, 16)) != before
