"""RoPE whose frequencies are scaled: settings of config.json, and what a GGUF file has of them.

A GGUF file has only the quotients of the frequencies for Llama 3's scaling, and the settings for YaRN and linear scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.base.values import Floats, GgufConfig, GgufKeys, GgufValues

QUOTIENTS = "rope_freqs.weight"
"""The tensor of a GGUF file by which frequencies are divided."""
USE_ORIGINAL = "Use the original checkpoint."

_SAME = 1e-6
"""How far a factor may be from 1 and still say nothing: config.json states defaults with few digits."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Meta's models with scaled frequencies have; a GGUF file has only the quotients that follow."""
_HIGH = (4.0, 1.0)
"""Their `high_freq_factor`: of Llama 3, and of Llama 4, between whose two factors there is nothing."""
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"} | {
    "rope.scaling.yarn_attn_factor": "attention_factor"
}
ATTENTION_FACTOR = "rope.scaling.attn_factor"
"""The key by which llama.cpp multiplies what it has for sines and cosines; the factor named after YaRN has no effect."""


def put_scaling(config: GgufConfig, rope: Mapping[str, Any], keys: GgufKeys, theirs: float | None = None) -> None:
    """The keys of linear scaling and YaRN. Raises Unsupported for other types than these and the default.

    theirs  what llama.cpp multiplies sines and cosines by under YaRN, where that is not `yarn_growth` of its factor
    """
    kind = rope["rope_type"]
    if kind not in ("linear", "yarn"):
        config.need("rope_type", kind, "default")
        return
    keys.put("rope.scaling.type", "str", kind)
    keys.f32("rope.scaling.factor", config.number("factor", None, rope))
    if kind == "yarn":
        context = config.count("max_position_embeddings")
        keys.u32("rope.scaling.original_context_length", config.count("original_max_position_embeddings", context, rope))
        for name, setting in _YARN.items():
            if rope.get(setting) is not None:
                keys.f32(name, config.number(setting, None, rope))
        quotient = np.float32(yarn_factor(config, rope) / (theirs or yarn_growth(config.number("factor", None, rope))))
        if abs(quotient - 1) > _SAME:
            keys.values.pop("rope.scaling.yarn_attn_factor", None)  # older versions of llama.cpp would multiply by both
            keys.f32(ATTENTION_FACTOR, float(quotient))


def yarn_growth(factor: float, share: float = 1.0) -> float:
    """By what YaRN multiplies sines and cosines: 1 + 0.1 share ln(factor), but 1 up to a factor of 1 (Peng et al. 2023).

    >>> round(yarn_growth(8.0), 4)
    1.2079
    """
    return 1.0 if factor <= 1 else 1 + 0.1 * share * math.log(factor)


def yarn_factor(config: GgufConfig, rope: Mapping[str, Any]) -> float:
    """By what transformers multiplies sines and cosines under YaRN: as stated, or from `mscale` and `mscale_all_dim`."""
    factor = config.number("factor", None, rope)
    if rope.get("attention_factor") is not None:
        return config.number("attention_factor", None, rope)
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # one of them alone has no effect
        shares = (config.number(name, None, rope) for name in ("mscale", "mscale_all_dim"))
        above, below = (yarn_growth(factor, share) for share in shares)
        return above / below
    return yarn_growth(factor)


def stated_factor(quotient: float, theirs: float) -> float:
    """The number with the fewest digits that gives this float32 when it is divided by what llama.cpp multiplies by."""
    product = quotient * theirs
    rounded = (float(f"{product:.{digits}g}") for digits in range(1, 17))
    return next((number for number in rounded if np.float32(number / theirs) == np.float32(quotient)), product)


