"""The pages on how to add something: their files work as they stand, from one file and one entry."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightsmith
from tests.mini import write_checkpoint
from weightsmith.engine.local import Resources, Workload, run
from weightsmith.engine.unwritten import DiscardedOutput
from weightsmith.options import RecipeOptions
from weightsmith.planner import prepare
from weightsmith.plans import Product
from weightsmith.tensors import DTYPES, TensorSpec

Page = Callable[[str, str], types.ModuleType]
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Page:
    """Makes a module of the one Python block of a page."""

    def made(page: str, name: str) -> types.ModuleType:
        (code,) = [part.partition("\n```")[0] for part in (DOCS / page).read_text().split("```python\n")[1:]]
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, page, "exec"), module.__dict__)
        return module

    return made


def test_a_product_from_its_page(files: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith import products
    from weightsmith.methods import get

    files("adding-a-product.md", "weightsmith.products.largest")
    monkeypatch.setitem(products.KINDS, "largest", "weightsmith.products.largest")
    rng = np.random.default_rng(0)
    models = [{"a.weight": rng.normal(0, 1, (300, 700)).astype(np.float32), "b.weight": np.ones(9, np.float32)} for _ in "abc"]
    models[1]["b.weight"][3] = 99
    for name, tensors in zip("abc", models, strict=True):
        write_checkpoint(tmp_path / name, tensors)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "a"),
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 1}} for name in "bc"],
    }
    method = get("task_arithmetic")
    product = Product("largest", "largest", (TensorSpec("largest", DTYPES["F64"], (2,)),), {}, models=(1, 2))
    from weightsmith.planner import build

    needing = replace(method, needs=lambda shared: True, product=lambda merged: product)
    monkeypatch.setattr(build.methods, "find", lambda *_, **__: needing)
    with prepare(recipe, RecipeOptions()) as prepared:
        assert prepared.plan.products == (product,)
        for threads in (1, 3):
            outcome = run(prepared.plan, prepared.inputs, DiscardedOutput(), Resources(threads, 1 << 17), Workload(()))
            deltas = [max(float(np.abs(m[n] - models[0][n]).max()) for n in m) for m in models[1:]]
            assert outcome.results.array("largest").tolist() == deltas
    products.find_kind.cache_clear()


def test_an_expert_layout_from_its_page(files: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.moe_help import Models, recipe
    from weightsmith.mixture import layouts

    files("adding-an-expert-layout.md", "weightsmith.mixture.layouts.toy_moe")
    monkeypatch.setattr(layouts, "NAMES", (*layouts.NAMES, "toy_moe"))
    dense = Models(tmp_path).dense("llama")
    weightsmith.moe(recipe(dense, architecture="toy_moe"), tmp_path / "toy")
    weightsmith.moe(recipe(dense, architecture="mixtral"), tmp_path / "mixtral")
    toy, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("toy", "mixtral"))
    renamed = {"gate": "toy.router", "experts": "toy.experts", "w1": "gate", "w2": "down", "w3": "up"}
    for name, tensor in plain.items():
        head, found, tail = name.partition("block_sparse_moe.")
        tail = ".".join(renamed.get(part, part) for part in tail.split("."))
        assert toy.pop(head + tail if found else name).tobytes() == tensor.tobytes()
    assert not toy
