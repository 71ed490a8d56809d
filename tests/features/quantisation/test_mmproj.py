"""The vision halves of models beside their GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import vision_zoo
from tests.gguf_help import computed
from tests.golden import mmproj
from tests.mtmd import embeddings, needs_mtmd
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.architectures import FAMILIES
from weightsmith._models.formats.gguf.base.vision import VisionHalf
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._outputs.places import verify
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import plan_from_json

GOLDEN = mmproj.load()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def quantize(source: str, out: str, name: str = "q8_0", **options: Any) -> Path:
    """The vision half that `quantize` writes."""
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False, **options)
    return Path(out) / "mmproj.gguf"


def planned(source: str, **options: Any) -> Any:
    recipe: Any = {"merge_method": "passthrough", "models": [{"model": source}]}
    return weightsmith.plan(recipe, **{"quantize": "gguf-q8_0", **options})


@pytest.mark.matrix("*-f16")
@pytest.mark.slow
@pytest.mark.parametrize("kind", mmproj.KINDS)
@pytest.mark.parametrize("name", vision_zoo.MODELS)
def test_it_is_the_file_that_llama_cpp_s_converter_writes(name: str, kind: str) -> None:
    vision_zoo.save(name, Path("m"))
    assert mmproj.described(quantize("m", "q", kind)) == GOLDEN[name][kind]


def test_it_is_f16_beside_quantised_tensors() -> None:
    vision_zoo.save("gemma3", Path("m"))
    assert mmproj.described(quantize("m", "q", "q4_0")) == GOLDEN["gemma3"]["f16"]
    kinds = {t.name: t.dtype.name for t in read_gguf_header(Path("q/model.gguf")).tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert not any(name.startswith(("v.", "mm.")) for name in kinds)


@pytest.mark.parametrize("name", vision_zoo.NEWER)
def test_names_as_newer_versions_of_transformers_write_them(name: str) -> None:
    vision_zoo.save(name, Path("m"))
    vision_zoo.save(name, Path("n"), rename=vision_zoo.NEWER[name])
    assert mmproj.described(quantize("n", "q", "f16"))["tensors"].keys() == GOLDEN[name]["f16"]["tensors"].keys()


@pytest.mark.long
def test_the_language_model_is_the_same_without_it() -> None:
    vision_zoo.save("gemma3", Path("m"))
    quantize("m", "with")
    assert not quantize("m", "without", mmproj=False).exists()
    assert Path("with/model.gguf").read_bytes() == Path("without/model.gguf").read_bytes()
    assert not any("image" in str(warning) for warning in planned("m", mmproj=False).warnings)
    assert [plan.lacking for plan in (planned("m"), planned("m", mmproj=False))] == [{}, {"m": ("preprocessor_config.json",)}]
    with pytest.raises(PlanError, match="mmproj"):
        weightsmith.quantize("m", "x", "fp8-dynamic", mmproj=False, progress=False)


def test_the_folder_is_read_as_the_language_model() -> None:
    vision_zoo.save("gemma3", Path("m"))
    quantize("m", "q", "f16")
    with weightsmith.open_checkpoint("q") as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["model_type"] == "gemma3_text"
        assert not any("vision" in name for name in checkpoint.specs)
        assert checkpoint.ignored == ("mmproj.gguf",)
    again = quantize("q", "again", "f16")
    assert not again.exists()
    assert verify("q").tensors == len(planned("m").steps)


def test_the_card_names_both_files() -> None:
    vision_zoo.save("gemma3", Path("m"))
    quantize("m", "q")
    card = Path("q/README.md").read_text()
    assert "llama-mtmd-cli -m q/model.gguf --mmproj q/mmproj.gguf" in card
    assert "Types of the tensors: 7 Q8_0, 7 F32, 1 F16; in mmproj.gguf, for images: " in card


# ---- merges, parts


def ties(name: str) -> Any:
    for seed, folder in enumerate(("base", "a", "b")):
        vision_zoo.save(name, Path(folder), seed)
    models = [{"model": model_name, "parameters": {"weight": 0.7, "density": 0.5}} for model_name in ("a", "b")]
    return {"merge_method": "dare_ties", "base_model": "base", "models": models, "dtype": "bfloat16"}


@pytest.mark.matrix("gemma3", "qwen2-vl")
@pytest.mark.slow
@pytest.mark.parametrize("name", vision_zoo.MODELS)
def test_a_merge_straight_to_gguf_is_the_merge_then_quantised(name: str) -> None:
    recipe = ties(name)
    weightsmith.merge(recipe, "merged", progress=False)
    twice = quantize("merged", "twice")
    for threads in (1, 3):
        weightsmith.merge(recipe, f"once{threads}", quantize="gguf-q8_0", threads=threads, progress=False)
        assert Path(f"once{threads}", "mmproj.gguf").read_bytes() == (twice.parent / "mmproj.gguf").read_bytes()
        assert computed(Path(f"once{threads}", "model.gguf")) == computed(twice.parent / "model.gguf")


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "pixtral", "qwen2-vl"])
def test_in_parts_and_in_another_process(name: str) -> None:
    vision_zoo.save(name, Path("m"))
    whole = quantize("m", "whole")
    plan = planned("m")
    again = plan_from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    weightsmith.run(again, "parts", part=(1, 2), progress=False)
    assert not Path("parts").exists()
    weightsmith.run(again, "parts", part=(2, 2), progress=False)
    weightsmith.run(again, "parts", progress=False)
    for file in ("model.gguf", "mmproj.gguf"):
        assert Path("parts", file).read_bytes() == (whole.parent / file).read_bytes()


@pytest.mark.long
def test_a_split_model_has_one_file_for_images() -> None:
    vision_zoo.save("gemma3", Path("m"))
    whole = quantize("m", "whole")
    parts = quantize("m", "parts", max_shard_bytes=6_000)
    assert parts.read_bytes() == whole.read_bytes()
    files = sorted(path.name for path in Path("parts").glob("model-*.gguf"))
    assert len(files) > 1
    counts = [len(read_gguf_header(Path("parts", file)).tensors) for file in files]
    assert read_gguf_header(Path("parts", files[0])).keys["split.tensors.count"] == sum(counts)
    with weightsmith.open_checkpoint("parts") as one, weightsmith.open_checkpoint("whole") as other:
        assert one.specs.keys() == other.specs.keys()


@pytest.mark.long
def test_it_counts_towards_a_size() -> None:
    vision_zoo.save("gemma3", Path("m"))
    nbytes = quantize("m", "q", "q4_0").stat().st_size
    least = []
    for with_images in (True, False):
        with pytest.raises(PlanError, match="the file has at least") as caught:
            planned("m", quantize="gguf-q4_k_m", size_bytes=1, mmproj=with_images)
        least.append(int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", "")))
    assert 0 <= least[0] - least[1] - nbytes < nbytes / 4


@pytest.mark.matrix
@pytest.mark.slow
def test_an_interrupted_run_is_resumed() -> None:
    vision_zoo.save("pixtral", Path("m"))
    whole = quantize("m", "whole")

    class Stop(Exception):
        pass

    def stop(now: Any) -> None:
        if now.tensors > 40:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.quantize("m", "q", "gguf-q8_0", progress=stop)
    assert not Path("q").exists()
    again = quantize("m", "q")
    for file in ("model.gguf", "mmproj.gguf"):
        assert (again.parent / file).read_bytes() == (whole.parent / file).read_bytes()


# ---- what llama.cpp computes

SIDES = {
    "gemma3": 32,
    "pixtral": 32,
    "mistral3": 64,
    "internvl": 32,
    "idefics3": 32,
    "smolvlm": 32,
    "qwen2-vl": 64,
    "qwen2.5-vl": 64,
    "qwen3-vl": 64,
    "qwen3.5": 64,
}
"""Side of a test image in pixels, chosen so that llama.cpp does not scale it."""


@pytest.mark.reader
@needs_mtmd
@pytest.mark.slow
@pytest.mark.parametrize("name", SIDES)
def test_llama_cpp_computes_the_images_that_transformers_does(name: str) -> None:
    import torch
    import transformers

    side, config = SIDES[name], vision_zoo.MODELS[name]()[1]
    vision_zoo.save(name, Path("m"), vision_config={**config["vision_config"], "image_size": side})
    Path("m/processor_config.json").write_text(json.dumps({"size": {"longest_edge": side}}))
    mmproj_file = quantize("m", "q", "f32")
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3)).astype(np.uint8)
    deep = len(config["vision_config"].get("deepstack_visual_indexes", []))
    width = (1 + deep) * vision_zoo.WIDTH
    vectors = embeddings(mmproj_file.with_name("model.gguf").resolve(), mmproj_file.resolve(), image, width)
    model = getattr(transformers, config["architectures"][0]).from_pretrained("m", dtype=torch.float32).eval()
    if name == "internvl":  # llama.cpp has the class token at the end, so that each place is one off
        places = model.model.vision_tower.embeddings.position_embeddings
        places.data = torch.roll(places.data, 1, 1)
    scaled = (image / 255 - vision_zoo.PROCESSOR["image_mean"]) / vision_zoo.PROCESSOR["image_std"]
    with torch.inference_mode():
        features = model.model.get_image_features(**pixels(name, torch.tensor(scaled).float().permute(2, 0, 1)))
    layers = getattr(features, "deepstack_features", None) or []
    features = getattr(features, "pooler_output", features)
    if deep:  # beside what the language model gets first, what its first layers get
        features = [torch.cat(parts, -1) for parts in zip(features, *layers, strict=True)]
    theirs = torch.cat([part.reshape(-1, width) for part in features]).numpy()
    if name in ("pixtral", "mistral3"):  # a row of [IMG_BREAK] follows each row of the image but the last
        across = round(len(theirs) ** 0.5)
        rows = [vectors[i : i + across] for i in range(0, len(vectors), across + 1)]
        breaks = vectors[across :: across + 1]
        with weightsmith.open_checkpoint("m") as stored:
            token = stored.read("language_model.model.embed_tokens.weight")[261].astype(np.float32)
        assert np.abs(breaks - token).max() < 1e-6
        vectors = np.concatenate(rows)
    bound = 0.002 if deep else 0.001  # llama.cpp rounds the GELUs of the mergers to float16, too
    assert np.abs(vectors - theirs).max() < bound * np.abs(theirs).max()


def pixels(name: str, image: Any) -> dict[str, Any]:
    """What transformers' classes take for an image [3, side, side]."""
    import torch

    side = image.shape[-1]
    if name.startswith("qwen"):  # patches in the order in which four become one, the image twice
        n = side // 16
        cut = image.reshape(3, n, 2, 8, n, 2, 8).permute(1, 4, 2, 5, 0, 3, 6).reshape(4 * n * n, 3, 1, 8, 8)
        patches = cut.expand(-1, -1, 2, -1, -1).reshape(4 * n * n, -1)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2 * n, 2 * n]])}
    if name in ("pixtral", "mistral3"):
        return {"pixel_values": image[None], "image_sizes": torch.tensor([[side, side]])}
    return {"pixel_values": image[None, None] if name in ("idefics3", "smolvlm") else image[None]}


