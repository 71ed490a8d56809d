"""The recipes of `weightsmith init --preset`: each says what it is, plans without a warning, merges, and means what it says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.plan_help import warnings

PRESETS = sorted((Path(weightsmith.__file__).parent / "_app" / "cli" / "presets").glob("*.yml"))
LAYERS = 32
ADAPTED = "model.layers.3.mlp.up_proj"
Tensors = dict[str, np.ndarray]


def paths(file: Path) -> list[str]:
    """The models that a recipe names."""
    named = re.findall(r"(?:model|base_model): (\./[^\s,}]+)", file.read_text())
    return list(dict.fromkeys(path for name in named for path in name.split("+")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every model that a preset names, 32 small layers each; 12 for a pattern."""
    folder = tmp_path_factory.mktemp("presets")
    for path in dict.fromkeys(path for file in PRESETS for path in paths(file)):
        if path.startswith("./adapters/"):
            adapter(folder / path)
            continue
        for name in [path.replace("*", str(i)) for i in range(1, 13)] if "*" in path else [path]:
            plan_help.model(folder / name, LAYERS, seed=sum(name.encode()))
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], weightsmith.Merged]:
    """Merges a preset, once."""
    out = tmp_path_factory.mktemp("merged")

    @cache
    def merge(preset: str) -> weightsmith.Merged:
        with contextlib.chdir(folder):
            return weightsmith.merge(PRESETS[0].parent / f"{preset}.yml", out / preset, fsync=False)

    return merge


