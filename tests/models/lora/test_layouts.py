"""How factors of all experts are stored, where shapes do not tell: Unsloth's order of B, and PEFT's two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_experts import CONFIG, MLP, TARGETS, E, R, W, apart, delta, fused, stacked
from tests.models.lora.test_lora import H, P, adapter, baked, normal, refusal
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.lora.config import INPUTS_FIRST, transposed_of

GATED = ("gate_proj", "up_proj", "down_proj")
GROUPED, RANK_MAJOR = "grouped_by_expert", "rank_major"
MARK = "unsloth_fused_expert_lora"


def marked(**layouts: str) -> dict[str, Any]:
    """What Unsloth says of each parameter."""
    parameters = {name: {"lora_B_layout": layout, "num_experts": E} for name, layout in layouts.items()}
    return {MARK: {"lora_A_layout": GROUPED, "parameters": parameters}}


def by_expert(factors_of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same factors with B expert after expert."""
    return {
        name: np.ascontiguousarray(a.reshape(len(a), R, E).transpose(0, 2, 1).reshape(a.shape))
        if ".experts" in name and "lora_B" in name
        else a
        for name, a in factors_of.items()
    }


BOTH = dict.fromkeys(("gate_up_proj", "down_proj"), GROUPED)


@pytest.mark.parametrize("store", ["fused", "apart"])
@pytest.mark.parametrize("swapped", [False, True], ids=["modern", "legacy"])
@pytest.mark.parametrize("marks", [{"lora_B_layout": GROUPED}, marked(**BOTH), {"lora_B_layout": GROUPED, **marked(**BOTH)}])
def test_a_b_that_is_grouped_by_expert_is_read_so(marks: dict[str, Any], swapped: bool, store: str, tmp_path: Path) -> None:
    tensors = fused()
    lora_tensors = stacked(tensors, swapped=swapped)
    model = write_checkpoint(tmp_path / "base", tensors if store == "fused" else apart(tensors, GATED), CONFIG)
    lora = adapter(tmp_path / "a", by_expert(lora_tensors), r=R, target_parameters=TARGETS, **marks)
    weights = baked(model, lora, tmp_path / "out")
    levels = zip((".base_layer", ""), tensors.items(), strict=True)
    want = {n: (w + delta(lora_tensors, level, swapped=swapped)).astype(np.float32) for level, (n, w) in levels}
    want = want if store == "fused" else apart(want, GATED)
    assert {n: as_bytes(a) for n, a in weights.items()} == {n: as_bytes(a) for n, a in want.items()}


@pytest.mark.parametrize("marks", [{}, {"lora_B_layout": RANK_MAJOR}, {"auto_mapping": {"unsloth_fixed": True}}])
def test_one_parameter_may_be_grouped_and_another_not(marks: dict[str, Any], tmp_path: Path) -> None:
    tensors = fused()
    lora_tensors = stacked(tensors)
    mixed = {name: by_expert(lora_tensors)[name] if ".base_layer." in name else a for name, a in lora_tensors.items()}
    if "lora_B_layout" in marks:
        layouts, factors_of = marked(gate_up_proj=RANK_MAJOR), lora_tensors
    else:
        layouts, factors_of = marked(gate_up_proj=GROUPED, down_proj=RANK_MAJOR), mixed
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    lora = adapter(tmp_path / "a", factors_of, r=R, target_parameters=TARGETS, **layouts, **marks)
    weights = baked(model, lora, tmp_path / "out")
    for level, (name, weight) in zip((".base_layer", ""), tensors.items(), strict=True):
        assert as_bytes(weights[name]) == as_bytes((weight + delta(lora_tensors, level, swapped=False)).astype(np.float32))


