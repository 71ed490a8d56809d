"""What is known of embeddings, heads and fused matrices, and the walks over config.json, whatever it holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base.errors import FormatError, WeightsmithError
from weightsmith._base.files import expand_user
from weightsmith._base.strict_json import texts
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.mixture.layouts.dense_config import semantics
from weightsmith._features.mixture.surgery import router_groups, with_experts
from weightsmith._models.structure import Structure, analyse, resize_config
from weightsmith._models.structure.configs import MAX_DEPTH, replace_value, sections
from weightsmith._models.structure.projections import fused_names, fused_parts
from weightsmith._models.structure.vocabulary import is_embedding, is_head, is_vocabulary, tie_flag, untie
from weightsmith._planning.planner.files import output_config


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DTYPES["BF16"], shape)


@pytest.mark.parametrize(
    ("tensor", "rows_are_tokens"),
    [
        (spec("model.embed_tokens.weight", 8, 4), True),
        (spec("model.layers.61.embed_tokens.weight", 8, 4), True),  # DeepSeek's prediction layer has its own
        (spec("model.layers.61.shared_head.head.weight", 8, 4), True),
        (spec("model.language_model.embed_tokens_per_layer.weight", 8, 6), False),
        (spec("lm_head.weight", 8, 4), True),
        (spec("lm_head.bias", 8), False),
        (spec("model.layers.0.attention.output.weight", 8, 4), False),
        (spec("model.norm.weight", 4), False),
        (spec("model.per_layer_model_projection.weight", 8, 4), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_which_matrices_have_a_row_for_each_token(tensor: TensorSpec, rows_are_tokens: bool) -> None:
    assert is_vocabulary(tensor) == rows_are_tokens


def test_an_embedding_for_each_layer_is_not_the_embedding() -> None:
    assert not is_embedding(spec("model.embed_tokens_per_layer.weight", 8, 6))
    assert not is_head(spec("model.layers.0.attn.output.weight", 8, 4))
    assert is_head(spec("output.weight", 8, 4))


def test_untying_is_said_wherever_tying_was() -> None:
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}, "vision_config": {"depth": 2}}
    untie(config)
    text = {"tie_word_embeddings": False}
    assert config == {"tie_word_embeddings": False, "text_config": text, "vision_config": {"depth": 2}}


def test_the_fused_tensors_of_a_matrix() -> None:
    assert fused_names("h.0.attn.k_proj.weight") == ["h.0.attn.qkv_proj.weight"]
    assert fused_names("h.0.attn.Wk.weight") == ["h.0.attn.Wqkv.weight"]
    assert fused_names("h.0.mlp.down_proj.weight") == []


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {"vocab_size": 8}
    for _ in range(depth):
        config = {"vocab_size": 8, "text_config": config}
    return config


def test_walks_end_at_a_depth() -> None:
    config = nested(900)
    assert [len(path) for path, _ in sections(config)] == list(range(MAX_DEPTH + 1))
    replace_value(config, "vocab_size", 8, 9)
    assert sum(section["vocab_size"] == 9 for _, section in sections(config)) == MAX_DEPTH + 1
    lists: list[Any] = ["experts.0"]
    for _ in range(5000):
        lists = [lists, {"key": "x"}]
    assert "experts.0" in set(texts(lists))


CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "head_dim": 2,
    "vocab_size": 16,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "sliding_window_pattern": 2,
    "num_nextn_predict_layers": 1,
    "attention_types": [[["global", "local"], 2]],
    "kv_source_layers": [0, 0, 1, 1],
    "num_kv_shared_layers": 1,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 1e4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "block_types": ["a", "b"],
    "moe_layer_start_index": 0,
    "dtype": "bfloat16",
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3, 4]},
    "quantization_config": {"ignore": ["lm_head"]},
    "text_config": {},
}
WRONG: list[Any] = [
    *(None, True, -1, 0, 3, 10**30, 1.5, float("nan"), "x", "abcd"),
    *([], [None], ["x"], [[1]], [1, 2, 3, 4], [{}] * 4, [[["a"], 10**12]], {}, {"0": 0}, {"factor": []}, nested(40)),
]
SPECS = [
    *(spec(f"model.layers.{i}.self_attn.qkv_proj.weight", 16, 8) for i in range(4)),
    *(spec(f"model.layers.{i}.mlp.gate_up_proj.weight", 12, 8) for i in range(4)),
    *(spec(f"model.layers.{i}.mlp.down_proj.weight", 8, 6) for i in range(4)),
    spec("model.embed_tokens.weight", 16, 8),
    spec("lm_head.weight", 16, 8),
]
NAMED, GROWN = {s.name: s for s in SPECS}, [spec(s.name, 17, 8) for s in SPECS[-2:]]
JOBS: dict[str, Callable[[dict[str, Any], Structure], object]] = {
    "fused": lambda c, s: [fused_parts(tensor, NAMED, s, c) for tensor in SPECS],
    "resized": lambda c, s: resize_config(c, s, {stack.prefix: [0, 1, 1, 3] for stack in s.stacks}),
    "output": lambda c, s: output_config(c, s, {}, GROWN, stored=NAMED, asked=None, untie=True),
    "experts": lambda c, s: (with_experts(c, 4, 2, "r.yml"), router_groups(c, 4), tie_flag(c)),
    "dense": lambda c, s: semantics(c),
}


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True], ids=["top", "text_config"])
def test_a_value_of_any_type_is_read_or_refused(inside: bool) -> None:
    """Every outcome but an error of Python's own is fine: most of these keys are not what this model is about."""
    passed = set()
    for key in CONFIG:
        for value in WRONG[inside :: 2 + inside]:
            config = {**copy.deepcopy(CONFIG), key: value}
            config = {"vocab_size": 16, "text_config": config} if inside else config
            structure = analyse(SPECS, config)
            for name, job in JOBS.items():
                with contextlib.suppress(WeightsmithError):
                    job(config, structure)
                    passed.add(name)
    assert passed == JOBS.keys()


def test_no_home_is_no_crash() -> None:
    assert expand_user("~nobody-of-that-name/models") == Path("~nobody-of-that-name/models")
    assert expand_user("~/models") == Path.home() / "models"


def test_a_number_of_layers_that_no_model_has_is_refused() -> None:
    with pytest.raises(FormatError, match=r"num_hidden_layers of config.json is 1099511627776, not a whole number"):
        semantics({"model_type": "llama", "num_hidden_layers": 1 << 40})
