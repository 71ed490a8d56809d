"""The tests that every merge method must pass.

    class TestMyMethod(MethodTests):
        @pytest.fixture
        def case(self):
            return MethodCase(my_method, {"weight": 0.5})

Test the numbers separately, against a reference of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._execution.state_dicts import plan_state_dicts
from weightsmith._methods import NAMES
from weightsmith._methods.method import Method
from weightsmith._methods.user import at_hand
from weightsmith._models.sources.composed import StateDict
from weightsmith.testing.sources import raised

_BF16 = DTYPES["BF16"].numpy
_NAME = "model.layers.0.mlp.up_proj.weight"
_SHAPE = (500, 300)
"""Three grains, of which the last is short."""


@dataclass(frozen=True, slots=True)
class MethodCase:
    """A method, and values of its parameters.

    parameters  as for `weightsmith.merge_state_dicts`
    models      inputs besides the base
    identity    merging a model with itself gives the model, bit for bit
    zeros       models of zeros give zeros
    """

    method: Method
    parameters: Mapping[str, Any] = field(default_factory=dict)
    models: int = 2
    identity: bool = True
    zeros: bool = True

    @property
    def base(self) -> bool:
        """Whether the tests give it a base."""
        return self.method.base == "required"


class MethodTests:
    """The tests. A subclass defines a fixture `case`, a `MethodCase`; pytest does not collect this class itself."""

    def test_the_texts_are_there_and_the_example_is_of_this_method(self, case: MethodCase) -> None:
        method = case.method
        for text in (method.title, method.summary, method.use, method.passes, method.source, method.formula):
            assert text.strip()
        assert all(parameter.doc for parameter in method.parameters)
        assert f"merge_method: {method.name}\n" in method.example

    def test_tiles_and_threads_do_not_change_a_byte(self, case: MethodCase) -> None:
        models = _models(case, _SHAPE)
        first = _merged(case, models, threads=1, tile_bytes=1)
        assert first.tobytes() == _merged(case, models, threads=4, tile_bytes=1).tobytes()
        assert first.tobytes() == _merged(case, models, threads=2, tile_bytes=1 << 30).tobytes()

    def test_the_inputs_are_not_changed(self, case: MethodCase) -> None:
        models = _models(case, _SHAPE)
        before = [model.copy() for model in models]
        _merged(case, models)
        assert all(model.tobytes() == old.tobytes() for model, old in zip(models, before, strict=True))

    def test_a_model_merged_with_itself_stays_as_it_is(self, case: MethodCase) -> None:
        if case.identity:
            model = _models(case, (40, 64))[0]
            assert _merged(case, [model] * (case.models + case.base)).tobytes() == model.tobytes()

    def test_no_elements_and_all_zeros(self, case: MethodCase) -> None:
        assert _merged(case, _models(case, (0, 5))).shape == (0, 5)
        zeros = np.zeros((20, 30), _BF16)
        assert bool(_merged(case, [zeros] * (case.models + case.base)).astype(np.float32).any()) != case.zeros

    def test_a_nan_of_one_model_is_an_error_unless_it_is_allowed(self, case: MethodCase) -> None:
        models = _models(case, (40, 64))
        models[-1][30, 7] = np.nan
        error = raised(lambda: _merged(case, models))
        assert isinstance(error, NonFinite) or (error is None and len(models) == 1)  # a single model may be copied as it is
        with np.errstate(all="ignore"):
            assert _merged(case, models, allow_nonfinite=True).shape == (40, 64)


def _models(case: MethodCase, shape: tuple[int, ...]) -> list[np.ndarray]:
    """A base, if the method takes one, and fine-tunes of it, with realistic magnitudes."""
    random = np.random.default_rng(0)
    base = random.normal(0, 0.02, shape)
    tuned = [(base + random.normal(0, 1e-3, shape)).astype(_BF16) for _ in range(case.models)]
    return [base.astype(_BF16), *tuned] if case.base else tuned


class _Array(DiscardedOutput):
    """Keeps one tensor."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.array = np.zeros(shape, _BF16)

    def write(self, name: str, start_byte: int, buffer: Any) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self.array.reshape(-1).view(np.uint8)[start_byte : start_byte + data.size] = data


def _merged(
    case: MethodCase,
    models: Sequence[np.ndarray],
    *,
    threads: int = 2,
    tile_bytes: int = 1 << 20,
    allow_nonfinite: bool = False,
) -> np.ndarray:
    tensors = [{_NAME: model} for model in models]
    base = tensors.pop(0) if case.base else None
    output = _Array(models[0].shape)
    with nullcontext(case.method) if case.method.name in NAMES else at_hand(case.method) as method:
        planned = plan_state_dicts(method, tensors, base, case.parameters, None, 0)
        inputs = [StateDict(views, model.ref) for views, model in zip(planned.views, planned.plan.models, strict=True)]
        run(planned.plan, inputs, output, Resources(threads, tile_bytes), Workload(allow_nonfinite=allow_nonfinite))
    return output.array
