"""Where models are active: the product of RAM+, from the JSON of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import plan_help
from weightsmith._base.errors import WeightsmithError
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import plan_from_json


def test_its_array_has_two_counts_for_each_model(tmp_path: Path) -> None:
    a, b, c = (plan_help.model(tmp_path / name, seed=seed) for seed, name in enumerate("abc"))
    p = plan_help.plan({"merge_method": "ramplus", "base_model": a, "models": [{"model": b}, {"model": c}]})
    data = json.loads(json.dumps(p.to_json()))
    reopen(plan_from_json(data)).close()
    (product,) = data["products"]
    product["outs"][0][2] = [2, 3]
    with pytest.raises(WeightsmithError, match=r"its array is not \[models, 2\]"):
        reopen(plan_from_json(data)).close()
