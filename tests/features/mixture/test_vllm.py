"""What vLLM computes of mixtures, on a processor, beside transformers. See `tests.vllm_help`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.models.formats.readers.test_loaders import logits
from tests.moe_help import DENSE, mixture
from tests.vllm_help import Crash, Floats, Request, error, logprobs, minutes, needs_vllm

TOKENS = np.random.default_rng(0).integers(3, 128, 60)
BOUND = 1e-4
"""Limit for the worst token. Rounding in float32 stays below 1e-5."""

WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""vLLM runs these sizes alone."""

# architecture, dense model, shared expert
SAME = (
    ("mixtral", "llama", False),
    ("mixtral", "phi3", False),
    ("mixtral", "smollm3", False),
    ("qwen3_moe", "qwen3", False),
    ("granitemoe", "granite", False),
    ("granitemoe", "llama", False),
    ("flex_olmo", "olmo2", False),
    ("qwen2_moe", "qwen2", True),
    ("qwen2_moe", "llama", True),
    ("glm4_moe", "llama", True),
    ("glm4_moe", "qwen3", True),
    ("dots1", "qwen3-heads", True),
)
ENDS = (("glm4_moe", "llama", False), ("deepseek_v3", "deepseek_v3", False))
LATENT_HEADS = (("deepseek_v2", "deepseek_v2", True), ("deepseek_v3", "deepseek_v3", True))
CASES = (*SAME, *LATENT_HEADS, *ENDS)

pytestmark = [needs_vllm, minutes]


def dense(root: Path, name: str, seed: int = 0) -> Path:
    """A dense model in float32."""
    out = root / f"{name}-{seed}"
    if not out.exists():
        plain = name.removesuffix("-heads")
        kind, arguments = DENSE[plain]
        heads = {"head_dim": 32} if "head_dim" in arguments else {}
        if plain != name or "kv_lora_rank" in arguments:
            heads = {**heads, "num_key_value_heads": 4}
        latent = LATENT if "kv_lora_rank" in arguments else {}
        ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 512}
        config = getattr(transformers, f"{kind}Config")(**{**arguments, **WIDE, **latent, **heads, **ends})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        for key, parameter in model.named_parameters():
            parameter.data = torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.2) + ("norm" in key)
        model.save_pretrained(out)
    return out


Case = tuple[str, str, bool]
Found = dict[Case, tuple[Path, Floats | Crash]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("mixtures")
    folders = [root / "-".join(map(str, case)) for case in CASES]
    for case, folder in zip(CASES, folders, strict=True):
        # transformers does not divide the weights of DeepSeek-V2's experts by their sum. That of all is 1
        per_token = 4 if case[0] == "deepseek_v2" else 2
        mixture(partial(dense, root), *case, folder, alike=False, per_token=per_token)
    predicted = logprobs([Request(folder, TOKENS) for folder in folders], root / "outputs")
    return {case: both for case, *both in zip(CASES, folders, predicted, strict=True)}  # type: ignore[misc]


@pytest.mark.parametrize("case", SAME, ids=str)
def test_the_same_as_in_transformers(case: Case, outputs: Found) -> None:
    folder, predicted = outputs[case]
    worst = error(predicted, logits(folder, TOKENS)).max()
    print(f"{case}: worst token {worst:.7f}")
    assert worst < BOUND


@pytest.mark.parametrize("case", LATENT_HEADS, ids=str)
def test_latent_attention_is_right_for_the_first_token(case: Case, outputs: Found) -> None:
    """On a processor vLLM rotates queries of latent attention as transformers does not, in dense models too.

    The first token is not rotated.
    """
    folder, predicted = outputs[case]
    token_errors = error(predicted, logits(folder, TOKENS))
    print(f"{case}: first token {token_errors[0]:.7f}, median {np.median(token_errors):.4f}")
    assert token_errors[0] < BOUND
    assert np.median(token_errors) > 0.1


@pytest.mark.parametrize("case", ENDS, ids=str)
def test_no_shared_expert_ends_vllm(case: Case, outputs: Found) -> None:
    """It makes one of no features, which the library for matrices on processors divides by."""
    assert isinstance(outputs[case][1], Crash)
    assert "ended with -8" in str(outputs[case][1])
