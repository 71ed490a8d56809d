"""`--quantize`: which tensors are stored as what, in bytes that numpy computes too, and that transformers reads."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.golden import inputs
from tests.golden.cases import recipe
from tests.mini import write_checkpoint
from weightsmith._app.api import run
from weightsmith._base.errors import Corrupt, NonFinite, PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse
from weightsmith._outputs.staging import Staging
from weightsmith._planning.planner.encode import ignored_modules, stored_plain
from weightsmith._plans import Plan, plan_from_json

__all__ = ["cli"]

FP8 = "fp8-dynamic"
BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
KINDS = {name: dtype.numpy for name, dtype in DTYPES.items()}
TWO = recipe("linear", ("base", "fr"), None, {"weight": [0.7, 0.3]})
TIES = recipe("ties", ("fr", "de"), "base", {"weight": [0.7, 0.5], "density": [0.4, 0.3]})
FUSED = recipe("ties", ("phi3_a", "phi3_b"), "phi3", {"weight": [0.7, 0.5], "density": [0.4, 0.3]})
EXPERTS = recipe("linear", ("fused_1", "fused_2"), None, {"weight": [0.5, 0.5]})
VISION = recipe("linear", ("vision", "vision_a"), None, {"weight": [0.5, 0.5]})
TIED = recipe("linear", ("tied", "tied_a"), None, {"weight": [0.5, 0.5]})
STACK = {
    "merge_method": "passthrough",
    "slices": [
        {"sources": [{"model": "base", "layer_range": [0, 2]}]},
        {"sources": [{"model": "fr", "layer_range": [1, 2]}]},
    ],
}
MIXTURE = {
    "base_model": "llama_0",
    "gate_mode": "random",
    "architecture": "mixtral",
    "experts": [{"source_model": "llama_0"}, {"source_model": "llama_1"}],
}
INNER = recipe("ties", ("llama_1",), "llama_0", {"weight": [0.7], "density": [0.4]})
MERGED_BASE = {
    "base_model": INNER,
    "gate_mode": "cheap_embed",
    "experts": [
        {"source_model": INNER, "positive_prompts": ["w3 w4"]},
        {"source_model": "llama_2", "positive_prompts": ["w5"]},
    ],
    "architecture": "mixtral",
}
SURGERY = {"model": "own", "merge_experts": {"groups": [[0, 1], [2, 3]]}}
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "inputs"
    inputs.make(folder)
    return folder


@pytest.fixture(autouse=True)
def inside(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


def make(what: Mapping[str, Any], out: Path, **options: Any) -> Plan:
    dense = "merge_method" in what
    return (weightsmith.merge if dense else weightsmith.moe)(what, out, fsync=False, **options).plan


def passthrough(model: Path) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": str(model)}]}


def weight_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every stored tensor, by a reader of its own."""
    arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8:start]).items():
            if name != "__metadata__":
                a, b = about["data_offsets"]
                arrays[name] = np.frombuffer(data[start + a : start + b], KINDS[about["dtype"]]).reshape(about["shape"])
    return arrays


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def problems(what: Any, **options: Any) -> str:
    with pytest.raises(PlanError) as refused:
        weightsmith.plan(what, **options)
    return str(refused.value)


# ---- bytes

