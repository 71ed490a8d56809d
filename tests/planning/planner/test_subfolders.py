"""Modules of sentence-transformers, templates in a subfolder, and parts of diffusers: outputs that their loaders take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.plan_help import plan, warnings
from weightsmith._base.errors import CheckpointError, FormatError
from weightsmith._files.copied import merged_metadata
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._planning.planner.merges import _merged_paths
from weightsmith._planning.planner.pipelines import drop_subfolders
from weightsmith._planning.recipe import ModelRef
from weightsmith._plans import PlanDraft, plan_from_json

MODULES = [{"idx": i, "name": str(i), "path": path, "type": "x"} for i, path in enumerate(("", "1_Pooling", "2_Dense"))]


def embedder(folder: Path, seed: int = 0, **dense: np.ndarray) -> str:
    """A decoder with the modules of a sentence-transformer."""
    path = plan_help.model(folder, seed=seed)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"of": name}))
    weights = dense or {"linear.weight": np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return path


def dense_of(folder: str | Path) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "2_Dense" / "model.safetensors")


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models], **options}


def test_the_weights_of_modules_are_merged_and_written_where_they_belong(tmp_path: Path) -> None:
    a, b = embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)
    done = weightsmith.merge(linear(a, b), tmp_path / "out", fsync=False)
    expected = (dense_of(a)["linear.weight"].astype(np.float64) + dense_of(b)["linear.weight"]) / 2
    assert np.abs(dense_of(done.out)["linear.weight"] - expected).max() < 1e-7
    assert not any("Dense" in name for name in load_file(done.out / "model.safetensors"))
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "modules.json"):
        assert (done.out / name).read_bytes() == (Path(a) / name).read_bytes()
    weightsmith.verify(done.out)
    with open_checkpoint(done.out) as again, open_checkpoint(a) as first:
        assert list(again.specs) == list(first.specs)
        assert again.weights == ("model.safetensors", "2_Dense/model.safetensors")


POOLED = {"pooling_mode": "cls"}
SAME = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"1_Pooling": SAME}, ""),
        ({"1_Pooling": {"pooling_mode": "mean"}}, "Pooling (mean), Dense (Tanh)"),
        ({"1_Pooling": {"pooling_mode_mean_tokens": True}}, "Pooling (mean), Dense (Tanh)"),
        ({"2_Dense": {"activation_function": "torch.nn.modules.linear.Identity"}}, "Pooling (cls), Dense (Identity)"),
    ],
)
def test_modules_that_compute_something_else_are_named(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    kinds = [
        {**module, "type": f"st.{name}"} for module, name in zip(MODULES, ("Transformer", "Pooling", "Dense"), strict=True)
    ]
    both = {"1_Pooling": POOLED, "2_Dense": {"activation_function": "torch.nn.modules.activation.Tanh"}}
    for name, changes in (("a", {}), ("b", settings)):
        embedder(tmp_path / name)
        (tmp_path / name / "modules.json").write_text(json.dumps(kinds))
        for module, config in {**both, **changes}.items():
            (tmp_path / name / module / "config.json").write_text(json.dumps(config))
    plan = weightsmith.plan(linear(str(tmp_path / "a"), str(tmp_path / "b")))
    about_modules = [warning for warning in plan.warnings if "modules of sentence-transformers" in warning.what]
    assert len(about_modules) == bool(text)
    if text:
        assert about_modules[0].what.endswith(f"the output has {tmp_path / 'a'}'s")
        assert f"{tmp_path / 'b'}: Transformer, {text}" in about_modules[0].details


def test_interrupted_work_is_resumed_with_the_weights_of_modules(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors > 4:
            raise Stop

    a, b = embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)
    with pytest.raises(Stop):
        weightsmith.merge(linear(a, b), tmp_path / "out", progress=stop, threads=1)
    assert weightsmith.merge(linear(a, b), tmp_path / "out", progress=False).resumed
    assert dense_of(tmp_path / "out").keys() == {"linear.weight"}


def test_a_quantised_output_has_plain_modules_and_names_none_of_them(tmp_path: Path) -> None:
    a = embedder(tmp_path / "a")
    done = weightsmith.quantize(a, tmp_path / "out", format="fp8-dynamic", fsync=False)
    assert dense_of(done.out)["linear.weight"].tobytes() == dense_of(a)["linear.weight"].tobytes()
    assert "Dense" not in (done.out / "config.json").read_text()
    with open_checkpoint(done.out) as again:
        assert again.specs["2_Dense/linear.weight"].shape == (3, 4)
    weightsmith.dequantize(done.out, tmp_path / "plain", fsync=False)
    assert dense_of(tmp_path / "plain")["linear.weight"].tobytes() == dense_of(a)["linear.weight"].tobytes()


def test_modules_that_the_donor_lacks_are_left_out_and_the_plan_says_so(tmp_path: Path) -> None:
    plain, a = plan_help.model(tmp_path / "plain"), embedder(tmp_path / "a", seed=1)
    p = plan(linear(plain, a))
    assert not any("Dense" in step.out.name for step in p.steps)
    assert f"{a}: left out with its weights: 2_Dense, which {plain} does not have" in "\n".join(warnings(p))
    assert any("Dense" in step.out.name for step in plan(linear(a, plain)).steps)


def test_a_format_may_keep_some_modules(tmp_path: Path) -> None:
    a, b = embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)
    draft = PlanDraft.of(plan(linear(a, b)))
    drop_subfolders(draft, "a reader", ["2_Dense"])
    assert (draft.naming.folders, draft.dropped) == (("2_Dense",), [])
    assert "2_Dense/linear.weight" in [step.out.name for step in draft.steps]


def test_a_format_without_modules_leaves_them_out_and_says_so(tmp_path: Path) -> None:
    """As GGUF does."""
    draft = PlanDraft.of(plan(linear(embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1))))
    drop_subfolders(draft, "llama.cpp")
    p = draft.finish()
    assert not any("Dense" in step.out.name for step in p.steps)
    assert {(d.model, d.tensor) for d in p.dropped} == {(0, "2_Dense/linear.weight"), (1, "2_Dense/linear.weight")}
    assert "2_Dense: left out, 1 tensor: llama.cpp computes" in warnings(p)[-1]


def test_weights_of_a_head_beside_the_model_are_named(tmp_path: Path) -> None:
    """BGE-M3 has those of two more kinds of vectors, in files that only its authors' code reads."""
    a, b = embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)
    for name in ("colbert_linear.pt", "sparse_linear.pt", "optimizer.pt"):
        (tmp_path / "a" / name).write_bytes(b"x")
    listed = "'colbert_linear.pt', 'sparse_linear.pt'"
    assert [warning.what for warning in plan(linear(a, b)).warnings if "colbert" in warning.what] == [
        f"2 files are neither merged nor copied, with weights of a head beside the model: {listed}"
    ]


