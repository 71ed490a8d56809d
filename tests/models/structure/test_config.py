"""config.json after layers moved: literal configs in the forms found on the Hub, and the rules as properties."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._base.errors import LayerError, UnknownName
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse, resize_config
from weightsmith._models.structure.perlayer import Config, Remap, rules_for

F32 = DTYPES["F32"]
S, F, L = "sliding_attention", "full_attention", "linear_attention"


def stack(prefix: str, kinds: str) -> list[TensorSpec]:
    """Layers whose tensors are named by a letter each: "aab" = two alike and one other."""
    return [TensorSpec(f"{prefix}{i}.{kind}.weight", F32, (2, 2)) for i, kind in enumerate(kinds)]


def resized(config: Config, source: Sequence[int], kinds: str = "", prefix: str = "model.layers.") -> dict[str, Any]:
    n = config.get("num_hidden_layers", config.get("num_layers", 4))
    return resize_config(config, analyse(stack(prefix, kinds or "a" * n), config), {prefix: source})[0]


@pytest.mark.parametrize(
    ("config", "source", "changed"),
    [
        ({"layer_types": [S, F, S, F]}, [0, 1, 1, 2], {"layer_types": [S, F, F, S]}),
        ({"layer_types": [S, F, S, F]}, [3], {"layer_types": [F]}),
        ({"layer_types": [S, F, S, F], "sliding_window_pattern": 2}, [1, 0], {"layer_types": [F, S]}),
        ({"mlp_only_layers": [0, 3]}, [3, 1, 0, 0], {"mlp_only_layers": [0, 2, 3]}),
        ({"mlp_only_layers": []}, [3, 1, 0, 0], {}),
        ({"no_rope_layers": [1, 1, 1, 0]}, [0, 3], {"no_rope_layers": [1, 0]}),
        ({"cross_attention_layers": [1, 3]}, [0, 1, 2, 1, 2, 3], {"cross_attention_layers": [1, 3, 5]}),
        ({"attn_layer_indices": [2]}, [0, 2, 3], {"attn_layer_indices": [1]}),
        ({"full_attn_idxs": [0, 2]}, [0, 2, 2], {"full_attn_idxs": [0, 1, 2]}),
        (
            {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4}},
            [0, 3, 3],
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2, 3], "num_heads": 4}},
        ),
        (
            {"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}},
            [0, 2, 2, 1],
            {"linear_attn_config": {"kda_layers": [1, 4], "full_attn_layers": [2, 3]}},
        ),
        ({"num_key_value_heads": [1, 2, 3, 4]}, [3, 0], {"num_key_value_heads": [4, 1]}),
        *(
            ({"num_hidden_layers": len(values), name: values}, [0], {})
            for name, values in {
                **{"time_step_limit": [0.0, float("inf")], "mlp_multipliers": [0.6, 0.3]},
                "ssm_multipliers": [0.4, 0.25, 0.2, 0.5, 0.35],
            }.items()
        ),
        ({"block_configs": [{"a": i} for i in range(4)]}, [2, 2], {"block_configs": [{"a": 2}, {"a": 2}]}),
        ({"moe_layer_freq": [0, 1, 1, 1]}, [0, 2], {"moe_layer_freq": [0, 1]}),
        ({"hybrid_override_pattern": "M-M*"}, [3, 0, 1], {"hybrid_override_pattern": "*M-"}),
        (
            {"attention_types": [[["global", "local"], 2]]},
            [0, 0, 1],
            {"attention_types": [[["global", "global", "local"], 1]]},
        ),
        (
            {"attention_types": [[["g", "l"], 2]], "attention_layers": ["g", "l", "g", "l"]},
            [3, 2],
            {"attention_types": [[["l", "g"], 1]], "attention_layers": ["l", "g"]},
        ),
        ({"layer_overrides": {"1": "x", "3": "y"}}, [3, 1, 1], {"layer_overrides": {"0": "y", "1": "x", "2": "x"}}),
        ({"deepstack_visual_indexes": [1, 3]}, [0, 1, 1, 3], {"deepstack_visual_indexes": [2, 3]}),
        ({"intermediate_hidden_state_indices": [1, 3]}, [0, 1, 1, 3], {"intermediate_hidden_state_indices": [2, 3]}),
        ({"cat_hidden_layers": [0, 2]}, [0, 1, 1, 3], {"cat_hidden_layers": [0, 3]}),
        ({"kv_source_layers": [0, 1, 0, 1]}, [0, 1, 1, 2], {"kv_source_layers": [0, 1, 2, 0]}),
        (
            {"compress_ratios": [0, 4, 8, 4, 9], "num_nextn_predict_layers": 1},
            [0, 1],
            {"compress_ratios": [0, 4, 9]},
        ),
        (
            {"quantization_config": {"ignore": ["lm_head", "model.layers.3.mlp.gate", "model.layers.1"]}},
            [3, 3, 0],
            {"quantization_config": {"ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}},
        ),
        ({"eos_token_id": [1, 2, 3, 4], "id2label": {str(i): "x" for i in range(4)}}, [0], {}),
        ({"rope_scaling": {"mrope_section": [1, 2, 3, 4], "long_factor": [1, 2, 3, 4]}}, [0], {}),
        ({"upsample_rates": [8, 8, 2, 2], "upsample_kernel_sizes": [16, 16, 4, 4]}, [0], {}),  # of VITS' decoder
        ({"architectures": ["A"], "attention_dropout": 0.0, "use_cache": True}, [0], {}),
    ],
)
def test_per_layer_values_follow_the_layers(config: Config, source: list[int], changed: Config) -> None:
    before = {"num_hidden_layers": 4, **config}
    untouched = copy.deepcopy(before)
    assert resized(before, source) == {**before, **changed, "num_hidden_layers": len(source)}
    assert before == untouched


def test_list_that_counts_extra_layers_too_keeps_their_part() -> None:
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 8, 9]}
    specs = [*stack("model.layers.", "aaa"), TensorSpec("model.layers.3.eh_proj.weight", F32, (2, 2))]
    new, _ = resize_config(config, analyse(specs, config), {"model.layers.": [2, 0]})
    assert new["compress_ratios"] == [8, 0, 9]
    assert new["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    ("config", "source", "changed"),
    [
        # thresholds are moved
        ({"first_k_dense_replace": 2, "n_routed_experts": 8}, [0, 2, 3], {"first_k_dense_replace": 1}),
        ({"first_k_dense_replace": 1, "n_routed_experts": 8}, [0, 0, 1], {"first_k_dense_replace": 2}),
        ({"first_k_dense_replace": 1, "n_routed_experts": None}, [1, 0], {}),
        ({"num_dense_layers": 2}, [0, 1, 2, 2], {}),
        ({"num_hash_layers": 2}, [0, 2, 3], {"num_hash_layers": 1}),
        ({"max_window_layers": 4, "use_sliding_window": False, "sliding_window": 8}, [0], {}),
        ({"max_window_layers": 4, "use_sliding_window": True}, [0, 1], {"max_window_layers": 2}),
        ({"max_window_layers": 2, "use_sliding_window": True}, [0, 2, 3], {"max_window_layers": 1}),
        ({"max_window_layers": 2, "use_sliding_window": True}, [3, 0], {"layer_types": [S, F]}),
        ({"num_kv_shared_layers": 2}, [0, 1, 3], {"num_kv_shared_layers": 1}),
        # periods stay when they still say the truth, and are written out when not
        ({"sliding_window_pattern": 2, "sliding_window": 8}, [0, 1, 0, 1, 2, 3], {}),
        ({"sliding_window_pattern": 2, "sliding_window": 8}, [0, 1, 1, 2], {"layer_types": [S, F, F, S]}),
        ({"sliding_window_pattern": 2, "sliding_window": None}, [0, 1, 1, 2], {}),
        ({"full_attention_interval": 4}, [0, 3], {"layer_types": [L, F]}),
        ({"no_rope_layer_interval": 4, "no_rope_layers": []}, [3, 0], {"no_rope_layers": [0, 1]}),
        ({"interleave_moe_layer_step": 2, "moe_layers": None}, [1, 1, 0], {"moe_layers": [0, 1]}),
        # pairs are looked for
        (
            {"attn_layer_period": 4, "attn_layer_offset": 2},
            [0, 2, 1, 2],
            {"attn_layer_period": 2, "attn_layer_offset": 1},
        ),
        (
            {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts": 4},
            [0, 1, 1],
            {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
        ),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0], "num_experts": 4}, [1, 0], {"mlp_only_layers": [1]}),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, [1, 2], {"moe_layer_start_index": 0}),
        ({"block_types": ["r", "r", "a"]}, [0, 1, 2, 3], {}),
        ({"block_types": ["r", "r", "a"]}, [0, 2, 2], {"block_types": ["r", "a", "a"]}),
        ({"aligner_num_add_layers": 2}, [0, 1], {"aligner_num_add_layers": 1}),
        ({"aligner_num_add_layers": 1}, [3, 3], {"aligner_num_add_layers": 2}),
        ({"scale_attn_by_inverse_layer_idx": True}, [0, 1, 2], {}),
        ({"scale_attn_by_inverse_layer_idx": False}, [0, 2], {}),
        ({"stagger_local_blocks": True}, [0, 3, 2, 1], {}),
        ({"model_type": "beam"}, [0, 1, 2], {}),
        ({"model_type": "esmc"}, [3, 1, 1, 0], {}),
        ({"model_type": "minimax_m2"}, [0, 2], {}),
        # numbers that are divided by the root of the number of layers
        ({"scale_depth": 1.5}, [2], {"scale_depth": 0.75}),
        ({"scale_depth": None, "model_type": "minicpm3"}, [2], {}),
        ({"model_type": "minicpm3"}, [2], {"scale_depth": 0.7}),
        ({"scale_depth": 1.5}, [3, 2, 1, 0], {}),
        ({"global_attn_every_n_layers": 2}, [2, 1, 0], {}),
        ({"global_attn_every_n_layers": 2, "layer_types": [F, S, F, S]}, [1, 0], {"layer_types": [S, F]}),
    ],
)
def test_numbers_that_imply_kinds_are_moved_or_written_out(config: Config, source: list[int], changed: Config) -> None:
    before = {"num_hidden_layers": 4, **config}
    after = resized(before, source)
    if "moe_layer_start_index" in config:
        changed = {**changed, "moe_layer_end_index": after["moe_layer_end_index"]}
        assert after["moe_layer_end_index"] == 1
    assert after == {**before, **changed, "num_hidden_layers": len(source)}


@pytest.mark.parametrize(
    ("config", "source", "message"),
    [
        ({"first_k_dense_replace": 1}, [1, 0], "the dense layers must come first"),
        ({"first_k_dense_replace": 1, "n_routed_experts": 8}, [0, 1, 0, 1], "first_k_dense_replace = 1"),
        ({"num_kv_shared_layers": 1}, [3, 0], "KV-sharing layers must come last"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, [0, 1, 1], "attention layers must be evenly spaced"),
        ({"decoder_sparse_step": 2, "num_experts": 4}, [0, 1, 1], "no mlp_only_layers"),
        ({"moe_layer_start_index": 1}, [1, 0, 1], "the layers with experts have a gap"),
        ({"global_attn_every_n_layers": 2}, [0, 2], "same i modulo 2"),
        ({"deepstack_visual_indexes": [1]}, [0, 2], "uses the output of layer 1"),
        ({"kv_source_layers": [0, 1, 0, 1]}, [1, 2], "layer 2 depends on layer 0"),
        ({"scale_attn_by_inverse_layer_idx": True}, [0, 2], "layer 2 would be layer 1, and the scale of its attention"),
        ({"stagger_local_blocks": True}, [0, 2, 1], "layer 2 would be layer 1, and where its blocks begin"),
        ({"model_type": "diffllama"}, [0, 1, 2, 3, 3], "layer 3 would be layer 4, and lambda_init"),
        ({"model_type": "beam"}, [0, 2, 3], "layer 2 would be layer 1, and the scale of its residuals"),
        ({"model_type": "esmc"}, [0, 1, 2], "3 layers instead of 4"),
        ({"architectures": ["MiniMaxM1ForCausalLM"]}, [0, 1, 2], "3 layers instead of 4, and the decay"),
        ({"model_type": "granite_speech_encoder"}, [0, 1, 2], "3 layers instead of 4, and the place"),
        (
            {"model_type": "granite_speech_plus_encoder"},
            [0, 2, 1, 3],
            "layer 2 would be layer 1, and whether it adds recognised text",
        ),
        ({"model_type": "minimax"}, [0, 2, 1, 3], "layer 2 would be layer 1, and the decay"),
        ({}, [], "no layers"),
        ({}, [0, 4], "layers 0 to 3, not 4"),
        ({}, [-1], "layers 0 to 3, not -1"),
    ],
)
def test_stack_that_the_config_cannot_express_is_refused(config: Config, source: list[int], message: str) -> None:
    with pytest.raises(LayerError, match=message):
        resized({"num_hidden_layers": 4, **config}, source)


def test_refusal_names_the_key_the_kinds_and_the_way_out() -> None:
    with pytest.raises(LayerError) as caught:
        resized({"num_hidden_layers": 4, "first_k_dense_replace": 1}, [1, 0, 2])
    assert str(caught.value) == (
        "first_k_dense_replace = 1 of config.json cannot express this stack: the dense layers must come first\n"
        "  new layers: 0:sparse, 1:dense, 2:sparse\n"
        "  -> Keep the layers in an order that the model class can build."
    )


def test_a_refusal_shows_the_first_layers_of_a_deep_model() -> None:
    for n, shown in ((80, "78:sparse, 79:sparse\n"), (81, "79:sparse, ...\n")):
        with pytest.raises(LayerError) as caught:
            resized({"num_hidden_layers": n, "first_k_dense_replace": 1}, [1, 0, *range(2, n)])
        assert shown in str(caught.value)


def test_whole_stack_in_order_changes_nothing_even_without_a_count() -> None:
    config = {"first_k_dense_replace": 1, "whatever": 4}
    assert resized(config, range(4)) == config


def test_stack_without_a_count_key_cannot_change() -> None:
    with pytest.raises(LayerError, match=r"no key of config\.json holds the layer count of model\.layers\. \(4\)"):
        resized({"whatever": 4}, [0, 1])


def test_unknown_stack_is_named() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'model\.layers\.'"):
        resize_config({}, analyse(stack("model.layers.", "aa"), {}), {"model.layer.": [0]})


def test_all_keys_of_the_count_change_in_their_sub_config_only() -> None:
    config = {
        "num_hidden_layers": 3,
        "layer_types": [S, F, S],
        "text_config": {"num_hidden_layers": 3, "layer_types": [S, F, S], "vocab_size": 3},
        "vision_config": {"num_hidden_layers": 3, "layer_types": [F, F, S]},
    }
    s = analyse([*stack("vision_tower.layers.", "aaa"), *stack("language_model.model.layers.", "aaa")], config)
    new, notes = resize_config(config, s, {"language_model.model.layers.": [1, 1]})
    text = {"num_hidden_layers": 2, "layer_types": [F, F]}
    assert new == {**text, "text_config": {**text, "vocab_size": 3}, "vision_config": config["vision_config"]}
    assert notes == (
        "layer_types: re-indexed for 2 layers",
        "text_config.num_hidden_layers: 3 -> 2",
        "num_hidden_layers: 3 -> 2",
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "kept"),
    [
        ("vision_config", "deepstack_visual_indexes", [2, 0], 2),  # of Qwen3-VL's tower, added after the first layers
        ("", "deepstack_layer_map", [[-1, 0], [0, 2]], 3),
        ("", "spatial_target_layers", [1], 2),
        ("talker_config", "accept_hidden_layer", 1, 2),
        ("", "vision_feature_layer", [2], 0),
    ],
)
def test_layers_that_other_sections_name_by_number_stay_in_their_place(
    section: str, key: str, value: object, kept: int
) -> None:
    config: dict[str, Any] = {
        "thinker_config": {"text_config": {"num_hidden_layers": 3}},
        "vision_config": {"num_hidden_layers": 3},
        "talker_config": {},
    }
    (config[section] if section else config)[key] = value
    text = "thinker.model.layers."
    s = analyse([*stack("visual.blocks.", "aaa"), *stack(text, "aaa")], config)
    for source, unmoved in (([1, 2], 0), ([0, 2], 1), ([0, 1, 1, 2], 2), ([0, 1, 2, 2], 3)):
        if unmoved >= kept:
            assert resize_config(config, s, {text: source})[0][section or key] == config[section or key]
        else:
            with pytest.raises(
                LayerError, match=rf"{key} of config\.json names layers of thinker\.model\.layers\. by their numbers"
            ):
                resize_config(config, s, {text: source})


@pytest.mark.parametrize(("key", "value", "kept"), [("vit_feature_layers", [1], 2), ("deepstack_layer_map", [[-1, 0]], 3)])
def test_layers_of_a_tower_whose_results_another_section_takes_stay_in_their_place(key: str, value: object, kept: int) -> None:
    config = {"num_hidden_layers": 2, "vision_config": {"num_hidden_layers": 3}, "adapter_config": {key: value}}
    s = analyse([*stack("visual.blocks.", "aaa"), *stack("model.layers.", "aa")], config)
    for source in ([1, 2], [0, 2], [0, 1, 1, 2]):
        if kept == 2 and source[:2] == [0, 1]:
            assert resize_config(config, s, {"visual.blocks.": source})[0]["vision_config"] == {"num_hidden_layers": 4}
        else:
            with pytest.raises(LayerError, match=rf"adapter_config\.{key} of config\.json names layers of visual\.blocks\."):
                resize_config(config, s, {"visual.blocks.": source})


def longcat(layers: int, parts: int = 2) -> list[TensorSpec]:
    """Layers with several attentions each."""
    names = [f"model.layers.{i}.self_attn.{part}.o_proj.weight" for i in range(layers) for part in range(parts)]
    return [TensorSpec(name, F32, (2, 2)) for name in names]


def test_a_number_of_parts_of_layers_follows_the_number_of_layers() -> None:
    """LongCat: the class reads num_hidden_layers after num_layers, and halves it."""
    config = {"num_layers": 3, "num_hidden_layers": 6, "num_blocks": 2}
    new, notes = resize_config(config, analyse(longcat(3), config), {"model.layers.": [0, 1, 2, 2]})
    assert new == {"num_layers": 4, "num_hidden_layers": 8, "num_blocks": 2}
    assert notes == ("num_layers: 3 -> 4", "num_hidden_layers: 6 -> 8")
    assert resize_config(config, analyse(longcat(3), config), {"model.layers.": [2, 1, 0]})[0] == config


def test_two_numbers_that_may_both_count_the_layers_are_refused() -> None:
    config = {"num_layers": 3, "num_hidden_layers": 9}
    with pytest.raises(LayerError) as error:
        resize_config(config, analyse(longcat(3), config), {"model.layers.": [0, 1, 2, 2]})
    assert str(error.value) == (
        "num_layers and num_hidden_layers of config.json may both count the layers of model.layers., so their number cannot be "
        "changed\n"
        "  num_layers: 3\n"
        "  num_hidden_layers: 9\n"
        "  -> Remove num_hidden_layers from config.json if the model class does not read it, or use as many layers as before."
    )
    assert resize_config(config, analyse(longcat(3), config), {"model.layers.": [2, 1, 0]})[0] == config


def test_a_multiple_that_counts_another_stack_is_left_alone() -> None:
    config = {"num_layers": 2, "depth": 4}
    specs = [*stack("model.layers.", "aa"), *stack("model.blocks.", "aaaa")]
    assert resize_config(config, analyse(specs, config), {"model.layers.": [0]})[0] == {"num_layers": 1, "depth": 4}


def test_two_flags_are_not_two_layer_numbers() -> None:
    config = {"num_hidden_layers": 2, "no_rope_layers": [0, 1]}
    assert resized(config, [1, 1]) == {"num_hidden_layers": 2, "no_rope_layers": [1, 1]}


def test_list_that_counts_by_its_length_stays_a_list() -> None:
    config = {"layers_block_type": ["mamba", "attention", "mamba", "moe"]}
    assert resized(config, [3, 0]) == {"layers_block_type": ["moe", "mamba"]}


@pytest.mark.parametrize("part", ["vision", "tail"])
def test_part_counted_by_a_list_is_left_alone(part: str) -> None:
    config = {"num_hidden_layers": 2, f"{part}_config": {"layer_types": [S, F]}}
    s = analyse([*stack(f"{part}.layers.", "aa"), *stack("model.layers.", "aa")], config)
    assert resize_config(config, s, {"model.layers.": [0]})[0] == {**config, "num_hidden_layers": 1}
    new, _ = resize_config(config, s, {f"{part}.layers.": [1, 1, 0]})
    assert new == {**config, f"{part}_config": {"layer_types": [F, F, S]}}


def test_each_side_of_an_encoder_decoder_changes_its_own_keys() -> None:
    config = {"encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2, "decoder_attention_windows": [4, 8]}
    s = analyse([*stack("model.encoder.layers.", "aa"), *stack("model.decoder.layers.", "aa")], config)
    new, _ = resize_config(config, s, {"model.encoder.layers.": [0, 1, 1]})
    assert new == {**config, "encoder_layers": 3, "num_hidden_layers": 3}
    new, _ = resize_config(config, s, {"model.decoder.layers.": [1]})
    assert new == {**config, "decoder_layers": 1, "decoder_attention_windows": [8]}


@pytest.mark.parametrize(("side", "key"), [("decoder", "num_decoder_layers"), ("encoder", "num_layers")])
def test_a_plain_number_mirrors_the_plain_one_of_an_encoder_decoder(side: str, key: str) -> None:
    """T5: num_hidden_layers is another name of num_layers, the encoder's."""
    config = {"num_layers": 3, "num_decoder_layers": 3, "num_hidden_layers": 3}
    s = analyse([*stack("encoder.block.", "aaa"), *stack("decoder.block.", "aaa")], config)
    new, _ = resize_config(config, s, {f"{side}.block.": [0, 1]})
    assert new == {**config, key: 2, **({"num_hidden_layers": 2} if side == "encoder" else {})}


