"""The tests that every stored format must pass that is written: what its writer writes, its reader reads.

class TestMyFormat(StoredFormatTests):
    @pytest.fixture
    def stored_format(self):
        return my_format.FORMAT
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.views import view_of
from weightsmith._models.formats.config import config_entries
from weightsmith._models.sources.memory import StateDict
from weightsmith.abc.stored import Encoding, Modules, StoredFormat
from weightsmith.abc.tensors import Tensors, read
from weightsmith.testing.encodings import encoded, example_rows, example_spec

_NORM = "model.norm.weight"
_TOLERANCE = 0.2
"""Of the norm of a weight: less is a matter of the encoding's bits and of its own tests, more of bytes that are misread."""


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
