"""What vLLM computes. Run by the Python that has vLLM, with the requests of `vllm_help` on standard input."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
"""Set before vllm is imported, and in this program alone: pytest imports this file too."""


def logprobs(request: dict[str, Any]) -> Any:
    """Log probabilities of all tokens after each token but the last: [tokens - 1, vocabulary]."""
    import torch
    import vllm
    from vllm.lora.request import LoRARequest

    adapter = request.get("adapter")
    options = {"enable_lora": True, "max_lora_rank": request["rank"]} if adapter else {}
    model = vllm.LLM(
        request["model"],
        dtype=request["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=1,
        **options,
    )
    try:
        sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
        asked = {"prompt_token_ids": request["tokens"]}
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        [output] = model.generate([asked], sampling, use_tqdm=False, lora_request=lora)
        rows = output.prompt_logprobs[1:]
        return np.array([[row[token].logprob for token in range(len(row))] for row in rows])
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Answer each request with a file: an array, or what went wrong."""
    os.environ.update(SETTINGS)
    for request in json.load(sys.stdin):
        out = Path(request["out"])
        try:
            np.save(out.with_suffix(".npy"), logprobs(request))
        except Exception:
            out.with_suffix(".txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
