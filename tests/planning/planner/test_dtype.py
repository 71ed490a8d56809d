"""The dtype of each output tensor, and what config.json says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import BF16, config, decoder, only, plan, warnings
from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DTYPES

ROUTER = "model.layers.0.mlp.gate.e_score_correction_bias"
COUNTER = "model.counter"


def write(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> str:
    return str(write_checkpoint(folder, tensors, config(**settings)))


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m} for m in models], "parameters": {"weight": 1}, **options}


def dtypes(p: weightsmith.Plan) -> set[str]:
    return {s.out.dtype.name for s in p.steps}


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "option", "expected"),
    [
        (None, None, None, "BF16"),
        ("float16", None, None, "F16"),
        ("float32", "float16", None, "F16"),
        ("float32", "float16", "F32", "F32"),
        (None, None, "F64", "F64"),
    ],
)
def test_the_option_wins_over_out_dtype_and_that_over_dtype(
    tmp_path: Path, dtype: str | None, out_dtype: str | None, option: str | None, expected: str
) -> None:
    a, b = (plan_help.model(tmp_path / n, seed=i) for i, n in enumerate("ab"))
    asked = {k: v for k, v in (("dtype", dtype), ("out_dtype", out_dtype)) if v}
    p = plan(linear(a, b, **asked), out_dtype=DTYPES[option] if option else None)
    assert dtypes(p) == {expected}
    assert p.config is not None
    assert p.config["dtype"] == DTYPES[expected].torch


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("bfloat16", "bfloat16", "BF16"),
        ("bfloat16", "float16", "F32"),
        ("float16", "float32", "F32"),
        ("float32", "float64", "F64"),
    ],
)
def test_without_an_asked_dtype_the_inputs_are_promoted(tmp_path: Path, first: str, second: str, expected: str) -> None:
    kinds = [BF16 if d == "bfloat16" else np.dtype(d) for d in (first, second)]
    a, b = (plan_help.model(tmp_path / n, seed=i, dtype=d) for i, (n, d) in enumerate(zip("ab", kinds, strict=True)))
    p = plan(linear(a, b))
    assert dtypes(p) == {expected}
    assert p.config is not None
    assert p.config["dtype"] == DTYPES[expected].torch


def test_a_copy_with_another_dtype_is_a_cast(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    recipe = {"merge_method": "passthrough", "models": [{"model": a}]}
    assert {s.op for s in plan(recipe).steps} == {"copy"}
    assert {s.op for s in plan({**recipe, "dtype": "float16"}).steps} == {"cast"}
    assert {s.op for s in plan({**recipe, "parameters": {"scale": 2}}).steps} == {"passthrough"}


def test_float32_tensors_among_16_bit_weights_stay_so_with_a_warning(tmp_path: Path) -> None:
    def with_router(folder: Path, dtype: Any) -> str:
        return write(folder, decoder(dtype=dtype) | {ROUTER: np.ones(4, np.float32)})

    a, b, wide = (with_router(tmp_path / n, d) for n, d in (("a", BF16), ("b", BF16), ("c", np.float32)))
    for models in ((a, b), (a, wide)):
        p = plan(linear(*models, dtype="bfloat16"))
        assert {s.out.name for s in p.steps if s.out.dtype.name == "F32"} == {ROUTER}
        assert {s.out.dtype.name for s in p.steps} == {"F32", "BF16"}
        assert warnings(p) == [f"{ROUTER}: 1 tensor stays F32 and not BF16: the models store them so among 16-bit weights"]
        assert p.config is not None
        assert p.config["dtype"] == "bfloat16"
    assert dtypes(plan(linear(wide, dtype="bfloat16"))) == {"BF16"}
    assert dtypes(plan(linear(a, b, dtype="float64"))) == {"F64"}


def test_both_dtype_keys_and_those_of_sub_configs_follow(tmp_path: Path) -> None:
    old = {"torch_dtype": "float32", "text_config": {"num_hidden_layers": 2, "dtype": "float32", "deep": {"dtype": "float32"}}}
    write_checkpoint(tmp_path / "a", decoder(dtype=np.float32), old)
    p = plan(linear(str(tmp_path / "a"), dtype="bfloat16"))
    assert p.config == {
        "torch_dtype": "bfloat16",
        "text_config": {"num_hidden_layers": 2, "dtype": "bfloat16", "deep": {"dtype": "bfloat16"}},
    }


def test_a_tower_kept_in_another_dtype_keeps_saying_so_unless_all_is_cast(tmp_path: Path) -> None:
    old = {"dtype": "bfloat16", "text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 1, "dtype": "float32"}}
    tower = {"visual.blocks.0.attn.q.weight": np.ones((2, 2), np.float32)}
    write_checkpoint(tmp_path / "a", decoder() | tower, old)
    a = str(tmp_path / "a")
    p = plan(linear(a))
    assert p.config == old
    p = plan(linear(a, dtype="float16"))
    assert p.config is not None
    assert (p.config["dtype"], p.config["vision_config"]["dtype"]) == ("float16", "float16")


def test_a_tower_keeps_its_dtype_where_only_the_parts_name_one(tmp_path: Path) -> None:
    """As in Qwen3-VL, whose config.json names none at the top."""
    old = {
        "text_config": {"num_hidden_layers": 2, "dtype": "bfloat16"},
        "vision_config": {"depth": 1, "dtype": "float32"},
    }
    tower = {"visual.blocks.0.attn.q.weight": np.ones((2, 2), np.float32)}
    write_checkpoint(tmp_path / "a", decoder() | tower, old)
    assert plan(linear(str(tmp_path / "a"))).config == {**old, "dtype": "bfloat16"}


def test_a_config_that_names_no_dtype_does_afterwards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", decoder(), {"num_hidden_layers": 2})
    p = plan(linear(str(tmp_path / "a")))
    assert p.config == {"num_hidden_layers": 2, "dtype": "bfloat16"}


def test_integers_are_copied_and_keep_their_dtype(tmp_path: Path) -> None:
    a, b = (write(tmp_path / n, decoder(seed=i) | {COUNTER: np.arange(3)}) for i, n in enumerate("ab"))
    p = plan(linear(a, b, dtype="float16"))
    step = next(s for s in p.steps if s.out.name == COUNTER)
    assert (step.op, step.out.dtype.name, len(step.inputs)) == ("copy", "I64", 2)
    assert warnings(p) == []


def test_integers_come_from_the_base_wherever_it_is_listed(tmp_path: Path) -> None:
    a, b = (write(tmp_path / n, decoder(seed=i) | {COUNTER: np.arange(3)}) for i, n in enumerate("ab"))
    p = plan(linear(a, b, base_model=b))
    step = next(s for s in p.steps if s.out.name == COUNTER)
    assert p.models[step.inputs[0].model].ref == b


def test_integers_of_different_dtype_are_taken_from_the_base_with_a_warning(tmp_path: Path) -> None:
    a = write(tmp_path / "a", decoder() | {COUNTER: np.arange(3, dtype=np.int32)})
    b = write(tmp_path / "b", decoder(seed=1) | {COUNTER: np.arange(3)})
    c = write(tmp_path / "c", decoder(seed=2) | {COUNTER: np.ones(3, BF16)})
    for other in (b, c):
        p = plan(linear(a, other))
        step = next(s for s in p.steps if s.out.name == COUNTER)
        assert (step.op, step.out.dtype.name, [i.model for i in step.inputs]) == ("copy", "I32", [0])
        assert [(d.model, d.tensor, d.reason) for d in p.dropped] == [
            (1, COUNTER, f"no floating numbers to merge: taken from {a}")
        ]
        assert warnings(p)[0].startswith(f"{COUNTER}: dtypes differ and are not all floating; taken from {a}\n")


def test_integers_that_disagree_are_told_after_the_merge(tmp_path: Path) -> None:
    a = write(tmp_path / "a", decoder() | {COUNTER: np.arange(3), "model.same": np.arange(2)})
    b = write(tmp_path / "b", decoder(seed=1) | {COUNTER: np.arange(1, 4), "model.same": np.arange(2)})
    done = weightsmith.merge(linear(a, b, base_model=b), tmp_path / "out", fsync=False)
    assert [str(w) for w in done.warnings] == [f"{COUNTER}: the models differ in this int64 tensor; taken from {b}"]
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        assert out.read(COUNTER).tolist() == [1, 2, 3]


def test_quantised_inputs_are_refused_with_their_place(tmp_path: Path) -> None:
    entry = {"quant_method": "higgs", "bits": 4}
    a = write(tmp_path / "a", decoder() | {"model.layers.0.mlp.W_q": np.ones((6, 2), np.uint8)}, quantization_config=entry)
    up = "model.layers.0.mlp.up_proj.weight"
    codes = {up: np.ones((6, 4), ml_dtypes.float8_e4m3fn), f"{up}_scale_inv": np.ones((1, 1), np.float32)}
    b = write(tmp_path / "b", decoder() | codes)
    for model in (a, b):
        problem = only(f"merge_method: linear\nmodels: [{{model: {model}}}]\nparameters: {{weight: 1}}\n")
        assert isinstance(problem, Unsupported)
        assert str(problem).startswith(f"<text>:2:18: {model} is quantised (")
