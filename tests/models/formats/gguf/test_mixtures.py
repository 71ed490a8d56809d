"""Mixtures of experts: settings that llama.cpp has in its code, and keys that it would read otherwise than transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.architectures.cohere import Cohere2Moe
from weightsmith._models.formats.gguf.architectures.glm import GlmDsa
from weightsmith._models.formats.gguf.architectures.granite import GraniteSwa
from weightsmith._models.formats.gguf.architectures.mimo import MimoV2
from weightsmith._models.formats.gguf.architectures.mistral import Mistral4
from weightsmith._models.formats.gguf.base.architecture import Contents
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.tokenizer.splits import EXAONE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}

PLAIN = {"rope_type": "default", "rope_theta": 1e4}

MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

SMALL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

MIMO = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [1.5] * 4} | {
    **{"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 32}
}

FFN = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


def saved(name: str, folder: Path, **changes: Any) -> Path:
    source = zoo.save(name, folder, 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return source


def written(name: str, folder: Path, **changes: Any) -> Path:
    weightsmith.quantize(saved(name, folder / "m", **changes), folder / "q", "gguf-f32", progress=False)
    return folder / "q" / "model.gguf"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("afmoe", {"mup_enabled": False}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"mup_enabled": "absent"}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"route_norm": False}, "route_norm is False, and llama.cpp takes True for granted"),
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax', and llama.cpp takes 'sigmoid' for granted"),
        ("afmoe", {"layer_types": ["full_attention"] * 5}, r"layer_types is \['full_attention'"),
        (
            "afmoe",
            {"layer_types": "absent", "global_attn_every_n_layers": 3},
            "global_attn_every_n_layers is 3, and llama.cpp takes 4 for granted",
        ),
        ("afmoe", {"sliding_window": None}, "sliding_window is missing"),
        ("afmoe", {"num_dense_layers": 2}, "num_dense_layers is 2, and layer 1 has experts"),
        ("exaone-moe", {"sliding_window": None, "layer_types": ["full_attention"] * 5}, "sliding_window is missing"),
        ("exaone-moe", {"mlp_layer_types": ["sparse"] * 5}, "first_k_dense_replace is 0, and layer 0 has no experts"),
        ("exaone-moe", {"num_shared_experts": 3}, r"num_shared_experts \* moe_intermediate_size is 48"),
        ("hunyuan-moe", {"moe_topk": [2, 1]}, r"moe_topk is \[2, 1\], not a positive whole number"),
        ("hunyuan-moe", {"moe_intermediate_size": 24}, "moe_intermediate_size is 24, and llama.cpp takes 48 for granted"),
        ("hunyuan-moe", {"num_shared_expert": [2, 2]}, "num_shared_expert is 2, and llama.cpp takes 1 for granted"),
        ("hunyuan-moe", {"use_cla": True}, "use_cla is True, and llama.cpp takes False for granted"),
        ("hunyuan-moe", {"norm_topk_prob": False}, "norm_topk_prob is False, and llama.cpp takes True for granted"),
        ("glm-dsa", {"index_head_dim": 32}, "index_head_dim is 32, which is not a multiple of 64"),
        (
            "glm-dsa",
            {"indexer_types": ["shared", "full", "full"]},
            "not full or shared for each of 3 layers, the first one",
        ),
        ("glm-dsa", {"indexer_types": "absent", "index_topk_pattern": "FF"}, "indexer_types is 'FF', not full or shared"),
        ("glm-dsa", {"rope_parameters": YARN}, "rope_type is 'yarn', and llama.cpp takes 'default' for granted"),
        ("glm-dsa", {"q_lora_rank": None}, "q_lora_rank is 'none', and llama.cpp takes 'a number' for granted"),
        ("glm-dsa", {"index_n_heads": 16}, "index_n_heads .*is 512 in config.json|index_n_heads is 16 in config.json"),
        ("deepseek-v32", {"index_head_dim": 32}, "index_head_dim is 32, which is not a multiple of 64"),
        ("deepseek-v32", {"scoring_func": "softmax"}, "scoring_func is 'softmax', and llama.cpp takes 'sigmoid'"),
        ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank is 'none', and llama.cpp takes 'a number' for granted"),
        ("mimo2", {"swa_head_dim": 8}, "swa_head_dim is 8, and llama.cpp takes 16 for granted"),
        ("mimo2", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads is 2, and llama.cpp takes 4 for granted"),
        ("mimo2", {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0, and llama.cpp takes 1.0 for granted"),
        ("mimo2", {"sliding_window": None}, "sliding_window is missing"),
        (
            "mimo2",
            {"layer_types": ["full_attention"] * 7},
            "layers with sliding_attention is 'none', and llama.cpp takes 'some'",
        ),
        (
            "mimo2",
            {"rope_parameters": {"full_attention": {**MIMO, "partial_rotary_factor": 0.25}, "sliding_attention": MIMO}},
            "partial_rotary_factor of sliding_attention is 0.5, and llama.cpp takes 0.25 for granted",
        ),
        (
            "mimo2",
            {"rope_parameters": {"full_attention": MIMO, "sliding_attention": {**MIMO, "rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention is 'linear', and llama.cpp takes 'default' for granted",
        ),
        ("phimoe", {"lm_head_bias": False}, "lm_head_bias is False, and llama.cpp takes True for granted"),
        ("phimoe", {"attention_bias": False}, "attention_bias is False, and llama.cpp takes True for granted"),
        (
            "phimoe",
            {"rope_parameters": {**LONG, "short_mscale": 1.1}},
            "short_mscale is 1.1, and llama.cpp takes 1.2 for granted",
        ),
        ("solar-open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and llama.cpp takes 1 for granted"),
        ("solar-open", {"use_qk_norm": True}, "use_qk_norm is True, and llama.cpp takes False for granted"),
        ("solar-open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1, and layer 0 has experts"),
        ("hy-v3", {"route_norm": False}, "route_norm is False, and llama.cpp takes True for granted"),
        ("hy-v3", {"attention_bias": True}, "attention_bias is True, and llama.cpp takes False for granted"),
        ("hy-v3", {"num_shared_experts": 0}, "num_shared_experts is 0, not a positive whole number"),
        ("hy-v3", {"num_shared_experts": 1}, r"num_shared_experts \* moe_intermediate_size is 16 in config.json"),
        ("mellum", {"norm_topk_prob": False}, "norm_topk_prob is False, and llama.cpp takes True for granted"),
        ("mellum", {"tie_word_embeddings": True}, "tie_word_embeddings is True, and llama.cpp takes False for granted"),
        ("mellum", {"mlp_layer_types": ["dense", *["sparse"] * 4]}, r"mlp_layer_types is \['dense', 'sparse'"),
        ("mellum", {"sliding_window": None}, "sliding_window is missing"),
        (
            "mellum",
            {"rope_parameters": "absent"},
            "rope_theta of sliding_attention is 10000.0, and llama.cpp takes 500000.0 for granted",
        ),
        (
            "mellum",
            {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN)},
            "rope_type of sliding_attention is 'yarn', and llama.cpp takes 'default' for granted",
        ),
        (
            "cohere2-moe",
            {"shared_expert_combination_strategy": "sum"},
            "shared_expert_combination_strategy is 'sum', and llama.cpp takes 'average' for granted",
        ),
        (
            "cohere2-moe",
            {"prefix_dense_sliding_window_pattern": 2},
            "prefix_dense_sliding_window_pattern is 2, and llama.cpp takes 1 for granted",
        ),
        ("cohere2-moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu', not softmax or sigmoid"),
        ("cohere2-moe", {"rope_scaling": YARN}, "rope_scaling is .*, and llama.cpp takes None for granted"),
        ("cohere2-moe", {"sliding_window": None}, "sliding_window is missing"),
        ("cohere2-moe", {"mlp_layer_types": ["sparse"] * 5}, "first_k_dense_replace is 0, and layer 0 has no experts"),
        ("granite-swa", {"sliding_window": None}, "sliding_window is missing"),
        ("granite-swa", {"layer_rope_theta": [1e4] * 4}, "layer_rope_theta is .*, not a number for each of 5 layers"),
        ("granite-swa", {"layer_rope_theta": [1e4, 0, 1e4, 5e3, 0]}, r"layer_rope_theta is \[10000.0, 0.0, 10000.0, 5000.0"),
        ("granite-swa", {"layer_rope_theta": [1e4, -1, 1e4, 1e4, 0]}, "layer_rope_theta is -1, not a positive number"),
        ("granite-swa", {"no_rope_layers": [1, 1, 1, 1, 0]}, r"no_rope_layers is \[1, 1, 1, 1, 0\], and llama.cpp takes"),
        ("granite-moe-swa", {"shared_intermediate_size": 41}, r"input_linear.weight: 2 \* shared_intermediate_size is 82"),
        *(
            (
                name,
                {"layer_types": ["full_attention"] * 5},
                "layers with sliding_attention is 'none', and llama.cpp takes 'some'",
            )
            for name in ("cohere2-moe", "granite-swa", "exaone-moe")
        ),
        ("laguna", {"moe_router_logit_softcapping": 2.0}, "moe_router_logit_softcapping is 2.0, and llama.cpp takes 0.0"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is True, and llama.cpp"),
        ("mistral4", {"rope_parameters": PLAIN}, "rope_type is 'default', and llama.cpp takes 'yarn' for granted"),
        ("mistral4", {"rope_parameters": {**SMALL, "mscale": 0.7}}, "mscale is 0.7, and llama.cpp takes 1.0 for granted"),
        (
            "mistral4",
            {"rope_parameters": {**SMALL, "mscale": 0.7, "mscale_all_dim": 0.7}},
            "mscale_all_dim is 0.7, and llama.cpp takes 1 for granted",
        ),
        ("mistral4", {"rope_parameters": {**SMALL, "llama_4_scaling_beta": None}}, "llama_4_scaling_beta is missing"),
        ("mistral4", {"rope_interleave": False}, "rope_interleave is False, and llama.cpp takes True for granted"),
        ("mistral4", {"q_lora_rank": None}, "q_lora_rank is 'none', and llama.cpp takes 'a number' for granted"),
        ("mistral4", {"moe_intermediate_size": 24}, "experts.down_proj: moe_intermediate_size is 24 in config.json"),
        ("laguna", {"attention_bias": True}, "attention_bias is True, and llama.cpp takes False for granted"),
        ("laguna", {"gating": "per-element"}, "gating is 'per-element', and the gate of layer 0 would have 32 rows, not 4"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 6]},
            "num_attention_heads_per_layer is .*, not a number for each of 5",
        ),
        ("laguna", {"num_attention_heads_per_layer": [4, 6, 6, 4, 4]}, "the gate of layer 4 would have 4 rows, not 6"),
        ("laguna", {"mlp_layer_types": ["dense"] * 5}, "first_k_dense_replace is 5, and layer 1 has experts"),
        ("laguna", {"sliding_window": 0}, "sliding_window is missing"),
        (
            "laguna",
            {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": YARN}},
            "rope_type of sliding_attention is 'yarn', and llama.cpp takes 'default' for granted",
        ),
        ("dbrx", {"ffn_config": {**FFN, "moe_normalize_expert_weights": None}}, "moe_normalize_expert_weights is 'none', and"),
        ("dbrx", {"ffn_config": {**FFN, "ffn_act_fn": {"name": "gelu"}}}, "hidden_act is 'gelu', and llama.cpp takes 'silu'"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(name, tmp_path, **changes)


@pytest.mark.parametrize(
    "stated",
    [
        {"norm_topk_prob": True, "rope_parameters": YARN},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "tie_word_embeddings": False},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-4},
    ],
)
def test_settings_of_coheres_mixtures_come_back(stated: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    source = zoo.save("cohere2-moe", tmp_path / "m", 1, vocab_size=262, **stated)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        here, there = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back.folder))
    assert {name: there.get(name) for name in stated} == {name: here[name] for name in stated}


def test_layers_of_coheres_mixtures_that_do_not_state_their_kinds(tmp_path: Path) -> None:
    import transformers

    for stated in ({"first_k_dense_replace": 2}, {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}, {}):
        theirs = transformers.Cohere2MoeConfig(num_hidden_layers=9, **stated)
        ours = Cohere2Moe().complete({"num_hidden_layers": 9, **stated})
        assert ours["layer_types"] == theirs.layer_types
        assert ours.get("first_k_dense_replace", 0) == theirs.mlp_layer_types.count("dense")


def test_weights_of_experts_that_coheres_config_cannot_state(tmp_path: Path) -> None:
    """A softmax of all scores; and llama.cpp has sigmoids where a file does not say it, transformers a softmax."""
    keys = dict(read_gguf_header(written("cohere2-moe", tmp_path)).keys)
    contents = Contents({"token_embd.weight": (262, 32)})
    assert Cohere2Moe().config(keys, contents, "float32", "here")["expert_selection_fn"] == "softmax"
    without = {name: value for name, value in keys.items() if name != "cohere2moe.expert_gating_func"}
    assert Cohere2Moe().config(without, contents, "float32", "here")["expert_selection_fn"] == "sigmoid"
    with pytest.raises(Unsupported, match=r"expert_gating_func is 1 and expert_weights_norm is False, which config\.json"):
        Cohere2Moe().config({**keys, "cohere2moe.expert_weights_norm": False}, contents, "float32", "here")


@pytest.mark.parametrize(
    "stated",
    [
        {"gating": "per-element", "num_attention_heads_per_layer": [6] * 5, "head_dim": 12, "sliding_window": 6},
        {"layer_types": ["full_attention"] * 5, "sliding_window": 0, "mlp_layer_types": ["sparse"] * 5},
        {"rope_parameters": {kind: {**PLAIN, "partial_rotary_factor": 0.75} for kind in MIXED[:2]}},
    ],
)
def test_settings_of_laguna_come_back(stated: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    source = zoo.save("laguna", tmp_path / "m", 1, vocab_size=262, **stated)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        here, there = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back.folder))
    assert {name: there.get(name) for name in stated} == {name: here[name] for name in stated}


def test_how_queries_of_mistral_4_grow(tmp_path: Path) -> None:
    """llama.cpp's converter leaves this out; files without it are read as those of models whose queries do not grow."""
    keys = dict(read_gguf_header(written("mistral4", tmp_path)).keys)
    scale, length = "mistral4.attention.temperature_scale", "mistral4.attention.temperature_length"
    assert (keys[scale], keys[length]) == (pytest.approx(0.1), 8)
    contents = Contents({"token_embd.weight": (262, 32), "output.weight": (262, 32)})
    without = {name: value for name, value in keys.items() if name not in (scale, length)}
    for stated, beta in ((keys, 0.1), (without, 0.0)):
        assert Mistral4().config(stated, contents, "float32", "here")["rope_parameters"]["llama_4_scaling_beta"] == beta
    with pytest.raises(Unsupported, match=r"temperature_length is not the context before YaRN"):
        Mistral4().config({**keys, length: 16}, contents, "float32", "here")
    rope = {**json.loads((tmp_path / "m" / "config.json").read_text())["rope_parameters"], "llama_4_scaling_beta": 0.0}
    keys = dict(read_gguf_header(written("mistral4", tmp_path / "plain", rope_parameters=rope)).keys)
    assert scale not in keys


