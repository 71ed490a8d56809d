"""The tests that every encoding must pass.

    class TestMyEncoding(EncodingTests):
        @pytest.fixture
        def encoding(self):
            return my_encoding.ENCODING

Test the accuracy of the codes separately, against the encoding's own bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from weightsmith.encodings import Encoding
from weightsmith.errors import Unsupported
from weightsmith.tensors import DTYPES, TensorSpec

_BANDS = 5


class EncodingTests:
    """The tests. A subclass defines a fixture `encoding`; pytest does not collect this class itself."""

    def test_the_first_stored_tensor_has_the_name_and_all_have_its_rows(self, encoding: Encoding) -> None:
        spec = _spec(encoding)
        outs = encoding.outs(spec)
        assert outs[0].name == spec.name
        assert {out.shape[0] for out in outs} == {spec.shape[0]}
        assert len({out.name for out in outs}) == len(outs)

    def test_every_byte_is_written_and_the_rows_are_not_changed(self, encoding: Encoding) -> None:
        rows = _rows(encoding)
        before = rows.copy()
        assert _encoded(encoding, rows, fill=0x00) == _encoded(encoding, rows, fill=0xFF)
        assert rows.tobytes() == before.tobytes()

    def test_any_cut_at_aligned_rows_gives_the_same_bytes(self, encoding: Encoding) -> None:
        rows, align = _rows(encoding), encoding.align_rows
        whole = _encoded(encoding, rows)
        for k in range(1 << (_BANDS - 1)):  # each subset of the boundaries between bands
            cuts = [0, *(align * i for i in range(1, _BANDS) if k >> (i - 1) & 1), len(rows)]
            assert _encoded(encoding, rows, cuts) == whole, cuts

    def test_threads_do_not_disturb_each_other(self, encoding: Encoding) -> None:
        rows = _rows(encoding)
        whole = _encoded(encoding, rows)
        with ThreadPoolExecutor(4) as pool:
            assert all(made == whole for made in pool.map(lambda _: _encoded(encoding, rows), range(16)))

    def test_zeros_and_tiny_and_huge_numbers_do_not_crash(self, encoding: Encoding) -> None:
        for value in (0.0, -0.0, 1e-45, 3e38, np.nan, np.inf):
            _encoded(encoding, np.full_like(_rows(encoding), value))

    def test_what_it_refuses_is_unsupported_with_the_reason(self, encoding: Encoding) -> None:
        spec = _spec(encoding)
        assert encoding.refusal(spec) == ""
        integers = TensorSpec(spec.name, DTYPES["I64"], spec.shape)
        why, error = encoding.refusal(integers), None
        try:
            encoding.outs(integers)
        except Unsupported as raised:
            error = raised
        assert why
        assert why in str(error)

    def test_config_is_json_and_names_what_is_ignored(self, encoding: Encoding) -> None:
        config = encoding.config(["lm_head", r"re:.*\.gate$"])
        assert json.loads(json.dumps(config)) == config
        if config:
            assert config["quantization_config"]["ignore"] == ["lm_head", r"re:.*\.gate$"]


def _spec(encoding: Encoding) -> TensorSpec:
    return TensorSpec("model.layers.0.mlp.up_proj.weight", DTYPES["BF16"], (_BANDS * encoding.align_rows, 48))


def _rows(encoding: Encoding) -> Any:
    """float32 [rows, cols] with bfloat16 values."""
    shape = _spec(encoding).shape
    return np.random.default_rng(0).standard_normal(shape).astype(DTYPES["BF16"].numpy).astype(np.float32)


def _encoded(encoding: Encoding, rows: Any, cuts: Sequence[int] | None = None, fill: int = 0) -> list[bytes]:
    """The bytes of each stored tensor, encoded in runs between `cuts`."""
    spec = _spec(encoding)
    made = [b"" for _ in encoding.outs(spec)]
    for first, end in pairwise(cuts or [0, len(rows)]):
        outs = [np.full(out.nbytes * (end - first) // len(rows), fill, np.uint8) for out in encoding.outs(spec)]
        encoding.encode(spec, rows[first:end], first, outs)
        made = [before + out.tobytes() for before, out in zip(made, outs, strict=True)]
    return made
