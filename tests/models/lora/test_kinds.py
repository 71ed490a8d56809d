"""Adapters of other kinds than LoRA: against PEFT's own merge, whatever the tiles, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import INNER, TOKENS, H, P, adapter, baked, base, normal, refusal
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.lora import apply_adapter, open_adapter
from weightsmith._models.lora.kinds import KINDS, NAMES

SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]

LINEAR: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa": ("LoHaConfig", {"r": 3, "alpha": 5}),
    "LoHa, patterns": ("LoHaConfig", {"r": 3, "alpha": 5, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 1.5}}),
    "LoKr": ("LoKrConfig", {"r": 2, "alpha": 3}),
    "LoKr, whole": ("LoKrConfig", {"r": 64, "alpha": 3}),
    "LoKr, both": ("LoKrConfig", {"r": 1, "alpha": 3, "decompose_both": True, "decompose_factor": 4}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "OFT, exact": ("OFTConfig", {"oft_block_size": 8, "use_cayley_neumann": False}),
    "OFT, three terms": ("OFTConfig", {"oft_block_size": 8, "num_cayley_neumann_terms": 3}),
    "OFT, shared": ("OFTConfig", {"oft_block_size": 4, "block_share": True}),
    "OFT, constrained": ("OFTConfig", {"oft_block_size": 4, "coft": True, "eps": 0.05}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
    "HRA, orthogonal": ("HRAConfig", {"r": 3, "apply_GS": True}),
    "VeRA": ("VeraConfig", {"r": 5}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "lora_alpha": 7, "total_step": 10}),
    "MiSS": ("MissConfig", {"r": 4}),
    "MiSS, remainder": ("MissConfig", {"r": 7}),
    "MiSS, bat": ("MissConfig", {"r": 4, "init_weights": "bat"}),
    "MiSS, mini": ("MissConfig", {"r": 4, "init_weights": "mini", "mini_r": 2}),
    "RandLoRA": ("RandLoraConfig", {"r": 5, "randlora_alpha": 20}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 50, "scaling": 30.0, "n_frequency_pattern": {"q_proj": 20}}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 3, "num_vectors": 10, "vector_length": 4, "topk": 2}),
    "VB-LoRA, largest": (
        "VBLoRAConfig",
        {"r": 3, "num_vectors": 10, "vector_length": 4, "topk": 3, "save_only_topk_weights": True},
    ),
    "SHiRA": ("ShiraConfig", {"r": 2, "random_seed": 1}),
    "C3A": ("C3AConfig", {"block_size": 4, "block_size_pattern": {"down_proj": 8}}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [3, 41, 7], "target_modules": ["embed_tokens"]}),
    "LoRA and tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [3, 41, 7]}),
    "LoRA and tokens by name": ("LoraConfig", {"r": 2, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [6, 1]}}),
    "OFT and biases": ("OFTConfig", {"oft_block_size": 4, "bias": "oft_only"}),
    "VeRA and biases": ("VeraConfig", {"r": 5, "bias": "all"}),
    "LoHa and a module": ("LoHaConfig", {"r": 2, "modules_to_save": ["lm_head"]}),
    "OFT of the embedding": ("OFTConfig", {"oft_block_size": 4, "target_modules": ["embed_tokens"]}),
}


def llama(transformers: Any, **keys: Any) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": TOKENS, "hidden_size": H, "intermediate_size": INNER}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **keys}))


def trained(torch: Any, model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) * 0.1
    return model


def saved_by_peft(name: str, folder: Path, adapter_name: str) -> tuple[Any, Any, Any]:
    """Writes `base` and an adapter of one of `LINEAR` into a folder. Returns torch, peft and transformers."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    kind, settings = LINEAR[name]
    model = llama(transformers, attention_bias="bias" in settings)
    model.save_pretrained(folder / "base")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **{"target_modules": SOME, **settings})
    trained(torch, peft.get_peft_model(model, config)).save_pretrained(folder / adapter_name)
    return torch, peft, transformers


def merged_by_peft(peft: Any, model: Any, folder: Path) -> dict[str, np.ndarray]:
    merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    return {name: tensor.detach().float().numpy().copy() for name, tensor in merged.state_dict().items()}


