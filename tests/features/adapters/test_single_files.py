"""Merges of adapters in single files: the updates are merged, not the factors, and the result is named as the inputs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.cli_help import Cli, cli
from tests.features.adapters.test_merge import merge, recipe, refusal
from tests.models.lora.test_files import FLUX, pair, product
from tests.models.lora.test_lora import H, Q, adapter, factors
from weightsmith._base.errors import MismatchError, PlanError

torch = pytest.importorskip("torch")
__all__ = ["cli"]

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Ends = tuple[str, str]

PEFT: Ends = ("lora_A", "lora_B")
OLDER: Ends = ("lora.down", "lora.up")
OF_TEXT_ENCODERS: Ends = ("lora_linear_layer.down", "lora_linear_layer.up")

SHAPES: Shapes = {
    "lora_unet_down_blocks_0_attentions_0_proj_in": (6, 8, 1, 1),
    "lora_unet_down_blocks_0_attn1_to_q": (6, 8),
    "lora_unet_down_blocks_0_resnets_0_conv1": (6, 4, 3, 3),
    "lora_te1_text_model_encoder_layers_0_mlp_fc1": (12, 8),
    "lora_te2_text_model_encoder_layers_0_mlp_fc1": (14, 10),
}
"""Modules of a LoRA for Stable Diffusion XL in kohya's names → outputs and inputs."""


def kohya(path: Path, seed: int, rank: int = 2, alpha: float | None = 1.0, shapes: Shapes = SHAPES) -> Path:
    tensors = {}
    for i, (module, shape) in enumerate(shapes.items()):
        a, b = pair(shape, rank, 100 * seed + 10 * i)
        tensors |= {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b}
        tensors |= {} if alpha is None else {f"{module}.alpha": np.array(alpha, np.float32)}
    save_file(tensors, path)
    return path


def diffusers(path: Path, seed: int, rank: int = 2, ends: Ends = PEFT, beginning: str = "transformer.") -> Path:
    a, b = pair((6, 8), rank, 10 * seed)
    save_file({f"{beginning}{FLUX}.{end}.weight": array for end, array in zip(ends, (a, b), strict=True)}, path)
    return path


def updates(tensors: Arrays, a_end: str, b_end: str) -> Arrays:
    """Module → what a file adds to its weight."""
    by_module = {}
    for name, a in tensors.items():
        if name.endswith(a_end):
            module = name.removesuffix(a_end)
            alpha = float(tensors.get(f"{module}.alpha", len(a)))
            b = tensors[f"{module}{b_end}"]
            by_module[module] = alpha / len(a) * product(a, b, (len(b), *a.shape[1:]))
    return by_module


def kohya_updates(path: Path) -> Arrays:
    return updates(load_file(path), ".lora_down.weight", ".lora_up.weight")


@pytest.mark.parametrize(
    ("method", "shared", "weights", "shares"),
    [
        ("linear", {"normalize": True}, (0.5, 0.5), (0.5, 0.5)),
        ("linear", {"normalize": False}, (0.7, -0.2), (0.7, -0.2)),
        ("task_arithmetic", {"lambda": 0.5}, (1.0, 1.0), (0.5, 0.5)),
        ("peft_cat", {}, (0.3, 0.9), (0.3, 0.9)),
    ],
)
def test_the_updates_of_kohya_s_files_are_merged(
    method: str, shared: dict[str, Any], weights: tuple[float, float], shares: tuple[float, float], tmp_path: Path
) -> None:
    paths = kohya(tmp_path / "one.safetensors", 1, 2, 1.0), kohya(tmp_path / "two.safetensors", 2, 3, 6.0)
    out = merge(recipe(paths, method, weights, **shared), tmp_path / "out")
    stored = load_file(out / "lora.safetensors")
    actual, (one, two) = kohya_updates(out / "lora.safetensors"), map(kohya_updates, paths)
    assert actual.keys() == SHAPES.keys()
    for module, shape in SHAPES.items():
        want = shares[0] * one[module] + shares[1] * two[module]
        np.testing.assert_allclose(actual[module], want, atol=3e-6 * np.abs(want).max(), err_msg=module)
        rank = min(5, shape[0], int(np.prod(shape[1:])))
        assert stored[f"{module}.alpha"].shape == ()
        assert float(stored[f"{module}.alpha"]) == rank
        assert stored[f"{module}.lora_down.weight"].shape == (rank, *shape[1:])
        assert stored[f"{module}.lora_up.weight"].shape == (shape[0], rank, *[1] * (len(shape) - 2))
    assert {path.name for path in out.iterdir()} >= {"README.md", "lora.safetensors", "weightsmith.json"}
    assert not (out / "config.json").exists()
    assert not (out / "adapter_config.json").exists()


