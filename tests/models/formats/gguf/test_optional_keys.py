"""Keys that llama.cpp's converter leaves out, and settings that it takes from elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.architectures.cohere import Cohere
from weightsmith._models.formats.gguf.architectures.deepseek import DeepseekV2
from weightsmith._models.formats.gguf.architectures.dots1 import Dots1
from weightsmith._models.formats.gguf.architectures.ernie import ErnieMoe
from weightsmith._models.formats.gguf.architectures.gemma import Gemma4
from weightsmith._models.formats.gguf.architectures.glm import Glm4Moe
from weightsmith._models.formats.gguf.architectures.lfm2 import Lfm2Moe
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture
from weightsmith._models.formats.gguf.base.values import GgufKeys
from weightsmith._models.structure.configs import with_defaults

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 262}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
EXPERTS |= {"topk_method": "greedy"}
DENSE = {**EXPERTS, "q_lora_rank": 32, "first_k_dense_replace": 3}


@pytest.mark.parametrize(
    ("architecture", "settings", "key", "setting", "expected"),
    [
        (DeepseekV2(), {**EXPERTS, "q_lora_rank": 32}, "expert_weights_norm", "norm_topk_prob", False),
        (Dots1(), {**EXPERTS, "num_key_value_heads": 4}, "expert_weights_norm", "norm_topk_prob", False),
        (Dots1(), {**EXPERTS, "num_key_value_heads": 4}, "attention.head_count_kv", "num_key_value_heads", 4),
        (DeepseekV2(), DENSE, "leading_dense_block_count", "first_k_dense_replace", 0),
        (Dots1(), {**EXPERTS, "num_key_value_heads": 4}, "leading_dense_block_count", "first_k_dense_replace", 0),
        (Glm4Moe(), {**EXPERTS, "head_dim": 16}, "leading_dense_block_count", "first_k_dense_replace", 0),
        (ErnieMoe(), {"moe_num_shared_experts": 0}, "leading_dense_block_count", "moe_layer_start_index", 0),
        (Lfm2Moe(), {"layer_types": ["conv"] * 3 + ["full_attention"]}, "leading_dense_block_count", "num_dense_layers", 0),
        (ErnieMoe(), {"moe_num_shared_experts": 0}, "expert_shared_count", "moe_num_shared_experts", 0),
        (ErnieMoe(), {"moe_num_shared_experts": 2}, "expert_shared_count", "moe_num_shared_experts", 2),
    ],
)
def test_a_key_that_is_left_out_has_llama_cpps_default(
    architecture: GgufArchitecture, settings: dict[str, Any], key: str, setting: str, expected: object
) -> None:
    whole = with_defaults({"model_type": architecture.model_types[0], **SIZES, **settings})
    keys, _ = architecture.keys(whole, 0)
    others = {name: value.value for name, value in keys.items() if name != f"{architecture.name}.{key}"}
    stated = {name: np.array(value) if isinstance(value, list) else value for name, value in others.items()}
    assert len(stated) == len(keys) - 1
    contents = Contents({"token_embd.weight": (262, 64), "output.weight": (262, 64)})
    assert architecture.config(stated, contents, "float32", "model.gguf")[setting] == expected


def test_the_context_of_command_r_is_that_of_its_tokenizer() -> None:
    settings = with_defaults({"model_type": "cohere", **SIZES, "max_position_embeddings": 8192})
    assert Cohere().keys(settings, 0)[0]["command-r.context_length"].value == 8192
    assert Cohere().keys({**settings, "model_max_length": 131_072}, 0)[0]["command-r.context_length"].value == 131_072


def test_a_number_that_the_file_cannot_hold_is_named() -> None:
    keys = GgufKeys()
    keys.u32("block_count", (1 << 32) - 1)
    with pytest.raises(FormatError, match="expert_shared_feed_forward_length would be 4,294,967,296 in the GGUF file"):
        keys.u32("expert_shared_feed_forward_length", 1 << 32)


@pytest.mark.parametrize("stated", [{}, {"layer_types": ["sliding_attention"] * 8}])
def test_the_last_layer_of_gemma_4_attends_to_everything(stated: dict[str, Any]) -> None:
    types = Gemma4().complete({"num_hidden_layers": 8, **stated})["layer_types"]
    expected = ["sliding_attention"] * 8
    for i in (7,) if stated else (5, 7):
        expected[i] = "full_attention"
    assert types == expected