def test_bases_of_granite_by_layer_come_back(tmp_path: Path) -> None:
    """llama.cpp has RoPE in all layers where a file does not say which."""
    bases = [1e4, 0, 0, 1e4, 1e4]
    keys = dict(read_gguf_header(written("granite-swa", tmp_path, layer_rope_theta=bases, no_rope_layers=[1, 0, 0, 1, 1])).keys)
    contents = Contents({"token_embd.weight": (262, 32)})
    assert GraniteSwa().config(keys, contents, "float32", "here")["layer_rope_theta"] == bases
    pattern = "granite_swa.attention.rope_pattern"
    without = {name: value for name, value in keys.items() if name != pattern}
    assert GraniteSwa().config(without, contents, "float32", "here")["layer_rope_theta"] == [1e4] * 5
    with pytest.raises(FormatError, match="not a truth value for each of 5 layers"):
        GraniteSwa().config(keys | {pattern: np.ones(4, bool)}, contents, "float32", "here")


@pytest.mark.long
@pytest.mark.parametrize(("name", "stem"), [("afmoe", "afmoe"), ("hy-v3", "hy_v3"), ("laguna", "laguna")])
def test_scores_of_some_are_always_normalised(name: str, stem: str, tmp_path: Path) -> None:
    """config.json of transformers does not say so, and llama.cpp does not normalise them where the file does not say it."""
    path = written(name, tmp_path)
    reader = gguf.GGUFReader(path)
    keys = {name.removeprefix(f"{stem}."): field.contents() for name, field in reader.fields.items()}
    assert keys["expert_weights_norm"] is True
    kept = {name: value for name, value in keys.items() if not name.startswith("GGUF.") and name != "general.architecture"}
    tensors = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    weightsmith.open_checkpoint(write_gguf(tmp_path / "same.gguf", stem, tensors, kept)).close()
    for changed in ({**kept, "expert_weights_norm": False}, {n: v for n, v in kept.items() if n != "expert_weights_norm"}):
        other = write_gguf(tmp_path / "other.gguf", stem, tensors, changed)
        with pytest.raises(Unsupported, match=rf"{stem}\.expert_weights_norm is not true, and transformers always normalises"):
            weightsmith.open_checkpoint(other)