def test_a_smaller_rank(tmp_path: Path) -> None:
    module = {"lora_unet_mid_block_attn1_to_q": (6, 8)}
    paths = tuple(kohya(tmp_path / f"{i}.safetensors", i, 3, None, module) for i in (1, 2))
    out = merge(recipe(paths, normalize=False), tmp_path / "out", adapter_rank=2, out_dtype="float16")
    (actual,), (one,), (two,) = (kohya_updates(path).values() for path in (out / "lora.safetensors", *paths))
    u, s, vt = np.linalg.svd(one + two)
    np.testing.assert_allclose(actual, (u[:, :2] * s[:2]) @ vt[:2], atol=2e-3 * s[0])
    stored = load_file(out / "lora.safetensors")
    assert {str(stored[name].dtype) for name in stored if "lora_" in name.partition(".")[2]} == {"float16"}


def test_modules_that_one_file_lacks(tmp_path: Path) -> None:
    first = dict(list(SHAPES.items())[:3])
    paths = kohya(tmp_path / "one.safetensors", 1), kohya(tmp_path / "two.safetensors", 2, shapes=first)
    actual = kohya_updates(merge(recipe(paths, normalize=False), tmp_path / "out") / "lora.safetensors")
    one, two = map(kohya_updates, paths)
    assert actual.keys() == SHAPES.keys()
    for module, want in one.items():
        np.testing.assert_allclose(actual[module], want + two.get(module, 0), atol=1e-5)


@pytest.mark.parametrize("ends", [PEFT, OLDER, OF_TEXT_ENCODERS])
def test_diffusers_files_keep_their_names(ends: Ends, tmp_path: Path) -> None:
    paths = tuple(diffusers(tmp_path / f"{i}.safetensors", i, i + 1, ends) for i in (1, 2))
    out = merge(recipe(paths, weights=(0.5, 0.5)), tmp_path / "out")
    name = f"transformer.{FLUX}"
    stored = load_file(out / "pytorch_lora_weights.safetensors")
    assert stored.keys() == {f"{name}.{end}.weight" for end in ends}
    (actual,) = updates(stored, f".{ends[0]}.weight", f".{ends[1]}.weight").values()
    per_file = [updates(load_file(path), f".{ends[0]}.weight", f".{ends[1]}.weight")[name] for path in paths]
    np.testing.assert_allclose(actual, sum(per_file) / 2, atol=1e-5)


def test_alphas_of_names_with_dots_are_kept(tmp_path: Path) -> None:
    """musubi-tuner's and ComfyUI's: dots, and an alpha."""
    shapes: Shapes = {f"diffusion_model.{FLUX}": (6, 8)}
    paths = tuple(kohya(tmp_path / f"{i}.safetensors", i, 2, 1.0, shapes) for i in (1, 2))
    out = merge(recipe(paths, normalize=False), tmp_path / "out")
    stored = load_file(out / "pytorch_lora_weights.safetensors")
    assert float(stored[f"diffusion_model.{FLUX}.alpha"]) == 4
    (actual,), ((one,), (two,)) = (
        updates(stored, ".lora_down.weight", ".lora_up.weight").values(),
        (kohya_updates(path).values() for path in paths),
    )
    np.testing.assert_allclose(actual, one + two, atol=1e-5)


