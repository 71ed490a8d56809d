"""`weightsmith quantize` and `dequantize`: one model in, one model out, through the same engine and store as a merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError

__all__ = ["cli"]

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "dtype": "bfloat16"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bfloat16 model with two layers, in the current folder as `m`."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 32), "model.norm.weight": (32,)}
    shapes |= {f"model.layers.{i}.{part}.weight": (32, 32) for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")}
    tensors = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    write_checkpoint(tmp_path / "m", tensors, CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "m"


def tensors_of(folder: str | Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as opened:
        return {name: opened.read(name) for name in opened.specs}


def config_of(folder: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", ["w4a16", "gguf-q4_k_m"])
@pytest.mark.parametrize("text", [(), ("--calibration", "none")])
def test_rows_without_a_calibration_text_are_an_error(name: str, text: tuple[str, ...], model: Path, cli: Cli) -> None:
    ran = cli("quantize", "m", "q", "--format", name, "--calibration-rows", "5", *text)
    assert ran.code == 1
    assert "--calibration-rows (calibration_rows): no calibration text is read" in ran.err


@pytest.mark.slow
def test_a_model_is_quantised_and_dequantised(model: Path, cli: Cli) -> None:
    ran = cli("quantize", "m", "q", "--format", "fp8-dynamic", "--quiet")
    assert (ran.code, ran.err) == (0, "")
    weightsmith.merge(
        {"merge_method": "passthrough", "models": [{"model": "m"}]}, "merged", quantize="fp8-dynamic", progress=False
    )
    assert Path("q/model.safetensors").read_bytes() == Path("merged/model.safetensors").read_bytes()
    manifest = json.loads(Path("q/weightsmith.json").read_text())
    assert (manifest["merge_method"], manifest["quantised"]) == ("quantize", "fp8-dynamic")
    assert "Quantised with weightsmith" in Path("q/README.md").read_text()

    assert cli("dequantize", "q", "plain", "--quiet").code == 0
    assert config_of("plain") == config_of("m")
    expected = tensors_of("q")
    for name, array in tensors_of("plain").items():
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), name)
        assert array.dtype == tensors_of("m")[name].dtype


def test_the_dtype_of_plain_weights(model: Path, cli: Cli) -> None:
    assert cli("dequantize", "m", "plain", "--out-dtype", "float32", "--quiet").code == 0
    assert {array.dtype.name for array in tensors_of("plain").values()} == {"float32"}
    assert config_of("plain")["dtype"] == "float32"


def test_the_card_names_the_relation_to_the_model(model: Path) -> None:
    (model / "README.md").write_text("---\nbase_model: org/base\n---\n")
    weightsmith.quantize("m", "q", "fp8-dynamic", progress=False)
    card = Path("q/README.md").read_text()
    assert "base_model_relation: quantized" in card
    assert "- merge" not in card
    weightsmith.dequantize("m", "plain", progress=False)
    assert "relation" not in Path("plain/README.md").read_text()


def test_a_model_that_is_quantised_already_is_dequantised_first(model: Path) -> None:
    weightsmith.quantize("m", "q", "fp8-dynamic", progress=False)
    again = weightsmith.quantize("q", "again", "int8", progress=False)
    assert "quantised already (codes with scales): its weights are dequantised, then stored as int8" in str(again.warnings[0])
    weightsmith.dequantize("q", "plain", progress=False)
    weightsmith.quantize("plain", "from plain", "int8", progress=False)
    assert Path("again/model.safetensors").read_bytes() == Path("from plain/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_plan_of_it_writes_nothing_and_runs_elsewhere(model: Path, cli: Cli) -> None:
    ran = cli("quantize", "m", "--format", "fp8-dynamic", "--plan", "--json")
    assert ran.code == 0
    assert not Path("q").exists()
    Path("plan.json").write_text(ran.out)
    assert cli("run", "plan.json", "q", "--quiet").code == 0
    weightsmith.quantize("m", "direct", "fp8-dynamic", progress=False)
    assert Path("q/model.safetensors").read_bytes() == Path("direct/model.safetensors").read_bytes()


def test_the_list_of_formats(cli: Cli) -> None:
    ran = cli("quantize", "--list")
    assert ran.code == 0
    assert "fp8-dynamic" in ran.out
    assert "vLLM" in ran.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("quantize", "m", "q", "--format", "fp8-dynamc"), "(did you mean 'fp8-dynamic'?)"),
        (
            ("quantize", "m", "q", "--format", "fp8-dynamic", "--bits", "4"),
            "--bits (bits): not a setting of fp8-dynamic, which reads --awq-scales (awq_scales), --calibration",
        ),
        (("quantize", "m", "q"), "--format"),
        (("quantize", "m", "--format", "fp8-dynamic"), "name the folder to create"),
        (("quantize", "n", "q", "--format", "fp8-dynamic"), "no such folder"),
        (("dequantize", "n", "q"), "no such folder"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_error(arguments: tuple[str, ...], text: str, model: Path, cli: Cli) -> None:
    ran = cli(*arguments)
    assert ran.code != 0
    assert text in " ".join(ran.err.replace("│", " ").split())
    assert "Traceback" not in ran.err
    assert sorted(path.name for path in Path().iterdir()) == ["m"]


def test_an_unknown_format_in_python(model: Path) -> None:
    known = r"--format \(format\): must be one of fp8-dynamic, .*gptq-4bit, \d+ others \(weightsmith quantize --list\), not 'x'"
    with pytest.raises(PlanError, match="'fp8' has several variants: write one of fp8-dynamic, fp8-static, fp8-block"):
        weightsmith.quantize("m", "q", "fp8")
    near = r"'gguf-Q4_K_M' is unknown \(did you mean 'gguf-q4_k_m'\?\); weightsmith quantize --list lists all \d+"
    with pytest.raises(PlanError, match=near):
        weightsmith.quantize("m", "q", "gguf-Q4_K_M")
    with pytest.raises(PlanError, match="'bnb-4bit' is unknown: transformers quantises to it when it loads a model"):
        weightsmith.quantize("m", "q", "bnb-4bit")
    with pytest.raises(PlanError, match=known):
        weightsmith.quantize("m", "q", "x")


def test_a_model_that_cannot_be_opened_is_named_as_the_argument(model: Path) -> None:
    Path("empty").mkdir()
    for make in (
        lambda: weightsmith.dequantize("empty", "out"),
        lambda: weightsmith.quantize("empty", "out", "int8"),
        lambda: weightsmith.statistics("empty", "built-in", "out"),
        lambda: weightsmith.transplant_tokenizer("empty", "m", "out"),
    ):
        with pytest.raises(PlanError, match=r"^error\[not-found\]: MODEL: empty: no weights"):
            make()
    with pytest.raises(PlanError, match=r"^error\[syntax\]: MODEL: cannot read the model 'm[+]': no adapter"):
        weightsmith.dequantize("m+", "out")


def test_an_option_under_another_name_in_python(model: Path) -> None:
    with pytest.raises(TypeError, match=r"dequantize\(\) has no option 'dtype' \(did you mean 'out_dtype'\?\)"):
        weightsmith.dequantize("m", "q", dtype="float32")
    with pytest.raises(TypeError, match=r"quantize\(\) has no option 'quantize' \(did you mean 'format'\?\)"):
        weightsmith.quantize("m", "q", "int8", quantize="fp8-dynamic")
    assert not Path("q").exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan", ("m.yml",)),
        ("plan_quantize", ("m", "int8")),
        ("plan_dequantize", ("m",)),
        ("plan_extract_lora", ("m", "m")),
        ("plan_convert_lora", ("m",)),
        ("plan_transplant_tokenizer", ("m", "m")),
    ],
)
def test_an_option_of_runs_is_none_of_plans(name: str, arguments: tuple[str, ...]) -> None:
    said = rf"^{name}\(\) has no option 'threads': it is an option of runs; leave it out of the plan$"
    with pytest.raises(TypeError, match=said):
        getattr(weightsmith, name)(*arguments, threads=2)
    with pytest.raises(TypeError, match=rf"^{name}\(\) has no option 'nonsense'$"):
        getattr(weightsmith, name)(*arguments, nonsense=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": None}, r"--format \(format\): must be a string, not None"),
        ({"format": ["w4a16"]}, r"--format \(format\): must be a string, not \['w4a16'\]"),
        ({"bits": "4"}, r"--bits \(bits\): must be a number, not '4'"),
        ({"bits": True}, r"--bits \(bits\): must be a number, not True"),
        ({"calibration": 5}, r"--calibration \(calibration\): must be a string, not 5"),
        ({"calibration_rows": 2.5}, r"--calibration-rows \(calibration_rows\): must be a whole number, not 2.5"),
        ({"uniform": None}, r"--uniform \(uniform\): must be True or False, not None"),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_one_clear_error(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        weightsmith.quantize(model, "q", **{"format": "exl2", **options})
    if "format" not in options:
        with pytest.raises(PlanError, match=message):
            weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "m"}]}, quantize="exl2", **options)
    assert not Path("q").exists()


def test_a_format_of_a_merge_is_a_string_or_none(model: Path) -> None:
    recipe: dict[str, Any] = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    with pytest.raises(PlanError, match=r"--quantize \(quantize\): must be a string, not \['w4a16'\]"):
        weightsmith.plan(recipe, quantize=["w4a16"])  # type: ignore[arg-type]
    assert weightsmith.plan(recipe, quantize=None).encodings == ()