@needs_llama_cpp
@pytest.mark.long
def test_llama_cpp_splits_text_as_k_exaone_does(tmp_path: Path) -> None:
    """With merges across all of the text, so that only the splits keep its parts apart."""
    import tokenizers as library

    atoms = (
        "the",
        "The",
        "ab",
        "'s",
        "'LL",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "23",
        "½",
        "!",
        "...",
        "/",
        "_",
        "中文",
        "か",
        "한국",
    )
    atoms += ("\u00e9", "e\u0301", "\u0931\u093c", "\u02b0", "\u2163", "\U0001f600")
    random = np.random.default_rng(0)
    texts = ["".join(atoms[i] for i in random.integers(0, len(atoms), 12)) for _ in range(4000)]
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = level
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts, library.trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    pattern = library.Regex(EXAONE)
    trained.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.Split(pattern, "isolated"), level])
    source = zoo.save("exaone-moe", tmp_path / "m", 1, vocab_size=trained.get_vocab_size())
    trained.save(str(source / "tokenizer.json"))
    weightsmith.quantize(source, tmp_path / "q", "gguf-f16", progress=False)
    assert read_gguf_header(tmp_path / "q" / "model.gguf").keys["tokenizer.ggml.pre"] == "exaone-moe"
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        for text in texts[:1000]:
            assert judge.tokens(text) == trained.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("alpha", "stated", "expected"),
    [(1000.0, 32768, 262144), (1000, 262144, 262144), (1000, 4096, 4096), (500, 32768, 32768), (None, 32768, 32768)],
)
def test_hunyuan_states_fewer_tokens_than_alpha_gives(alpha: float | None, stated: int, expected: int, tmp_path: Path) -> None:
    rope = {"rope_type": "default"} if alpha is None else {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
    changes = {"rope_parameters": {**rope, "rope_theta": 10000.0}, "max_position_embeddings": stated}
    keys = read_gguf_header(written("hunyuan-moe", tmp_path, **changes)).keys
    assert keys["hunyuan-moe.context_length"] == expected
    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        assert back.config is not None
        assert back.config["max_position_embeddings"] == expected


@pytest.mark.long
def test_numbers_that_hunyuan_lists_for_each_layer(tmp_path: Path) -> None:
    plain = read_gguf_header(written("hunyuan-moe", tmp_path / "plain")).keys
    listed = {"num_experts": [4, 4], "moe_topk": [2, 2], "moe_intermediate_size": [48, 48], "num_shared_expert": [1, 1]}
    keys = read_gguf_header(written("hunyuan-moe", tmp_path / "listed", **listed)).keys
    assert {name: str(value) for name, value in keys.items()} == {name: str(value) for name, value in plain.items()}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"indexer_types": ["full", "shared", "shared"]}, "FSS"),
        ({"index_topk_pattern": "FSF"}, "FSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFF"),
        ({}, "FFF"),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(stated: dict[str, Any], expected: str) -> None:
    """Whichever setting says so; llama.cpp takes GLM 5.2's where a file with a long context does not."""
    import transformers

    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=3, **stated)
    assert "".join(kind[0].upper() for kind in theirs.indexer_types) == expected
    keys = GgufKeys()
    GlmDsa().put_more(GgufConfig({"num_hidden_layers": 3, **stated}), keys)
    assert keys.values["attention.indexer.types"].value == [kind == "F" for kind in expected]