def test_modules_of_other_shapes_are_an_error(tmp_path: Path) -> None:
    a = embedder(tmp_path / "a")
    b = embedder(tmp_path / "b", **{"linear.weight": np.zeros((2, 4), np.float32)})
    assert any("2_Dense/linear.weight" in str(problem) for problem in plan_help.problems(linear(a, b)))


def test_a_plan_from_json_writes_the_same_files(tmp_path: Path) -> None:
    p = plan(linear(embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)))
    again = plan_from_json(json.loads(json.dumps(p.to_json())))
    assert again.layout == p.layout
    for folders in (["../x"], ["/etc"], ["a\\b"], [""]):
        with pytest.raises(FormatError):
            plan_from_json({**p.to_json(), "naming": {"stem": "model", "metadata": {}, "folders": folders}})


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "1_Pooling"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    a = Path(embedder(tmp_path / "a"))
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("secret")
    for path in sorted((a / "1_Pooling").iterdir()):
        path.unlink()
    if name == "1_Pooling":
        (a / name).rmdir()
        (a / name).symlink_to(secret)
    else:
        (a / name).symlink_to(secret / "config.json")
    with pytest.raises(CheckpointError, match="symbolic link that leaves the folder"):
        open_checkpoint(a)


def test_a_stage_keeps_the_modules_of_its_base(tmp_path: Path) -> None:
    a, b = embedder(tmp_path / "a"), embedder(tmp_path / "b", seed=1)
    inner = {"merge_method": "linear", "models": [{"model": a, "parameters": {"weight": 1}}]}
    recipe = linear(b)
    recipe["models"].append({"model": inner, "parameters": {"weight": 0.5}})
    done = weightsmith.merge(recipe, tmp_path / "out", fsync=False)
    expected = (dense_of(a)["linear.weight"] + dense_of(b)["linear.weight"]) / 2
    assert np.abs(dense_of(done.out)["linear.weight"] - expected).max() < 1e-6


# ---- chat templates


def chatting(folder: Path, seed: int = 0, *, default: str = "D", **named: str) -> str:
    path = plan_help.model(folder, seed=seed)
    if default:
        (folder / "chat_template.jinja").write_text(default)
    for name, text in named.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return path


def templates(recipe: dict[str, Any], out: Path) -> dict[str, str]:
    done = weightsmith.merge(recipe, out, fsync=False)
    return {str(path.relative_to(done.out)): path.read_text().strip() for path in sorted(done.out.rglob("*.jinja"))}


TOOLS = "additional_chat_templates/tool_use.jinja"


