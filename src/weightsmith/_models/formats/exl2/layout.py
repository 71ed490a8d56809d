"""EXL2's layout of a linear layer, as ExLlamaV2 0.3.2 reads it, and the models and the config.json that it loads. Pure.

    X.q_weight     I32 [R, N]     codes, packed; R = Σ rows · bits / 32 over the groups
    X.q_scale      I32 [G, N/8]   eight 4-bit scale codes a word
    X.q_scale_max  F16 [G]        the largest scale of each group
    X.q_groups     I16 [2 G]      bits and first row of q_weight, group by group
    X.q_invperm    I32 [K]        the row of codes of each input feature

The matrix is transposed: a row is an input feature (of K), a column an output feature (of N, padded to a multiple of 32). Rows
are sorted by importance and divided into G groups, each with its own number of bits.

Decoding, each line rounded once to float16 (subnormals included):

    m[g]    = q_scale_max[g] / 256
    s[g, c] = (n[g, c] + 1)² · m[g]            n: the 4-bit scale codes
    D[k, c] = (code[k, c] - 2^(bits - 1)) · s[g, c]
    W[c, i] = D[q_invperm[i], c]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import full_attention_every, older_config, window_difference
from weightsmith._models.formats.hessians import PADDED, Group, Groups
from weightsmith._plans.codec import has_type
from weightsmith.abc.stored import Config, Specs

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)

BITS = (2, 3, 4, 5, 6, 8)
"""The widths of a code."""

ROWS = PADDED
"""Groups have a multiple of so many rows, and matrices a multiple of so many columns."""

MAX_ROWS = (1 << 16) - 1
"""The loader narrows q_invperm to 16 bits."""

SCALE_BITS = 4

GROUP_SIZES = (32, 64, 128)
"""Rows of a group that writers choose."""

SUFFIXES = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")


def padded(features: int) -> int:
    """Columns that are stored for so many output features."""
    return -(-features // ROWS) * ROWS


def packed_rows(groups: Sequence[Group]) -> int:
    """Rows of q_weight."""
    return sum(group.rows * group.bits // 32 for group in groups)


def why_illegal(groups: Sequence[Group], in_features: int) -> str:
    """Why the loader would reject or misread a matrix with these groups; "" if it reads it.

    >>> why_illegal([Group(4, 64), Group(5, 64)], 128)
    'group 1 has 5 bits and follows one of 4: kernels read groups from the most bits to the fewest'
    """
    if in_features % ROWS or not 0 < in_features <= MAX_ROWS:
        return f"it has {in_features:,} input features, which must be a multiple of {ROWS} up to {MAX_ROWS:,}"
    before = max(BITS)
    for number, (bits, rows) in enumerate(groups):
        if bits not in BITS:
            return f"group {number} has {bits} bits, which must be one of {', '.join(map(str, BITS))}"
        if bits > before:
            what = f"group {number} has {bits} bits and follows one of {before}"
            return f"{what}: kernels read groups from the most bits to the fewest"
        if rows % ROWS or rows <= 0:
            return f"group {number} has {rows} rows, which must be a multiple of {ROWS}"
        before = bits
    total = sum(group.rows for group in groups)
    return "" if total == in_features else f"its groups have {total:,} rows in total, and it has {in_features:,} input features"


def stored_specs(module: str, groups: Sequence[Group], in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
    """The tensors of a linear layer, in the order of `SUFFIXES`.

    >>> for spec in stored_specs("q_proj", [Group(4, 64)], 64, 96):
    ...     print(spec)
    q_proj.q_weight [8, 96] I32
    q_proj.q_scale [1, 12] I32
    q_proj.q_scale_max [1] F16
    q_proj.q_groups [2] I16
    q_proj.q_invperm [64] I32
    """
    cols = padded(out_features)
    described = (
        ("I32", (packed_rows(groups), cols)),
        ("I32", (len(groups), cols // 8)),
        ("F16", (len(groups),)),
        ("I16", (2 * len(groups),)),
        ("I32", (in_features,)),
    )
    return tuple(
        TensorSpec(f"{module}.{suffix}", DTYPES[dtype], shape)
        for suffix, (dtype, shape) in zip(SUFFIXES, described, strict=True)
    )


# ---- settings


@dataclass(frozen=True, slots=True)
class Params:
    """A setting of one linear layer.

    bits         of each part, from the most to the fewest
    proportions  shares of the input features, in the same order; they add up to 1
    group_sizes  rows of a group of each part
    """

    bits: tuple[int, ...]
    proportions: tuple[float, ...]
    group_sizes: tuple[int, ...]

    def __str__(self) -> str:
        parts = zip(self.bits, self.proportions, self.group_sizes, strict=True)
        return "+".join(f"{b}/g{g}" if p == 1 else f"{b}@{p}/g{g}" for b, p, g in parts)

    def to_json(self) -> dict[str, Any]:
        """As in measurement.json.

        >>> params("5@.1+4@.9/g128").to_json()
        {'group_size': {'5': 128, '4': 128}, 'bits': [5, 4], 'bits_prop': [0.1, 0.9], 'scale_bits': 4}
        """
        sizes = {str(bits): size for bits, size in zip(self.bits, self.group_sizes, strict=True)}
        return {
            "group_size": sizes,
            "bits": list(self.bits),
            "bits_prop": list(self.proportions),
            "scale_bits": SCALE_BITS,
        }


def params_from_json(value: object, where: str) -> Params:
    """A setting of an untrusted measurement.json. Raises FormatError for anything that no writer of EXL2 uses."""

    def refuse(what: str) -> FormatError:
        return FormatError(f"not a setting of EXL2: {what}", where=where)

    if not isinstance(value, Mapping):
        raise refuse(f"it is {show(value)}, not an object")
    bits, shares, sizes = (value.get(key, ()) for key in ("bits", "bits_prop", "group_size"))
    if not has_type(bits, tuple[int, ...]) or not bits or not set(bits) <= set(BITS):
        raise refuse(f"bits are {show(bits)}, not a list of {', '.join(map(str, BITS))}")
    if list(bits) != sorted(set(bits), reverse=True):
        raise refuse(f"bits are {show(bits)}, not from the most to the fewest")
    if not has_type(shares, tuple[float, ...]) or len(shares) != len(bits):
        raise refuse(f"bits_prop is {show(shares)}, not a number for each of bits")
    if any(not 0 < share <= 1 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise refuse(f"bits_prop is {show(shares)}, not shares that add up to 1")
    if not isinstance(sizes, Mapping) or any(sizes.get(str(b)) not in GROUP_SIZES for b in bits):
        raise refuse(f"group_size is {show(sizes)}, not one of {', '.join(map(str, GROUP_SIZES))} for each of bits")
    if value.get("scale_bits", SCALE_BITS) != SCALE_BITS:
        raise refuse(f"scale_bits is {show(value['scale_bits'])}, not {SCALE_BITS}")
    return Params(tuple(bits), tuple(map(float, shares)), tuple(sizes[str(b)] for b in bits))


def params(text: str) -> Params:
    """A setting from its text.

    `6@.05/g32+3@.2/g64+2@.75/g64`: 6 bits for the most important twentieth of the input features, in groups of 32, and so on. A
    group size at the end is that of all parts without their own. Raises ValueError.

    >>> params("8@.05/g32+4@.95/g128")
    Params(bits=(8, 4), proportions=(0.05, 0.95), group_sizes=(32, 128))
    >>> str(params("4/g128"))
    '4/g128'
    """
    parts = [part.partition("/g") for part in text.split("+")]
    shared = parts[-1][2]
    bits, proportions, sizes = [], [], []
    for part, _, size in parts:
        b, _, share = part.partition("@")
        bits.append(int(b))
        proportions.append(float(share or 1))
        sizes.append(int(size or shared))
    return Params(tuple(bits), tuple(proportions), tuple(sizes))


def groups_of(setting: Params, in_features: int) -> Groups:
    """The groups of a matrix: each part's share of the input features, rounded up to whole groups. The last may be smaller.

    >>> groups = groups_of(params("8@.05/g32+4@.1/g128+3@.85/g128"), 4096)
    >>> [sum(group.bits == bits for group in groups) for bits in (8, 4, 3)], groups[-1]
    ([7, 4, 27], Group(bits=3, rows=32))
    """
    groups, remaining = [], in_features
    for bits, share, size in zip(setting.bits, setting.proportions, setting.group_sizes, strict=True):
        count = max(0, math.ceil(min(in_features * share, remaining) / size))
        for _ in range(count):
            groups.append(Group(bits, min(size, remaining)))
            remaining -= groups[-1].rows
    return tuple(groups)


def bits_of(groups: Groups, in_features: int, out_features: int, *, bias: bool = False) -> int:
    """Bits that a matrix takes on disk: codes, scales, groups, permutation.

    >>> bits_of(groups_of(params("4/g128"), 4096), 4096, 4096)
    67765760
    """
    n, count = padded(out_features), len(groups)
    codes = sum(group.rows * group.bits for group in groups) * n
    return codes + count * (16 + 32 + SCALE_BITS * n) + 32 * in_features + (16 * n if bias else 0)


# ---- scales, as codes and as the loader computes them


def pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Eight 4-bit codes a word, the first in the lowest bits: [G, n] → int32 [G, n / 8].

    >>> [hex(word) for word in pack_codes(np.arange(16, dtype=np.uint8)[None] % 8)[0]]
    ['0x76543210', '0x76543210']
    """
    words = codes.reshape(len(codes), -1, 8).astype(np.uint32) << _SHIFTS
    packed: npt.NDArray[np.uint32] = np.bitwise_or.reduce(words, axis=2)
    return packed.view(np.int32)