@pytest.mark.parametrize(
    ("marks", "error", "words"),
    [
        ({"lora_B_layout": "expert_major"}, Unsupported, "lora_B_layout is 'expert_major': neither rank_major nor grouped_by"),
        ({"lora_B_layout": 1}, Unsupported, "lora_B_layout is 1: neither"),
        (marked(down_proj="mixed"), Unsupported, "lora_B_layout of down_proj is 'mixed': neither"),
        ({"lora_B_layout": RANK_MAJOR, **marked(down_proj=GROUPED)}, FormatError, "is grouped_by_expert, and lora_B_layout is"),
        ({MARK: {"lora_A_layout": RANK_MAJOR}}, Unsupported, f"lora_A_layout of {MARK} is 'rank_major', not grouped_by_expert"),
        ({MARK: [1]}, FormatError, f"{MARK} is [1], not an object"),
        ({MARK: {"parameters": {"down_proj": "x"}}}, FormatError, "down_proj of"),
        ({"auto_mapping": {"unsloth_fixed": True}}, Unsupported, "Unsloth saved it without lora_B_layout"),
    ],
)
def test_layouts_that_are_not_known_are_refused(
    marks: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    tensors = fused()
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    problem = refusal(model, adapter(tmp_path / "a", stacked(tensors), r=R, target_parameters=TARGETS, **marks))
    assert isinstance(problem, error)
    assert words in str(problem)


# ---- PEFT's two layouts

VERSIONS = {  # what PEFT of each version does with models that have [experts, outputs, inputs]; None: cannot be told
    "0.18.0": True,
    "0.18.1": True,
    "0.19.0": True,
    "0.19.1": False,
    "0.21.2": False,
    "1.0.0": False,
    "0.20.1.dev0@UNKNOWN": False,
    "0.19.1.dev0@1f2e": None,
    "0.17.1": None,
    "0.21": None,
    None: None,
    21: None,
    "9" * 5000 + ".1.1": None,
}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: str(v)[:24])
def test_the_version_of_peft_tells_the_layout(version: Any) -> None:
    assert transposed_of(version, "nemotron_h") is VERSIONS[version]
    assert transposed_of(version, None) is None


def test_models_whose_layout_depends_on_transformers_too() -> None:
    assert [transposed_of(version, "gpt_oss") for version in ("0.18.1", "0.19.0", "0.21.2")] == [True, None, None]


def test_which_models_peft_takes_for_inputs_first() -> None:
    """As transformers declares them. A new one fails here: add its `model_type`."""
    transformers = pytest.importorskip("transformers")
    folders = Path(transformers.__file__).parent / "models"
    declared = {path.parent.name for path in folders.glob("*/modeling_*.py") if "is_transposed=True" in path.read_text()}
    assert declared == INPUTS_FIRST


def up_and_down(inner: int = W) -> dict[str, np.ndarray]:
    """Experts without gates: up and down are each other's transpose."""
    where = f"{MLP}.experts"
    return {f"{where}.up_proj": normal(E, inner, H, seed=1), f"{where}.down_proj": normal(E, H, inner, seed=2)}


@pytest.mark.parametrize(("version", "swapped"), [("0.21.2", False), ("0.18.1", True)])
@pytest.mark.parametrize("inner", [W, H], ids=["each other's transpose", "square"])
def test_up_and_down_without_gates_are_told_apart_by_the_version(
    inner: int, version: str, swapped: bool, tmp_path: Path
) -> None:
    tensors = up_and_down(inner)
    config = {"r": R, "target_parameters": ["experts.up_proj", "experts.down_proj"]}
    lora_tensors = stacked(tensors, swapped=swapped)
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    weights = baked(model, adapter(tmp_path / "a", lora_tensors, peft_version=version, **config), tmp_path / "out")
    for level, (name, weight) in zip((".base_layer", ""), tensors.items(), strict=True):
        assert as_bytes(weights[name]) == as_bytes((weight + delta(lora_tensors, level, swapped=swapped)).astype(np.float32)), (
            name
        )
    problem = refusal(model, adapter(tmp_path / "b", lora_tensors, **config))
    assert isinstance(problem, Unsupported)
    assert "both of PEFT's layouts of experts fit its matrices" in str(problem)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inner", [12, 24])
def test_experts_without_gates_are_merged_as_peft_merges_them(inner: int, tmp_path: Path) -> None:
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "vocab_size": 40, "intermediate_size": 20, "moe_intermediate_size": inner}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "n_groups": 1, "ssm_state_size": 8}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 16}
    sizes |= {"layers_block_type": ["moe", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 12}
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes)).float()
    model.save_pretrained(tmp_path / "base")
    targets = ["mixer.experts.up_proj", "mixer.experts.down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "peft")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    before = load_file(tmp_path / "base/model.safetensors")
    want = load_file(tmp_path / "peft/model.safetensors")
    assert sum((want[n] != before[n]).any() for n in want if ".experts." in n) == 8
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


def test_an_adapter_is_of_the_module_that_it_names(tmp_path: Path) -> None:
    """A layout of a parameter that has no factors changes nothing."""
    tensors = fused()
    lora_tensors = {name: a for name, a in stacked(tensors).items() if ".base_layer." not in name}
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    lora = adapter(tmp_path / "a", lora_tensors, r=R, target_parameters=TARGETS[1:], **marked(gate_up_proj=GROUPED))
    weights = baked(model, lora, tmp_path / "out")
    name = f"{MLP}.experts.down_proj"
    assert as_bytes(weights[name]) == as_bytes((tensors[name] + delta(lora_tensors, "", swapped=False)).astype(np.float32))
    assert f"{P}{MLP}.experts.lora_A.weight" in lora_tensors