def test_peft_s_files_give_a_folder_for_peft(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", factors(Q, H, H, seed=1)), adapter(tmp_path / "two", factors(Q, H, H, seed=5))
    want = merge(recipe((one, two)), tmp_path / "folders")
    merged_folder = merge(recipe((one / "adapter_model.safetensors", two)), tmp_path / "files")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (merged_folder / name).read_bytes() == (want / name).read_bytes()


def test_folders_with_a_file_and_results_are_merged_again(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / f"hub{i}").mkdir()
        diffusers(tmp_path / f"hub{i}/pytorch_lora_weights.safetensors", i)
    out = merge(recipe((tmp_path / "hub1", tmp_path / "hub2")), tmp_path / "out")
    again = merge(recipe((out, tmp_path / "hub1"), normalize=False), tmp_path / "again")
    name = "pytorch_lora_weights.safetensors"
    (actual,), (merged,), (one,) = (
        updates(load_file(path / name), ".lora_A.weight", ".lora_B.weight").values() for path in (again, out, tmp_path / "hub1")
    )
    np.testing.assert_allclose(actual, merged + one, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("kohya", "adapters that name their modules in different ways"),
        ("peft", "adapters that name their modules in different ways"),
        ("comfy", "adapters that name the modules of the diffusion model in different ways"),
        ("original", "adapters that name the modules of the diffusion model in different ways"),
        ("another base", "adapters of different bases"),
        ("half a LoKr", "1 of its modules are no LoRA"),
        ("model", "an adapter (LoRA), not a model"),
    ],
)
def test_adapters_that_are_not_merged(other: str, message: str, tmp_path: Path) -> None:
    path, first = tmp_path / "two.safetensors", diffusers(tmp_path / "one.safetensors", 1)
    if other == "kohya":
        kohya(path, 2)
    elif other == "peft":
        path = adapter(tmp_path / "two")
    elif other == "comfy":
        diffusers(path, 2, beginning="diffusion_model.")
    elif other == "original":
        shapes: Shapes = {"transformer.double_blocks.0.img_attn.qkv": (6, 8)}
        kohya(path, 2, shapes=shapes)
    elif other == "another base":
        kohya(path, 2, alpha=None, shapes={f"transformer.{FLUX}": (6, 9)})
    elif other == "half a LoKr":
        save_file({f"lycoris_{FLUX.replace('.', '_')}.lokr_w1": np.ones((2, 2), np.float32)}, path)
    else:
        save_file({f"{FLUX}.weight": np.ones((6, 8), np.float32)}, path)
    assert message in str(refusal(recipe((first, path), weights=(0.5, 0.5))))


def test_two_names_of_the_blocks_of_one_model(tmp_path: Path) -> None:
    """diffusers silently drops one half of such a file."""
    paths = (
        kohya(tmp_path / "one.safetensors", 1, shapes={"lora_unet_input_blocks_4_1_proj_in": (6, 8)}),
        kohya(tmp_path / "two.safetensors", 2, shapes={"lora_unet_down_blocks_1_attentions_0_proj_in": (6, 8)}),
    )
    problem = refusal(recipe(paths))
    assert isinstance(problem, MismatchError)
    assert any("lora_unet_input_blocks" in line for line in problem.finding.details)


def test_files_with_other_modules_of_one_network(tmp_path: Path) -> None:
    """What begins with no block says nothing of the names; and files for other modules are merged, with a warning."""
    paths = (
        kohya(tmp_path / "one.safetensors", 1, shapes={"lora_unet_conv_in": (6, 4, 3, 3)}),
        kohya(tmp_path / "two.safetensors", 2, shapes={"lora_unet_down_blocks_1_proj_in": (6, 8)}),
    )
    plan = weightsmith.plan(recipe(paths))
    assert len(plan.steps) == 6
    (warning,) = (warning for warning in plan.warnings if "in common" in warning.what)
    assert f"no module of the diffusion model in common with {paths[0]}" in warning.what


def test_factors_in_memory_are_not_averaged() -> None:
    a, b = pair((6, 8))
    state = {"layers.0.q.lora_A.weight": a, "layers.0.q.lora_B.weight": b, "norm": np.ones(3, np.float32)}
    with pytest.raises(PlanError, match="would be merged as weights, and their product is not merged then"):
        weightsmith.merge_state_dicts("linear", [state, state], weight=0.5)