CASES = {
    "linear": TWO,
    "ties": TIES,
    "stack": STACK,
    "fused": FUSED,
    "mixture": MIXTURE,
    "mixture of a merge": MERGED_BASE,
    "fused experts": EXPERTS,
    "vision": VISION,
    "tied": TIED,
    "surgery": SURGERY,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_quantised_at_once_is_merged_and_then_quantised(name: str, tmp_path: Path) -> None:
    plan = make(CASES[name], tmp_path / "once", quantize=FP8)
    make(CASES[name], tmp_path / "merged")
    make(passthrough(tmp_path / "merged"), tmp_path / "then", quantize=FP8)
    once = weight_files(tmp_path / "once")
    assert once == weight_files(tmp_path / "then")
    assert config_of(tmp_path / "once") == config_of(tmp_path / "then")
    assert {k: v for k, v in config_of(tmp_path / "once").items() if k != "quantization_config"} == config_of(
        tmp_path / "merged"
    )
    encoded = [step.out.name for step in plan.steps if step.encoding == FP8]
    assert encoded
    weightsmith.verify(tmp_path / "once")
    # The oracle: the tensors of the plain merge, quantised by numpy and ml_dtypes.
    plain, stored = tensors(tmp_path / "merged"), tensors(tmp_path / "once")
    for tensor, array in plain.items():
        if tensor not in encoded:
            assert (stored.pop(tensor).tobytes(), array.dtype) == (array.tobytes(), BF16), tensor
            continue
        rows = array.astype(np.float32)
        scales = (np.abs(rows).max(1, keepdims=True) / np.float32(448)).astype(BF16)
        codes = np.clip(rows / scales.astype(np.float32), -448, 448).astype(E4M3)
        assert (stored[f"{tensor}_scale"].shape, stored[f"{tensor}_scale"].dtype) == ((len(rows), 1), BF16)
        assert stored.pop(f"{tensor}_scale").tobytes() == scales.tobytes(), tensor
        assert stored.pop(tensor).tobytes() == codes.tobytes(), tensor
    assert not stored


@pytest.mark.long
@pytest.mark.parametrize("out_dtype", ["F16"])
def test_other_dtypes_are_rounded_before_they_are_quantised(out_dtype: str, tmp_path: Path) -> None:
    make(TIES, tmp_path / "once", quantize=FP8, out_dtype=DTYPES[out_dtype])
    make(TIES, tmp_path / "merged", out_dtype=DTYPES[out_dtype])
    make(passthrough(tmp_path / "merged"), tmp_path / "then", quantize=FP8)
    assert weight_files(tmp_path / "once") == weight_files(tmp_path / "then")
    assert config_of(tmp_path / "once")["dtype"] == DTYPES[out_dtype].torch


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"threads": 2, "max_memory_bytes": 176_000_000}, {"max_shard_bytes": 100_000}], ids=str
)
def test_threads_memory_and_shards_change_no_tensor(options: dict[str, Any], tmp_path: Path) -> None:
    make(TIES, tmp_path / "a", quantize=FP8)
    make(TIES, tmp_path / "b", quantize=FP8, **options)
    expected, actual = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert {name: array.tobytes() for name, array in actual.items()} == {name: a.tobytes() for name, a in expected.items()}


@pytest.mark.long
def test_a_plan_from_json_and_parts_of_it_give_the_same_bytes(tmp_path: Path) -> None:
    plan = make(FUSED, tmp_path / "once", quantize=FP8)
    again = plan_from_json(json.loads(json.dumps(weightsmith.plan(FUSED, quantize=FP8).to_json())))
    assert again.hash == plan.hash
    assert run(again, tmp_path / "parts", part=(1, 2), fsync=False) is None
    assert run(again, tmp_path / "parts", part=(2, 2), fsync=False) is None
    done = run(again, tmp_path / "parts", fsync=False)
    assert done is not None
    assert done.resumed == len(plan.steps)
    assert weight_files(tmp_path / "parts") == weight_files(tmp_path / "once")


