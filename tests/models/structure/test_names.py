"""Stacks, layers and modules from literal names: no model library needed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.work import steps
from weightsmith._base.errors import LayerError, UnknownName
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import Structure, analyse

Config = dict[str, Any]


def spec(name: str, shape: tuple[int, ...] = (4, 4)) -> TensorSpec:
    return TensorSpec(name, DTYPES["BF16"], shape)


def layers(prefix: str, n: int, *suffixes: str) -> list[str]:
    suffixes = suffixes or ("attn.q_proj.weight", "mlp.up_proj.weight")
    return [f"{prefix}{i}.{suffix}" for i in range(n) for suffix in suffixes]


def structure(names: list[str], config: Config | None) -> Structure:
    return analyse([spec(name) for name in names], config)


LLAMA = ["model.embed_tokens.weight", *layers("model.layers.", 3), "model.norm.weight", "lm_head.weight"]
T5 = [
    "shared.weight",
    *layers("encoder.block.", 3, "layer.0.SelfAttention.q.weight", "layer.1.DenseReluDense.wo.weight"),
    "encoder.final_layer_norm.weight",
    *layers("decoder.block.", 2, "layer.0.SelfAttention.q.weight", "layer.1.EncDecAttention.q.weight"),
    "decoder.final_layer_norm.weight",
    "lm_head.weight",
]
BART = [
    "model.shared.weight",
    *layers("model.encoder.layers.", 2),
    *layers("model.decoder.layers.", 2),
    "final_logits_bias",
]
QWEN2_VL_OLD = [
    "visual.patch_embed.proj.weight",
    *layers("visual.blocks.", 4, "attn.qkv.weight", "mlp.fc1.weight"),
    "visual.merger.ln_q.weight",
    "visual.merger.mlp.0.weight",
    "visual.merger.mlp.2.weight",
    *LLAMA,
]
QWEN2_VL_NEW = [
    name.replace("visual.", "model.visual.").replace("model.layers", "model.language_model.layers")
    if name.startswith("visual") or ".layers." in name
    else name.replace("model.", "model.language_model.")
    for name in QWEN2_VL_OLD
]
QWEN2_VL_CONFIG: Config = {"num_hidden_layers": 3, "vision_config": {"depth": 4, "model_type": "qwen2_vl"}}
LLAVA_OLD = [
    *layers("vision_tower.vision_model.encoder.layers.", 2),
    "vision_tower.vision_model.post_layernorm.weight",
    "multi_modal_projector.linear_1.weight",
    *[f"language_model.{name}" for name in LLAMA],
]
LLAVA_CONFIG: Config = {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 2}}


def stacks_of(s: Structure) -> dict[str, tuple[int, str, tuple[tuple[str, ...], ...]]]:
    return {stack.prefix: (stack.n_layers, stack.kind, stack.config_paths) for stack in s.stacks}


def test_decoder_has_one_stack_and_one_module() -> None:
    s = structure(LLAMA, {"num_hidden_layers": 3})
    assert stacks_of(s) == {"model.layers.": (3, "decoder", (("num_hidden_layers",),))}
    assert s.main == s.stacks[0]
    assert list(s.modules) == ["model"]
    assert s.modules["model"] == tuple(LLAMA)
    assert s.find_module("default") == "model"


def test_locate_and_rename_change_the_layer_number_only() -> None:
    s = structure(LLAMA, {"num_hidden_layers": 3})
    assert s.locate("model.layers.2.mlp.up_proj.weight") == (s.main, 2)
    assert s.locate("model.norm.weight") is None
    assert s.rename("model.layers.2.mlp.up_proj.weight", 11) == "model.layers.11.mlp.up_proj.weight"
    assert s.suffix("model.layers.2.mlp.up_proj.weight") == "mlp.up_proj.weight"
    with pytest.raises(LayerError, match="not in a layer"):
        s.rename("model.norm.weight", 1)


def test_number_inside_a_layer_is_not_a_layer() -> None:
    s = structure(T5, {"num_layers": 3, "num_decoder_layers": 2})
    name = "encoder.block.1.layer.0.SelfAttention.q.weight"
    assert s.rename(name, 2) == "encoder.block.2.layer.0.SelfAttention.q.weight"
    names = layers("model.layers.", 2, *(f"mlp.experts.{e}.w1.weight" for e in range(2)), "mlp.gate.weight")
    s = structure(names, {"num_hidden_layers": 2})
    assert [stack.prefix for stack in s.stacks] == ["model.layers."]
    assert s.rename("model.layers.1.mlp.experts.0.w1.weight", 5) == "model.layers.5.mlp.experts.0.w1.weight"


@pytest.mark.parametrize("config", [{"num_hidden_layers": 1}, {"n_layer": 1}, {}, None])
def test_one_layer_model_has_a_stack(config: Config | None) -> None:
    s = structure(["wte.weight", *layers("transformer.h.", 1)], config)
    assert s.main is not None
    assert (s.main.prefix, s.main.n_layers) == ("transformer.h.", 1)
    assert (s.main.config_path is None) == (not config)


def test_one_layer_with_an_unusual_name_is_found_through_the_config() -> None:
    names = layers("model.decks.", 1)
    assert structure(names, {"num_decks_layers": 1}).stacks[0].prefix == "model.decks."
    assert structure(names, {"num_hidden_layers": 12}).stacks == ()


def test_indices_of_a_sequential_are_not_layers() -> None:
    names = [*LLAMA, *(f"classifier.{i}.weight" for i in range(3)), "mlp1.0.weight", "mlp1.3.bias"]
    assert [stack.prefix for stack in structure(names, {"num_hidden_layers": 3}).stacks] == ["model.layers."]


def test_number_with_leading_zeros_is_part_of_a_name() -> None:
    s = structure([f"rows.0000{i}.a.weight" for i in range(3)], None)
    assert s.stacks == ()
    assert s.locate("rows.00001.a.weight") is None


def test_huge_index_is_no_layer_and_allocates_nothing() -> None:
    names = [*layers("model.layers.", 2), "model.layers.999999999.a.weight", f"model.layers.{'9' * 5000}.a.weight"]
    assert structure(names, {"num_hidden_layers": 1_000_000_000}).stacks == ()


def test_stack_inside_a_numbered_part_is_found() -> None:
    names = layers("vision_tower.0.blocks.", 3, "attn.qkv.weight", "mlp.fc1.weight")
    s = structure([*names, *LLAMA], {"text_config": {"num_hidden_layers": 3}, "vision_config": {"depth": 3}})
    assert stacks_of(s)["vision_tower.0.blocks."] == (3, "vision", (("vision_config", "depth"),))
    assert s.rename(names[-1], 0) == "vision_tower.0.blocks.0.mlp.fc1.weight"


def test_layers_of_different_kinds_are_one_stack() -> None:
    names = [
        "model.layers.0.mamba.A_log.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.up.weight",
        "model.layers.2.mamba.A_log.weight",
    ]
    s = structure(names, {"num_hidden_layers": 3})
    assert s.signatures["model.layers."] == (0, 1, 0)


def test_layer_without_tensors_is_a_layer_when_the_config_counts_it() -> None:
    names = [name for name in layers("model.layers.", 5) if ".2." not in name]
    s = structure(names, {"num_hidden_layers": 5})
    assert s.main is not None
    assert s.main.n_layers == 5
    assert s.signatures["model.layers."] == (0, 0, 1, 0, 0)


def test_prediction_layers_beyond_the_count_are_extra() -> None:
    names = [*layers("model.layers.", 4), "model.layers.4.eh_proj.weight"]
    s = structure(names, {"num_hidden_layers": 4, "num_nextn_predict_layers": 1})
    assert s.main is not None
    assert (s.main.n_layers, s.main.n_extra) == (4, 1)
    assert s.locate("model.layers.4.eh_proj.weight") is None
    assert s.extra("model.layers.4.eh_proj.weight") == (s.main, 0)
    assert s.extra("model.layers.3.attn.q_proj.weight") is None
    assert s.rename("model.layers.4.eh_proj.weight", 9) == "model.layers.9.eh_proj.weight"
    assert "model.layers.4.eh_proj.weight" in s.modules["model"]


def test_count_far_below_the_layers_found_is_not_theirs() -> None:
    s = structure(layers("model.layers.", 40), {"num_hidden_layers": 2})
    assert s.main is not None
    assert (s.main.n_layers, s.main.config_path) == (40, None)


def test_encoder_decoder_has_no_main_stack_and_three_modules() -> None:
    s = structure(T5, {"num_layers": 3, "num_decoder_layers": 2})
    assert stacks_of(s) == {
        "encoder.block.": (3, "encoder", (("num_layers",),)),
        "decoder.block.": (2, "decoder", (("num_decoder_layers",),)),
    }
    assert s.main is None
    assert list(s.modules) == ["encoder", "decoder", "shared"]
    assert s.modules["shared"] == ("shared.weight", "lm_head.weight")


def test_t5_with_equal_counts_keeps_them_apart() -> None:
    names = [*layers("encoder.block.", 2, "layer.0.q.weight"), *layers("decoder.block.", 2, "layer.0.q.weight")]
    s = structure(names, {"num_layers": 2, "num_decoder_layers": 2})
    assert [stack.config_paths for stack in s.stacks] == [(("num_layers",),), (("num_decoder_layers",),)]


def test_plain_count_beside_encoder_layers_mirrors_the_encoder() -> None:
    s = structure(BART, {"encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2})
    assert stacks_of(s)["model.encoder.layers."][2] == (("encoder_layers",), ("num_hidden_layers",))
    assert stacks_of(s)["model.decoder.layers."][2] == (("decoder_layers",),)
    assert (s.find_module("encoder"), s.find_module("shared")) == ("model.encoder", "shared")


def test_a_plain_count_is_not_that_of_convolutions_before_the_encoder() -> None:
    """SpeechT5: num_feat_extract_layers has no word of either side."""
    convolutions = "model.encoder.prenet.feature_encoder.conv_layers."
    names = [*BART, *layers(convolutions, 3, "conv.weight", "layer_norm.weight")]
    s = structure(names, {"encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2, "num_feat_extract_layers": 3})
    assert stacks_of(s)[convolutions][2] == (("num_feat_extract_layers",),)
    assert stacks_of(s)["model.encoder.layers."][2] == (("encoder_layers",), ("num_hidden_layers",))


def test_count_that_fits_both_sides_is_the_decoders() -> None:
    config = {"text_config": {"num_layers": 2}, "vision_config": {"num_hidden_layers": 2}}
    s = structure([*layers("encoder.encoder.layer.", 2), *layers("decoder.layer.", 2)], config)
    assert [stack.config_path for stack in s.stacks] == [None, ("text_config", "num_layers")]


def test_every_key_that_holds_the_count_is_found() -> None:
    s = structure(layers("backbone.layers.", 3), {"n_layer": 3, "num_hidden_layers": 3, "num_experts": 3})
    assert s.stacks[0].config_paths == (("n_layer",), ("num_hidden_layers",))


def test_text_count_repeated_at_the_top_is_a_mirror() -> None:
    config = {"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 3}, "vision_config": {"depth": 3}}
    names = [*layers("model.visual.blocks.", 3), *layers("model.language_model.layers.", 3)]
    assert stacks_of(structure(names, config)) == {
        "model.visual.blocks.": (3, "vision", (("vision_config", "depth"),)),
        "model.language_model.layers.": (
            3,
            "decoder",
            (("text_config", "num_hidden_layers"), ("num_hidden_layers",)),
        ),
    }


def test_encoder_layers_of_an_audio_config_count_the_audio_tower() -> None:
    config = {"audio_config": {"encoder_layers": 2, "decoder_layers": 2}, "text_config": {"num_hidden_layers": 3}}
    s = structure([*layers("audio_tower.layers.", 2), *layers("language_model.model.layers.", 3)], config)
    assert stacks_of(s)["audio_tower.layers."] == (2, "audio", (("audio_config", "encoder_layers"),))
    assert s.main is not None
    assert s.main.prefix == "language_model.model.layers."


def test_encoder_with_a_config_of_its_own_beside_a_text_model_is_a_tower() -> None:
    config = {"encoder_config": {"num_layers": 2}, "text_config": {"num_hidden_layers": 3}}
    s = structure([*layers("encoder.layers.", 2), *layers("language_model.model.layers.", 3)], config)
    assert [stack.kind for stack in s.stacks] == ["tower", "decoder"]
    assert s.main == s.stacks[1]


def test_list_of_layer_kinds_counts_where_no_number_does() -> None:
    s = structure(layers("model.layers.", 3), {"layers_block_type": ["mamba", "attention", "moe"]})
    assert s.stacks[0].config_path == ("layers_block_type",)


@pytest.mark.parametrize(
    ("names", "text", "tower"),
    [(QWEN2_VL_OLD, "model", "visual"), (QWEN2_VL_NEW, "model.language_model", "model.visual")],
    ids=["old", "new"],
)
def test_vision_language_model_has_text_tower_and_projector(names: list[str], text: str, tower: str) -> None:
    s = structure(names, QWEN2_VL_CONFIG)
    projector = f"{tower}.merger"
    assert set(s.modules) == {text, tower, projector}
    assert s.main is not None
    assert s.main.module == text
    assert s.aliases["multi_modal_projector"] == projector
    assert [s.find_module(alias) for alias in ("text_decoder", "vision_tower")] == [text, tower]
    assert s.module_of("lm_head.weight") == text
    assert s.modules[projector] == tuple(name for name in names if ".merger." in name)
    assert s.module_of(f"{tower}.patch_embed.proj.weight") == tower
    assert s.stacks_of(projector) == ()


def test_old_llava_names_have_the_same_modules() -> None:
    s = structure(LLAVA_OLD, LLAVA_CONFIG)
    assert set(s.modules) == {"vision_tower", "multi_modal_projector", "language_model"}
    assert s.find_module("text_decoder") == "language_model"
    assert s.module_of("language_model.lm_head.weight") == "language_model"
    assert s.module_of("vision_tower.vision_model.post_layernorm.weight") == "vision_tower"


def test_projectors_of_several_names_are_one_module_named_by_role() -> None:
    names = [
        *layers("model.visual.blocks.", 2),
        "model.visual.merger.norm.weight",
        *layers("model.visual.deepstack_merger_list.", 3, "norm.weight", "linear_fc1.weight"),
        *layers("model.language_model.layers.", 3),
        "lm_head.weight",
    ]
    s = structure(names, {"text_config": {"num_hidden_layers": 3}, "vision_config": {"depth": 2}})
    assert [stack.prefix for stack in s.stacks] == ["model.visual.blocks.", "model.language_model.layers."]
    assert len(s.modules["multi_modal_projector"]) == 7


def test_text_model_that_shares_its_root_with_the_tower_keeps_its_embeddings() -> None:
    names = [
        *LLAMA,
        "model.mm_projector.0.weight",
        *layers("model.vision_tower.vision_tower.vision_model.encoder.layers.", 2),
    ]
    s = structure(names, {"num_hidden_layers": 3, "mm_vision_tower": "openai/clip-vit-large-patch14-336"})
    assert s.module_of("model.embed_tokens.weight") == "model"
    assert s.find_module("multi_modal_projector") == s.module_of("model.mm_projector.0.weight") != "model"


def test_two_towers_of_a_contrastive_model_have_no_main_stack() -> None:
    names = [*layers("text_model.encoder.layers.", 3), *layers("vision_model.encoder.layers.", 2), "logit_scale"]
    s = structure(names, LLAVA_CONFIG)
    assert s.main is None
    assert set(s.modules) == {"text_model", "vision_model", "logit_scale"}


PATCHES = "embeddings.patch_embedding.weight"


@pytest.mark.parametrize(
    ("model_type", "first", "kind"),
    [
        ("siglip_vision_model", PATCHES, "vision"),
        ("vit", "embeddings.cls_token", "vision"),
        ("audio-spectrogram-transformer", "embeddings.patch_embeddings.projection.weight", "audio"),
        ("beit", "embeddings.patch_embeddings.projection.weight", "vision"),
        ("clip_text_model", "embeddings.token_embedding.weight", "encoder"),
        ("bert", "embeddings.word_embeddings.weight", "encoder"),
        ("wav2vec2", "feature_projection.projection.weight", "encoder"),
    ],
)
def test_layers_of_a_tower_saved_alone_are_of_its_kind(model_type: str, first: str, kind: str) -> None:
    s = structure([first, *layers("encoder.layers.", 3)], {"model_type": model_type, "num_hidden_layers": 3})
    assert [stack.kind for stack in s.stacks] == [kind]
    assert s.main is s.stacks[0]
    assert list(s.modules) == ["model"]


@pytest.mark.parametrize("model_type", ["whisper", "vision-encoder-decoder", "vit_mae"])
def test_an_encoder_with_a_decoder_is_no_tower_alone(model_type: str) -> None:
    names = [PATCHES, *layers("encoder.layers.", 3), *layers("decoder.layers.", 2)]
    config = {"model_type": model_type, "encoder_layers": 3, "decoder_layers": 2}
    assert [stack.kind for stack in structure(names, config).stacks] == ["encoder", "decoder"]


def test_unknown_module_names_the_nearest() -> None:
    s = structure(QWEN2_VL_OLD, QWEN2_VL_CONFIG)
    with pytest.raises(UnknownName, match="did you mean 'text_decoder'") as caught:
        s.find_module("text_decodr")
    assert "modules: visual, model, visual.merger" in str(caught.value)


@pytest.mark.parametrize("names", [LLAMA, T5, BART, QWEN2_VL_OLD, QWEN2_VL_NEW, LLAVA_OLD])
@pytest.mark.parametrize("config", [None, {}, LLAVA_CONFIG, {"num_hidden_layers": 3}])
def test_every_tensor_is_in_one_module_whatever_the_config_says(names: list[str], config: Config | None) -> None:
    s = structure(names, config)
    assert sorted(name for members in s.modules.values() for name in members) == sorted(names)
    assert all(name in s.modules[s.module_of(name)] for name in names)
    assert all(s.rename(name, at[1]) == name for name in names if (at := s.locate(name)))


@pytest.mark.parametrize(
    ("name", "shape", "experts"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 4, 6), 8),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (8, 4, 6), 8),
        ("model.layers.0.block_sparse_moe.other.weight", (7, 4, 6), 1),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (4, 6), 1),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (8, 6), 1),
        ("model.layers.0.mamba.conv1d.weight", (8, 1, 4), 1),
        ("visual.patch_embed.proj.weight", (8, 3, 2, 2), 1),
        ("encoder.pos_embed", (8, 4, 6), 1),
        ("model.layers.0.mlp.experts.w", (1, 4, 6), 1),
    ],
)
def test_experts_counts_the_matrices_of_a_fused_tensor(name: str, shape: tuple[int, ...], experts: int) -> None:
    config = {"text_config": {"num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 7}}
    tensor = spec(name, shape)
    assert analyse([spec("model.layers.0.a.weight"), tensor], config).experts(tensor) == experts


def test_layers_of_equal_tensors_have_equal_signatures() -> None:
    specs = [spec("h.x", (2,)), *(spec(f"m.layers.{i}.a.weight", (i // 2, 3)) for i in range(3))]
    s = analyse(specs, {"num_layers": 3})
    assert s.signatures == {"m.layers.": (0, 0, 1)}


@pytest.mark.slow
def test_work_grows_with_the_names() -> None:
    def work(n_layers: int, n_experts: int) -> int:
        parts = [f"mlp.experts.{e}.{p}_proj.weight" for e in range(n_experts) for p in ("gate", "up", "down")]
        specs = [spec(name) for name in layers("model.layers.", n_layers, *parts)]
        return steps(lambda: analyse(specs, {"num_hidden_layers": n_layers, "num_experts": n_experts}))

    few = work(13, 32)
    assert work(65, 32) < 5.5 * few
    assert work(13, 160) < 5.5 * few