def unpack_codes(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """The codes: int32 [G, n / 8] → [G, n].

    >>> unpack_codes(pack_codes(np.uint8([[1, 2, 3, 4, 5, 6, 7, 8]]))).tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    return (words.view(np.uint32)[:, :, None] >> _SHIFTS & np.uint32(15)).reshape(len(words), -1)


def scale_values(tops: Halves, codes: npt.NDArray[np.integer]) -> Floats:
    """float32 [len(tops), …]: the scales of 4-bit codes for each largest scale, in the loader's float16 arithmetic."""
    steps = (tops.astype(np.float32) / 256).astype(np.float16).astype(np.float32)
    return (steps[:, None] * (codes.astype(np.float32) + 1) ** 2).astype(np.float16).astype(np.float32)


# ---- Whole models: config.json, written and read, and the architectures that ExLlamaV2 knows. Gemma 3 is the text model of a
# model with images there: it is stored with that one's prefix and config.json.


ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""`architectures` of config.json for which names and layout have been checked."""

VERSION = "0.3.2"
"""The version of ExLlamaV2 whose layout is written."""

GEMMA3, GEMMA3_LOADED = "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
"""ExLlamaV2 knows the text model only as part of the other one, with this prefix."""
GEMMA3_PREFIX = "language_model."

OTHER_FORMATS = "choose another format; weightsmith quantize --list shows all"


ELSEWHERE = "choose a gguf format, or w4a16 or fp8-dynamic, for a program that computes what transformers does"

_LAYER_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with query and key norms, where ExLlamaV2 also subtracts the mean (`headnorm` in its architecture.py)."""


def differences(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Differences between ExLlamaV2 and transformers that affect this model: (what, where, fix).

    config  of the output, with `rope_scaling`

    >>> [where for _, where, _ in differences({"architectures": ["Qwen3ForCausalLM"]})]
    ['architectures in config.json']
    """
    findings = window_difference(config, f"ExLlamaV2 {VERSION}")
    if not set(_LAYER_NORMS).isdisjoint(config.get("architectures") or ()):
        what = f"ExLlamaV2 {VERSION} subtracts the mean in the norms of queries and keys, and transformers does not"
        findings.append((what, "architectures in config.json", ELSEWHERE))
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    scaling = inner.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return findings
    kind, longest = scaling.get("type") or scaling.get("rope_type"), inner.get("max_position_embeddings")
    original = scaling.get("original_max_position_embeddings") or inner.get("original_max_position_embeddings")
    if not isinstance(longest, int) or not isinstance(original, int | float):
        return findings
    place, version = "rope_scaling in config.json", f"ExLlamaV2 {VERSION}"
    if kind == "yarn" and longest <= original:
        what = f"does not scale positions, because max_position_embeddings ({longest:,}) is not above {original:,}"
        findings.append((f"{version} {what}; transformers does", place, ELSEWHERE))
    elif kind == "yarn":
        what = f"computes YaRN for {longest:,} positions (max_position_embeddings), and transformers for {original:,}"
        findings.append((f"{version} {what} (original_max_position_embeddings)", place, ELSEWHERE))
    elif kind in ("longrope", "su") and longest > original:
        what = f"uses LongRoPE's long factors for texts of all lengths, transformers the short ones up to {original:,} tokens"
        findings.append((f"{version} {what}", place, f"load the model with max_seq_len {original:,} for short texts"))
    return findings


def quantization_config(bits: float, head_bits: int, calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of config.json. bits: for each weight; calibration: rows and tokens.

    >>> quantization_config(4.0, 6, {})["quantization_config"]["quant_method"]
    'exl2'
    """
    described = {"quant_method": "exl2", "version": VERSION, "bits": round(bits, 4), "head_bits": head_bits}
    return {"quantization_config": {**described, "calibration": dict(calibration)}}


def loader_config(config: Mapping[str, Any], *, gemma3: bool) -> dict[str, Any]:
    """config.json as ExLlamaV2 reads it: see `older_config`. Gemma 3 is the text model in another one's."""
    older = older_config(config)
    if not gemma3:
        return older
    text = {key: value for key, value in older.items() if key != "architectures"}
    top: dict[str, Any] = {
        key: older[key] for key in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id") if key in older
    }
    named: dict[str, Any] = {
        "architectures": [GEMMA3_LOADED],
        "model_type": "gemma3",
        "sliding_window_pattern": _pattern(config),
    }
    return {**named, **top, "text_config": text}


def _pattern(config: Mapping[str, Any]) -> int:
    """Every which layer has full attention. Raises PlanError if it is not every n-th."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        value = config.get("sliding_window_pattern", 6)
        return value if isinstance(value, int) else 6
    pattern = full_attention_every(kinds)
    if pattern is None:
        full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
        what = f"layers {', '.join(map(str, full))} have full attention, and ExLlamaV2 expects every n-th to have it"
        raise PlanError([Unsupported(what, where="layer_types in config.json", fix=OTHER_FORMATS)])
    return pattern


def text_config(config: Config, specs: Specs) -> dict[str, Any] | None:
    """config.json of the Gemma 3 text model that `loader_config` has renamed; None for other models."""
    text = config.get("text_config")
    if config.get("architectures") != [GEMMA3_LOADED] or "vision_config" in config or not isinstance(text, Mapping):
        return None
    if not all(name.startswith(GEMMA3_PREFIX) for name in specs):
        return None
    return {"architectures": [GEMMA3], **text}
