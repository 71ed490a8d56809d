"""Pipelines of diffusers: each part is merged, and their loader takes the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.plan_help import plan, warnings
from weightsmith._base.errors import FormatError, NotFound, PlanError
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._plans import plan_from_json

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
WEIGHTS = {
    UNET: {f"down_blocks.{i}.resnets.0.conv1.weight": (4, 4) for i in range(3)} | {"conv_in.weight": (4, 2)},
    TEXT: {f"text_model.encoder.layers.{i}.mlp.fc1.weight": (6, 4) for i in range(2)},
    "vae/diffusion_pytorch_model.safetensors": {"encoder.conv_in.weight": (2, 3, 1, 1), "decoder.conv_in.weight": (3, 2, 1, 1)},
}
CONFIGS = {
    "unet": {"_class_name": "UNet2DConditionModel"},
    "vae": {"_class_name": "AutoencoderKL"},
    "text_encoder": {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "dtype": "float32"},
}


def pipeline(folder: Path, seed: int, *without: str) -> str:
    """A tiny pipeline. without: parts whose folders are missing."""
    random = np.random.default_rng(seed)
    for name, shapes in WEIGHTS.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        tensors = {tensor: random.standard_normal(shape).astype(np.float32) for tensor, shape in shapes.items()}
        save_file(tensors, path, {"format": "pt"})
        (path.parent / "config.json").write_text(json.dumps(CONFIGS[path.parent.name]))
    for name in ("scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt", "model_index.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(INDEX if name == "model_index.json" else {"of": seed}))
    for part in without:
        shutil.rmtree(folder / part)
    return str(folder)


def pair(tmp_path: Path) -> tuple[str, str]:
    return pipeline(tmp_path / "a", 1), pipeline(tmp_path / "b", 2)


def tensors_of(folder: str | Path) -> dict[str, np.ndarray]:
    files = sorted(Path(folder).glob("*/*.safetensors"))
    return {f"{file.parent.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models], **options}


def test_each_part_is_merged_by_its_own_values(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    weights = [{"filter": "unet/", "value": 0.25}, {"filter": "text_encoder/", "value": 0.5}, {"value": 0}]
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": a,
        "models": [{"model": b, "parameters": {"weight": weights}}],
    }
    out = weightsmith.merge(recipe, tmp_path / "out", fsync=False).out
    share = {"unet": 0.25, "text_encoder": 0.5, "vae": 0.0}
    first, second, merged = tensors_of(a), tensors_of(b), tensors_of(out)
    assert merged.keys() == first.keys()
    for name, tensor in merged.items():
        part = share[name.partition("/")[0]]
        np.testing.assert_allclose(tensor, first[name] * (1 - part) + second[name] * part, atol=1e-6)
    assert all((out / name).is_file() for name in WEIGHTS)
    for name in ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json", "unet/config.json"):
        assert (out / name).read_bytes() == (Path(a) / name).read_bytes(), name
    weightsmith.verify(out)


def test_the_parts_are_the_modules(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    taken = [{"model": b, "parameters": {"weight": 1}}]
    recipe = {"merge_method": "linear", "modules": {"unet": {"models": linear(a, b)["models"]}, "vae": {"models": taken}}}
    out = weightsmith.merge(recipe, tmp_path / "out", fsync=False).out
    first, second, merged = tensors_of(a), tensors_of(b), tensors_of(out)
    for name, tensor in merged.items():
        expected = {"vae": second[name], "text_encoder": first[name]}.get(
            name.partition("/")[0], (first[name] + second[name]) / 2
        )
        np.testing.assert_allclose(tensor, expected, atol=1e-7)


def test_a_gradient_runs_over_the_layers_of_each_part(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    recipe = {"merge_method": "task_arithmetic", "base_model": a, "models": [{"model": b}], "parameters": {"weight": [0, 1]}}
    out = weightsmith.merge(recipe, tmp_path / "out", fsync=False).out
    first, second, merged = tensors_of(a), tensors_of(b), tensors_of(out)
    for name, depth in {
        "unet/down_blocks.1.resnets.0.conv1.weight": 0.5,
        "text_encoder/text_model.encoder.layers.1.mlp.fc1.weight": 1,
    }.items():
        np.testing.assert_allclose(merged[name], first[name] * (1 - depth) + second[name] * depth, atol=1e-6)


def test_shards_have_an_index_in_the_folder_of_each_part(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    out = weightsmith.merge(linear(a, b), tmp_path / "out", max_shard_bytes=100, fsync=False).out
    index = json.loads((out / f"{UNET}.index.json").read_text())
    assert index["weight_map"].keys() == WEIGHTS[UNET].keys()
    assert index["metadata"]["total_size"] == sum(4 * a * b for a, b in WEIGHTS[UNET].values())
    assert {path.name for path in (out / "unet").glob("*.safetensors")} == set(index["weight_map"].values())
    whole = weightsmith.merge(linear(a, b), tmp_path / "whole", fsync=False).out
    with open_checkpoint(out) as parts, open_checkpoint(whole) as one:
        assert [*parts.specs] == [*one.specs]
        assert all(np.array_equal(parts[name], one[name]) for name in one)
    weightsmith.verify(out)


def test_config_json_of_a_part_says_the_dtype_and_no_quantisation(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    out = weightsmith.merge(linear(a, b, out_dtype="bfloat16"), tmp_path / "out", fsync=False).out
    assert json.loads((out / "text_encoder/config.json").read_text()) == {**CONFIGS["text_encoder"], "dtype": "bfloat16"}
    assert json.loads((out / "unet/config.json").read_text()) == CONFIGS["unet"], "classes of diffusers take no dtype"
    save_file(
        {"w.weight": np.ones((4, 4), np.float32).astype("float8_e4m3fn"), "w.weight_scale_inv": np.ones((1, 1), np.float32)},
        Path(a) / UNET,
    )
    settings = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
    (Path(a) / "unet/config.json").write_text(json.dumps({**CONFIGS["unet"], "quantization_config": settings}))
    out = weightsmith.dequantize(a, tmp_path / "plain", fsync=False).out
    assert json.loads((out / "unet/config.json").read_text()) == CONFIGS["unet"]
    assert tensors_of(out)["unet/w.weight"].dtype == "bfloat16"


def test_a_part_whose_codes_are_not_read_is_refused(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    settings = {"quant_method": "unheard_of"}
    (Path(a) / "unet/config.json").write_text(json.dumps({**CONFIGS["unet"], "quantization_config": settings}))
    assert any("unheard_of" in str(problem) for problem in plan_help.problems(linear(a, b)))


def test_parts_that_only_one_model_has(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1), pipeline(tmp_path / "b", 2, "text_encoder")
    out = weightsmith.merge(linear(b, a), tmp_path / "out", fsync=False).out
    assert np.array_equal(
        load_file(out / TEXT)["text_model.encoder.layers.0.mlp.fc1.weight"],
        tensors_of(a)["text_encoder/text_model.encoder.layers.0.mlp.fc1.weight"],
    )
    c = pipeline(tmp_path / "c", 3)
    index = {**INDEX, "image_encoder": ["transformers", "CLIPVisionModel"]}
    shutil.copytree(Path(c) / "vae", Path(c) / "image_encoder")
    (Path(c) / "model_index.json").write_text(json.dumps(index))
    p = plan(linear(a, c))
    assert not any("image_encoder" in step.out.name for step in p.steps)
    assert any("left out with its weights: image_encoder" in text for text in warnings(p))


def test_a_part_that_the_first_model_names_and_lacks_is_copied(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1, "vae"), pipeline(tmp_path / "b", 2)
    with_settings(b, "vae/config.json", scaling_factor=0.5)
    with_settings(b, "text_encoder/config.json", hidden_act="b")
    p = plan(linear(a, b, out_dtype="float16"))
    assert not any("left out" in text for text in warnings(p))
    assert any("vae" in text and "copied from" in text for text in warnings(p))
    assert not any(d.tensor.startswith("vae/") for d in p.dropped)
    again = plan_from_json(json.loads(json.dumps(p.to_json())))
    assert again.layout == p.layout
    out = weightsmith.merge(linear(a, b, out_dtype="float16"), tmp_path / "out", fsync=False).out
    first, second, merged = tensors_of(a), tensors_of(b), tensors_of(out)
    assert merged.keys() == second.keys()
    for name, tensor in merged.items():
        whole = second[name] if name.startswith("vae/") else (first[name] + second[name]) / 2
        np.testing.assert_allclose(tensor, whole, atol=2e-3)
    assert json.loads((out / "vae/config.json").read_text()) == {**CONFIGS["vae"], "scaling_factor": 0.5}
    assert (out / "vae/diffusion_pytorch_model.safetensors").is_file()
    weightsmith.verify(out)


def test_of_several_models_with_a_part_that_the_first_lacks_one_gives_it(tmp_path: Path) -> None:
    a, b, c = pipeline(tmp_path / "a", 1, "vae"), pipeline(tmp_path / "b", 2), pipeline(tmp_path / "c", 3)
    p = plan(linear(a, b, c))
    assert {d.model for d in p.dropped} == {2}
    assert all(d.tensor.startswith("vae/") for d in p.dropped)
    assert all([r.model for r in step.reads] == [1] for step in p.steps if step.out.name.startswith("vae/"))


def test_a_part_that_no_model_has_is_warned_of(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1, "vae"), pipeline(tmp_path / "b", 2, "vae")
    assert sum("no model has the part" in text for text in warnings(plan(linear(a, b)))) == 1
    assert any("no model has the part vae" in text for text in warnings(plan(linear(a, b))))


def test_the_first_pipeline_gives_the_files_whatever_layers_others_have(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1, "text_encoder"), pipeline(tmp_path / "b", 2)
    p = plan(linear(a, b))
    assert p.donor == 0
    assert any(step.out.name.startswith("text_encoder/") for step in p.steps)
    index = {key: value for key, value in INDEX.items() if key != "text_encoder"}
    (Path(a) / "model_index.json").write_text(json.dumps(index))
    p = plan(linear(a, b))
    assert p.donor == 0
    assert any("left out with its weights: text_encoder" in text for text in warnings(p))


def test_weights_beside_the_parts_are_another_copy(tmp_path: Path) -> None:
    """As in the repositories of Stable Diffusion, which hold the single file, too."""
    a, b = pair(tmp_path)
    save_file({"model.diffusion_model.out.weight": np.ones((2, 2), np.float32)}, Path(a) / "v1-5.safetensors")
    with open_checkpoint(a) as model:
        assert model.ignored == ("v1-5.safetensors",)
        assert any("v1-5.safetensors" in note.what for note in model.notes)
        assert all("/" in name for name in model)
    out = weightsmith.merge(linear(a, b), tmp_path / "out", fsync=False).out
    assert not [*out.glob("*.safetensors")]


def test_a_plan_from_json_writes_the_same_files(tmp_path: Path) -> None:
    p = plan(linear(*pair(tmp_path)))
    again = plan_from_json(json.loads(json.dumps(p.to_json())))
    assert again.layout == p.layout
    naming = p.to_json()["naming"]
    for parts in ({"../x": "model"}, {"unet": "../model"}):
        with pytest.raises(FormatError):
            plan_from_json({**p.to_json(), "naming": {**naming, "parts": parts}})


@pytest.mark.long
def test_a_merge_of_pipelines_is_a_model_of_another(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    inner = {**linear(a, b), "dtype": "float16"}
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in (inner, a)]}
    out = weightsmith.merge(recipe, tmp_path / "out", fsync=False).out
    first, second, merged = tensors_of(a), tensors_of(b), tensors_of(out)
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor, first[name] * 0.75 + second[name] * 0.25, atol=2e-3)
    assert json.loads((out / "text_encoder/config.json").read_text())["dtype"] == "float32"


def test_a_pipeline_is_not_quantised_as_one_model(tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    with pytest.raises(PlanError, match="a pipeline of several models"):
        weightsmith.quantize(a, tmp_path / "out", format="fp8-dynamic")
    with pytest.raises(
        PlanError, match="ComfyUI-GGUF does not load"
    ):  # it would take the pipeline's UNet, if it knew its class
        weightsmith.quantize(a, tmp_path / "out", format="gguf-q8_0")


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../b"])
def test_a_part_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    (Path(a) / "model_index.json").write_text(json.dumps({**INDEX, name: ["diffusers", "X"]}))
    with pytest.raises(FormatError, match="no subfolder of the model"):
        open_checkpoint(a)


@pytest.mark.parametrize("name", ["README.md", "recipe.yml", "weightsmith.json", "unet/sub", "UNET", "1_unet", "unet-2"])
def test_a_part_in_the_way_of_another_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    (Path(a) / "model_index.json").write_text(json.dumps({**INDEX, name: ["diffusers", "X"]}))
    with pytest.raises(FormatError, match=r"parts have names of letters|differ only in case") as error:
        open_checkpoint(a)
    assert name in str(error.value)


def test_a_pipeline_without_weights_names_its_parts(tmp_path: Path) -> None:
    a = pipeline(tmp_path / "a", 1, "unet", "vae", "text_encoder")
    with pytest.raises(NotFound, match=r"no part that model_index\.json names has weights"):
        open_checkpoint(a)


@pytest.mark.parametrize("name", ["diffusion_flax_model.msgpack", "openvino_model.xml", "model.pb"])
def test_a_part_whose_weights_are_in_no_format_that_is_read_is_refused(name: str, tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    (Path(a) / UNET).rename(Path(a) / "unet" / name)
    with pytest.raises(NotFound, match="no weight file with a usual name") as error:
        open_checkpoint(a)
    assert "/unet" in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "CLIPTokenizer", "T5TokenizerFast", "DDIMScheduler"])
def test_a_part_without_weights_may_have_config_json(kind: str, tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    (Path(a) / "extra").mkdir()
    (Path(a) / "extra/config.json").write_text('{"_class_name": "X", "model_type": "clip"}')
    (Path(a) / "model_index.json").write_text(json.dumps({**INDEX, "extra": ["library", kind]}))
    with open_checkpoint(a) as model:
        assert model.subfolders == ("text_encoder", "unet", "vae")
        assert "extra/config.json" in model.files


@pytest.mark.parametrize("index", [{}, {"files": ["model.safetensors"]}, {"unet": ["diffusers", "X"]}, []])
def test_model_index_json_without_a_class_makes_no_pipeline(index: object, tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "unet").mkdir()
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "unet/model.safetensors")
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as model:
        assert [*model] == ["w"]


@pytest.mark.parametrize("text", ["", '{"_class_name": "StableDiffusionPipeline", ', "\ufeff{}"])
def test_a_damaged_model_index_json_is_an_error(text: str, tmp_path: Path) -> None:
    """Not another copy of the weights, which lies beside it in the repositories of Stable Diffusion."""
    a, _ = pair(tmp_path)
    save_file({"model.diffusion_model.out.weight": np.ones((2, 2), np.float32)}, Path(a) / "v1-5.safetensors")
    (Path(a) / "model_index.json").write_text(text)
    with pytest.raises(FormatError, match=r"model_index\.json, which names the parts of the pipeline, is not JSON") as error:
        open_checkpoint(a)
    assert error.value.finding.where == a


def test_all_models_of_several_control_nets_are_parts(tmp_path: Path) -> None:
    """As MultiControlNetModel of diffusers stores them. model_index.json names the first folder alone."""
    a, b = pair(tmp_path)
    for model in (a, b):
        for folder in ("controlnet", "controlnet_1", "controlnet_2", "controlnet_old"):
            shutil.copytree(Path(model) / "unet", Path(model) / folder)
        nets = ["diffusers.pipelines.controlnet.multicontrolnet", "MultiControlNetModel"]
        (Path(model) / "model_index.json").write_text(json.dumps({**INDEX, "controlnet": nets}))
    merged = tensors_of(weightsmith.merge(linear(a, b), tmp_path / "out", fsync=False).out)
    for part in ("controlnet", "controlnet_1", "controlnet_2"):
        np.testing.assert_array_equal(merged[f"{part}/conv_in.weight"], merged["unet/conv_in.weight"])
    assert not any(name.startswith("controlnet_old") for name in merged)
    assert (tmp_path / "out/controlnet_2/config.json").is_file()


@pytest.mark.parametrize("variant", ["fp16", "non_ema"])
def test_a_variant_in_safetensors_does_not_replace_the_plain_file(variant: str, tmp_path: Path) -> None:
    """diffusers loads the .bin file here: it reads variants only if one asks for them."""
    torch = pytest.importorskip("torch")
    a, _ = pair(tmp_path)
    plain = load_file(Path(a) / UNET)
    (Path(a) / UNET).unlink()
    torch.save({name: torch.from_numpy(x) for name, x in plain.items()}, Path(a) / UNET.replace(".safetensors", ".bin"))
    other = Path(a) / UNET.replace(".safetensors", f".{variant}.safetensors")
    save_file({name: x * 0 for name, x in plain.items()}, other)
    with open_checkpoint(a) as model:
        for name, tensor in plain.items():
            np.testing.assert_array_equal(model[f"unet/{name}"], tensor)
    (Path(a) / UNET.replace(".safetensors", ".bin")).unlink()
    with open_checkpoint(a) as model:
        assert not model["unet/conv_in.weight"].any()


def changed(pipeline: str, file: str, rename: Callable[[str], str], tensors: Mapping[str, np.ndarray] | None = None) -> str:
    """The pipeline with other names, and more tensors, in one file."""
    path = Path(pipeline) / file
    path.parent.mkdir(exist_ok=True)
    stored = {**(load_file(path) if path.is_file() else {}), **(tensors or {})}
    save_file({rename(name): tensor for name, tensor in stored.items()}, path)
    return pipeline


@pytest.mark.parametrize("first", [0, 1])
def test_a_text_encoder_is_merged_whatever_release_of_transformers_wrote_it(first: int, tmp_path: Path) -> None:
    """transformers 5 has no `text_model.` in front of CLIP's names, inside and outside the layers."""
    pair_of = [pipeline(tmp_path / "a", 1), pipeline(tmp_path / "b", 2)]
    for seed, model in enumerate(pair_of):
        table = np.random.default_rng(seed).standard_normal((5, 4)).astype(np.float32)
        changed(model, TEXT, str, {"text_model.embeddings.token_embedding.weight": table, "text_model.norm.weight": table[0]})
    means = {name: (tensor + tensors_of(pair_of[1])[name]) / 2 for name, tensor in tensors_of(pair_of[0]).items()}
    changed(pair_of[1], TEXT, lambda name: name.removeprefix("text_model."))
    merged = tensors_of(weightsmith.merge(linear(pair_of[first], pair_of[1 - first]), tmp_path / "out", fsync=False).out)
    if first:
        means = {name.replace("/text_model.", "/"): tensor for name, tensor in means.items()}
    assert merged.keys() == means.keys()
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor, means[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("first", [0, 1])
def test_a_vae_is_merged_whatever_release_of_diffusers_wrote_it(first: int, tmp_path: Path) -> None:
    new = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    file, models = "vae/diffusion_pytorch_model.safetensors", [pipeline(tmp_path / "a", 1), pipeline(tmp_path / "b", 2)]
    attention = "decoder.mid_block.attentions.0."
    for seed, model in enumerate(models):
        random = np.random.default_rng(seed)
        factors = {f"{attention}{old}.weight": random.standard_normal((4, 4)).astype(np.float32) for old in new}
        changed(model, file, str, factors)
    means = {name: (tensor + tensors_of(models[1])[name]) / 2 for name, tensor in tensors_of(models[0]).items()}
    renamed = {f"{attention}{old}.weight": f"{attention}{name}.weight" for old, name in new.items()}
    changed(models[1], file, lambda name: renamed.get(name, name))
    p = plan(linear(models[first], models[1 - first]))
    assert not any("only" in text for text in warnings(p))
    merged = tensors_of(weightsmith.merge(linear(models[first], models[1 - first]), tmp_path / "out", fsync=False).out)
    if first:
        means = {f"vae/{renamed.get(name[4:], name[4:])}" if name[:4] == "vae/" else name: x for name, x in means.items()}
    assert merged.keys() == means.keys()
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor, means[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("first", [0, 1])
def test_the_embedding_of_t5_is_one_tensor_under_two_names(first: int, tmp_path: Path) -> None:
    file, models = "text_encoder_2/model.safetensors", [pipeline(tmp_path / "a", 1), pipeline(tmp_path / "b", 2)]
    tables = [np.full((5, 4), value, np.float32) for value in (1, 3)]
    for model, table in zip(models, tables, strict=True):
        changed(model, file, str, {"shared.weight": table, "encoder.final_layer_norm.weight": table[0]})
        (Path(model) / "model_index.json").write_text(
            json.dumps({**INDEX, "text_encoder_2": ["transformers", "T5EncoderModel"]})
        )
    changed(models[1], file, str, {"encoder.embed_tokens.weight": tables[1]})
    merged = tensors_of(weightsmith.merge(linear(models[first], models[1 - first]), tmp_path / "out", fsync=False).out)
    t5 = {name for name in merged if name.startswith("text_encoder_2/")}
    assert t5 == {"text_encoder_2/shared.weight", "text_encoder_2/encoder.final_layer_norm.weight"}
    assert all((merged[name] == 2).all() for name in t5)
    changed(models[0], file, lambda name: name.replace("shared", "encoder.embed_tokens"))
    merged = tensors_of(weightsmith.merge(linear(models[first], models[1 - first]), tmp_path / "out2", fsync=False).out)
    assert all((merged[name] == 2).all() for name in merged if name.startswith("text_encoder_2/"))


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]}])
def test_a_model_with_model_index_json_keeps_its_own_weights(config: dict[str, Any], tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    save_file({"lm_head.weight": np.ones((2, 2), np.float32)}, Path(a) / "model.safetensors")
    (Path(a) / "config.json").write_text(json.dumps(config))
    with open_checkpoint(a) as model:
        assert [*model] == ["lm_head.weight"]


def test_a_quantisation_that_a_part_does_not_have_is_ignored_where_asked(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    settings = {"quant_method": "gptq", "bits": 4}
    (Path(a) / "unet/config.json").write_text(json.dumps({**CONFIGS["unet"], "quantization_config": settings}))
    with open_checkpoint(a) as model:
        assert "gptq" in model.stale
        assert model.quantised is not None
    assert any("gptq" in str(problem) for problem in plan_help.problems(linear(a, b)))
    out = weightsmith.merge(linear(a, b), tmp_path / "out", ignore_quantization_config=True, fsync=False).out
    assert json.loads((out / "unet/config.json").read_text()) == CONFIGS["unet"]


def with_settings(pipeline: str, name: str, **settings: Any) -> None:
    path = Path(pipeline) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.long
def test_a_part_of_another_model_has_the_config_json_of_that_model(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    with_settings(a, "vae/config.json", scaling_factor=0.18215, _name_or_path="a")
    with_settings(b, "vae/config.json", scaling_factor=0.13025, _name_or_path="b")
    taken = [{"model": b, "parameters": {"weight": 1}}]
    recipe = {"merge_method": "linear", "modules": {"unet": {"models": linear(a, b)["models"]}, "vae": {"models": taken}}}
    assert not any("scaling_factor" in text for text in warnings(plan(recipe)))
    out = weightsmith.merge(recipe, tmp_path / "out", fsync=False).out
    assert json.loads((out / "vae/config.json").read_text())["scaling_factor"] == 0.13025
    assert (out / "unet/config.json").read_bytes() == (Path(a) / "unet/config.json").read_bytes()
    nested = weightsmith.merge({**linear(recipe, b)}, tmp_path / "nested", fsync=False).out
    assert json.loads((nested / "vae/config.json").read_text())["scaling_factor"] == 0.13025


def test_settings_of_parts_that_differ_are_warned_of(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    for model, factor, kind in ((a, 0.18215, "epsilon"), (b, 0.13025, "v_prediction")):
        with_settings(model, "vae/config.json", scaling_factor=factor, _diffusers_version=str(factor))
        with_settings(model, "scheduler/scheduler_config.json", prediction_type=kind, of=0)
    texts = [str(finding) for finding in plan(linear(a, b)).warnings]
    assert sum("differ in scaling_factor;" in text and "0.18215" in text and "0.13025" in text for text in texts) == 1
    assert sum("differ in prediction_type;" in text and "v_prediction" in text for text in texts) == 1
    recipe = {"merge_method": "linear", "modules": {"vae": {"models": linear(a, b)["models"]}}}
    assert not any("prediction_type" in text for text in warnings(plan(recipe))), "the UNet is of the scheduler's model"


def taking(a: str, **parts: str) -> dict[str, Any]:
    """A recipe that copies parts from other models, and the UNet from the first."""
    entries = {
        part: {"models": [{"model": model, "parameters": {"weight": 1}}]} for part, model in {"unet": a, **parts}.items()
    }
    return {"merge_method": "linear", "modules": entries}


@pytest.mark.long
def test_parts_without_weights_are_taken_from_the_model_that_the_recipe_names(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    (Path(b) / "tokenizer/special_tokens_map.json").write_text("{}")
    (Path(a) / "tokenizer/added_tokens.json").write_text("{}")
    kinds = {"scheduler": ["diffusers", "EulerDiscreteScheduler"], "tokenizer": ["transformers", "CLIPTokenizerFast"]}
    (Path(b) / "model_index.json").write_text(json.dumps({**INDEX, **kinds}))
    out = weightsmith.merge(taking(a, scheduler=b, tokenizer=b), tmp_path / "out", fsync=False).out
    for name in ("scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/special_tokens_map.json"):
        assert (out / name).read_bytes() == (Path(b) / name).read_bytes(), name
    assert not (out / "tokenizer/added_tokens.json").exists()
    assert json.loads((out / "model_index.json").read_text()) == {**INDEX, **kinds}
    first, merged = tensors_of(a), tensors_of(out)
    assert {name: x.tobytes() for name, x in merged.items()} == {name: x.tobytes() for name, x in first.items()}
    same = weightsmith.merge(taking(a, scheduler=a), tmp_path / "same", fsync=False).out
    assert (same / "model_index.json").read_bytes() == (Path(a) / "model_index.json").read_bytes()


def test_a_part_that_the_first_model_lacks_is_taken_by_its_name(tmp_path: Path) -> None:
    """With weights, config.json, and its line in model_index.json."""
    a, b = pair(tmp_path)
    (Path(a) / "model_index.json").write_text(json.dumps({**INDEX, "safety_checker": [None, None]}))
    shutil.copytree(Path(b) / "text_encoder", Path(b) / "safety_checker")
    (Path(b) / "safety_checker/preprocessor_config.json").write_text("{}")
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (Path(b) / "model_index.json").write_text(json.dumps({**INDEX, "safety_checker": checker}))
    recipe = taking(a, safety_checker=b)
    p = plan(recipe)
    assert not any("left out with its weights" in text or ("copied from" in text and "safety" in text) for text in warnings(p))
    again = plan_from_json(json.loads(json.dumps(p.to_json())))
    assert again.layout == p.layout
    out = weightsmith.merge(recipe, tmp_path / "out", max_shard_bytes=100, fsync=False).out
    second, merged = tensors_of(b), tensors_of(out)
    names = {name for name in second if name.startswith("safety_checker/")}
    assert names == {name for name in merged if name.startswith("safety_checker/")}
    assert all(merged[name].tobytes() == second[name].tobytes() for name in names)
    assert json.loads((out / "model_index.json").read_text())["safety_checker"] == checker
    configs = [json.loads((folder / "safety_checker/config.json").read_text()) for folder in (out, Path(b))]
    assert configs[0] == configs[1]
    assert (out / "safety_checker/preprocessor_config.json").is_file()
    weightsmith.verify(out)


@pytest.mark.long
def test_a_part_with_weights_of_another_model_has_the_class_of_that_model(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    kind = ["transformers", "CLIPTextModelWithProjection"]
    (Path(b) / "model_index.json").write_text(
        json.dumps({**INDEX, "text_encoder": kind, "vae": ["diffusers", "AutoencoderTiny"]})
    )
    out = weightsmith.merge(taking(a, text_encoder=b), tmp_path / "out", fsync=False).out
    assert json.loads((out / "model_index.json").read_text()) == {**INDEX, "text_encoder": kind}
    modules = {part: {"models": linear(a, b)["models"]} for part in ("text_encoder", "unet")}
    recipe = {"merge_method": "linear", "modules": modules}
    both = weightsmith.merge(recipe, tmp_path / "both", fsync=False).out
    assert (both / "model_index.json").read_bytes() == (Path(a) / "model_index.json").read_bytes(), "the first model is read"
    nested = weightsmith.merge(linear(taking(a, text_encoder=b), a), tmp_path / "nested", fsync=False).out
    assert json.loads((nested / "model_index.json").read_text())["text_encoder"] == kind


def test_a_part_without_weights_is_of_one_model_that_has_it(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    recipe = taking(a, scheduler=b)
    recipe["modules"]["scheduler"]["models"] *= 2
    assert any("it is taken from one model as it is" in str(problem) for problem in plan_help.problems(recipe))
    (Path(b) / "scheduler/scheduler_config.json").unlink()
    problems = [str(problem) for problem in plan_help.problems(taking(a, scheduler=b))]
    assert any("has no part 'scheduler'" in problem and a in problem for problem in problems)
    assert any("no module 'schedule'" in str(problem) for problem in plan_help.problems(taking(a, schedule=b)))


def test_inspect_names_the_pipeline(tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    assert weightsmith.inspect(a).architecture == "StableDiffusionPipeline"


@pytest.mark.parametrize("flat", [False, True], ids=["diffusers", "kohya"])
@pytest.mark.parametrize("inner", ["text_model.", ""], ids=["transformers 4", "transformers 5"])
def test_an_adapter_changes_each_part_that_it_has_factors_of(inner: str, flat: bool, tmp_path: Path) -> None:
    a, random, factors = pipeline(tmp_path / "a", 1), np.random.default_rng(0), {}
    encoder = {f"{inner}encoder.layers.{i}.self_attn.q_proj.weight": (4, 4) for i in range(2)}
    parts = {
        "unet": {"mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight": (4, 4)},
        "text_encoder": encoder,
        "text_encoder_2": encoder,
    }
    for part, shapes in parts.items():
        (Path(a) / part).mkdir(exist_ok=True)
        file = "diffusion_pytorch_model" if part == "unet" else "model"
        save_file(
            {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
            Path(a) / part / f"{file}.safetensors",
        )
    (Path(a) / "model_index.json").write_text(json.dumps({**INDEX, "text_encoder_2": ["transformers", "CLIPTextModel"]}))
    first = {name: tensor for name, tensor in tensors_of(a).items() if not name.startswith("vae")}
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    expected = {}
    for name, tensor in first.items():
        part, _, module = name.removesuffix(".weight").partition("/")
        module = module if part == "unet" else f"text_model.{module.removeprefix(inner)}"
        module = f"{prefixes[part]}{module.replace('.', '_')}" if flat else f"{part}.{module}"
        down, up = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 4), (4, 2)))
        factors |= (
            {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
            if flat
            else {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        )
        expected[name] = tensor + up @ down
    save_file(factors, tmp_path / "lora.safetensors")
    weights = tensors_of(weightsmith.dequantize(f"{a}+{tmp_path / 'lora.safetensors'}", tmp_path / "out", fsync=False).out)
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, atol=1e-5, err_msg=name)


def test_a_pipeline_with_an_adapter_has_the_files_of_the_pipeline(tmp_path: Path) -> None:
    a, name = pipeline(tmp_path / "a", 1), "unet.down_blocks.0.resnets.0.conv1.lora_{}.weight"
    save_file(
        {name.format("A"): np.ones((1, 4), np.float32), name.format("B"): np.ones((4, 1), np.float32)},
        tmp_path / "lora.safetensors",
    )
    models = {"plain": a, "adapted": f"{a}+{tmp_path / 'lora.safetensors'}"}
    outs = [
        weightsmith.merge(
            {"merge_method": "passthrough", "models": [{"model": model}]}, tmp_path / out, max_shard_bytes=100, fsync=False
        ).out
        for out, model in models.items()
    ]
    plain, adapted = ({str(path.relative_to(out)) for path in Path(out).rglob("*/*")} for out in outs)
    assert "unet/diffusion_pytorch_model.safetensors.index.json" in adapted == plain


@pytest.mark.reader
def test_diffusers_loads_the_result(tmp_path: Path) -> None:
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            norm_num_groups=4,
            attention_head_dim=4,
        )
        vae = diffusers.AutoencoderKL(block_out_channels=[8, 16], latent_channels=4, norm_num_groups=4, **blocks)
        text = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=64, max_position_embeddings=8, **sizes))
        parts = {
            "unet": unet,
            "vae": vae,
            "text_encoder": text,
            "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        }
        nothing = dict.fromkeys(("tokenizer", "safety_checker", "feature_extractor"))
        pipe = diffusers.StableDiffusionPipeline(**parts, **nothing, requires_safety_checker=False)
        pipe.save_pretrained(tmp_path / name)
    recipe = linear(str(tmp_path / "a"), str(tmp_path / "b"))
    out = weightsmith.merge(recipe, tmp_path / "out", max_shard_bytes=20_000, fsync=False).out
    a, b, merged = (
        diffusers.DiffusionPipeline.from_pretrained(path, **nothing) for path in (tmp_path / "a", tmp_path / "b", out)
    )
    for part in ("unet", "vae", "text_encoder"):
        states = [getattr(pipe, part).state_dict() for pipe in (a, b, merged)]
        for name, weight in states[2].items():
            expected = (states[0][name] + states[1][name]) / 2 if weight.is_floating_point() else states[0][name]
            torch.testing.assert_close(weight, expected)
    embeds = {name: torch.randn(1, 8, 16) for name in ("prompt_embeds", "negative_prompt_embeds")}
    image = merged(**embeds, num_inference_steps=2, height=16, width=16, output_type="pt").images
    assert torch.isfinite(image).all()
