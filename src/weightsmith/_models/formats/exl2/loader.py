"""Whole models as ExLlamaV2 loads them: config.json, written and read, and the architectures that it knows.

Gemma 3 is the text model of a model with images, for ExLlamaV2: it is stored with that one's prefix and config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._models.formats.reader_configs import full_attention_every, older_config, window_difference
from weightsmith.abc.stored import Config, Specs

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
    """config.json as ExLlamaV2 reads it: see `older_config`, and for Gemma 3 the beginning of this file."""
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