def adapter(folder: Path) -> None:
    """A LoRA adapter of rank 2 for one of the layers."""
    rng = np.random.default_rng(0)
    factors = {f"{ADAPTED}.lora_A.weight": rng.standard_normal((2, 4)), f"{ADAPTED}.lora_B.weight": rng.standard_normal((6, 2))}
    folder.mkdir(parents=True)
    save_file({f"base_model.model.{n}": a.astype(np.float32) for n, a in factors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')


def test_there_are_presets() -> None:
    assert len(PRESETS) == 21


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_a_preset_says_what_it_is_and_where_it_comes_from(file: Path) -> None:
    comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert len(comment) >= 3
    assert any(line.startswith("# Source: ") and ("https://" in line or " 1992" in line) for line in comment)
    assert all(len(line) <= 128 for line in file.read_text().splitlines())
    assert yaml.safe_load(file.read_text())["dtype"] in ("bfloat16", "float32")


@pytest.mark.long
@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_a_preset_plans_and_merges(file: Path, merged: Callable[[str], weightsmith.Merged]) -> None:
    written = merged(file.stem)
    assert warnings(written.plan) == []
    with weightsmith.open_checkpoint(written.out) as out:
        assert all(np.isfinite(out.read(name).astype(np.float64)).all() for name in out.specs)


# ---- the formulas


@cache
def read(path: Path) -> Tensors:
    with weightsmith.open_checkpoint(path) as model:
        return {name: model.read(name).astype(np.float64) for name in model.specs}


def depth(name: str) -> float:
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) / (LAYERS - 1) if layer else 0.0


def swapped(m: Callable[[str], Tensors], name: str) -> np.ndarray:
    layer = re.search(r"layers\.(\d+)\.", name)
    language, math = m("models/language")[name], m("models/math")[name]
    if layer is None or int(layer[1]) < 5 or int(layer[1]) >= 30:
        return language
    return (language + math) / 2 if int(layer[1]) in (5, 29) else math


def shifted(m: Callable[[str], Tensors], name: str) -> np.ndarray:
    layer = re.search(r"layers\.(\d+)\.", name)
    i = int(layer[1]) if layer else 0
    return m("models/base")[name.replace(f"layers.{i}.", f"layers.{i if i < 24 else i - 16}.")]


def run(m: Callable[[str], Tensors], name: str, weights: list[float]) -> np.ndarray:
    return sum((w * m(f"run/checkpoint-{i}")[name] for i, w in enumerate(weights, 1)), np.zeros(()))


ROOTS = [1 - (j / 12) ** 0.5 for j in range(13)]
FORMULAS: dict[str, Callable[[Callable[[str], Tensors], str], np.ndarray]] = {
    "task-negation": lambda m, n: m("models/base")[n] - 0.5 * (m("models/toxic")[n] - m("models/base")[n]),
    "chat-vector": lambda m, n: m("models/continued")[n] + m("models/chat")[n] - m("models/base")[n],
    "expo": lambda m, n: m("models/rlhf")[n] + 0.3 * (m("models/rlhf")[n] - m("models/sft")[n]),
    "warp-liti": lambda m, n: 0.7 * m("models/sft")[n] + 0.3 * m("merged/warp_slerp")[n],
    "model-soup": lambda m, n: np.mean([m(f"sweep/{i}")[n] for i in range(1, 13)], axis=0),
    "ema": lambda m, n: run(m, n, [0.9**11, *(0.1 * 0.9 ** (12 - i) for i in range(2, 13))]),
    "lawa": lambda m, n: np.mean([m(f"run/checkpoint-{i}")[n] for i in range(8, 13)], axis=0),
    "wsm": lambda m, n: run(m, n, [ROOTS[j] - ROOTS[j + 1] for j in range(12)]),
    "lines": lambda m, n: (
        m("models/base")[n]
        + (0.333 + 0.5 * depth(n)) * sum(m(f"models/{f}")[n] - m("models/base")[n] for f in ("fr", "de", "py"))
    ),
    "layer-swapping": swapped,
    "depth-up-scaling": shifted,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_a_preset_means_what_it_says(name: str, folder: Path, merged: Callable[[str], weightsmith.Merged]) -> None:
    tensors = read(merged(name).out)
    assert len(tensors) == len(plan_help.decoder(48 if name == "depth-up-scaling" else LAYERS))
    for tensor, got in tensors.items():
        exact = FORMULAS[name](lambda path: read(folder / path), tensor)
        expected = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-6, err_msg=tensor)


@pytest.mark.slow
def test_an_adapter_is_baked_in(folder: Path, merged: Callable[[str], weightsmith.Merged]) -> None:
    a, b = load_file(folder / "adapters/fr/adapter_model.safetensors").values()
    base = read(folder / "models/base")
    for tensor, got in read(merged("bake-in-lora").out).items():
        exact = base[tensor] + (1.5 * (b @ a) if tensor == f"{ADAPTED}.weight" else 0)
        np.testing.assert_allclose(got, exact.astype(ml_dtypes.bfloat16).astype(np.float64), rtol=2**-7, atol=1e-6)


@pytest.mark.long
def test_warp_s_slerp_is_of_task_vectors(folder: Path, merged: Callable[[str], weightsmith.Merged]) -> None:
    sft, one, two = (read(folder / "models" / name) for name in ("sft", "policy-1", "policy-2"))
    for tensor, got in read(merged("warp-slerp").out).items():
        a, b = one[tensor] - sft[tensor], two[tensor] - sft[tensor]
        angle = np.arccos(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))
        expected = sft[tensor] + np.sin(angle / 2) / np.sin(angle) * (a + b)
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-7, err_msg=tensor)


@pytest.mark.long
def test_the_two_stages_of_dare_with_ties_follow_each_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(folder / "models")
    stage1, stage2 = (PRESETS[0].parent / f"dare-ties-stage{i}.yml" for i in (1, 2))
    for seed, name in enumerate(("fr", "de")):
        text = stage1.read_text().replace("./models/fr", f"./models/{name}")
        weightsmith.merge(text, f"merged/{name}-dropped", seed=seed, fsync=False)
    weightsmith.merge(stage2, "merged/both", fsync=False)
    base, fr, both = (read(tmp_path / path) for path in ("models/base", "merged/fr-dropped", "merged/both"))
    changed = [np.mean(model[name] != base[name]) for model in (fr, both) for name in ("model.layers.3.mlp.up_proj.weight",)]
    assert 0.2 < changed[0] < 0.8
    assert changed[1] < 0.6