def test_number_about_the_decoder_does_not_bind_the_encoder() -> None:
    config = {"num_layers": 2, "num_decoder_layers": 2, "num_experts": 4, "decoder_sparse_step": 2}
    s = analyse([*stack("encoder.block.", "aa"), *stack("decoder.block.", "ab")], config)
    assert resize_config(config, s, {"encoder.block.": [1, 1]})[0] == config
    with pytest.raises(LayerError, match="decoder_sparse_step"):
        resize_config(config, s, {"decoder.block.": [1, 1]})


@pytest.mark.parametrize(("other", "tower", "refused"), [(4, "", True), (3, "", False), (4, "vision.layers.", False)])
def test_an_encoder_that_another_section_may_count_stays(other: int, tower: str, refused: bool) -> None:
    config = {"encoder_layers": 4, "decoder_layers": 2, "vision_config": {"num_hidden_layers": other}}
    s = analyse(
        [*stack("encoder.layers.", "aaaa"), *stack("decoder.layers.", "bb"), *stack(tower, "cccc" if tower else "")], config
    )
    if refused:
        with pytest.raises(
            LayerError, match=r"encoder_layers and vision_config\.num_hidden_layers of config\.json may both be"
        ):
            resize_config(config, s, {"encoder.layers.": [0, 1]})
    else:
        assert resize_config(config, s, {"encoder.layers.": [0, 1]})[0] == {**config, "encoder_layers": 2}


