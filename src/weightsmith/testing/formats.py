"""The tests that every stored format must pass that is written: what its writer writes, its reader reads.

class TestMyFormat(StoredFormatTests):
    @pytest.fixture
    def stored_format(self):
        return my_format.FORMAT
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np

from weightsmith._base.errors import NonFinite, Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.arrays import view_of
from weightsmith._models.formats.config import config_entries
from weightsmith._models.formats.decoded import DecodedTensors
from weightsmith._models.sources.composed import StateDict
from weightsmith.abc.stored import WHOLE, Encoding, Modules, StoredFormat
from weightsmith.abc.tensors import Tensors, read
from weightsmith.testing.sources import raised

# ---- The tests that every encoding must pass


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


_NORM = "model.norm.weight"
_TOLERANCE = 0.2
"""A share of a weight's norm: smaller errors come from the encoding's bits, larger ones from bytes that are misread."""


class StoredFormatTests:
    """The tests. A subclass defines a fixture `stored_format`; pytest does not collect this class itself."""

    def test_what_is_written_is_recognised_and_read(self, stored_format: StoredFormat) -> None:
        for encoding, stored in _written(stored_format):
            spec, config = example_spec(encoding), encoding.config(Modules())
            assert stored_format.recognises(config, stored.specs), encoding.name
            wrapped = stored_format.read(stored, config, "here")
            with closing(wrapped.source) as source:
                assert {name: tuple(tensor.shape) for name, tensor in source.specs.items()} == {
                    spec.name: spec.shape,
                    _NORM: (3,),
                }
                assert source.specs[spec.name].dtype.name == "F32"
                difference = read(source, spec.name) - example_rows(encoding)
                assert np.linalg.norm(difference) <= _TOLERANCE * np.linalg.norm(example_rows(encoding)), encoding.name
                assert read(source, _NORM).tolist() == [1, 2, 3]
            assert not config_entries(wrapped.config or {}), "config.json still says that the weights are quantised"

    def test_plain_tensors_are_not_recognised(self, stored_format: StoredFormat) -> None:
        for encoding in stored_format.encodings:
            spec = example_spec(encoding)
            plain = StateDict({spec.name: view_of(spec.name, np.zeros(spec.shape, np.float32))}, "here")
            assert not stored_format.recognises({}, plain.specs)

    def test_a_tensor_that_is_missing_is_an_error_or_changes_nothing(self, stored_format: StoredFormat) -> None:
        for encoding, stored in _written(stored_format):
            config = encoding.config(Modules())
            whole = _read_all(stored_format.read(stored, config, "here").source)
            for out in encoding.outs(example_spec(encoding)):
                views = {name: view for name, view in stored._views.items() if name != out.name}
                part = StateDict(views, "here")
                try:
                    wrapped = stored_format.recognises(config, part.specs) and stored_format.read(part, config, "here")
                    assert not wrapped or _read_all(wrapped.source) == whole, f"{encoding.name} is misread without {out.name}"
                except WeightsmithError:
                    continue

    def test_what_names_its_encoding_is_stored_so(self, stored_format: StoredFormat) -> None:
        """Copies keep the codes of weights with an encoding (`Weight.encoding`)."""
        by_name = {encoding.name: encoding for encoding in stored_format.encodings}
        for encoding, stored in _written(stored_format):
            spec, source = example_spec(encoding), stored_format.read(stored, encoding.config(Modules()), "here").source
            place = source.stored_as(spec.name) if isinstance(source, DecodedTensors) else None
            if place is not None and place.encoding:
                assert by_name[place.encoding].outs(spec) == encoding.outs(spec), encoding.name
                assert [part.tensor for part in place.parts] == [out.name for out in encoding.outs(spec)], encoding.name

    def test_a_mark_shows_that_tensors_are_quantised(self, stored_format: StoredFormat) -> None:
        for encoding, stored in _written(stored_format):
            marks = stored_format.marks.items()
            marked = [mark(name, stored.specs) for name in stored.specs for end, mark in marks if name.endswith(end)]
            assert any(marked), encoding.name


def _written(stored_format: StoredFormat) -> Iterator[tuple[Encoding, StateDict]]:
    """A weight in each of the format's encodings, and a norm."""
    assert stored_format.encodings, "it writes nothing"
    for encoding in stored_format.encodings:
        outs, data = encoding.outs(example_spec(encoding)), encoded(encoding, example_rows(encoding))
        views = {out.name: view_of(out.name, _array(out, raw)) for out, raw in zip(outs, data, strict=True)}
        norm = np.array([1, 2, 3], np.float32)
        yield encoding, StateDict({**views, _NORM: view_of(_NORM, norm)}, "here")


def _array(spec: TensorSpec, raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, spec.dtype.numpy).reshape(spec.shape)


def _read_all(source: Tensors) -> dict[str, bytes]:
    return {name: read(source, name).tobytes() for name in source.specs}