def test_layers_with_an_indexer_in_a_file_that_does_not_say_it(tmp_path: Path) -> None:
    keys = dict(read_gguf_header(written("glm-dsa", tmp_path)).keys) | {"glm-dsa.block_count": 8}
    contents = Contents({"token_embd.weight": (262, 32), "output.weight": (262, 32)})
    for types, context, expected in ((None, 1 << 17, "F" * 8), (None, 1 << 20, "FFFSSSFS"), ("FSSSFSSS", 1 << 20, "FSSSFSSS")):
        stated = None if types is None else np.array([kind == "F" for kind in types])
        changed = {**keys, "glm-dsa.context_length": context, "glm-dsa.attention.indexer.types": stated}
        config = GlmDsa().config(changed, contents, "float32", "here")
        assert "".join(kind[0].upper() for kind in config["indexer_types"]) == expected
    with pytest.raises(FormatError, match=r"indexer\.types is .*, not a truth value for each of 8 layers"):
        GlmDsa().config({**keys, "glm-dsa.attention.indexer.types": np.ones(3, bool)}, contents, "float32", "here")


@pytest.mark.long
def test_weights_that_choose_tokens_are_f32_where_nothing_is_quantised(tmp_path: Path) -> None:
    source = saved("glm-dsa", tmp_path / "m")
    for name, expected in (("f16", "F32"), ("q8_0", "Q8_0")):
        weightsmith.quantize(source, tmp_path / name, f"gguf-{name}", progress=False)
        assert stored(tmp_path / name / "model.gguf")["blk.0.indexer.proj.weight"][0] == expected


