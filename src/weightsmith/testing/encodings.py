"""The tests that every encoding must pass.

    class TestMyEncoding(EncodingTests):
        @pytest.fixture
        def encoding(self):
            return my_encoding.ENCODING

Test the accuracy of the codes separately, against the encoding's own bound.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from weightsmith._base.errors import NonFinite, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats import Encoding
from weightsmith.abc.stored import WHOLE, Modules
from weightsmith.testing.errors import raised

_BANDS = 5
_ROWS = 32
"""Rows of a band of a matrix that is encoded as a whole."""


class EncodingTests:
    """The tests. A subclass defines a fixture `encoding`; pytest does not collect this class itself."""

    def test_names_and_rows_of_the_stored_tensors(self, encoding: Encoding) -> None:
        spec = example_spec(encoding)
        outs = encoding.outs(spec)
        rowed = outs[: len(outs) - encoding.whole]
        assert rowed or encoding.align_rows == WHOLE
        assert all(out.name.startswith(spec.name.removesuffix("weight")) for out in outs)
        assert {out.shape[0] for out in rowed} <= {spec.shape[0], spec.shape[0] // encoding.align_rows}
        assert len({out.name for out in outs}) == len(outs)

    def test_every_byte_is_written_and_the_rows_are_not_changed(self, encoding: Encoding) -> None:
        rows = example_rows(encoding)
        before = rows.copy()
        assert encoded(encoding, rows, fill=0x00) == encoded(encoding, rows, fill=0xFF)
        assert rows.tobytes() == before.tobytes()

    def test_any_cut_at_aligned_rows_gives_the_same_bytes(self, encoding: Encoding) -> None:
        rows, align = example_rows(encoding), encoding.align_rows
        if align == WHOLE:
            return
        whole = encoded(encoding, rows)
        for k in range(1 << (_BANDS - 1)):  # each subset of the boundaries between bands
            cuts = [0, *(align * i for i in range(1, _BANDS) if k >> (i - 1) & 1), len(rows)]
            assert encoded(encoding, rows, cuts) == whole, cuts

    def test_threads_do_not_disturb_each_other(self, encoding: Encoding) -> None:
        rows = example_rows(encoding)
        whole = encoded(encoding, rows)
        with ThreadPoolExecutor(4) as pool:
            assert all(threaded == whole for threaded in pool.map(lambda _: encoded(encoding, rows), range(16)))

    def test_zeros_and_tiny_and_huge_numbers_do_not_crash(self, encoding: Encoding) -> None:
        for value in (0.0, -0.0, 1e-45, 3e38, np.nan, np.inf):
            with contextlib.suppress(NonFinite):
                encoded(encoding, np.full_like(example_rows(encoding), value))

    def test_what_it_refuses_is_unsupported_with_the_reason(self, encoding: Encoding) -> None:
        spec = example_spec(encoding)
        assert encoding.refusal(spec) == ""
        integers = TensorSpec(spec.name, DTYPES["I64"], spec.shape)
        why, error = encoding.refusal(integers), raised(lambda: encoding.outs(integers))
        assert why
        assert isinstance(error, Unsupported)
        assert why in str(error)

    def test_config_is_json_and_names_what_is_ignored(self, encoding: Encoding) -> None:
        modules = Modules(["lm_head", r"re:.*\.gate$"], ["lm_head", "l.0.gate"], ["l.0.up"])
        config = encoding.config(modules)
        assert json.loads(json.dumps(config)) == config
        if "ignore" in config.get("quantization_config", {}):
            assert config["quantization_config"]["ignore"] == modules.ignored


def example_spec(encoding: Encoding) -> TensorSpec:
    """A weight that an encoding takes."""
    rows = _BANDS * (_ROWS if encoding.align_rows == WHOLE else encoding.align_rows)
    specs = [TensorSpec("model.layers.0.mlp.up_proj.weight", DTYPES["BF16"], (rows, cols)) for cols in (384, 256)]
    return next(spec for spec in specs if not encoding.refusal(spec))


def example_rows(encoding: Encoding) -> Any:
    """The numbers of that weight: float32 [rows, cols] with bfloat16 values."""
    shape = example_spec(encoding).shape
    return np.random.default_rng(0).standard_normal(shape).astype(DTYPES["BF16"].numpy).astype(np.float32)


def encoded(encoding: Encoding, rows: Any, cuts: Sequence[int] | None = None, fill: int = 0) -> list[bytes]:
    """The bytes of each stored tensor, encoded in runs between `cuts`."""
    spec = example_spec(encoding)
    stored = encoding.outs(spec)
    rowed = len(stored) - encoding.whole
    numbers = np.full(1 if encoding.maxima else 0, np.abs(np.nan_to_num(rows)).max(), np.float32)
    parts = [b"" for _ in stored]
    for first, end in pairwise(cuts or [0, len(rows)]):
        sizes = [out.nbytes * (end - first) // len(rows) for out in stored[:rowed]] + [out.nbytes for out in stored[rowed:]]
        outs = [np.full(size, fill, np.uint8) for size in sizes]
        encoding.encode(spec, rows[first:end], first, outs, numbers)
        parts = [
            old + out.tobytes() if i < rowed else out.tobytes() for i, (old, out) in enumerate(zip(parts, outs, strict=True))
        ]
    return parts