def test_a_plan_whose_pieces_have_other_rows_is_refused() -> None:
    data = weightsmith.plan(FUSED, quantize=FP8).to_json()
    piece = next(step for step in data["steps"] if step.get("pieces") and step.get("encoding"))["pieces"][0]
    rows, cols = piece["shape"]
    piece["shape"] = [cols * 2, rows // 2]
    with pytest.raises(PlanError, match="stores whole rows, and its pieces have other rows"):
        run(plan_from_json(data), "nowhere")


# ---- which tensors


def test_what_is_stored_how(tmp_path: Path) -> None:
    plan = weightsmith.plan(VISION, quantize=FP8)
    encoded = {step.out.name for step in plan.steps if step.encoding == FP8}
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert encoded == {f"language_model.model.layers.{i}.{part}.weight" for i in range(2) for part in parts}
    why = stored_plain(plan)
    assert why.keys() == {step.out.name for step in plan.steps} - encoded
    assert why["language_model.lm_head.weight"] == "the head"
    assert why["language_model.model.embed_tokens.weight"] == "an embedding"
    assert why["multi_modal_projector.linear_1.weight"] == "it is outside the decoder's layers"
    assert why["vision_tower.encoder.layers.0.mlp.fc1.weight"] == "it is outside the decoder's layers"
    assert why["language_model.model.layers.0.input_layernorm.weight"] == "it is not a matrix of numbers"


def test_routers_stay_as_they_are_and_experts_of_their_own_do_not() -> None:
    plan = weightsmith.plan(MIXTURE, quantize=FP8)
    why = stored_plain(plan)
    assert why["model.layers.0.block_sparse_moe.gate.weight"] == "a router or gate"
    assert sum("experts" in step.out.name for step in plan.steps if step.encoding == FP8) == 2 * 2 * 3
    assert not any("experts" in name for name in why)


def test_a_merge_on_the_way_is_not_quantised_itself() -> None:
    """Router weights follow from its numbers, and experts are pieces of it."""
    plan = weightsmith.plan(MERGED_BASE, quantize=FP8)
    inner = [piece for step in plan.steps for piece in step.pieces] + [step for p in plan.products for step in p.steps]
    assert inner
    assert {step.encoding for step in inner} == {"plain"}


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DTYPES["BF16"], shape)


def match(entries: list[str], module: str) -> bool:
    """As vLLM and compressed-tensors match a module's name."""
    return any(re.match(e[3:], module) if e.startswith("re:") else e == module for e in entries)


def test_ignored_modules_match_under_the_names_that_loaders_give() -> None:
    attention = [spec(f"model.layers.{i}.self_attn.q_proj.weight", 8, 8) for i in range(2)]
    experts = [spec(f"model.layers.{i}.mlp.experts.0.up_proj.weight", 8, 8) for i in range(2)]
    plain = [
        spec("model.embed_tokens.weight", 64, 8),
        *(spec(f"model.layers.{i}.mlp.gate.weight", 4, 8) for i in range(2)),
        *(spec(f"model.layers.{i}.mlp.shared_expert_gate.weight", 1, 8) for i in range(2)),
        *(spec(f"model.layers.{i}.input_layernorm.weight", 8) for i in range(2)),
        spec("model.layers.2.mlp.experts.0.up_proj.weight", 8, 8),  # a prediction layer
        spec("model.layers.2.eh_proj.weight", 8, 16),
    ]
    structure = analyse([*attention, *experts, *plain], {"num_hidden_layers": 2})
    entries = ignored_modules(plain, [*attention, *experts], structure)
    for module in (
        "lm_head",
        "model.layers.1.mlp.gate",
        "language_model.layers.1.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.2.mlp.experts.0.up_proj",
        "model.layers.2.mtp_block.mlp.experts.0.up_proj",
        "embed_out",  # a tied head of another name
        "decoder",
    ):
        assert match(entries, module), module
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj", "model.layers.20.mlp.gate_proj"):
        assert not match(entries, module), module
    assert len(entries) == 5