@pytest.mark.long
def test_mimo_under_published_names(tmp_path: Path) -> None:
    """The window of published models is that of SGLang, which counts the tokens before each, as transformers reads it."""
    rope = {"full_attention": {**MIMO, "rope_theta": 5e6}, "sliding_attention": MIMO}
    plain = read_gguf_header(written("mimo2", tmp_path / "plain", sliding_window=9, rope_parameters=rope)).keys
    published = {
        **{"sliding_window": 8, "sliding_window_size": 8, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1]},
        **{"layer_types": "absent", "mlp_layer_types": "absent", "rope_parameters": "absent"},
        **{"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.5, "routed_scaling_factor": None},
    }
    keys = read_gguf_header(written("mimo2", tmp_path / "published", **published)).keys
    assert {name: str(value) for name, value in keys.items()} == {name: str(value) for name, value in plain.items()}
    assert keys["mimo2.attention.sliding_window"] == 9


def test_keys_of_mimo_for_layers_that_predict(tmp_path: Path) -> None:
    """llama.cpp's converter writes numbers of those layers, too."""
    keys = dict(read_gguf_header(written("mimo2", tmp_path)).keys) | {"mimo2.block_count": 8, "mimo2.nextn_predict_layers": 1}
    heads, slides = keys["mimo2.attention.head_count_kv"], keys["mimo2.attention.sliding_window_pattern"]
    more = {
        "mimo2.attention.head_count_kv": np.append(heads, 4),
        "mimo2.attention.sliding_window_pattern": np.append(slides, True),
    }
    contents = Contents({"token_embd.weight": (262, 32), "output.weight": (262, 32)})
    config = MimoV2().config(keys | more, contents, "float32", "here")
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (7, 2)
    assert config["layer_types"] == ["full_attention", *["sliding_attention"] * 4, "full_attention", "sliding_attention"]
    with pytest.raises(FormatError, match=r"head_count_kv is .*, not a whole number for each of 7 layers"):
        MimoV2().config(keys | more | {"mimo2.attention.head_count_kv": heads[:3]}, contents, "float32", "here")
    with pytest.raises(Unsupported, match="not twice as large in layers with a window"):
        MimoV2().config(keys | more | {"mimo2.attention.head_count_kv": np.full(8, 2)}, contents, "float32", "here")


