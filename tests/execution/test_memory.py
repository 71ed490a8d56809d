"""Merging in memory: the bytes of a merge of files, any memory layout, and every mistake said at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import weightsmith
from tests.cases import CASES, MERGED
from tests.cases.case import Case, fine_tunes
from tests.mini import write_checkpoint
from tests.sampling import sampled
from weightsmith._base.errors import NonFinite, PlanError, UnknownName
from weightsmith._base.tensors import DTYPES
from weightsmith._execution.state_dicts import merge_state_dicts
from weightsmith._methods import get

Models = list[dict[str, np.ndarray]]


def models_of(count: int, seed: int = 0) -> Models:
    """A base and fine-tunes: a matrix of two grains, a vector, fused experts, a scalar, a mask."""
    shapes = {"a.weight": (150, 517), "norm.weight": (33,), "mlp.experts.up": (4, 30, 20), "scale": ()}
    models: Models = [{} for _ in range(count)]
    for i, (name, shape) in enumerate(shapes.items()):
        for model, array in zip(models, fine_tunes(shape, count - 1, seed=seed + i), strict=True):
            model[name] = array
    for model in models:
        model["mask"] = np.arange(6, dtype=np.int32).reshape(2, 3)
    return models


def shared(case: Case) -> dict[str, Any]:
    """The parameters of the merge that a user may give: a value, of one that has an effect."""
    ignored = {p.name for p in get(case.method).parameters if p.ignored}
    return {name: value for name, value in case.shared.items() if value is not None and name not in ignored}


def from_files(folder: Path, case: Case, models: Models, **options: Any) -> dict[str, np.ndarray]:
    """The same merge by recipe and files."""
    listed = []
    for i, model in enumerate(models):
        write_checkpoint(folder / f"m{i}", model)
        parameters = dict(case.models[i])
        listed.append({"model": str(folder / f"m{i}"), **({"parameters": parameters} if parameters else {})})
    recipe = {"merge_method": case.method, "models": listed, "parameters": shared(case)}
    if case.base:
        recipe |= {"base_model": listed[0]["model"]}
    weightsmith.merge({k: v for k, v in recipe.items() if v}, folder / "out", fsync=False, card=False, **options)
    with weightsmith.open_checkpoint(folder / "out") as out:
        return {name: out.read(name) for name in out.specs}


def in_memory(case: Case, models: Models, **options: Any) -> dict[str, np.ndarray]:
    per_model = case.models[1:] if case.base else case.models
    by_name = {name: [m[name] for m in per_model] for name in per_model[0]}
    for_all = {"lambda_" if name == "lambda" else name: value for name, value in shared(case).items()}
    base = models[0] if case.base else None
    return merge_state_dicts(case.method, models[1:] if case.base else models, base=base, **by_name, **for_all, **options)


SAMPLE = {"linear", "slerp", "ties", "dare_linear", "sce", "karcher", "multislerp", "nearswap", "ram", "tsv_m"}
"""Cases of every run: at least one of each way in which the engine runs a method. The others are for the sweeps."""


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([n for n, case in MERGED.items() if set(case.dims) >= {0, 1, 2}], SAMPLE))
def test_the_bytes_are_those_of_a_merge_of_files(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    models = models_of(case.inputs)
    same(in_memory(case, models, seed=3), from_files(tmp_path, case, models, seed=3))


@pytest.mark.long
@pytest.mark.parametrize("name", ["linear", "ties", "dare_linear"])
def test_the_result_does_not_depend_on_threads(name: str) -> None:
    models = models_of(CASES[name].inputs)
    same(in_memory(CASES[name], models, threads=1), in_memory(CASES[name], models, threads=3))


# ---- kinds and layouts


def layouts(array: np.ndarray) -> dict[str, Any]:
    """The same elements in other strides, orders and libraries."""
    wide = np.zeros((array.shape[0], 2 * array.shape[1]), array.dtype)
    wide[:, ::2] = array
    return {
        "transposed": np.ascontiguousarray(array.T).T,
        "every other": wide[:, ::2],
        "backwards": np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
        "big-endian": array.astype(">f4"),
        "torch transposed": torch.from_numpy(array).t().contiguous().t(),
        "torch negated": torch._neg_view(torch.from_numpy(-array)),
        "torch parameter": torch.nn.Parameter(torch.from_numpy(array)),
    }


@pytest.mark.parametrize("layout", list(layouts(np.zeros((1, 1), np.float32))))
def test_any_layout_gives_the_same_bytes(layout: str) -> None:
    a, b = fine_tunes((700, 517), 1, np.float32)
    plain = merge_state_dicts("ties", [{"w": b}], base={"w": a}, weight=1.0, density=0.3)["w"]
    got = merge_state_dicts("ties", [{"w": layouts(b)[layout]}], base={"w": a}, weight=1.0, density=0.3)["w"]
    assert got.tobytes() == plain.tobytes()


@pytest.mark.parametrize("shape", [(5, 1, 300_000), (3, 4, 5, 7000), (2, 200_000), (400_000,)])
def test_tiles_that_begin_and_end_inside_strided_dimensions(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    strided = np.ascontiguousarray(array.T).T
    got = merge_state_dicts("linear", [{"w": strided}], weight=1.0, threads=1)["w"]
    np.testing.assert_array_equal(got, array)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu")
def test_tensors_on_a_gpu_are_read_from_there() -> None:
    a, b = (torch.from_numpy(array) for array in fine_tunes((700, 517), 1, np.float32))
    plain = merge_state_dicts("ties", [{"w": b}], base={"w": a}, weight=1.0, density=0.3)["w"]
    got = merge_state_dicts("ties", [{"w": b.cuda().t().contiguous().t()}], base={"w": a.cuda()}, weight=1.0, density=0.3)["w"]
    assert got.device.type == "cpu"
    assert torch.equal(got, plain)


def test_torch_in_torch_out_and_the_inputs_stay_as_they_are() -> None:
    a = {"w": torch.randn(40, 30, dtype=torch.bfloat16), "n": torch.tensor(2.0), "i": torch.arange(3), "e": torch.zeros(0, 4)}
    b = {name: tensor + 1 for name, tensor in a.items()} | {"i": a["i"]}
    before = {name: tensor.clone() for name, tensor in a.items()}
    got = merge_state_dicts("linear", [a, b], weight=[1, 3])
    assert [(n, t.dtype, tuple(t.shape)) for n, t in got.items()] == [(n, t.dtype, tuple(t.shape)) for n, t in a.items()]
    assert torch.equal(got["w"], (a["w"].double() * 0.25 + b["w"].double() * 0.75).to(torch.bfloat16))
    assert got["n"] == 2.75
    assert all(torch.equal(a[name], before[name]) for name in a)
    got["w"].add_(1)  # memory of its own


def test_the_state_dict_of_a_module_goes_back_into_it() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    merged = merge_state_dicts("linear", [m.state_dict() for m in models], weight=0.5)
    models[0].load_state_dict(merged)
    assert models[0][1].num_batches_tracked == 0


def test_the_kind_of_the_base_decides_when_kinds_are_mixed() -> None:
    a, b = fine_tunes((3, 4), 1, np.float32)
    got = merge_state_dicts("slerp", [{"w": b}], base={"w": torch.from_numpy(a)}, t=0.5)
    assert isinstance(got["w"], torch.Tensor)


@pytest.mark.parametrize("asked", ["bfloat16", torch.bfloat16, np.dtype(ml_dtypes.bfloat16), DTYPES["BF16"]], ids=str)
def test_out_dtype_by_any_name(asked: Any) -> None:
    got = merge_state_dicts("linear", [{"w": np.float32([1, 2]), "i": np.int64([7])}], weight=1.0, out_dtype=asked)
    assert (got["w"].dtype, got["i"].dtype) == (np.dtype(ml_dtypes.bfloat16), np.int64)


def test_tied_tensors_stay_tied() -> None:
    def model(seed: int) -> dict[str, Any]:
        shared = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed))
        return {"embed": shared, "head": shared, "loose": shared.clone()}

    base, tuned = model(0), model(1)
    got = merge_state_dicts("dare_linear", [tuned], base=base, weight=1.0, density=0.5)
    assert got["embed"].data_ptr() == got["head"].data_ptr() != got["loose"].data_ptr()
    tuned["head"] = tuned["head"].clone()
    got = merge_state_dicts("dare_linear", [tuned], base=base, weight=1.0, density=0.5)
    assert got["embed"].data_ptr() != got["head"].data_ptr()


def test_integers_are_the_bases_and_a_difference_is_a_warning() -> None:
    base, a, b = ({"i": np.int64([n]), "w": np.float32([n])} for n in (1, 2, 2))
    with pytest.warns(UserWarning, match="^i: the models differ; taken from base$"):
        got = merge_state_dicts("task_arithmetic", [a, b], base=base, weight=1.0)
    assert got["i"] == 1
    with pytest.warns(UserWarning, match=r"^i: dtypes differ and are not all floating; taken from models\[0\]"):
        got = merge_state_dicts("linear", [a, {**b, "i": np.int32([5])}], weight=1.0)
    assert got["i"].dtype == np.int64


def test_a_base_among_the_models_is_the_base() -> None:
    base, a, b = ({"w": array} for array in fine_tunes((5, 6), 2))
    plain = merge_state_dicts("ties", [a, b], base=base, weight=[1, 2], density=0.5)
    listed = merge_state_dicts("ties", [a, base, b], base=base, weight=[1, 9, 2], density=[0.5, 0.1, 0.5])
    same(plain, listed)


def test_a_base_of_a_method_without_one_is_one_more_input() -> None:
    base, a = {"w": np.float32([1])}, {"w": np.float32([4])}
    assert merge_state_dicts("linear", [a], base=base, weight=1.0)["w"] == 2.5
    assert merge_state_dicts("linear", [a, base], base=base, weight=[2, 1])["w"] == 3


# ---- problems


def problems(method: str, models: Any, **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        merge_state_dicts(method, models, **options)
    return [f"{type(p).__name__}: {p}" for p in caught.value.problems]


W = {"w": np.float32([1, 2])}


def test_all_problems_are_told_at_once() -> None:
    messages = problems("ties", [W, W], weigth=1, density=[0.5, 2], normalize="no", out_dtype="bfloat", seed=1)
    assert messages == [
        "ParameterError: method ties needs a base\n  -> Give base=, the model the others came from.",
        messages[1],
        "ParameterError: normalize: must be true or false, not 'no'",
        "ParameterError: method ties needs the parameter 'weight'\n  -> Give weight=.",
        "ParameterError: density[1]: must be at most 1, not 2",
        messages[-1],
    ]
    assert messages[-1].endswith("must be one of bfloat16, float16, float32, float64 (did you mean 'bfloat16'?), not 'bfloat'")
    assert messages[1].startswith(
        "UnknownParameter: method ties has no parameter 'weigth' (did you mean 'weight'?)\n  -> Write one of weight, "
    )
    assert "lambda_" in messages[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": [1]}, "ParameterError: weight: has 1 values, and there are 2 models"),
        (
            {"weight": 1, "normalize": [True, False]},
            "ParameterError: normalize: must be one value, for all models and tensors, not",
        ),
        ({"weight": [[1, 2], 3]}, "ParameterError: weight[0]: must be one value for each model, not a list"),
        ({"weight": [1, -1]}, "ParameterError: the weights sum to 0, so they cannot be normalised"),
        ({"weight": [1, 2], "base": {"w": np.float32([3, 4])}}, "ParameterError: weight: the base counts as one more input"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    (error,) = problems("linear", [W, dict(W)], **options)
    assert error.startswith(message)


def test_numbers_of_models() -> None:
    assert problems("slerp", [W, W], base=W | {}, t=0.5) == [
        "MismatchError: method slerp takes exactly 1 models besides the base, not 2"
    ]
    assert problems("linear", [], weight=1)[0] == "MismatchError: method linear takes at least 1 models, not 0"
    assert problems("linear", W, weight=1) == [
        "ParameterError: models: models must be a list of state dicts\n  -> Write [a, b]."
    ]
    with pytest.raises(UnknownName, match="did you mean 'linear'"):
        merge_state_dicts("liner", [W])


def test_names_and_shapes_that_differ() -> None:
    a = {"w": np.zeros((2, 3), np.float32), "x": np.zeros(1), "y": np.zeros(1)}
    b = {"w": np.zeros((2, 4), np.float32), "x": np.zeros(1), "z": np.zeros(1)}
    assert problems("linear", [a, b], weight=1) == [
        "MismatchError: the models have different tensors\n"
        "  models[1] has no y\n"
        "  models[1] has z, which models[0] has not\n"
        "  -> Give the same names to the same tensors, and leave out what is not to be merged.",
        "ShapeError: w: the shapes differ\n  models[0]: [2, 3] F32\n  models[1]: [2, 4] F32",
    ]


def test_what_is_no_state_dict_or_tensor() -> None:
    messages = problems("linear", [[1.0], {"w": [1.0], 3: np.zeros(1), "c": np.zeros(1, np.complex128)}], weight=1)
    what = "Unsupported: models[0]: this is a list, not a mapping of names to tensors"
    assert messages[0] == f"{what}\n  -> Pass a torch module or its state_dict()."
    assert messages[1].startswith("Unsupported: models[1], tensor w: this is a builtins.list; it cannot be merged")
    assert messages[2] == "Unsupported: models[1]: the name 3 is not a string\n  -> Use names as in a state_dict."
    assert messages[3].startswith("Unsupported: models[1], tensor c: this is a tensor of dtype complex128; it cannot be merged")


def test_what_is_no_number_is_an_error_that_speaks_of_no_files() -> None:
    models = [{"w": np.float32([1, 2])}, {"w": np.float32([1, np.nan])}]
    with pytest.raises(NonFinite) as caught:
        merge_state_dicts("linear", models, weight=1)
    assert str(caught.value).startswith("models[1], tensor w: element [1] is nan\n")
    assert "published" not in str(caught.value)
    assert np.isnan(merge_state_dicts("linear", models, weight=1, allow_nonfinite=True)["w"][1])


# ---- what it takes


MEASURE = """
import re, sys
sys.path[:0] = sys.argv[1:]
import numpy as np
from weightsmith import merge_state_dicts

def resident(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

for size in (300, 5_000):  # the first compiles
    models = [{"w": np.full((size, size), i, np.float32).T} for i in range(3)]
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = resident("VmRSS")
    merge_state_dicts("ties", models[1:], base=models[0], weight=1.0, density=0.5, threads=2)
print(resident("VmHWM") - before)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_takes_the_output_and_little_more_and_no_torch() -> None:
    code = MEASURE + "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code, *sys.path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 95.4 + 30  # MiB: an output of 100 MB


def test_a_parameter_without_effect_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="^int8_mask has no effect: "):
        merge_state_dicts("task_arithmetic", [W], base=W | {}, weight=1.0, int8_mask=True)