def test_a_pattern_that_would_match_an_encoded_module_becomes_names() -> None:
    """A projection that one layer stores as a matrix of a single row."""
    encoded = [spec("model.layers.0.mlp.up_proj.weight", 8, 8), spec("model.layers.0.mlp.down_proj.weight", 8, 8)]
    plain = [spec("model.layers.1.mlp.up_proj.weight", 1, 8)]
    structure = analyse([*encoded, *plain, spec("model.layers.1.mlp.down_proj.weight", 8, 1)], {"num_hidden_layers": 2})
    entries = ignored_modules(plain, encoded, structure)
    assert match(entries, "model.layers.1.mlp.up_proj")
    assert not match(entries, "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("what", CASES.values(), ids=list(CASES))
def test_ignored_are_all_plain_matrices_and_no_encoded_one(what: Mapping[str, Any]) -> None:
    plan = weightsmith.plan(what, quantize=FP8)
    assert plan.config is not None
    entries = plan.config["quantization_config"]["ignore"]
    assert "lm_head" in entries
    for step in plan.steps:
        module = step.out.name.removesuffix(".weight")
        if step.encoding == FP8:
            assert not match(entries, module), module
        elif len(step.out.shape) in (2, 3) and "embed" not in module:
            assert match(entries, f"{module}.0.gate_proj" if len(step.out.shape) == 3 else module), module


def test_fused_experts_stay_as_they_are_with_a_warning() -> None:
    plan = weightsmith.plan(EXPERTS, quantize=FP8)
    assert [w.what for w in plan.warnings] == [
        "fused experts are stored as they are, not as fp8-dynamic, which takes matrices: 4 tensors"
    ]
    assert stored_plain(plan)["model.layers.0.mlp.experts.down_proj"] == "its experts are one tensor"
    entries = (plan.config or {})["quantization_config"]["ignore"]
    assert match(entries, "model.layers.0.mlp.experts.0.gate_proj")  # what vLLM asks for


# ---- errors


@pytest.mark.parametrize("what", [TIES, MIXTURE, SURGERY], ids=["merge", "moe", "surgery"])
def test_an_unknown_format(what: Mapping[str, Any]) -> None:
    text = problems(what, quantize="fp8-dynamc")
    assert "--quantize (quantize): 'fp8-dynamc' is unknown (did you mean 'fp8-dynamic'?)" in text
    assert text.endswith("Nothing was written. (1 problem)")


def test_settings_that_the_format_does_not_read() -> None:
    text = problems(TIES, quantize=FP8, bits=4.0, uniform=True)
    assert (
        "--bits (bits), --uniform (uniform): not a setting of fp8-dynamic, which reads --awq-scales (awq_scales), --calibration"
        in text
    )
    assert "--group-size (group_size): needs a quantised format that reads it" in problems(TIES, group_size=64)


def test_a_dtype_that_cannot_be_encoded() -> None:
    text = problems(TIES, quantize=FP8, out_dtype=DTYPES["F64"])
    assert "cannot be stored as fp8-dynamic: it is F64, not 16-bit or 32-bit floating point (and 13 more)" in text
    assert "--out-dtype bfloat16" in text


def write(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None) -> Path:
    inputs.write(folder, {name: np.ones(shape, BF16) for name, shape in shapes.items()}, config)
    return folder


def test_a_model_without_a_linear_weight(tmp_path: Path) -> None:
    shapes = {"wte.weight": (8, 4)} | {
        f"h.{i}.attn.{n}.weight": s for i in range(2) for n, s in (("c_attn", (4, 12)), ("c_proj", (4, 4)))
    }
    text = problems(passthrough(write(tmp_path / "gpt2", shapes, {"n_layer": 2})), quantize=FP8)
    assert "nothing can be stored as fp8-dynamic: no decoder of this model has the weight of a linear layer" in text
    assert "4 as they are: it is stored transposed (Conv1D) (h.0.attn.c_attn.weight)" in text


def test_a_model_whose_widths_do_not_fit(tmp_path: Path) -> None:
    shapes = {"model.norm.weight": (64,)} | {f"model.layers.{i}.mlp.up_proj.weight": (64, 64) for i in range(2)}
    text = problems(passthrough(write(tmp_path / "narrow", shapes, {"num_hidden_layers": 2})), quantize="fp8-block")
    assert "nothing can be stored as fp8-block: no linear weight of this model fits (its width 64 is not" in text
    assert "2 as they are: its width 64 is not a multiple of 128 (model.layers.0.mlp.up_proj.weight)" in text
    assert "Choose another format" in text
    assert "leave" not in text.lower()


def test_matrices_called_c_attn_are_linear_weights_where_they_are_not_transposed(tmp_path: Path) -> None:
    shapes = {"wte.weight": (8, 4)} | {
        f"h.{i}.attn.{n}.weight": s for i in range(2) for n, s in (("c_attn", (12, 4)), ("c_proj", (4, 4)))
    }
    plan = weightsmith.plan(passthrough(write(tmp_path / "bigcode", shapes, {"n_layer": 2})), quantize=FP8)
    assert sum(step.encoding == FP8 for step in plan.steps) == 4


def test_a_model_of_several_stacks(tmp_path: Path) -> None:
    shapes = {f"{side}.block.{i}.layer.0.wi.weight": (4, 4) for side in ("encoder", "decoder") for i in range(2)}
    text = problems(passthrough(write(tmp_path / "t5", shapes, {"num_layers": 2, "num_decoder_layers": 2})), quantize=FP8)
    assert (
        "only a decoder can be stored as fp8-dynamic, and this model has several stacks: decoder.block., encoder.block." in text
    )


def test_no_config_json(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (4, 4) for i in range(2)}
    text = problems(passthrough(write(tmp_path / "bare", shapes, None)), quantize=FP8)
    assert "the output has no config.json, in which readers of fp8-dynamic find what is quantised" in text


@pytest.mark.parametrize("command", ["merge", "prune"])
def test_an_input_of_codes(command: str, models: Path, tmp_path: Path) -> None:
    model = tmp_path / "gptq"
    loaded = {**tensors(models / "own"), "model.layers.0.mlp.codes.W_q": np.ones((4, 2), np.uint8)}
    write_checkpoint(model, loaded, {**config_of(models / "own"), "quantization_config": {"quant_method": "higgs", "bits": 4}})
    what = passthrough(model) if command == "merge" else {"model": str(model), "prune_experts": {"keep": [0, 1]}}
    assert "is quantised ('higgs', 4 bits" in problems(what, quantize=FP8)


def test_a_scale_that_the_model_has_already(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj.{n}": (4, 4) for i in range(2) for n in ("weight", "weight_scale")}
    with pytest.raises(weightsmith.WeightsmithError, match="two tensors have this name"):
        weightsmith.plan(passthrough(write(tmp_path / "scaled", shapes, {"num_hidden_layers": 2})), quantize=FP8)


@pytest.mark.parametrize("out_dtype", ["BF16", "F32"], ids=["copied", "cast"])
def test_an_infinity_that_is_only_copied_is_an_error(out_dtype: str, models: Path, tmp_path: Path) -> None:
    loaded = {name: array.copy() for name, array in tensors(models / "small").items()}
    loaded[Q_PROJ][3, 5] = np.inf
    inputs.write(tmp_path / "m", loaded, config_of(models / "small"))
    options = {"quantize": FP8, "out_dtype": DTYPES[out_dtype]}
    with pytest.raises(NonFinite, match=r"element \[3, 5\] is inf") as refused:
        make(passthrough(tmp_path / "m"), tmp_path / "out", **options)
    assert Q_PROJ in str(refused.value)
    make(passthrough(tmp_path / "m"), tmp_path / "out", **options, allow_nonfinite=True)
    make(passthrough(tmp_path / "m"), tmp_path / "plain", out_dtype=DTYPES[out_dtype])  # without codes it is copied


# ---- downstream


@pytest.mark.parametrize("damaged", [f"{UP_PROJ}_scale", UP_PROJ])
def test_verify_names_a_damaged_code_or_scale(damaged: str, tmp_path: Path) -> None:
    make(TIES, tmp_path / "out", quantize=FP8)
    manifest = json.loads((tmp_path / "out" / "weightsmith.json").read_text())
    assert manifest["quantised"] == FP8
    place = manifest["tensors"][damaged]
    with (tmp_path / "out" / place["file"]).open("r+b") as file:
        file.seek(place["offset"] + place["bytes"] - 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt) as caught:
        weightsmith.verify(tmp_path / "out")
    assert len(caught.value.finding.details) == 1
    assert f"tensor {damaged}: differs" in str(caught.value)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("last", [UP_PROJ, f"{UP_PROJ}_scale"], ids=["before the codes", "between codes and scales"])
def test_killed_around_the_tensors_of_one_weight(last: str, tmp_path: Path) -> None:
    make(TIES, tmp_path / "expected", quantize=FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads of libraries; the child uses none
        pid = os.fork()
    if pid == 0:
        finish = Staging.finish

        def dying(self: Staging, name: str, *args: Any) -> None:
            if name == last:
                os._exit(7)
            finish(self, name, *args)

        try:
            Staging.finish = dying  # type: ignore[method-assign]
            make(TIES, tmp_path / "out", quantize=FP8, threads=1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    merged = weightsmith.merge(TIES, tmp_path / "out", fsync=False, quantize=FP8)
    assert 0 < merged.resumed < len(merged.plan.steps)
    assert weight_files(tmp_path / "out") == weight_files(tmp_path / "expected")
    weightsmith.verify(tmp_path / "out")


def test_another_encoding_is_another_plan(tmp_path: Path) -> None:
    assert weightsmith.plan(TIES).hash != weightsmith.plan(TIES, quantize=FP8).hash


@pytest.mark.long
def test_distances_are_those_of_the_merge_and_the_card_says_that_it_is_quantised(tmp_path: Path) -> None:
    quantised = weightsmith.merge(TIES, tmp_path / "fp8", fsync=False, quantize=FP8)
    plain = weightsmith.merge(TIES, tmp_path / "plain", fsync=False)
    assert quantised.distance == plain.distance
    assert "\nQuantised: fp8-dynamic (14 of 21 tensors).\n" in (tmp_path / "fp8" / "README.md").read_text()
    assert "Quantised" not in (tmp_path / "plain" / "README.md").read_text()
    assert quantised.written_bytes == sum(array.nbytes for array in tensors(tmp_path / "fp8").values())


# ---- the command line


@pytest.fixture
def yml(models: Path) -> str:
    (models / "ties.yml").write_text(json.dumps(TIES))
    (models / "moe.yml").write_text(json.dumps(MIXTURE))
    (models / "tsv.yml").write_text(json.dumps(recipe("tsv_m", ("small_a", "small_b"), "small")))
    return "ties.yml"


@pytest.mark.long
def test_merge_on_the_command_line(cli: Cli, yml: str, tmp_path: Path) -> None:
    ran = cli("merge", yml, tmp_path / "out", "--quantize", FP8, "--quiet", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["bytes"] == sum(array.nbytes for array in tensors(tmp_path / "out").values())
    ran = cli("moe", "moe.yml", tmp_path / "mixture", "--quantize", FP8, "--quiet")
    assert ran.code == 0, ran.err
    assert tensors(tmp_path / "mixture")["model.layers.0.block_sparse_moe.experts.1.w2.weight"].dtype == E4M3
    ran = cli("merge", yml, tmp_path / "none", "--quantize", "fp8-dynamik")
    assert ran.code == 2
    assert "(did you mean 'fp8-dynamic'?)" in " ".join(ran.err.split())


@pytest.mark.slow
def test_the_plan_lists_what_is_stored_how_and_why(cli: Cli, yml: str) -> None:
    ran = cli("plan", yml, "--quantize", FP8)
    assert ran.code == 0, ran.err
    table = ran.out[ran.out.index("storage of tensors") :].split("\n\n")[0]
    lines = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    assert lines[1] == ["stored as", "tensors", "bytes", "reason", "first tensor"]
    assert ["as it is", "1"] in [line[:2] for line in lines if "the head" in line]
    assert [FP8, "14"] in [line[:2] for line in lines]
    summary = json.loads(cli("plan", yml, "--quantize", FP8, "--json").out)["summary"]
    assert {(s["encoding"], s["why"]): s["tensors"] for s in summary["stored"]} == {
        (FP8, ""): 14,
        ("plain", "an embedding"): 1,
        ("plain", "the head"): 1,
        ("plain", "it is not a matrix of numbers"): 4,
        ("plain", "it is outside the decoder's layers"): 1,
    }
    assert sum(s["bytes"] for s in summary["stored"]) == summary["bytes"]
    assert "storage of tensors" not in cli("plan", yml).out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ties.yml", "--quantize", FP8, "--explain", Q_PROJ), f"stored as fp8-dynamic: {Q_PROJ} F8_E4M3, {Q_PROJ}_scale BF16"),
        (("ties.yml", "--quantize", FP8, "--explain", "lm_head.weight"), "stored as it is: the head"),
        (("tsv.yml", "--explain", "lm_head.weight"), "averaged: not a linear weight"),
    ],
)
def test_explain_says_how_a_tensor_is_stored_and_merged(cli: Cli, yml: str, arguments: tuple[str, ...], says: str) -> None:
    ran = cli("plan", *arguments)
    assert says in ran.out.splitlines()


@pytest.mark.slow
def test_explain_says_nothing_of_it_where_there_is_nothing_to_say(cli: Cli, yml: str) -> None:
    assert "stored as" not in cli("plan", "ties.yml", "--explain", Q_PROJ).out
    assert "averaged" not in cli("plan", "tsv.yml", "--explain", Q_PROJ).out
    assert "averaged" not in cli("plan", "ties.yml", "--explain", "lm_head.weight").out


# ---- transformers

ZOO = (
    "llama",
    "llama-tied",
    "phi3-tied",
    "gpt-neox",
    "mixtral",
    "qwen3-moe",
    "deepseek-v3",
    "gpt-oss",
    "modernbert",
    "qwen2-vl",
    "llava",
)


LOADED = frozenset({"deepseek-v3", "gpt-oss", "llama", "llava", "qwen3-moe"})
"""Models that every run loads; the others are loaded in a sweep."""


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what transformers and compressed-tensors say of tiny models is not our concern
@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *(pytest.param(name, FP8, marks=() if name in LOADED else (pytest.mark.slow, pytest.mark.sweep)) for name in ZOO),
        ("llama", "int8"),
    ],
)
def test_transformers_loads_it(name: str, encoding: str, tmp_path: Path) -> None:
    """Loaded weights are codes times scales, and the logits near those of the plain merge."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    from tests import zoo

    model_class = getattr(transformers, zoo.ZOO[name][0])
    parts = [zoo.save(name, tmp_path / str(seed), seed) for seed in (1, 2)]
    what = recipe("linear", [str(part) for part in parts], None, {"weight": [0.5, 0.5]})
    plan = make(what, tmp_path / "quantised", quantize=encoding)
    make(what, tmp_path / "plain")
    # The oracle of the weights: the plain merge, with each encoded tensor replaced by its codes times its scales.
    stored = tensors(tmp_path / "quantised")
    decoded = {name: array for name, array in stored.items() if not name.endswith("_scale")}
    for step in plan.steps:
        if step.encoding != "plain":
            scale = stored[f"{step.out.name}_scale"].astype(np.float32)
            decoded[step.out.name] = (decoded[step.out.name].astype(np.float32) * scale).astype(BF16)
    inputs.write(tmp_path / "decoded", decoded, config_of(tmp_path / "plain"))

    def load(folder: str, **options: Any) -> Any:
        model, info = model_class.from_pretrained(tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True, **options)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        return model.eval()

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            predicted: torch.Tensor = model(input_ids=torch.arange(24)[None] * 7 % 64).logits.float()
        return predicted

    expected, exact, quantised = load("plain"), load("decoded"), load("quantised")
    if encoding == FP8:
        dequantised = load("quantised", quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
        for key, value in exact.state_dict().items():
            assert torch.equal(dequantised.state_dict()[key], value), key
        assert torch.equal(logits(dequantised), logits(exact))
    # As it is meant to run, activations are rounded too.
    difference = float((logits(quantised) - logits(expected)).norm() / logits(expected).norm())
    print(f"{name}: logits differ by {difference:.4f} of their norm")
    assert 0 < difference < 0.05
