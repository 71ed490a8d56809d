"""Merge methods on mixtures of experts, in every way of storing experts: names, dtypes, and statistics for each expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import moe_zoo
from tests.cases import CASES
from tests.moe_zoo import CORRECTED, MODELS, E
from tests.sampling import sampled
from weightsmith import _methods as methods

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models is not our concern

LINEAR: dict[str, Any] = {"merge_method": "linear", "parameters": {"weight": 1}}
TIES: dict[str, Any] = {"merge_method": "ties", "parameters": {"weight": 1, "density": 0.5}}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Path]]:
    """Two models of each kind."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("moe")
    return moe_zoo.Saved(folder, 1), moe_zoo.Saved(folder, 2)


def merge(recipe: dict[str, Any], base: Path, *models: Path, out: Path, **options: Any) -> weightsmith.Merged:
    listed = [{"model": str(model)} for model in models]
    if recipe["merge_method"] == "linear":
        listed.insert(0, {"model": str(base)})
    else:
        recipe = {**recipe, "base_model": str(base)}
    return weightsmith.merge({**recipe, "models": listed, **options}, out, fsync=False)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [LINEAR, TIES], ids=lambda recipe: recipe["merge_method"])
@pytest.mark.parametrize("name", sampled(MODELS, ("mixtral", "granitemoe", "gpt-oss", "deepseek-v3")))
def test_a_merge_keeps_names_and_dtypes_and_loads(
    name: str, recipe: dict[str, Any], pairs: tuple[dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    a, b = (models[name] for models in pairs)
    done = merge(recipe, a, b, out=tmp_path / "out", dtype="bfloat16")
    before, after = moe_zoo.read(a), moe_zoo.read(tmp_path / "out")
    assert {k: (v.dtype, v.shape) for k, v in after.items()} == {k: (v.dtype, v.shape) for k, v in before.items()}
    kept = {k: v.dtype for k, v in after.items() if "e_score_correction_bias" in k}
    assert bool(kept) == (name in CORRECTED)
    assert set(kept.values()) <= {np.dtype(np.float32)}
    assert [("stay" in w.what and "F32" in w.what) for w in done.warnings] == [True] * bool(kept)
    other = moe_zoo.read(b)
    changed = [k for k in before if not np.array_equal(after[k], before[k])]
    assert changed == [k for k in before if not np.array_equal(other[k], before[k])]
    moe_zoo.load(name, tmp_path / "out")


@pytest.fixture(scope="session")
def triples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Three models of some kinds: an expert a tensor, fused, transposed and interleaved, with corrections."""
    folder = tmp_path_factory.mktemp("triples")
    kinds = ("mixtral", "granitemoe", "gpt-oss", "deepseek-v3")
    return {name: [moe_zoo.save(name, folder / f"{name}-{seed}", seed) for seed in range(3)] for name in kinds}


PLAIN = [name for name in methods.NAMES if not methods.get(name).requires({})]
"""Methods that look at no text."""


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("method", sampled(PLAIN, ("linear", "ties", "slerp", "tsv_m", "passthrough")))
def test_every_method_merges_mixtures(method: str, triples: dict[str, list[Path]], tmp_path: Path) -> None:
    """Names, shapes and dtypes stay, every expert changes, and all numbers are finite."""
    case = next(case for case in CASES.values() if case.method == method)
    for name, folders in triples.items():
        parameters = [{k: v for k, v in model_parameters.items() if v is not None} for model_parameters in case.models][
            case.base :
        ]
        used = folders[case.base :][: len(parameters)]
        listed = [
            {"model": str(m), "parameters": model_parameters} for m, model_parameters in zip(used, parameters, strict=False)
        ]
        shared = {key: value for key, value in case.shared.items() if value not in (None, "none")}
        recipe = {"merge_method": method, "models": listed, "parameters": shared, "dtype": "bfloat16"}
        if case.base:
            recipe["base_model"] = str(folders[0])
        weightsmith.merge(recipe, tmp_path / name, fsync=False)
        before, after = moe_zoo.read(folders[0]), moe_zoo.read(tmp_path / name)
        assert {k: (v.dtype, v.shape) for k, v in after.items()} == {k: (v.dtype, v.shape) for k, v in before.items()}
        assert all(np.isfinite(v.astype(np.float32)).all() for v in after.values())
        experts = [k for k in after if "experts" in k and "shared" not in k and k.endswith("weight")]
        experts = experts or [k for k in after if "input_linear" in k or "gate_up_proj" in k]
        if method != "passthrough":
            same = [k for k in experts for e in range(E) if after[k].ndim == 3 and np.array_equal(after[k][e], before[k][e])]
            assert not [k for k in experts if np.array_equal(after[k], before[k])] + same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method"),
    [("fused", "ties"), ("fused", "slerp"), ("transposed", "model_stock"), ("paired", "ties")],
)
def test_each_expert_of_a_fused_tensor_is_merged_as_if_alone(how: str, method: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    models, apart = [], []
    base = moe_zoo.experts(seed=0, dtype=np.float32)
    for seed in range(3):
        # Deltas of very different sizes: one threshold, or angle, over all experts would be another than each one's.
        # Alone, an expert is there twice: a tensor [1, rows, columns] is not known to be fused.
        listed = [
            {
                part: (value + seed * 10.0**e * random.standard_normal(value.shape)).astype(np.float32)
                for part, value in x.items()
            }
            for e, x in enumerate(base)
        ]
        models.append(moe_zoo.store(tmp_path / f"{how}{seed}", how, listed))
        apart.append([moe_zoo.store(tmp_path / f"{e}-{seed}", how, [expert, expert]) for e, expert in enumerate(listed)])
    recipe: dict[str, Any] = {"merge_method": method}
    if method == "slerp":
        recipe["parameters"] = {"t": 0.3}
        models, apart = models[:2], apart[:2]
    elif method != "model_stock":
        recipe["parameters"] = {"weight": 1, "density": 0.5}
    merged = merge(recipe, *models, out=tmp_path / "out")
    assert merged.plan.provenance.name == method
    together = moe_zoo.read(tmp_path / "out")
    fused = [name for name in together if "experts" in name and together[name].ndim == 3]
    assert len(fused) == 2
    for e in range(E):
        merge(recipe, *(folders[e] for folders in apart), out=tmp_path / f"out{e}")
        alone = moe_zoo.read(tmp_path / f"out{e}")
        for name in fused:
            assert np.array_equal(together[name][e], alone[name][0]), (name, e)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3", "granitemoe", "llama4", "glm4-moe"])
def test_a_stack_of_two_mixtures_loads(name: str, pairs: tuple[dict[str, Path], dict[str, Path]], tmp_path: Path) -> None:
    a, b = (models[name] for models in pairs)
    runs = [(a, 0, 2), (b, 1, 2), (a, 1, 2)]
    slices = [{"sources": [{"model": str(m), "layer_range": [first, end]}]} for m, first, end in runs]
    weightsmith.merge({"merge_method": "passthrough", "slices": slices}, tmp_path / "out", fsync=False)
    model = moe_zoo.load(name, tmp_path / "out")
    assert len(model.model.layers) == 4
    first, second, out = moe_zoo.read(a), moe_zoo.read(b), moe_zoo.read(tmp_path / "out")
    sources = [(first, 0), (first, 1), (second, 1), (first, 1)]
    for i, (source, layer) in enumerate(sources):
        prefix, source_prefix = f"model.layers.{i}.", f"model.layers.{layer}."
        actual = {n.removeprefix(prefix): v for n, v in out.items() if n.startswith(prefix)}
        expected = {n.removeprefix(source_prefix): v for n, v in source.items() if n.startswith(source_prefix)}
        assert actual.keys() == expected.keys()
        assert all(np.array_equal(actual[n], expected[n]) for n in actual)