# ---- what is not written


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3", {"hidden_act": []}, "hidden_act is [], and llama.cpp takes"),
        ("gemma3", {"num_hidden_layers": 1 << 31}, "its vision_config has 2,147,483,648 layers"),
        ("pixtral", {"num_attention_heads": 64}, "its 32 rows are not 64 heads"),
        ("qwen2.5-vl", {"fullatt_block_indexes": [1, 2]}, "fullatt_block_indexes is [1, 2], and llama.cpp takes [1, 3]"),
        ("qwen2.5-vl", {"window_size": 56}, "window_size is 56, and llama.cpp takes 112 for granted"),
    ],
)
def test_numbers_that_do_not_fit_are_warned_of(name: str, changes: dict[str, Any], words: str) -> None:
    _, config, _ = vision_zoo.MODELS[name]()
    vision_zoo.save(name, Path("m"), vision_config={**config["vision_config"], **changes})
    plan = planned("m")
    assert any(words in str(warning) for warning in plan.warnings)
    assert not plan.mmproj


def test_numbers_that_no_file_holds_are_errors() -> None:
    _, config, _ = vision_zoo.MODELS["qwen2.5-vl"]()
    vision_zoo.save("qwen2.5-vl", Path("q"), vision_config={**config["vision_config"], "fullatt_block_indexes": [1 << 40]})
    with pytest.raises(PlanError, match=r"fullatt_block_indexes is .*, not a list of layers"):
        planned("q")
    vision_zoo.save("internvl", Path("i"), downsample_ratio=1e-30)
    with pytest.raises(PlanError, match="downsample_ratio is 1e-30, not a share"):
        planned("i")


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu', and llama.cpp takes gelu_pytorch_tanh for granted"),
        ({"num_hidden_layers": 3}, "its vision_config has 3 layers, and its tensors are of 4"),
    ],
)
def test_settings_that_llama_cpp_does_not_know_are_warned_of(vision: dict[str, Any], words: str) -> None:
    _, config, _ = vision_zoo.MODELS["gemma3"]()
    vision_zoo.save("gemma3", Path("m"), vision_config={**config["vision_config"], **vision})
    plan = planned("m")
    assert any(words in str(warning) for warning in plan.warnings)
    assert not plan.mmproj
    assert [shard.name for shard in plan.layout.shards] == ["model.gguf"]