def put_quotients(config: GgufConfig, rope: Mapping[str, Any], head_dim: int, keys: GgufKeys) -> None:
    """The tensor of Llama 3's scaling."""
    context = config.get("max_position_embeddings")  # which transformers takes for the original one
    defaults = {**dict.fromkeys(_LLAMA3), "original_max_position_embeddings": context, "factor": None}
    scaling = {name: config.number(name, default, rope) for name, default in defaults.items()}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if low > high:
        what = f"low_freq_factor {low:g} is above high_freq_factor {high:g}"
        raise FormatError(what, where="config.json", fix="repair it")
    keys.tensors[QUOTIENTS] = llama3_quotients(head_dim, config.number("rope_theta", within=rope), scaling)


def take_scaling(values: GgufValues, config: Mapping[str, Any], factors: Mapping[str, Floats]) -> dict[str, Any]:
    """`rope_scaling` of config.json; {} if there is none. factors: tensors of the file by which frequencies are divided."""
    if QUOTIENTS in factors:
        return _take_quotients(config, factors[QUOTIENTS], values.where)
    kind = values.get("rope.scaling.type")
    kind = kind if isinstance(kind, str) else ""
    if not kind:  # as older files have it
        kind = "linear" if "rope.scaling.factor" in values or "rope.scale_linear" in values else "none"
    if kind == "linear":
        older = values.float32("rope.scale_linear") if "rope.scale_linear" in values else None
        return {"rope_type": "linear", "factor": values.float32("rope.scaling.factor", older)}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": values.float32("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
        scaling |= {setting: values.float32(name) for name, setting in _YARN.items() if name in values}
        if ATTENTION_FACTOR in values:
            scaling["attention_factor"] = stated_factor(values.number(ATTENTION_FACTOR), yarn_growth(scaling["factor"]))
        return scaling
    if kind == "none":
        return {}
    raise Unsupported(f"RoPE scaling of the type {show(kind)}", where=values.where, fix=USE_ORIGINAL)


def share_turned(turned: int, width: int) -> float:
    """`partial_rotary_factor` of heads of this width, of which RoPE turns so many numbers.

    >>> int(share_turned(15, 22) * 22), int(15 / 22 * 22)
    (15, 14)
    """
    share = turned / width
    return share if int(share * width) == turned else math.nextafter(share, 1)


def state_by_kind(config: dict[str, Any], local_base: float) -> None:
    """Move the settings of RoPE in config.json to `rope_parameters`, of layers that attend to everything and those that slide.

    local_base  of layers that slide, whose frequencies are not scaled
    """
    full = {"rope_type": "default", "rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling", {})}
    local = {"rope_type": "default", "rope_theta": local_base}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _take_quotients(config: Mapping[str, Any], quotients: Floats, where: str) -> dict[str, Any]:
    """The settings of Llama 3's scaling, from the quotients that follow from them."""
    head_dim = config["head_dim"]
    if not quotients.size or quotients.size != head_dim // 2 or not np.isfinite(quotients).all():
        what = f"{QUOTIENTS} has {quotients.size:,} numbers, or one that is not finite, for heads of {head_dim:,}"
        raise FormatError(what, where=where, fix=DAMAGED)
    scaling = {"rope_type": "llama3", "factor": float(str(quotients.max())), **_LLAMA3}
    for high in _HIGH:
        scaling["high_freq_factor"] = high
        if np.allclose(llama3_quotients(head_dim, config["rope_theta"], scaling), quotients, rtol=1e-5):
            return scaling
    what = f"RoPE frequencies that are not scaled as Llama 3's ({QUOTIENTS})"
    raise Unsupported(what, where=where, fix=USE_ORIGINAL)


def llama3_quotients(width: int, theta: float, scaling: Mapping[str, Any]) -> Floats:
    """By what Llama 3's scaling divides each frequency of a head: float32 [width / 2].

    High frequencies stay, low ones are divided by `factor`, and those between are interpolated (Meta's `apply_scaling`).
    """
    factor, low, high = float(scaling["factor"]), float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    lengths = 2 * math.pi * theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = (context / lengths - low) / ((high - low) or 1.0)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(lengths < context / high, 1.0, np.where(lengths > context / low, factor, between)).astype(np.float32)
