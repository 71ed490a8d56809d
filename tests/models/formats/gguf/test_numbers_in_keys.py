"""Numbers of tensors that a GGUF file has in its keys: those of Apertus' activation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import weightsmith
from tests import zoo
from tests.fake_hub import COMMIT, serve
from tests.fork_help import forked_cli
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._base.tensors import DTYPES
from weightsmith._models.formats.gguf.header import read_gguf_header

BF16 = DTYPES["BF16"].numpy
KEYS = ("alpha_n", "alpha_p", "beta", "eps")


def apertus(folder: Path, seed: int, **changes: Any) -> Path:
    source = zoo.save("apertus", folder, seed, **{"vocab_size": 262, **changes})
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (source / name).write_bytes(content)
    return source


def numbers(path: Path) -> dict[str, list[float]]:
    keys = read_gguf_header(path).keys
    return {name: keys[f"xielu.{name}"].tolist() for name in KEYS}


def of_tensors(folder: Path) -> dict[str, list[float]]:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        names = {name: [f"model.layers.{i}.mlp.act_fn.{name}" for i in range(2)] for name in KEYS}
        return {name: [checkpoint.read(one).item() for one in ones] for name, ones in names.items()}


def quantize(source: Path, out: Path, name: str = "f32") -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False)
    return out / "model.gguf"


@pytest.mark.long
def test_keys_have_the_numbers_of_the_activation(tmp_path: Path) -> None:
    source = apertus(tmp_path / "m", 1)
    path = quantize(source, tmp_path / "q", "q8_0")
    assert numbers(path) == of_tensors(source)
    assert not any("act_fn" in name or "xielu" in name for name in stored(path))
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(source)}]}, quantize="gguf-f32")
    left_out = {dropped.tensor for dropped in plan.dropped}
    assert left_out == {f"model.layers.{i}.mlp.act_fn.{name}" for i in range(2) for name in KEYS}
    with weightsmith.open_checkpoint(path) as back:
        name = "model.layers.1.mlp.act_fn.alpha_p"
        assert back.specs[name].shape == (1,)
        assert back.specs[name.replace("alpha_p", "beta")].shape == ()
        assert back.natural_dtype(name).name == "BF16"
    report = weightsmith.inspect(path)
    assert "F32" in str(report)


@pytest.mark.long
@pytest.mark.parametrize("method", ["linear", "dare_ties"])
def test_a_merge_straight_to_gguf_has_the_merged_numbers(method: str, tmp_path: Path) -> None:
    folders = [str(apertus(tmp_path / name, seed)) for seed, name in enumerate(("base", "a", "b"))]
    models = [{"model": folder, "parameters": {"weight": 0.5, "density": 0.4}} for folder in folders[1:]]
    recipe: dict[str, Any] = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method == "linear":
        models[0]["parameters"] = models[1]["parameters"] = {"weight": 0.5}
    else:
        recipe["base_model"] = folders[0]
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    weightsmith.merge(recipe, tmp_path / "once", quantize="gguf-q8_0", progress=False)
    merged = of_tensors(tmp_path / "merged")
    assert merged["alpha_p"] != of_tensors(tmp_path / "a")["alpha_p"]
    assert numbers(tmp_path / "once" / "model.gguf") == merged
    assert numbers(quantize(tmp_path / "merged", tmp_path / "twice")) == merged
    chained = {**recipe, "models": [{"model": recipe, "parameters": models[0]["parameters"]}, models[1]]}
    weightsmith.merge(chained, tmp_path / "chained", progress=False)
    weightsmith.merge(chained, tmp_path / "chained-once", quantize="gguf-q8_0", progress=False)
    assert numbers(tmp_path / "chained-once" / "model.gguf") == of_tensors(tmp_path / "chained")


def test_a_merge_that_looks_at_whole_models_first_is_refused(tmp_path: Path) -> None:
    folders = [str(apertus(tmp_path / name, seed)) for seed, name in enumerate(("base", "a", "b"))]
    models = [{"model": folder, "parameters": {"weight": 0.5, "density": 0.4}} for folder in folders[1:]]
    recipe = {"merge_method": "ties", "base_model": folders[0], "models": models, "parameters": {"scope": "model"}}
    with pytest.raises(PlanError, match=r"act_fn\.\w+: its number belongs in the header of the file") as caught:
        weightsmith.plan(recipe, quantize="gguf-q8_0")
    assert "Merge without --quantize" in str(caught.value)
    inner = {"merge_method": "linear", "models": [{"model": recipe, "parameters": {"weight": 1.0}}]}
    with pytest.raises(PlanError, match="its number belongs in the header of the file"):
        weightsmith.plan(inner, quantize="gguf-q8_0")


@pytest.mark.long
def test_models_on_the_hub_are_asked_for_these_numbers_alone(tmp_path: Path) -> None:
    source = apertus(tmp_path / "m", 1, hidden_size=256, intermediate_size=1024)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with serve({("org/apertus", COMMIT): files}) as hub:
        (tmp_path / "home").mkdir()
        recipe = tmp_path / "recipe.yml"
        recipe.write_text("merge_method: passthrough\nmodels: [{model: org/apertus}]\n")
        planned = forked_cli("plan", recipe, "--quantize", "gguf-f32", "--json", env=hub.environment(tmp_path / "home"))
        assert planned.code == 0, planned.err
        assert "model.safetensors" not in hub.whole()
        assert hub.sent < len(files["model.safetensors"]) / 2
        (tmp_path / "plan.json").write_text(planned.out)
        done = forked_cli("run", tmp_path / "plan.json", tmp_path / "out", env=hub.environment(tmp_path / "home"))
        assert done.code == 0, done.err
        assert "model.safetensors" in hub.whole()
    assert numbers(tmp_path / "out" / "model.gguf") == of_tensors(source)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("beta", None, r"layers\.1\.mlp\.act_fn\.beta: the model has no such tensor, and llama.cpp needs its number in xielu"),
        ("alpha_n", np.ones(2, BF16), r"act_fn\.alpha_n: its shape is \[2\], and llama.cpp has one number for it"),
        ("eps", np.array(np.nan, BF16), r"act_fn\.eps: its number is nan"),
    ],
)
def test_numbers_that_are_none(name: str, value: Any, words: str, tmp_path: Path) -> None:
    source = apertus(tmp_path / "m", 1)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    full = f"model.layers.1.mlp.act_fn.{name}"
    tensors = {one: values for one, values in tensors.items() if one != full} | ({} if value is None else {full: value})
    write_checkpoint(source, tensors, config)
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


@pytest.mark.parametrize(("changes"), [{"hidden_act": "silu"}, {"qk_norm": False}, {"post_norm": True}, {"mlp_bias": True}])
def test_settings_of_apertus_that_llama_cpp_does_not_have(changes: dict[str, Any], tmp_path: Path) -> None:
    source = apertus(tmp_path / "m", 1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(PlanError, match=f"{next(iter(changes))} is .*, and llama.cpp takes"):
        quantize(source, tmp_path / "q")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0.5, 0.25, 0.5], r"xielu\.beta is .*, not a number for each of 2 layers"),
        ([1, 2], r"xielu\.beta is .*, not a number for each of 2 layers"),
        ([0.5, float("inf")], r"xielu\.beta is .*, and one of them is not finite"),
        (None, r"xielu\.beta is missing"),
        (0.5, ""),
    ],
)
def test_keys_of_a_file(value: Any, words: str, tmp_path: Path) -> None:
    path = quantize(apertus(tmp_path / "m", 1), tmp_path / "q")
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "apertus")
    for name, field in keys.items():
        if name in ("general.architecture", "xielu.beta"):
            continue
        kind = reader.fields[name].types[0]
        sub = reader.fields[name].types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field, kind, sub)
    if isinstance(value, list):
        writer.add_array("xielu.beta", value)
    elif value is not None:
        writer.add_float32("xielu.beta", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    if words:
        with pytest.raises(FormatError, match=words):
            weightsmith.open_checkpoint(tmp_path / "theirs.gguf")
    else:
        assert of_tensors(tmp_path / "theirs.gguf")["beta"] == [0.5, 0.5]
