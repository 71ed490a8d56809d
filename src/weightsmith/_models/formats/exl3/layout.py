"""EXL3's layout of a linear layer, as exllamav3 1.6.5 reads it, and the models and the config.json that it loads. Pure.

    X.trellis    I16 [K / 16, N / 16, 16 · bits]   a stream of 256 · bits bits for each tile of 16 x 16 weights
    X.suh        F16 [K]                           scale of each input; older: X.su I16 [K / 16], a sign for each
    X.svh        F16 [N]                           scale of each output; older: X.sv
    X.mcg, X.mul1  I32                             which codebook: its multiplier; neither: the first one, 3inst

K inputs and N outputs are padded to multiples of 128. With R the values of the codes, [K, N], and H the Hadamard matrix over
√128 in each block of 128:

    W[o, i] = suh[i] · (H R H)[i, o] · svh[o]

`_kernels/trellis.py` has the decoding. Half a bit (2.5) means that odd weights of a stream add one more than even ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import window_difference

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

BLOCK = 128
"""Inputs and outputs that are rotated together."""

CODEBOOKS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""The multipliers of the codebooks that a tensor names."""

MUL1 = "mul1"
"""The codebook that exllamav3 writes, and the only one for half a bit."""

VERSION = "1.6.5"
"""The version of exllamav3 whose layout is written."""


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Bits of a weight. halves: twice as many.

    >>> Rate(5).bits, Rate(5).words, str(Rate(5)), Rate(8).bits, str(Rate(8))
    (2.5, 40, '2.5', 4, '4')
    """

    halves: int

    @property
    def bits(self) -> float:
        """As users write them: an int if they are whole."""
        return self.halves / 2 if self.halves % 2 else self.halves // 2

    @property
    def words(self) -> int:
        """16-bit words of a tile."""
        return 8 * self.halves

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """int64 [2]: bits that even and odd weights of a stream add."""
        return np.array([self.halves // 2, (self.halves + 1) // 2])

    def __str__(self) -> str:
        return f"{self.bits:g}"


RATES = tuple(Rate(halves) for halves in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Those that exllamav3 has kernels for."""


def padded_size(n: int) -> int:
    """The next multiple of 128."""
    return -(-n // BLOCK) * BLOCK


def stored_specs(name: str, rate: Rate, inputs: int, outputs: int) -> tuple[TensorSpec, ...]:
    """The tensors of a layer. name: without `.weight`; sizes without padding."""
    k, n = padded_size(inputs), padded_size(outputs)
    return (
        TensorSpec(f"{name}.trellis", DTYPES["I16"], (k // 16, n // 16, rate.words)),
        TensorSpec(f"{name}.suh", DTYPES["F16"], (k,)),
        TensorSpec(f"{name}.svh", DTYPES["F16"], (n,)),
        TensorSpec(f"{name}.{MUL1}", DTYPES["I32"], ()),
    )


@cache
def values_of(codebook: str) -> Floats:
    """float32 [65536]: the value of each state, a float16."""
    states = np.arange(1 << 16, dtype=np.uint32)
    if codebook == MUL1:
        x = states * np.uint32(CODEBOOKS[codebook])
        total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
        half = (total + 0x6400).astype(np.uint16).view(np.float16).astype(np.float64)
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        table: Floats = (half * factor + offset).astype(np.float16).astype(np.float32)
        return table
    x = states * np.uint32(CODEBOOKS[codebook]) if codebook in CODEBOOKS else states * np.uint32(89226354) + np.uint32(64248484)
    x = x & np.uint32(0x8FFF8FFF) ^ np.uint32(0x3B603B60)
    low, high = ((x >> shift & 0xFFFF).astype(np.uint16).view(np.float16) for shift in (0, 16))
    return (low + high).astype(np.float32)


def config_entry(bits: float, head_bits: float, calibration: dict[str, int]) -> dict[str, Any]:
    """`quantization_config` of config.json. calibration: rows and cols; {}: none."""
    described = {"quant_method": "exl3", "version": VERSION, "bits": round(bits, 4), "head_bits": head_bits}
    calibrated = {"calibration": calibration} if calibration else {}
    return {**described, **calibrated, "out_scales": "always", "codebook": MUL1}


# ---- whole models as exllamav3 loads them


_SILU, _TANH = {"hidden_act": "silu"}, {"hidden_act": "gelu_pytorch_tanh"}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": _SILU,
    "MistralForCausalLM": _SILU,
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": _SILU,
    "Gemma2ForCausalLM": _TANH,
    "Phi3ForCausalLM": _SILU,
    "MixtralForCausalLM": _SILU,
    "Qwen3MoeForCausalLM": {**_SILU, "norm_topk_prob": True},
}
"""`architectures` of config.json for which names and layout have been checked, and what config.json must say where it says it.

Of Gemma3ForCausalLM, exllamav3 1.6.5 looks for tensors with names that begin with a dot.
"""

_OTHER_NAMES = (
    ("Gemma2ForCausalLM", "sliding_window_size", "sliding_window"),
    ("Qwen3MoeForCausalLM", "num_experts", "num_local_experts"),
)
"""Architecture, the key that exllamav3 reads, and the key of transformers 5 with the same value."""


def contradiction(config: Mapping[str, Any]) -> str:
    """A key of config.json with a value that exllamav3 does not load, or "". The architecture is one of `ARCHITECTURES`.

    >>> contradiction({"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"})
    'hidden_act'
    """
    expected = ARCHITECTURES[config["architectures"][0]]
    return next((key for key, value in expected.items() if config.get(key, value) != value), "")


def differences(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Differences between exllamav3 and transformers that affect this model: (what, where, fix).

    >>> differences({"architectures": ["LlamaForCausalLM"]})
    []
    """
    return window_difference(config, f"exllamav3 {VERSION}")


def loader_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that exllamav3 1.6.5 reads beside those of transformers 5.

    Gemma 2 gets `sliding_window_size`, without which all layers would have full attention. Qwen3-MoE gets `num_experts`.

    >>> loader_config({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096})["sliding_window_size"]
    4096
    >>> loader_config({"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 8})["num_experts"]
    8
    """
    loaded = dict(config)
    architecture = config.get("architectures")
    for expected, key, other in _OTHER_NAMES:
        if architecture == [expected] and config.get(other) is not None:
            loaded.setdefault(key, config[other])
    return loaded