def test_stacks_with_one_count_must_change_together() -> None:
    config = {"n_layers": 2}
    s = analyse([*stack("transformer.attentions.", "aa"), *stack("transformer.ffns.", "aa")], config)
    assert s.main is None
    with pytest.raises(LayerError, match="share n_layers"):
        resize_config(config, s, {"transformer.attentions.": [0]})
    new, _ = resize_config(config, s, {"transformer.attentions.": [0], "transformer.ffns.": [0]})
    assert new == {"n_layers": 1}


def test_silent_alternation_of_attention_is_pointed_out() -> None:
    config = {"num_hidden_layers": 4, "sliding_window": 4096}
    s = analyse(stack("model.layers.", "aaaa"), config)
    _, notes = resize_config(config, s, {"model.layers.": [0, 1, 1]})
    assert "does not say which layers use it" in notes[0]


@pytest.mark.parametrize(
    ("kinds", "source", "legal"),
    [
        ("baaa", [0, 2, 2], True),  # T5: the first block has the position bias
        ("baaa", [0, 0, 1], False),
        ("baaa", [1, 2], False),
        ("aaab", [0, 1, 1, 3], True),  # the last layer is special
        ("aaab", [0, 3, 1], False),
        ("baac", [0, 1, 2, 2, 3], True),
        ("abababab", [0, 1, 2, 3], True),  # alternates, and no key says so
        ("abababab", [0, 2], False),
        ("abbabaaa", [0, 1, 2], True),
        ("abbabaaa", [1, 2], False),  # no rule found: only the beginning can be kept
    ],
)
def test_layer_goes_only_where_the_model_builds_its_kind(kinds: str, source: list[int], legal: bool) -> None:
    config = {"num_hidden_layers": len(kinds)}
    if legal:
        assert resized(config, source, kinds)["num_hidden_layers"] == len(source)
        return
    with pytest.raises(LayerError, match=r"cannot become layer|cannot be reordered"):
        resized(config, source, kinds)


