"""Our own kinds of products that stream through the suite that plug-ins run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import write_checkpoint
from tests.plan_help import prepare
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith.testing import ProductCase, ProductTests

RECIPES: dict[str, dict[str, Any]] = {
    "thresholds": {"merge_method": "ties", "parameters": {"weight": 1, "density": 0.3, "scope": "model"}},
    "activity": {"merge_method": "ramplus"},
}


class TestProducts(ProductTests):
    @pytest.fixture(params=RECIPES)
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ProductCase:
        folders = []
        for seed, name in enumerate("abc"):
            random = np.random.default_rng(seed)
            shapes = {"model.embed_tokens.weight": (700, 300), "model.norm.weight": (5,)}
            tensors = {key: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for key, shape in shapes.items()}
            folders.append(write_checkpoint(tmp_path / name, tensors))
        models = [{"model": str(folder)} for folder in folders[1:]]
        with prepare({**RECIPES[request.param], "base_model": str(folders[0]), "models": models}) as prepared:
            plan = prepared.plan
        assert [product.op for product in plan.products] == [request.param]
        return ProductCase(plan, lambda: [open_checkpoint(folder) for folder in folders])