def compare(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> int:
    """How many tensors the adapter changes."""
    changed = 0
    for name, array in weights.items():
        np.testing.assert_allclose(array, expected[name], rtol=3e-6, atol=3e-6, err_msg=name)
        changed += bool((expected[name] != before[name]).any()) if name in before else 1
        assert (array != before.get(name, 0)).any() == (expected[name] != before.get(name, 0)).any(), name
    return changed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LINEAR)
def test_applying_an_adapter_is_peft_s_merge(name: str, tmp_path: Path) -> None:
    torch, peft, transformers = saved_by_peft(name, tmp_path, "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = merged_by_peft(peft, fresh, tmp_path / "adapter")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert compare(weights, expected, load_file(tmp_path / "base/model.safetensors")) >= (
        1 if "token" in name or "embed" in name else 3
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("IA3Config", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
        ("VeraConfig", {"r": 3}),
        ("FourierFTConfig", {"n_frequency": 30}),
        ("RandLoraConfig", {"r": 5}),
        ("VBLoRAConfig", {"r": 2, "num_vectors": 6, "vector_length": 4}),
        ("AdaLoraConfig", {"init_r": 3, "total_step": 10}),
    ],
)
def test_weights_that_are_stored_inputs_first(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2's; its modules have biases, which IA3 multiplies too."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = trained(torch, transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    model.save_pretrained(tmp_path / "base")
    config = getattr(peft, kind)(**{"target_modules": ["c_attn", "mlp.c_fc"], **settings}, fan_in_fan_out=True)
    trained(torch, peft.get_peft_model(model, config)).save_pretrained(tmp_path / "adapter")
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = merged_by_peft(peft, fresh, tmp_path / "adapter")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert compare(weights, expected, load_file(tmp_path / "base/model.safetensors")) == (3 if kind == "IA3Config" else 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoHaConfig", {"r": 3, "use_effective_conv2d": True}),
        ("LoHaConfig", {"r": 3}),
        ("LoKrConfig", {"r": 1, "use_effective_conv2d": True, "target_modules": ["two", "three"]}),
        ("LoKrConfig", {"r": 1, "target_modules": ["two", "three"]}),
        ("LoKrConfig", {"r": 64, "target_modules": ["two"]}),
        ("IA3Config", {"feedforward_modules": []}),
        ("IA3Config", {"feedforward_modules": ["two", "three"]}),
        ("IA3Config", {"feedforward_modules": ["two"], "target_modules": ["two"]}),
        ("OFTConfig", {"oft_block_size": 3, "target_modules": ["two"]}),
        ("HRAConfig", {"r": 4, "target_modules": ["two"]}),
    ],
)
def test_convolutions(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch, peft = (pytest.importorskip(n) for n in ("torch", "peft"))
    torch.manual_seed(0)
    targets = settings.get(
        "target_modules", ["one", "two", "three"] if kind in ("LoHaConfig", "LoKrConfig") else ["two", "three"]
    )

    class Convolutions(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Conv1d(4, 6, 5)
            self.two = torch.nn.Conv2d(6, 8, 3)
            self.three = torch.nn.Conv2d(8, 8, 1)

    model = Convolutions()
    tensors = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    write_checkpoint(tmp_path / "base", tensors, {})
    config = getattr(peft, kind)(**{**settings, "target_modules": targets})
    trained(torch, peft.get_peft_model(model, config)).save_pretrained(tmp_path / "adapter")
    fresh = Convolutions()
    fresh.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
    expected = merged_by_peft(peft, fresh, tmp_path / "adapter")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert compare(weights, expected, tensors) >= len(targets)


def two_modules(kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A trained adapter of a kind, without PEFT: of the second layer's q_proj [24, 24] and up_proj [40, 24]."""
    tensors: dict[str, np.ndarray] = {}
    settings: dict[str, dict[str, Any]] = {
        "lokr": {"r": 2, "alpha": 1},
        "loha": {"r": 2, "alpha": 1},
        "miss": {"r": 4, "init_weights": "bat"},
        "fourierft": {"n_frequency": 9, "scaling": 9.0},
        "boft": {},
        "hra": {"r": 3},
        "shira": {"r": 1},
        "c3a": {"block_size": 4},
        "oft": {"use_cayley_neumann": False},
    }
    for module, rows in (("self_attn.q_proj", H), ("mlp.up_proj", INNER)):
        places = np.stack((np.arange(rows + H) % rows, np.arange(rows + H) % H))
        parts = {
            "lokr": {"lokr_w1": (2, 3), "lokr_w2_a": (rows // 2, 2), "lokr_w2_b": (2, 8)},
            "loha": {f"hada_w{k}_{e}": (rows, 2) if e == "a" else (2, H) for k in "12" for e in "ab"},
            "miss": {"miss_block": (rows // 4, 4, 4)},
            "fourierft": {"fourierft_spectrum": (9,)},
            "boft": {"boft_R": (2, 4, 6, 6), "boft_s": (rows, 1)},
            "hra": {"hra_u": (H, 3)},
            "shira": {"shira_weight": (rows + H,), "shira_indices": (2, rows + H)},
            "c3a": {"c3a_kernel": (rows // 4, 6, 4)},
            "oft": {"oft_R.weight": (4, 15)},
        }[kind]
        for part, shape in parts.items():
            values = normal(*shape, seed=len(tensors)) if part != "shira_indices" else places.astype(np.int64)
            tensors[f"{P}model.layers.1.{module}.{part}"] = values
    return tensors, {"peft_type": KINDS.get(kind).types[0], "target_modules": ["q_proj", "up_proj"], **settings[kind]}


ROW_WISE = ("lokr", "loha", "miss", "fourierft", "boft", "hra", "shira", "c3a", "oft")


@pytest.mark.parametrize("kind", ROW_WISE)
def test_what_becomes_of_a_row_depends_on_no_other(kind: str, tmp_path: Path) -> None:
    """Whole, row by row, and from the middle of a row: the same bytes."""
    tensors, config = two_modules(kind)
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    with weightsmith.open_checkpoint(model) as opened, apply_adapter(opened, open_adapter(str(lora)), "x") as adapted:
        name = "model.layers.1.mlp.up_proj.weight"
        assert (adapted.read(name) != opened.read(name).astype(np.float32)).all(axis=None) or kind == "shira"
        whole = np.empty(adapted.specs[name].nbytes, np.uint8)
        adapted.source.read_into(name, 0, whole)
        for step in (4 * H, 52, 4 * H * 7 + 4):
            pieces = [np.empty(min(step, whole.size - at), np.uint8) for at in range(0, whole.size, step)]
            for at, piece in zip(range(0, whole.size, step), pieces, strict=True):
                adapted.source.read_into(name, at, piece)
            assert np.concatenate(pieces).tobytes() == whole.tobytes()


def test_boft_with_two_butterfly_factors(tmp_path: Path) -> None:
    """PEFT computes these on a GPU alone, so its formula stands here."""
    torch, peft = (pytest.importorskip(n) for n in ("torch", "peft"))
    from peft.tuners.boft import layer as of_peft

    tensors, config = two_modules("boft")
    model, lora = base(tmp_path / "base", np.float32), adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    weights = baked(model, lora, tmp_path / "out")
    name = "model.layers.1.mlp.up_proj"
    turns, scales = (torch.from_numpy(tensors[f"{P}{name}.boft_{part}"]) for part in "Rs")
    helper = of_peft.BOFTLayer
    blocks = helper.cayley_batch(None, turns.view(8, 6, 6)).view(2, 4, 6, 6)
    rotation = torch.eye(H)
    for i in range(2):
        order = helper.block_butterfly_perm(None, H, 4 // 2**i, 3, 1)
        shuffle = helper.perm2mat(None, order)
        rotation = shuffle @ torch.block_diag(*blocks[i]) @ shuffle.T @ rotation
    with weightsmith.open_checkpoint(model) as opened:
        weight = torch.from_numpy(opened.read(f"{name}.weight").copy())
    expected = (rotation @ weight.T).T * scales
    np.testing.assert_allclose(weights[f"{name}.weight"], expected.numpy(), rtol=1e-4, atol=1e-5)
    assert peft


# ---- what is refused


@pytest.mark.parametrize("kind", NAMES)
def test_each_kind_has_a_name_types_and_parts_of_its_own(kind: str) -> None:
    described = KINDS.get(kind)
    assert described.title
    others = [KINDS.get(name) for name in NAMES if name != kind]
    assert not any(set(described.types) & set(other.types) for other in others)
    assert not described.used & described.unused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hada_w1_a": (H, 3)}, "hada_w1_a is [24, 3], and [24, 2] is what config and weight [24, 24] ask for"),
        ({"hada_w1_b": (2, 23)}, "hada_w1_b is [2, 23], and [2, 24]"),
        ({"hada_w2_b": None}, "it has no hada_w2_b"),
        ({"hada_w1_b": None}, "it has no hada_w1_b"),
        ({"hada_t1": (2, 2, 3, 3)}, "it has cores of a convolution, and the weight is none"),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, tuple[int, ...] | None], said: str, tmp_path: Path) -> None:
    tensors, config = two_modules("loha")
    for part, shape in change.items():
        name = f"{P}model.layers.1.self_attn.q_proj.{part}"
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = normal(*shape)
    lora = adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    problem = refusal(base(tmp_path / "base"), lora)
    assert f"model.layers.1.self_attn.q_proj.weight: {said}" in str(problem)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": "2"}, "r is '2', not a positive whole number"),
        ({"alpha": None}, "alpha"),
        ({"r": 3}, "r is 3, and hada_w1_b has 2 rows"),
        ({"bias": "some"}, "bias is 'some', none of none, all, lora_only"),
        ({"use_dora": True}, "keys that weightsmith does not know"),
        ({"rank_pattern": [1]}, "rank_pattern is [1], not an object"),
        ({"fan_in_fan_out": "yes"}, "fan_in_fan_out is 'yes'"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors, settings = two_modules("loha")
    lora = adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(settings | config))
    assert said in str(refusal(base(tmp_path / "base"), lora))


def test_numbers_that_do_not_fit_are_seen_when_they_are_read(tmp_path: Path) -> None:
    tensors, config = two_modules("shira")
    tensors[f"{P}model.layers.1.mlp.up_proj.shira_indices"][0, 3] = INNER
    lora = adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="shira_indices has a place that is outside the weight"):
        baked(base(tmp_path / "base"), lora, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "ADAPTION_PROMPT", "CPT", "MULTITASK_PROMPT_TUNING"]
)
def test_prompts_are_no_weights(kind: str, tmp_path: Path) -> None:
    problem = refusal(
        base(tmp_path / "base"), adapter(tmp_path / "adapter", {"prompt_embeddings": normal(4, H)}, peft_type=kind)
    )
    assert f"an adapter of peft_type '{kind}'" in problem.finding.what
    assert "it is no change of weights" in problem.finding.fix


def test_projections_that_were_not_saved(tmp_path: Path) -> None:
    tensors = {f"{P}model.layers.0.self_attn.q_proj.vera_lambda_{part}": normal(n) for part, n in (("b", H), ("d", 3))}
    lora = adapter(tmp_path / "adapter", tensors, peft_type="VERA", r=3, save_projection=False)
    config = json.loads((lora / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (lora / "adapter_config.json").write_text(json.dumps(config))
    assert "vera_A is not in the file" in str(refusal(base(tmp_path / "base"), lora))


def test_a_config_with_tokens_that_are_in_no_tensor(tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "adapter", trainable_token_indices=[1]))
    assert "no tensor is trainable_tokens_delta" in str(problem)


# ---- single files


def in_one_file(path: Path, prefix: str, *, flat: bool, alpha: float | None = 3) -> np.ndarray:
    """A LoHa of to_q and a LoKr of to_k of a denoiser. Returns what both add, [2, 6, 8]."""
    block = "transformer_blocks.0.attn."
    named = {part: f"{prefix}{(block + part).replace('.', '_') if flat else block + part}" for part in ("to_q", "to_k")}
    loha = {f"hada_w{k}_{e}": normal(6, 2, seed=k) if e == "a" else normal(2, 8, seed=k) for k in (1, 2) for e in "ab"}
    lokr = {"lokr_w1": normal(2, 2, seed=5), "lokr_w2_a": normal(3, 2, seed=6), "lokr_w2_b": normal(2, 4, seed=7)}
    tensors = {f"{named['to_q']}.{part}": array for part, array in loha.items()}
    tensors |= {f"{named['to_k']}.{part}": array for part, array in lokr.items()}
    if alpha is not None:
        tensors |= {f"{name}.alpha": np.array(alpha, np.float32) for name in named.values()}
    save_file(tensors, path)
    of_q = (loha["hada_w1_a"] @ loha["hada_w1_b"]) * (loha["hada_w2_a"] @ loha["hada_w2_b"])
    of_k = np.kron(lokr["lokr_w1"], lokr["lokr_w2_a"] @ lokr["lokr_w2_b"])
    return np.stack((of_q, of_k)) * (1 if alpha is None else alpha / 2)


@pytest.mark.parametrize(("prefix", "flat"), [("lora_unet_", True), ("lycoris_", True), ("diffusion_model.", False)])
@pytest.mark.parametrize("alpha", [3.0, None])
def test_loha_and_lokr_in_one_file(prefix: str, flat: bool, alpha: float | None, tmp_path: Path) -> None:
    names = [f"transformer_blocks.0.attn.{part}.weight" for part in ("to_q", "to_k", "to_v")]
    model = write_checkpoint(tmp_path / "base", {name: normal(6, 8, seed=i) for i, name in enumerate(names)}, {})
    deltas = in_one_file(tmp_path / "style.safetensors", prefix, flat=flat, alpha=alpha)
    weights = baked(model, tmp_path / "style.safetensors", tmp_path / "out")
    before = load_file(model / "model.safetensors")
    for name, delta in zip(names, (*deltas, 0 * deltas[0]), strict=True):
        np.testing.assert_allclose(weights[name], before[name] + delta, rtol=1e-6, atol=1e-6)


# ---- kinds that are a LoRA: they merge with others, and are converted


OF_BASE = ("VeRA", "MiSS", "RandLoRA", "FourierFT", "SHiRA", "C3A")
"""Kinds whose tensors do not tell how many inputs a module has."""

EXACT = [
    name
    for name in LINEAR
    if name.startswith(("LoHa", "LoKr", "AdaLoRA", "VB-LoRA", *OF_BASE)) and "module" not in name and "biases" not in name
]
EXACT.remove("MiSS, bat")


def weighted(first: Path, second: Path, **options: Any) -> dict[str, Any]:
    models = [{"model": str(path), "parameters": {"weight": weight}} for path, weight in ((first, 0.7), (second, -0.4))]
    return {"merge_method": "linear", "models": models, "parameters": {"normalize": False}, **options}


def summed(first: Path, second: Path, base_model: Path) -> dict[str, Any]:
    return {**weighted(first, second), "merge_method": "task_arithmetic", "base_model": str(base_model), "parameters": {}}


@pytest.mark.matrix("LoHa")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXACT)
def test_a_kind_that_is_a_lora_merges_with_one(name: str, tmp_path: Path) -> None:
    """The weighted sum of what PEFT merges; and the plan runs again from its JSON."""
    torch, peft, transformers = saved_by_peft(name, tmp_path, "one")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    one = merged_by_peft(peft, fresh, tmp_path / "one")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"])
    trained(torch, peft.get_peft_model(fresh, plain)).save_pretrained(tmp_path / "two")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    two = merged_by_peft(peft, fresh, tmp_path / "two")
    before = load_file(tmp_path / "base/model.safetensors")
    of_base = name.startswith(OF_BASE)
    recipe = (
        summed(tmp_path / "one", tmp_path / "two", tmp_path / "base")
        if of_base
        else weighted(tmp_path / "one", tmp_path / "two")
    )
    weightsmith.merge(recipe, tmp_path / "both", progress=False, fsync=False)
    weights = baked(tmp_path / "base", tmp_path / "both", tmp_path / "out")
    for tensor, values in before.items():
        expected = values + 0.7 * (one[tensor] - values) - 0.4 * (two[tensor] - values)
        np.testing.assert_allclose(weights[tensor], expected, rtol=1e-5, atol=1e-5, err_msg=tensor)
    plan = weightsmith.plan(recipe)
    weightsmith.run(plan, tmp_path / "again", progress=False, fsync=False)
    stored = "adapter_model.safetensors"
    assert (tmp_path / "again" / stored).read_bytes() == (tmp_path / "both" / stored).read_bytes()
    based = {"base": str(tmp_path / "base")} if of_base else {}
    weightsmith.convert_lora(tmp_path / "one", tmp_path / "lora", progress=False, fsync=False, **based)
    assert json.loads((tmp_path / "lora/adapter_config.json").read_text())["peft_type"] == "LORA"
    direct, through = (baked(tmp_path / "base", tmp_path / lora, tmp_path / f"{lora} out") for lora in ("one", "lora"))
    for tensor, values in direct.items():
        np.testing.assert_allclose(through[tensor], values, rtol=1e-5, atol=1e-6, err_msg=tensor)


def test_loha_and_lokr_in_one_file_merge(tmp_path: Path) -> None:
    names = [f"transformer_blocks.0.attn.{part}.weight" for part in ("to_q", "to_k", "to_v")]
    model = write_checkpoint(tmp_path / "base", {name: normal(6, 8, seed=i) for i, name in enumerate(names)}, {})
    deltas = in_one_file(tmp_path / "style.safetensors", "lora_unet_", flat=True)
    in_one_file(tmp_path / "other.safetensors", "lora_unet_", flat=True)
    recipe = weighted(tmp_path / "style.safetensors", tmp_path / "other.safetensors")
    weightsmith.merge(recipe, tmp_path / "both", progress=False, fsync=False)
    weights = baked(model, tmp_path / "both/lora.safetensors", tmp_path / "out")
    before = load_file(model / "model.safetensors")
    for name, delta in zip(names, (*deltas, 0 * deltas[0]), strict=True):
        np.testing.assert_allclose(weights[name], before[name] + 0.3 * delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [name for name in ROW_WISE if KINDS.get(name).exact is None])
def test_kinds_that_are_no_lora_say_what_to_do(kind: str, tmp_path: Path) -> None:
    tensors, config = two_modules(kind)
    lora = adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    for action in (
        lambda: weightsmith.plan({"merge_method": "linear", "models": [{"model": str(lora), "parameters": {"weight": 1}}]}),
        lambda: weightsmith.convert_lora(lora, tmp_path / "out", progress=False),
    ):
        with pytest.raises(PlanError, match=rf"it is .*{re.escape(KINDS.get(kind).title)}") as caught:
            action()
        assert f"weightsmith extract-lora BASE+{lora} BASE OUT" in caught.value.problems[0].finding.fix


def test_shapes_that_the_base_alone_tells(tmp_path: Path) -> None:
    config = {"peft_type": "MISS", "r": 4}
    lora = adapter(tmp_path / "adapter", {f"{P}model.layers.1.self_attn.q_proj.miss_block": normal(4, H)})
    (lora / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="it is MiSS, whose tensors do not tell how many inputs its modules have") as caught:
        weightsmith.plan({"merge_method": "linear", "models": [{"model": str(lora), "parameters": {"weight": 1}}]})
    assert "base_model: the model that the adapters were trained on" in caught.value.problems[0].finding.fix
    with pytest.raises(PlanError, match="shapes and the order of rows depend on the base"):
        weightsmith.convert_lora(lora, tmp_path / "out", progress=False)
    tensors, config = two_modules("miss")
    save_file(tensors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps(config))
    model = base(tmp_path / "base", np.float32)
    recipe = {"merge_method": "task_arithmetic", "models": [{"model": str(lora), "parameters": {"weight": 1}}]}
    with pytest.raises(PlanError, match="with bat, what is added depends on the weight"):
        weightsmith.plan({**recipe, "base_model": str(model)})


def test_inspect_says_which_kind_it_is(tmp_path: Path) -> None:
    tensors, config = two_modules("hra")
    lora = adapter(tmp_path / "adapter", tensors)
    (lora / "adapter_config.json").write_text(json.dumps(config))
    text = str(weightsmith.inspect(lora).report())
    assert "A HRA adapter" in text or "HRA for an unnamed model" in text
