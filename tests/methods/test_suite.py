"""Our own methods through the suite that plug-ins run."""

from __future__ import annotations

import pytest

from tests.cases import CASES
from weightsmith import _methods as methods
from weightsmith.testing import MethodCase, MethodTests

IDENTITY = {case.method: case.identity for case in reversed(CASES.values())}
"""By method, of its first case."""


class TestMethods(MethodTests):
    @pytest.fixture(params=methods.NAMES)
    def case(self, request: pytest.FixtureRequest) -> MethodCase:
        method = methods.get(request.param)
        required = {parameter.name: 0.5 for parameter in method.parameters if parameter.required}
        models = method.max_models or max(2, method.min_models)
        return MethodCase(method, required, models, IDENTITY[method.name], zeros=method.name != "add_noise")