@pytest.mark.long
def test_a_plan_that_runs_elsewhere(tmp_path: Path, cli: Cli) -> None:
    paths = kohya(tmp_path / "one.safetensors", 1), kohya(tmp_path / "two.safetensors", 2)
    (tmp_path / "r.yml").write_text(json.dumps(recipe(paths, "ties", density=0.5)))
    ran = cli("plan", tmp_path / "r.yml", "--json")
    assert ran.code == 0, ran.err
    (tmp_path / "plan.json").write_text(ran.out)
    assert cli("run", tmp_path / "plan.json", tmp_path / "run", "--quiet").code == 0
    direct = merge(recipe(paths, "ties", density=0.5), tmp_path / "direct", threads=1)
    assert (tmp_path / "run/lora.safetensors").read_bytes() == (direct / "lora.safetensors").read_bytes()
    assert cli("verify", tmp_path / "run").code == 0
    assert "- lora\n" in (direct / "README.md").read_text()


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stated", [False, True])
def test_diffusers_is_the_judge(stated: bool, tmp_path: Path) -> None:
    """A transformer with the merged file loaded has the mean of the updates, from files with and without an alpha."""
    diffusers_library = pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    settings |= {"joint_attention_dim": 16, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}

    def fresh() -> Any:
        torch.manual_seed(0)
        return diffusers_library.FluxTransformer2DModel(**settings)

    paths, seen = [], []
    before = {name: value.clone() for name, value in fresh().state_dict().items()}
    for i, rank in enumerate((2, 4)):
        from peft import LoraConfig
        from peft.utils import get_peft_model_state_dict

        model = fresh()
        config = LoraConfig(r=rank, lora_alpha=3 if stated else rank, target_modules=["to_q", "to_out.0", "proj_out"])
        model.add_adapter(config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter) * 0.1
        layers = get_peft_model_state_dict(model)
        pipeline = diffusers_library.FluxPipeline
        options = {"transformer_lora_adapter_metadata": model.peft_config["default"].to_dict()} if stated else {}
        pipeline.save_lora_weights(tmp_path / str(i), transformer_lora_layers=layers, **options)
        paths.append(tmp_path / str(i))
        seen.append(_fused(fresh(), paths[-1]))
    out = merge(recipe(tuple(paths), weights=(0.5, 0.5)), tmp_path / "out")
    fused = _fused(fresh(), out)
    changed = 0
    for name, value in before.items():
        want = sum((state[name] - value for state in seen), torch.zeros_like(value)) / 2
        changed += bool(want.abs().max() > 0.01)
        torch.testing.assert_close(fused[name] - value, want, atol=1e-5, rtol=0)
    assert changed >= 3


def _fused(model: Any, folder: Path) -> dict[str, Any]:
    """A model's weights with a file of factors loaded and fused by diffusers."""
    model.load_lora_adapter(folder / "pytorch_lora_weights.safetensors", prefix="transformer", use_safetensors=True)
    model.fuse_lora()
    model.unload_lora()
    return {name: value.clone() for name, value in model.state_dict().items()}


TRAINED = {"ss_network_dim": "2", "ss_network_alpha": "1", "ss_tag_frequency": '{"a": {"cat": 3}}', "sshs_model_hash": "0x12"}
SAID = {"modelspec.title": "Cat", "modelspec.license": "mit", "modelspec.trigger_phrase": "sks cat", **TRAINED}


def said(path: Path, **changes: str) -> dict[str, str]:
    """Rewrites a file with metadata, or reads its metadata."""
    if changes:
        save_file(load_file(path), path, changes)
    with safe_open(path, "numpy") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(("program", "alpha"), [("kohya", "1.0"), ("diffusers", "2.0")])
def test_what_a_file_says_of_its_training_goes_along(program: str, alpha: str, tmp_path: Path) -> None:
    """Trigger words and tags are shown by other programs. Hashes of the old tensors are wrong."""
    shapes = {"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": (6, 8)}
    source = kohya(tmp_path / "a.safetensors", 1, shapes=shapes)
    said(source, **SAID)
    result = weightsmith.convert_lora(source, tmp_path / "out", layout=program, progress=False)
    (written,) = result.out.glob("*.safetensors")
    hashes = {"sshs_model_hash"}
    kept = {key: value for key, value in SAID.items() if key not in hashes}
    assert said(written) == {"format": "pt", **kept, "ss_network_alpha": alpha}


def test_a_merge_says_what_its_first_adapter_does_and_its_own_rank(tmp_path: Path) -> None:
    files = [kohya(tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate("ab")]
    for path, licence in zip(files, ("mit", "apache-2.0"), strict=True):
        said(path, **SAID | {"modelspec.license": licence})
    out = tmp_path / "out"
    merge(recipe(tuple(files)), out)
    metadata = said(out / "lora.safetensors")
    assert "modelspec.license" not in metadata
    assert metadata["modelspec.merged_from"] == "a, b"
    assert metadata["modelspec.trigger_phrase"] == "sks cat"
    ranks = {len(a) for name, a in load_file(out / "lora.safetensors").items() if name.endswith("lora_down.weight")}
    assert metadata["ss_network_dim"] == (str(*ranks) if len(ranks) == 1 else "Dynamic")
