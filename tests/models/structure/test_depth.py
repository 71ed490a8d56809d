"""Resized checkpoints: layers of tiny saved models, taken by `rename` and `resize_config`, must load in transformers
with no missing, unexpected or mismatched key; or be refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from weightsmith._base.errors import LayerError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import Structure, analyse, resize_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models is not our concern
F32 = DTYPES["F32"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


SIZES: dict[str, Any] = {**zoo.SIZES, "num_hidden_layers": 4}
HEADS = {**zoo.HEADS, **SIZES}
MHA = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
MOE = {**zoo.MOE, **SIZES}
SEQ2SEQ = {**zoo.SPEECH, "encoder_layers": 3, "decoder_layers": 3}
DEEPSEEK = {**zoo.DEEPSEEK, **SIZES, "num_key_value_heads": 4}
JAMBA = {
    **SIZES,
    "num_experts": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 4,
    "use_mamba_kernels": False,
}
QWEN2_VL = {
    "text_config": {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 3, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2, "hidden_size": 32},
}
GRANITE_HYBRID = {
    **SIZES,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 4,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
}
QWEN3_NEXT = {
    **MOE,
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LLAMA4 = {
    **HEADS,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 64}
FREE = ([0, 1, 1, 2], [0, 2], [2, 1, 0], [0, 1, 2, 3, 2, 3])

# model, config, size arguments, choices that load, choices that must be refused
DEPTH: list[tuple[str, str, dict[str, Any], Sequence[Any], Sequence[Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", SIZES, FREE, ()),
    ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "max_window_layers": 2, "use_sliding_window": True}, FREE, ()),
    ("Qwen3ForCausalLM", "Qwen3Config", HEADS, FREE, ()),
    ("Gemma2ForCausalLM", "Gemma2Config", HEADS, FREE, ()),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", {**HEADS, "sliding_window_pattern": 3}, FREE, ()),
    ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 3}, FREE, ()),
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 64}, FREE, ()),
    (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "vocab_size": 64,
            "attention_types": [[["global", "local"], 2]],
        },
        FREE,
        (),
    ),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", MHA, FREE[:2], ()),
    ("FalconForCausalLM", "FalconConfig", MHA, FREE[:2], ()),
    ("Phi3ForCausalLM", "Phi3Config", SIZES, FREE[:2], ()),
    ("BertForMaskedLM", "BertConfig", MHA, FREE, ()),
    ("Olmo2ForCausalLM", "Olmo2Config", SIZES, FREE, ()),
    (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64, "state_size": 4},
        FREE,
        (),
    ),
    ("JambaForCausalLM", "JambaConfig", JAMBA, ([0, 2], [2, 1, 0], [0, 1, 2, 3, 2, 3], [0, 0, 1]), ([0, 1, 1, 2],)),
    (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DEEPSEEK,
        ([0, 1, 1, 2], [0, 2], [1, 3], [0, 0, 1, 2]),
        ([2, 1, 0], [0, 1, 0, 1]),
    ),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "mlp_only_layers": [1]}, FREE, ()),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "decoder_sparse_step": 2}, FREE, ()),
    ("Qwen3NextForCausalLM", "Qwen3NextConfig", QWEN3_NEXT, FREE, ()),
    ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": 4}, FREE, ()),
    ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4, FREE, ()),
    ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_HYBRID, FREE, ()),
    ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", QWEN2_VL, (*FREE, {"visual.blocks.": [0, 2, 2]}), ()),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        ({"encoder.block.": [0, 1, 1, 2]}, {"encoder.block.": [0, 3], "decoder.block.": [0, 1, 2, 1, 2]}),
        ({"encoder.block.": [0, 0, 1]}, {"decoder.block.": [1, 2]}),
    ),
    (
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 64},
        ({"model.encoder.layers.": [0, 1, 1, 2]}, {"model.decoder.layers.": [0, 2]}),
        (),
    ),
    (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8},
        ({"model.encoder.layers.": [0, 1, 1, 2]}, {"model.decoder.layers.": [0, 2]}),
        (),
    ),
]


def take_layers(s: Structure, tensors: Mapping[str, Any], layers: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The tensors of the resized model, as a merge would write them."""
    out = {}
    for name, tensor in tensors.items():
        at = s.locate(name)
        if at is None or at[0].prefix not in layers:
            out[name] = tensor
        else:
            copies = [new for new, old in enumerate(layers[at[0].prefix]) if old == at[1]]
            out |= {s.rename(name, new): tensor.clone() for new in copies}
    return out


SAMPLE = frozenset("Llama Gemma3 GPTNeo Jamba DeepseekV3 Llama4 Qwen2VL T5".split())
"""One for each way in which config.json says what kind a layer is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config", "sizes", "legal", "illegal"),
    [
        pytest.param(*case, id=f"{i}-{case[0]}", marks=() if case[0].partition("For")[0] in SAMPLE else pytest.mark.sweep)
        for i, case in enumerate(DEPTH)
    ],
)
def test_resized_checkpoint_loads_with_every_key(
    tmp_path: Path, model: str, config: str, sizes: dict[str, Any], legal: Sequence[Any], illegal: Sequence[Any]
) -> None:
    model_class = getattr(transformers, model)
    torch.manual_seed(0)
    model_class(getattr(transformers, config)(**sizes)).save_pretrained(tmp_path)
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    donor = json.loads((tmp_path / "config.json").read_text())
    s = analyse([TensorSpec(name, F32, tuple(t.shape)) for name, t in tensors.items()], donor)

    def by_prefix(choice: Any) -> dict[str, Sequence[int]]:
        if isinstance(choice, dict):
            return choice
        assert s.main is not None
        return {s.main.prefix: choice}

    for i, choice in enumerate(legal):
        layers = by_prefix(choice)
        folder = tmp_path / str(i)
        folder.mkdir()
        new, _ = resize_config(donor, s, layers)
        (folder / "config.json").write_text(json.dumps(new))
        resized = take_layers(s, tensors, layers)
        safetensors_torch.save_file(resized, folder / "model.safetensors", metadata={"format": "pt"})
        _, info = model_class.from_pretrained(folder, output_loading_info=True)
        stray = {key: value for key, value in info.items() if value}
        assert stray == {}, f"layers {layers}"
    for choice in illegal:
        with pytest.raises(LayerError):
            resize_config(donor, s, by_prefix(choice))


def test_saved_qwen2_vl_has_the_three_modules(tmp_path: Path) -> None:
    model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(**QWEN2_VL))
    model.save_pretrained(tmp_path)
    names = safetensors_torch.load_file(tmp_path / "model.safetensors")
    donor = json.loads((tmp_path / "config.json").read_text())
    s = analyse([TensorSpec(name, F32, tuple(t.shape)) for name, t in names.items()], donor)
    assert s.main is not None
    assert s.main.n_layers == 4
    aliases = ("text_decoder", "vision_tower", "multi_modal_projector")
    assert {s.find_module(alias) for alias in aliases} == set(s.modules)