@pytest.mark.long
def test_files_and_numbers_that_are_missing() -> None:
    vision_zoo.save("gemma3", Path("m"))
    Path("m/preprocessor_config.json").unlink()
    assert any("image_mean of the images is missing" in str(warning) for warning in planned("m").warnings)
    Path("m/processor_config.json").write_text(json.dumps({"image_processor": {**vision_zoo.PROCESSOR, "image_seq_length": 4}}))
    assert mmproj.described(quantize("m", "q", "f16")) == GOLDEN["gemma3"]["f16"]
    for wrong in ([0.5, 0.5], 0.5, [0.5, "x", 1], [1, 2, 10**40]):
        Path("m/processor_config.json").write_text(json.dumps({**vision_zoo.PROCESSOR, "image_std": wrong}))
        with pytest.raises(PlanError, match=r"image_std is .*, not three numbers"):
            planned("m")
    Path("m/processor_config.json").write_text("[]")
    with pytest.raises(PlanError, match="not a JSON object"):
        planned("m")
    _, config, _ = vision_zoo.MODELS["gemma3"]()
    vision_zoo.save("gemma3", Path("m"), vision_config={**config["vision_config"], "patch_size": 0})
    Path("m/processor_config.json").unlink()
    with pytest.raises(PlanError, match=r"vision_config\.patch_size is 0, not a positive whole number"):
        planned("m")


