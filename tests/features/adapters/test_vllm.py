"""Adapters for vLLM, loaded by vLLM on a processor. See `tests.vllm_help`.

With the adapter, the base computes what transformers does with the fine-tune.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import weightsmith
from tests.models.formats.readers.test_loaders import TEXT, TOKENIZER, logits, make
from tests.vllm_help import Request, error, logprobs, needs_vllm

TOKENS = np.array(TOKENIZER.encode(TEXT).ids[:200])
NAMES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
"""vLLM has no kernels for factors of experts on a processor."""
BOUND = 1e-3
RANK = 8


def fine_tuned(base: Path, out: Path) -> Path:
    """Deltas of rank 4 on all linear layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if re.search("embed|lm_head|norm", name) or tensor.ndim < 2:
                continue
            n, k = tensor.shape
            b, a = (torch.randn(*shape, generator=random) for shape in ((n, 4), (4, k)))
            tensor += 0.1 * k**-0.5 * (b @ a)
    model.save_pretrained(out)
    return out


@needs_vllm
@pytest.mark.parametrize("name", NAMES)
def test_the_base_with_the_adapter_is_the_fine_tune(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    weightsmith.merge(
        {"merge_method": "passthrough", "models": [{"model": str(make(tmp_path / "made", name))}], "dtype": "float32"},
        base,
        progress=False,
    )
    fine = fine_tuned(base, tmp_path / "fine")
    extraction = weightsmith.extract_lora(
        fine, base, tmp_path / "adapter", max_rank=RANK, energy=0.999999, out_dtype="float32", layout="vllm", progress=False
    )
    requests = [Request(base, TOKENS), Request(base, TOKENS, adapter=Path(str(extraction.out)), rank=RANK)]
    without, adapted = logprobs(requests, tmp_path / "outputs")
    expected = logits(fine, TOKENS)
    medians = [float(np.median(error(predicted, expected))) for predicted in (without, adapted)]
    print(f"{name}: error {medians[1]:.6f}, without the adapter {medians[0]:.4f}")
    assert medians[1] < BOUND < medians[0] / 10
