"""Models of several architectures, as they are and quantised, run by vLLM on a processor. See `tests.vllm_help`.

Its log probabilities are those of transformers, in float32, with the weights that weightsmith reads. Where activations are
quantised too, those of transformers are quantised as the format says. What is left is the rounding of the arithmetic. It
decides which way a number near the middle of two codes is rounded, which every later token sees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch

import weightsmith
from tests.models.formats.readers.test_loaders import TEXT, TOKENIZER, V_PROJ, double, logits, make, swap
from tests.vllm_help import Crash, Floats, Request, error, logprobs, minutes, needs_vllm

TOKENS = np.array(TOKENIZER.encode(TEXT).ids[:200])
BOUNDS = {"float32": 1e-4, "float16": 0.005}
"""Limits for the error of a `typical` token."""

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


pytestmark = [pytest.mark.reader, needs_vllm, minutes]


class Case(NamedTuple):
    """A model in a format; "" is as it was made."""

    model: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.format or 'plain'}"

    @property
    def dtype(self) -> str:
        """Kernels for 4 bits have none for float32."""
        return "float16" if self.format in FOUR_BITS else "float32"


ACTIVATIONS = ("int8", "fp8-dynamic")
FOUR_BITS = ("w4a16", "gptq-4bit", "awq-4bit")
CASES = (
    *(Case(model, "") for model in (*DENSE, "mixtral", "qwen3-moe")),
    *(Case(model, format_) for model in DENSE for format_ in ACTIVATIONS),
    # vLLM runs no Gemma in float16, and bfloat16 would hide a wrong number
    *(Case(model, format_) for model in DENSE if not model.startswith("gemma") for format_ in FOUR_BITS),
)


def stored(folder: Path, case: Case) -> tuple[Path, Path]:
    """The model in its format, and with the weights that weightsmith reads."""
    source = make(folder / "made", case.model)
    if not case.format:
        return source, source
    weightsmith.quantize(source, folder / "quantised", case.format, progress=False)
    weightsmith.dequantize(folder / "quantised", folder / "plain", out_dtype="float32", progress=False)
    return folder / "quantised", folder / "plain"


def typical(errors: np.ndarray, case: Case) -> float:
    """The error of the median token; where activations are quantised, that of the best twentieth."""
    return float(np.quantile(errors, 0.05 if case.format in ACTIVATIONS else 0.5))


def quantise_activations(format_: str) -> Callable[[Any], None]:
    """Quantises what enters the linear layers, each token with a scale of its own."""
    import torch

    def rounded(x: Any) -> Any:
        largest = x.abs().amax(-1, keepdim=True)
        if format_ == "int8":
            scale = largest / 127
            return (x / scale).round() * scale
        scale = largest / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def change(model: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]))

    return change


def expected(plain: Path, format_: str) -> np.ndarray:
    """What transformers computes in float32."""
    return logits(plain, TOKENS, change=quantise_activations(format_) if format_ in ACTIVATIONS else None)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Floats | Crash, np.ndarray]]:
    """Of each case what vLLM computes, and what transformers does."""
    root = tmp_path_factory.mktemp("vllm")
    folders = {case: stored(root / case.name, case) for case in CASES}
    predicted = logprobs([Request(folders[case][0], TOKENS, case.dtype) for case in CASES], root / "outputs")
    return {
        case: (prediction, expected(folders[case][1], case.format)) for case, prediction in zip(CASES, predicted, strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_computes_what_transformers_does(case: Case, outputs: dict[Case, tuple[Floats | Crash, np.ndarray]]) -> None:
    token_errors = error(*outputs[case])
    print(
        f"{case.name} {case.dtype}: error {typical(token_errors, case):.7f}, of the median token {np.median(token_errors):.7f}"
    )
    assert typical(token_errors, case) <= BOUNDS[case.dtype]


@pytest.mark.parametrize(
    ("format_", "part", "damage"),
    [("int8", "weight_scale", double), ("fp8-dynamic", "weight_scale", double), ("w4a16", "weight_scale", swap)],
)
def test_one_wrong_number_exceeds_the_bound(
    format_: str, part: str, damage: Callable[[np.ndarray], None], tmp_path: Path
) -> None:
    """One scale of an output, or two of them exchanged, in one of fourteen matrices."""
    case = Case("llama", format_)
    out, plain = stored(tmp_path, case)
    file = out / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    scales = tensors[f"{V_PROJ}.{part}"].float()
    damage(scales.numpy())
    tensors[f"{V_PROJ}.{part}"] = scales.bfloat16()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    [predicted] = logprobs([Request(out, TOKENS, case.dtype)], tmp_path / "outputs")
    typical_error = typical(error(predicted, expected(plain, format_)), case)
    print(f"{format_} {part}: error {typical_error:.4f}")
    assert typical_error > BOUNDS[case.dtype]
