"""Adapters of mixtures of experts, of other trainers' names, and in kohya's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import moe_zoo
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_lora import BF16, DOWN, INNER, H, P, Q, adapter, baked, base, base_tensors, factors, normal, refusal
from weightsmith._models.lora import apply_adapter, open_adapter

E, W, R = 3, 10, 2  # experts, their width, rank
MLP = "model.layers.0.mlp"
CONFIG = {"model_type": "x", "num_local_experts": E, "num_hidden_layers": 1}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def fused(*, transposed: bool = False, inner: int = W) -> dict[str, np.ndarray]:
    """Experts as two parameters: [E, outputs, inputs], or [E, inputs, outputs]."""
    shapes = {"gate_up_proj": (2 * inner, H), "down_proj": (H, inner)}
    return {
        f"{MLP}.experts.{name}": normal(E, *(shape[::-1] if transposed else shape), seed=k)
        for k, (name, shape) in enumerate(shapes.items())
    }


def apart(
    tensors: dict[str, np.ndarray], names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Any]:
    """The same experts as matrices of their own."""
    both, down = tensors.values()
    where = f"{MLP}.experts" if names[0] == "gate_proj" else "model.layers.0.block_sparse_moe.experts"
    pieces = {}
    for e in range(E):
        parts = (both[e, : both.shape[1] // 2], both[e, both.shape[1] // 2 :], down[e])
        pieces |= {f"{where}.{e}.{name}.weight": np.ascontiguousarray(part) for name, part in zip(names, parts, strict=True)}
    return pieces


def stacked(tensors: dict[str, np.ndarray], *, swapped: bool = False) -> dict[str, np.ndarray]:
    """Factors of both parameters; swapped: in the layout that takes all of them for [E, inputs, outputs]."""
    stored_factors = {}
    for level, (name, weight) in zip((".base_layer", ""), tensors.items(), strict=True):
        _, rows, cols = weight.shape
        inputs, outputs = (rows, cols) if swapped else (cols, rows)
        stored_factors[f"{P}{MLP}.experts{level}.lora_A.weight"] = normal(E * R, inputs, seed=len(name))
        stored_factors[f"{P}{MLP}.experts{level}.lora_B.weight"] = normal(outputs, R * E, seed=len(name) + 1)
    return stored_factors


def delta(factors_of: dict[str, np.ndarray], level: str, *, swapped: bool) -> np.ndarray:
    """By PEFT's formula: float64 [E, rows, cols], with a scaling of 8 / 2."""
    a, b = (factors_of[f"{P}{MLP}.experts{level}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    a, b = a.reshape(E, R, -1), b.reshape(len(b), R, E)
    return 4.0 * np.einsum("ore,eri->eio" if swapped else "ore,eri->eoi", b, a)


@pytest.mark.parametrize("transposed", [False, True], ids=["[E, out, in]", "[E, in, out]"])
@pytest.mark.parametrize("swapped", [False, True], ids=["modern", "legacy"])
@pytest.mark.parametrize("targets", [TARGETS, ["gate_up_proj", "down_proj"]], ids=["long", "bare"])
def test_both_of_peft_s_layouts_of_experts_are_known_by_their_shapes(
    transposed: bool, swapped: bool, targets: list[str], tmp_path: Path
) -> None:
    tensors = fused(transposed=transposed)
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    lora = adapter(tmp_path / "a", lora_tensors := stacked(tensors, swapped=swapped), r=R, target_parameters=targets)
    weights = baked(model, lora, tmp_path / "out")
    for level, (name, weight) in zip((".base_layer", ""), tensors.items(), strict=True):
        want = weight + delta(lora_tensors, level, swapped=swapped)
        assert as_bytes(weights[name]) == as_bytes(want.astype(np.float32))


@pytest.mark.parametrize("swapped", [False, True], ids=["modern", "legacy"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_factors_of_fused_experts_are_applied_to_experts_that_are_apart(
    swapped: bool, names: tuple[str, str, str], tmp_path: Path
) -> None:
    tensors = fused()
    model = write_checkpoint(tmp_path / "base", apart(tensors, names), CONFIG)
    lora = adapter(tmp_path / "a", lora_tensors := stacked(tensors, swapped=swapped), r=R, target_parameters=TARGETS)
    weights = baked(model, lora, tmp_path / "out")
    levels = zip((".base_layer", ""), tensors.items(), strict=True)
    merged = {n: (w + delta(lora_tensors, level, swapped=swapped)).astype(np.float32) for level, (n, w) in levels}
    assert {n: as_bytes(a) for n, a in weights.items()} == {n: as_bytes(a) for n, a in apart(merged, names).items()}


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_factors_of_experts_that_are_apart_are_applied_to_fused_ones(names: tuple[str, str, str], tmp_path: Path) -> None:
    tensors = fused()
    lora_tensors = {
        k: v for n, w in apart(tensors, names).items() for k, v in factors(n.removesuffix(".weight"), *w.shape, R).items()
    }
    lora_tensors = {
        name.replace("block_sparse_moe", "mlp"): array for name, array in lora_tensors.items() if ".experts.1." not in name
    }
    lora = adapter(tmp_path / "a", lora_tensors, r=R)
    weights = baked(write_checkpoint(tmp_path / "base", tensors, CONFIG), lora, tmp_path / "out")
    for name, want in apart(tensors, names).items():
        if (factor := f"{P}{name.replace('block_sparse_moe', 'mlp').removesuffix('.weight')}.lora_A.weight") in lora_tensors:
            want += (4.0 * lora_tensors[factor.replace("_A", "_B")].astype(np.float64) @ lora_tensors[factor]).astype(
                np.float32
            )
        np.testing.assert_allclose(apart({n: weights[n] for n in tensors}, names)[name], want, rtol=1e-6, atol=1e-6)


def listed(experts: int = E) -> dict[str, np.ndarray]:
    """Factors of all experts of a gpt-oss, which Unsloth has in lists."""
    places = [("gate_up_projs", 2 * W, H), ("down_projs", H, W)]
    modules = [(f"{MLP}.experts.{name}.{e}", *shape) for e in range(experts) for name, *shape in places]
    return {k: v for module, *shape in modules for k, v in factors(module, *shape, R).items()}


def test_factors_of_experts_that_unsloth_has_in_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    shapes = {f"{MLP}.experts.gate_up_proj": (E, H, 2 * W), f"{MLP}.experts.down_proj": (E, W, H)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = write_checkpoint(tmp_path / "base", tensors, {"model_type": "gpt_oss"})
    lists = listed()
    weights = baked(model, adapter(tmp_path / "a", lists, r=R), tmp_path / "out")
    for name, before in tensors.items():
        for e in range(E):
            module = f"{P}{name}s.{e}"
            update = 4.0 * lists[f"{module}.lora_B.weight"].astype(np.float64) @ lists[f"{module}.lora_A.weight"]
            np.testing.assert_allclose(weights[name][e], before[e] + update.T, rtol=1e-5, atol=1e-5)
    problem = str(refusal(model, adapter(tmp_path / "b", listed(E + 1), r=R)))
    assert (
        f"{E} of [{W}, {H}] in {MLP}.experts.down_proj of the base, and the adapter is for expert {E} of [{W}, {H}]" in problem
    )
    other = write_checkpoint(tmp_path / "other", tensors, {"model_type": "qwen3_moe"})
    assert f"{MLP}.experts.down_projs.0.weight: the base has no such tensor" in str(refusal(other, tmp_path / "a"))


def test_any_run_of_bytes_of_experts_is_that_run_of_the_whole(tmp_path: Path) -> None:
    tensors = fused()
    model = write_checkpoint(tmp_path / "base", {n: a.astype(BF16) for n, a in tensors.items()}, CONFIG)
    lora_tensors = {k: v for k, v in stacked(tensors).items() if ".base_layer." not in k}
    lora = adapter(tmp_path / "a", lora_tensors, r=R, target_parameters=TARGETS[1:])
    name = f"{MLP}.experts.down_proj"
    with weightsmith.open_checkpoint(model) as plain, apply_adapter(plain, open_adapter(str(lora)), "x") as checkpoint:
        whole = as_bytes(checkpoint.read(name))
        for start, end in [(0, 4), (3, 90), (W * H * 4 - 4, W * H * 4 + 8), (1, len(whole)), (777, 777)]:
            buffer = np.empty(end - start, np.uint8)
            checkpoint.read_into(name, start, buffer)
            assert buffer.tobytes() == whole[start:end]


def test_what_is_no_adapter_of_these_experts(tmp_path: Path) -> None:
    square = fused(inner=H)
    lora_tensors = {k: v for k, v in stacked(square).items() if ".base_layer." not in k}
    config: dict[str, Any] = {"r": R, "target_parameters": TARGETS[1:]}
    model = write_checkpoint(tmp_path / "square", square, CONFIG)
    problem = str(refusal(model, adapter(tmp_path / "a", lora_tensors, **config)))
    assert f"{MLP}.experts: both of PEFT's layouts of experts fit its matrices, and adapter_config.json has no" in problem
    assert "Write the version of PEFT that saved the adapter" in problem
    problem = str(refusal(model, adapter(tmp_path / "a", lora_tensors, **config, peft_version="0.19.0.dev0@abc")))
    assert "peft_version '0.19.0.dev0@abc' does not tell them apart" in problem
    model = write_checkpoint(tmp_path / "base", fused(), CONFIG)
    problem = str(refusal(model, adapter(tmp_path / "a", lora_tensors, **config)))
    assert f"A and B [6, 24] and [24, 6]; the base has there {MLP}.experts.down_proj [3, 24, 10]" in problem
    problem = str(refusal(base(tmp_path / "dense"), adapter(tmp_path / "a", lora_tensors, **config)))
    assert f"{MLP}.experts has in the base no down_proj of several experts" in problem
    problem = str(refusal(model, adapter(tmp_path / "b", lora_tensors, r=R, target_parameters="down_proj")))
    assert "target_parameters is 'down_proj', not a list of names" in problem
    one = factors(f"{MLP}.experts.1.down_proj", H, W, R)
    lora_tensors = {k: v for k, v in stacked(fused()).items() if ".base_layer." not in k}
    config = {"r": R, "target_parameters": TARGETS[1:]}
    for tensors in (fused(), apart(fused(), ("gate_proj", "up_proj", "down_proj"))):
        both = write_checkpoint(tmp_path / f"{len(tensors)}", tensors, CONFIG)
        problem = str(refusal(both, adapter(tmp_path / "both", lora_tensors | one, **config)))
        assert "down_proj" in problem
        assert "the adapter has factors for it under several names" in problem
    same = {f"{MLP}.experts.{name}": normal(E, 8, H) for name in ("one", "two")}
    model = write_checkpoint(tmp_path / "same", same, CONFIG)
    config = {"r": R, "target_parameters": ["experts.one", "experts.two"]}
    problem = str(refusal(model, adapter(tmp_path / "c", stacked(same), **config)))
    assert f"{MLP}.experts: its factors fit more than one parameter" in problem


@pytest.mark.matrix("mixtral")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "granitemoe", "gpt-oss", "llama4"])
def test_experts_are_merged_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    """In float64; and a bf16 model to one unit in the last place."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model_class, config_class, arguments = moe_zoo.MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments))
    model.save_pretrained(tmp_path / "base")
    where = "block_sparse_moe" if name == "granitemoe" else "feed_forward" if name == "llama4" else "mlp"
    targets = [f"{where}.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    patterns = {"rank_pattern": {".*gate_up_proj": 6}, "alpha_pattern": {".*down_proj": 3}}
    settings = {"target_modules": ["q_proj"], "target_parameters": targets, **patterns}
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, **settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter", autocast_adapter_dtype=False).merge_and_unload()
    merged.save_pretrained(tmp_path / "peft")
    want = load_file(tmp_path / "peft/model.safetensors")
    before = load_file(tmp_path / "base/model.safetensors")
    assert sum((want[n] != before[n]).any() for n in want) > 2
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert weights.keys() == want.keys()
    short = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "short", dtype="bfloat16")
    for tensor, array in want.items():
        np.testing.assert_allclose(weights[tensor], array, rtol=2e-7, atol=1e-9, err_msg=tensor)
        if short[tensor].dtype == BF16:
            ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(array), 1e-30))) - 7)
            assert (np.abs(short[tensor].astype(np.float64) - array) <= ulp).all(), tensor


# ---- other trainers


def test_names_that_trainers_add_to_are_read(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    plain, saved = factors(Q, H, H), normal(50, H, seed=4)
    renamed = {
        name.replace("model.layers", "_orig_mod.model._fsdp_wrapped_module.layers").replace("_A.", "_A.default."): array
        for name, array in plain.items()
    }
    renamed[f"{P}lm_head.modules_to_save.default.weight"] = saved
    renamed[f"{P}lm_head.original_module.weight"] = normal(50, H, seed=5)
    want = baked(model, adapter(tmp_path / "a", plain | {f"{P}lm_head.weight": saved}), tmp_path / "one")
    weights = baked(model, adapter(tmp_path / "b", renamed), tmp_path / "two")
    assert {n: as_bytes(a) for n, a in weights.items()} == {n: as_bytes(a) for n, a in want.items()}


def kohya(path: Path, modules: dict[str, tuple[int, int]], alpha: float | None = 8.0, start: str = "lora_te_") -> Path:
    tensors = {}
    for module, shape in modules.items():
        a, b = factors(module, *shape).values()
        flat = start + module.replace(".", "_")
        tensors |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b}
        tensors |= {} if alpha is None else {f"{flat}.alpha": np.array(alpha, np.float32)}
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(("alpha", "start"), [(8.0, "lora_te_"), (3.0, "lora_te1_"), (None, "lora_unet_")])
def test_kohya_s_files_are_matched_with_the_base_s_names(alpha: float | None, start: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    shapes = {Q.removeprefix("model."): (H, H), DOWN: (H, INNER)}
    weights = baked(model, kohya(tmp_path / "lora.safetensors", shapes, alpha, start), tmp_path / "out")
    for module, shape in {Q: (H, H), DOWN: (H, INNER)}.items():
        a, b = factors(module.removeprefix("model.") if module == Q else module, *shape).values()
        scaling = 1.0 if alpha is None else alpha / 4
        want = base_tensors()[f"{module}.weight"] + scaling * (b.astype(np.float64) @ a)
        np.testing.assert_allclose(weights[f"{module}.weight"], want, rtol=1e-6, atol=1e-6)


def test_modules_that_the_base_does_not_have(tmp_path: Path) -> None:
    model, path = base(tmp_path / "base"), tmp_path / "a.safetensors"
    kohya(path, {"layers.7.self_attn.q_proj": (H, H)})
    assert "layers_7_self_attn_q_proj.weight: the base has no such tensor" in str(refusal(model, path))
    kohya(path, {"self_attn.q_proj": (H, H)})  # of two layers
    assert "self_attn_q_proj.weight: the base has no such tensor" in str(refusal(model, path))
    kohya(path, {Q: (H, H)}, alpha=np.nan)
    assert "alpha is nan" in str(refusal(model, path))