def test_named_templates_go_with_the_default_one(tmp_path: Path) -> None:
    a, b = chatting(tmp_path / "a", tool_use="A"), chatting(tmp_path / "b", seed=1, default="E", tool_use="B")
    c = chatting(tmp_path / "c", seed=2, default="")
    assert templates(linear(a, b), tmp_path / "1") == {"chat_template.jinja": "D", TOOLS: "A"}
    assert templates(linear(c, b), tmp_path / "2") == {"chat_template.jinja": "E", TOOLS: "B"}
    assert templates(linear(a, b, chat_template="chatml"), tmp_path / "3").keys() == {"chat_template.jinja"}
    assert templates(linear(a, b, chat_template="auto"), tmp_path / "4") == {"chat_template.jinja": "D", TOOLS: "A"}


# ---- diffusers, and single files


def test_a_part_of_diffusers_is_named_as_it_looks_for_it(tmp_path: Path) -> None:
    settings = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        weights = {f"down.{i}.weight": np.full((16, 16), seed, np.float32) for i in range(4)}
        save_file(weights, tmp_path / name / "diffusion_pytorch_model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    recipe = linear(str(tmp_path / "a"), str(tmp_path / "b"))
    done = weightsmith.merge(recipe, tmp_path / "out", fsync=False)
    assert (done.out / "diffusion_pytorch_model.safetensors").is_file()
    assert json.loads((done.out / "config.json").read_text()) == settings, "its classes take no dtype"
    sharded = weightsmith.merge(recipe, tmp_path / "shards", max_shard_bytes=2_000, fsync=False).out
    index = json.loads((sharded / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"diffusion_pytorch_model-{i:05d}-of-00004.safetensors" for i in range(1, 5)}
    with open_checkpoint(sharded) as again:
        assert len(again.specs) == 4


def test_metadata_that_describes_a_single_file_is_kept_without_its_hashes(tmp_path: Path) -> None:
    said = {"modelspec.title": "Ink", "ss_base_model_version": "sdxl_base_v1-0", "format": "pt"}
    stale = {"modelspec.hash_sha256": "0x12", "sshs_model_hash": "34", "other": "5"}
    for seed, name in enumerate("ab"):
        save_file({"w": np.full((4, 4), seed, np.float32)}, tmp_path / f"{name}.safetensors", metadata=said | stale)
    recipe = linear(*(str(tmp_path / f"{name}.safetensors") for name in "ab"))
    done = weightsmith.merge(recipe, tmp_path / "out", fsync=False)
    with safe_open(done.out / "model.safetensors", "np") as file:
        assert file.metadata() == said | {"modelspec.merged_from": "a, b"}
    one = {"merge_method": "passthrough", "models": [{"model": str(done.out / "model.safetensors")}], "dtype": "bfloat16"}
    again = weightsmith.merge(one, tmp_path / "again", fsync=False)
    with safe_open(again.out / "model.safetensors", "np") as file:
        assert file.metadata() == said | {"modelspec.merged_from": "a, b"}, "a cast is no merge"


def test_folders_name_what_they_were_merged_from_where_a_model_has_modelspec_keys(tmp_path: Path) -> None:
    for said, expected in (({"modelspec.title": "Ink"}, {"modelspec.merged_from": "a, b"}), ({"ss_epoch": "1"}, {})):
        for seed, name in enumerate("ab"):
            (tmp_path / name).mkdir(exist_ok=True)
            save_file({"w": np.full((4, 4), seed, np.float32)}, tmp_path / name / "model.safetensors", metadata=said)
        done = weightsmith.merge(linear(str(tmp_path / "a"), str(tmp_path / "b")), tmp_path / str(len(expected)), fsync=False)
        with safe_open(done.out / "model.safetensors", "np") as file:
            assert file.metadata() == {"format": "pt", **said, **expected}


def test_two_revisions_of_a_model_are_two_names() -> None:
    refs = [ModelRef("me/ink", "v1"), ModelRef("me/ink", "v2"), ModelRef("me/sd", "main"), ModelRef("me/ink", "v1")]
    names = merged_metadata({"modelspec.title": "Ink"}, _merged_paths(refs, {}), alone=True)
    assert names["modelspec.merged_from"] == "ink@v1, ink@v2, sd"


def test_metadata_after_which_comfyui_builds_a_model_is_kept_and_compared(tmp_path: Path) -> None:
    said = {"config": '{"transformer": {"rope_type": "split"}, "vae": {}}', "is_512": "True", "resolution": "512"}
    for name, metadata in (("a", said), ("b", said), ("c", said | {"config": "{}"}), ("d", {"format": "pt"})):
        save_file({"w": np.full((4, 4), ord(name), np.float32)}, tmp_path / f"{name}.safetensors", metadata=metadata)
    for other, differing in (("b", 0), ("c", 1), ("d", 0)):
        recipe = linear(*(str(tmp_path / f"{name}.safetensors") for name in ("a", other)))
        done = weightsmith.merge(recipe, tmp_path / other, fsync=False)
        assert len([f for f in done.plan.warnings if "its metadata config differs" in f.what]) == differing
        with safe_open(done.out / "model.safetensors", "np") as file:
            assert file.metadata() == {"format": "pt", "modelspec.merged_from": f"a, {other}", **said}
    done = weightsmith.merge(linear(*(str(tmp_path / f"{name}.safetensors") for name in "da")), tmp_path / "lost", fsync=False)
    assert any("its metadata config, is_512, resolution differs" in finding.what for finding in done.plan.warnings)


def _lists(out: Path) -> str | None:
    with safe_open(out / "model.safetensors", "np") as file:
        metadata: dict[str, str] = file.metadata()
    assert metadata["modelspec.title"] == "Ink"
    return metadata.get("modelspec.merged_from")


def _image_models(tmp_path: Path, *names: str) -> list[str]:
    for seed, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tensors = {"w": np.full((4, 4), seed, np.float32), "model.diffusion_model.out.2.weight": np.ones((2, 2), np.float32)}
        tensors |= {"model_ema.diffusion_modelout2weight": np.zeros((2, 2), np.float32)}
        said = {"modelspec.title": "Ink", "modelspec.merged_from": "old, older"}
        save_file(tensors, tmp_path / name, metadata=said)
    return [str(tmp_path / name) for name in names]


def test_files_of_the_same_name_are_listed_by_their_folders(tmp_path: Path) -> None:
    names = "a/model.safetensors", "b/model.safetensors", "a/ink.safetensors", "b/ink.safetensors"
    done = weightsmith.merge(linear(*_image_models(tmp_path, *names)), tmp_path / "out", fsync=False)
    assert _lists(done.out) == "a, b, a/ink, b/ink"


def test_the_choice_of_a_moving_average_is_no_merged_model(tmp_path: Path) -> None:
    a, b = _image_models(tmp_path, "a.safetensors", "b.safetensors")
    done = weightsmith.merge(linear(f"{a}+ema", f"{b}+no-ema"), tmp_path / "out", fsync=False)
    assert _lists(done.out) == "a, b"
    one = {"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]}
    assert _lists(weightsmith.merge(one, tmp_path / "one", fsync=False).out) == "old, older", "it is no merge"


def test_a_stage_is_listed_by_its_models(tmp_path: Path) -> None:
    _image_models(tmp_path, *(f"{name}.safetensors" for name in ("a", "b", "c", "d1", "d2")))
    models = "models: [{{model: {}, parameters: {{weight: 1}}}}, {{model: {}, parameters: {{weight: 1}}}}]\n"
    folder = f"{tmp_path}/"
    first = "name: first\nmerge_method: linear\n" + models.format(f"{folder}a.safetensors", f"'{folder}d*.safetensors'")
    second = "name: second\nmerge_method: linear\n" + models.format("first", f"{folder}b.safetensors")
    last = "merge_method: linear\n" + models.format("second", f"{folder}c.safetensors")
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("---\n".join((first, second, last)))
    done = weightsmith.merge(str(recipe), tmp_path / "out", fsync=False)
    assert _lists(done.out) == "a, d1, d2, b, c"


def test_the_current_folder_is_listed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, b = _image_models(tmp_path, "ink/model.safetensors", "b.safetensors")
    monkeypatch.chdir(tmp_path / "ink")
    assert _lists(weightsmith.merge(linear(".", b), tmp_path / "out", fsync=False).out) == "ink, b"


def test_models_that_are_not_read_are_not_listed(tmp_path: Path) -> None:
    recipe = linear(*_image_models(tmp_path, *(f"{name}.safetensors" for name in "abc")))
    recipe["models"][1]["parameters"] = {"weight": 0}
    assert _lists(weightsmith.merge(recipe, tmp_path / "out", fsync=False).out) == "a, c"
    recipe["models"][2]["parameters"] = {"weight": 0}
    assert _lists(weightsmith.merge(recipe, tmp_path / "one", fsync=False).out) is None, "the old list would be false"


@pytest.mark.parametrize(("other", "stated"), [("mit", "mit"), ("openrail", None), (None, None)])
def test_a_merge_has_the_licence_that_all_of_its_files_have(other: str | None, stated: str | None) -> None:
    says = [{"modelspec.license": "mit"}, {} if other is None else {"modelspec.license": other}]
    metadata = merged_metadata({"modelspec.title": "Ink", **says[0]}, ["a.safetensors", "b.safetensors"], says, alone=True)
    assert metadata.get("modelspec.license") == stated