def test_kinds_told_by_a_list_may_be_anywhere() -> None:
    config = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mamba"]}
    after = resized(config, [1, 1, 0], "mamm")
    assert after["layers_block_type"] == ["attention", "attention", "mamba"]


NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        "first_k_dense_replace": st.integers(0, 9),
        "max_window_layers": st.integers(0, 9),
        "num_kv_shared_layers": st.integers(1, 4),
        "sliding_window_pattern": st.integers(1, 5),
        "full_attention_interval": st.integers(1, 5),
        "no_rope_layer_interval": st.integers(1, 5),
        "decoder_sparse_step": st.integers(1, 4),
        "mlp_only_layers": st.lists(st.integers(0, 4), unique=True),
        "moe_layer_start_index": st.integers(0, 4),
        "moe_layer_interval": st.integers(1, 3),
        "block_types": st.lists(st.sampled_from("ra"), min_size=1, max_size=4),
        "global_attn_every_n_layers": st.integers(1, 4),
    },
)
PAIRS = st.integers(1, 5).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p - 1)))


@pytest.mark.long
@given(numbers=NUMBERS, pair=PAIRS, source=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_every_layer_keeps_its_kind_or_the_stack_is_refused(numbers: Config, pair: tuple[int, int], source: list[int]) -> None:
    old: dict[str, Any] = {
        **numbers,
        "use_sliding_window": True,
        "attn_layer_period": pair[0],
        "attn_layer_offset": pair[1],
    }
    written = {"full_attention_interval": "layer_types", "no_rope_layer_interval": "no_rope_layers"}
    written |= {"sliding_window_pattern": "layer_types"}
    for rule in rules_for(old):
        new = copy.deepcopy(old)
        if "mlp_only_layers" in old:
            new["mlp_only_layers"] = [i for i, layer in enumerate(source) if layer in old["mlp_only_layers"]]
        before = rule.kinds(old, 5)
        expected = [before[i] for i in source]
        try:
            rule.move(old, new, Remap(tuple(source), 5), tuple(expected))
        except LayerError:
            continue
        explicit = new.get(written.get(getattr(rule, "key", ""), "layer_types"))
        if explicit is not None:
            below_above = {S: True, F: False}
            is_threshold = isinstance(expected[0], bool)
            assert [below_above[kind] for kind in explicit] == expected if is_threshold else explicit == expected
        else:
            assert list(rule.kinds(new, len(source))) == expected


@pytest.mark.slow
@given(
    types=st.lists(st.sampled_from([S, F, L]), min_size=1, max_size=6),
    data=st.data(),
)
def test_layer_types_are_those_of_the_sources(types: list[str], data: st.DataObject) -> None:
    n = len(types)
    source = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    after = resized({"num_hidden_layers": n, "layer_types": types}, source)
    assert after == {"num_hidden_layers": len(source), "layer_types": [types[i] for i in source]}