def test_tensors_that_llama_cpp_does_not_know() -> None:
    vision_zoo.save("gemma3", Path("m"), rename={"vision_tower.vision_model.post_layernorm": "vision_tower.other"})
    [warning] = [warning for warning in planned("m").warnings if "for images" in warning.what]
    assert warning.where == "vision_tower.other.bias"
    assert "llama.cpp knows no such tensor in the vision half of gemma3" in str(warning)


def test_tensors_that_llama_cpp_does_not_use() -> None:
    vision_zoo.save(
        "gemma3", Path("m"), rename={"vision_tower.vision_model.post_layernorm": "vision_tower.vision_model.head.x"}
    )
    plan = planned("m")
    assert {(tensor.tensor, tensor.reason) for tensor in plan.dropped} == {
        (f"vision_tower.vision_model.head.x.{kind}", "llama.cpp does not use it") for kind in ("weight", "bias")
    }
    assert "v.post_ln.weight" not in {out.name for step in plan.steps for out in step.outs}


def test_a_plan_that_does_not_fit() -> None:
    vision_zoo.save("gemma3", Path("m"))
    plan = planned("m").to_json()
    reopen(plan_from_json(plan)).close()
    plan["mmproj"] = plan["mmproj"][:40]
    with pytest.raises(PlanError, match="mmproj: not a plan that can be run"):
        weightsmith.run(plan_from_json(plan), "q", progress=False)
    assert not Path("q").exists()


OWN = {"image_size": 560, "layer_norm_eps": None}
"""What llama.cpp's converter adds where transformers has no such setting."""


@pytest.mark.slow
@pytest.mark.parametrize("half", [half for family in FAMILIES for half in family.vision], ids=lambda config: config.model_type)
def test_defaults_are_those_of_transformers(half: VisionHalf) -> None:
    from transformers import CONFIG_MAPPING

    vision = {"vision_config": {"model_type": half.vision_type}} if half.vision_type else {}
    theirs = CONFIG_MAPPING[half.model_type](**vision).vision_config.to_dict()
    for name, value in half.defaults.items():
        known = theirs.get(name, OWN.get(name))
        known = known[0] if isinstance(known, list) and not name.endswith("_indexes") else known
        assert known in (value, None), name