STEEP = ("q_norm.weight", "k_norm.weight", "query_layernorm.weight", "key_layernorm.weight", "q_b_proj.weight", "wq_b.weight")
STEEP += ("mlp.gate.weight", "mlp.router.gate.weight", "mlp.gate.wg.weight", "v_proj.weight", "down_proj.weight")
STEEP += ("q_proj.weight", "k_proj.weight")


@needs_llama_cpp
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("afmoe", {"rope_parameters": YARN}),
        ("exaone-moe", {"layer_types": MIXED, "rope_parameters": YARN}),
        ("glm-dsa", {"indexer_types": ["full", "full", "shared"], "n_routed_experts": 8, "n_group": 2}),
        ("solar-open", {"attention_bias": True, "rope_parameters": YARN}),
        ("hy-v3", {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": YARN}),
        ("mellum", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
        ("deepseek-v32", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("cohere2-moe", {"norm_topk_prob": False, "num_shared_experts": 0, "rope_parameters": YARN}),
        ("cohere2-moe", {"expert_selection_fn": "sigmoid"}),
        ("cohere2-moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-4}),
        ("granite-swa", {"layer_rope_theta": [0, *[7e3] * 4], "attention_bias": True, "mlp_bias": True}),
        ("granite-moe-swa", {"layer_rope_theta": None, "rope_parameters": YARN, "shared_intermediate_size": 0}),
        ("laguna", {"rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": PLAIN}}),
        ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": None, "layer_types": None}),
        ("mellum", {"layer_types": None}),
        ("mistral4", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
        ("mimo2", {"layer_types": MIXED[::-1] + MIXED[:2], "mlp_layer_types": ["sparse", "dense"] * 3 + ["sparse"]}),
    ],
)
def test_llama_cpp_computes_the_same_where_attention_and_routers_decide(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Small random weights attend to all tokens alike: there, a wrong setting would hardly change the logits."""
    source = zoo.save(name, tmp_path / "m", 1, dtype="float32", vocab_size=262, max_position_embeddings=64, **changes)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {tensor: checkpoint.read(tensor) for tensor in checkpoint.specs}, checkpoint.config
    write_checkpoint(source, {n: v * np.float32(8 if n.endswith(STEEP) else 1) for n, v in tensors.items()}, config)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, _ = zoo.load(name, source)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()


class RmsNorm(torch.nn.Module):
    """A layer norm's weight and bias after an RMS norm."""

    def __init__(self, norm: torch.nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.norm.eps) * self.norm.weight + self.norm.bias


@needs_llama_cpp
@pytest.mark.slow
def test_what_llama_cpp_computes_of_phi_3_5_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RMS norms, and weights of experts with the sum 1: a warning says so. All else is as in transformers."""
    from transformers.models.phimoe import modeling_phimoe

    def normalised(scores: torch.Tensor, top_k: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(torch.softmax(scores, -1), top_k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    monkeypatch.setattr(modeling_phimoe, "sparsemixer", normalised)
    source = zoo.save("phimoe", tmp_path / "m", 1, dtype="float32", vocab_size=262)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert any("llama.cpp does not compute what transformers does" in str(warning) for warning in quantised.warnings)
    model, _ = zoo.load("phimoe", source)
    for name, norm in list(model.named_modules()):
        if isinstance(norm, torch.nn.LayerNorm):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, RmsNorm(norm))
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 0.001 * np.abs(theirs).max()
