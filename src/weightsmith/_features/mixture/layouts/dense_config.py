"""Expands a dense model's config.json to every key that affects what it computes.

A missing key has its class's default, and the mixture's class may have another: `rope_theta` is 10,000 for Mistral and
1,000,000 for Mixtral. Conversely, the mixture's class may read a key that the dense class ignores, such as a Llama's
`sliding_window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.structure.configs import MAX_COUNT, MAX_LAYERS, count_of, number_of, wrong_value
from weightsmith.abc.layout import ExpertLayout, Facts

ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"})
"""Keys of rotary embeddings: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""

_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings
    attention_dropout rope_theta
""".split()
"""Keys that all of these classes read, in the order of config.json."""

_COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0}
_TAKEN = ROPE | frozenset(_KEYS) - {"head_dim", "intermediate_size"}
_COLUMNS = [key for key in _KEYS if key not in _COMMON]
_ROWS: Mapping[str, tuple[Any, ...]] = {
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-6, None, 1, 2, False, 1e4),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, None, 1, 2, False, 1e4),
    "ministral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, None, 1, 2, False, 1e4),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, 1e-6, None, None, None, False, 1e4),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-6, None, None, None, False, 1e4),
    "phi3": (32064, 3072, 8192, 32, 32, None, None, 4096, 1e-5, 32000, 1, 32000, False, 1e4),
    "granite": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-6, None, 1, 2, False, 1e4),
    "olmo2": (50304, 4096, 11008, 32, 32, None, None, 2048, 1e-5, 1, None, 50279, False, 1e4),
    "seed_oss": (155136, 4096, 27648, 64, 80, 8, 128, 524288, 1e-6, 1, 0, 2, False, 1e4),
    "smollm3": (128256, 2048, 11008, 36, 16, 4, None, 32768, 1e-6, 128004, 128000, 128001, True, 2e6),
    "deepseek_v2": (102400, 4096, 11008, 32, 32, None, None, 2048, 1e-6, None, 1, 2, False, 1e4),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, None, 4096, 1e-6, None, 0, 1, False, 1e4),
    "youtu": (128256, 2048, 6144, 32, 16, 16, None, 131072, 1e-6, None, 128000, 128001, True, 1e4),
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_ROPELESS = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_INTERLEAVED = {**_MLA, "attention_bias": False, "rope_interleave": True}
_FACTORS = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
_DEFAULTS_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": _BIASES,
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096, "layer_types": None},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "attention_bias": False},
    "phi3": {"original_max_position_embeddings": 4096, "sliding_window": None},
    "granite": {**_BIASES, **_FACTORS, "attention_multiplier": 1.0},
    "olmo2": {"attention_bias": False},
    "seed_oss": {"attention_dropout": 0.1, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "layer_types": None, **_ROPELESS, **_BIASES},
    "deepseek_v2": {**_MLA, **_BIASES},
    "deepseek_v3": _INTERLEAVED,
    "youtu": {**_INTERLEAVED, "initializer_range": None},
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    name: {**dict.fromkeys(_KEYS), **_COMMON, **dict(zip(_COLUMNS, row, strict=True)), **_DEFAULTS_OF_TYPE[name]}
    for name, row in _ROWS.items()
}
"""Model type → every key that its transformers class reads to compute, with its default."""

KNOWN: frozenset[str] = frozenset().union(*DEFAULTS.values())
"""Every key that any of these classes reads."""


_COUNTS = frozenset(
    """
    num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size intermediate_size vocab_size sliding_window
    max_window_layers no_rope_layer_interval q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    """.split()
)
_NUMBERS = frozenset(_FACTORS) | {"attention_multiplier", "rope_theta", "partial_rotary_factor"}
_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list, "a list")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object")),
    **dict.fromkeys(("hidden_act", "model_type"), (str, "a string")),
}


def neutral_factors(config: Mapping[str, Any]) -> dict[str, float]:
    """The values of Granite's factors that have no effect."""
    size = config.get("head_dim")
    return _FACTORS | ({"attention_multiplier": size**-0.5} if size else {})


def semantics(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """A dense config with every key that affects what the model computes.

    where  the model, for messages

    Always includes heads, their size, the window of each layer (`sliding_window`, `layer_types`) and the RoPE base. Drops
    keys that only other model types read. For a model type that is not in `DEFAULTS`, keeps config.json's values.

    Raises FormatError for values of a wrong type or an absurd size.

    >>> semantics({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 8})["head_dim"]
    16
    >>> semantics({"model_type": "mistral", "num_hidden_layers": 2, "rope_theta": 5e5})["layer_types"]
    ['sliding_attention', 'sliding_attention']
    """
    _check_values(config, where)
    model_type = str(config.get("model_type"))
    defaults = DEFAULTS.get(model_type)
    if defaults is None:
        full = {"tie_word_embeddings": False, "hidden_act": "silu", **config}
    else:
        foreign = KNOWN - defaults.keys() - ROPE
        full = {**defaults, **{key: value for key, value in config.items() if key not in foreign}}
        _write_rope(full, config, model_type)
    heads = full.get("num_attention_heads") or 0
    stated = full.get("num_key_value_heads")
    full["num_key_value_heads"] = heads if stated is None else stated
    if full.get("head_dim") is None and heads and (hidden := full.get("hidden_size")):
        full["head_dim"] = hidden // heads
    full["layer_types"] = _windows(full, model_type)
    if "sliding_attention" not in full["layer_types"]:
        full["sliding_window"] = None
    return full


def config_of(layout: ExpertLayout, facts: Facts) -> dict[str, Any]:
    """config.json of the output: the base's, converted. Keys that only the dense class reads go, those of no class stay."""
    foreign = facts.config.keys() & KNOWN - _TAKEN - set(layout.take)
    left_out = foreign | {"auto_map", "quantization_config", "_name_or_path", *layout.drop}
    kept = {key: value for key, value in facts.config.items() if key not in left_out}
    return {**kept, "architectures": [layout.architecture], "model_type": layout.name, **layout.keys(facts)}


def _check_values(config: Mapping[str, Any], where: str) -> None:
    for key in config.keys() & _COUNTS:
        count_of(config, key, where=where, most=MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT)
    for key in config.keys() & _NUMBERS:
        number_of(config, key, 1.0, where=where)
    for key, (kind, words) in _TYPES.items():
        if not isinstance(value := config.get(key), kind | None):
            raise wrong_value(key, value, words, where)
    number_of(rope_scaling(config), "partial_rotary_factor", 1.0, where=where)
    number_of(rope_scaling(config), "factor", 1.0, where=where)


def rope_type(config: Mapping[str, Any]) -> str:
    """The RoPE scaling type: `default`, `linear`, `yarn`, `longrope` ..."""
    rope = rope_scaling(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rotary_share(config: Mapping[str, Any]) -> float:
    """The share of each head that is rotated."""
    return float(rope_scaling(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The RoPE scaling. If both keys exist, the old one takes precedence, as in transformers."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _write_rope(full: dict[str, Any], config: Mapping[str, Any], model_type: str) -> None:
    """Write the RoPE keys in the form config.json has, old or new, with the base and the rotated share."""
    rope = dict(rope_scaling(config))
    theta = rope.get("rope_theta", full["rope_theta"])
    # Of these model types, only Phi-3 reads the share; the others always rotate the whole head.
    share = rotary_share(config) if model_type == "phi3" else 1.0
    if model_type == "phi3" and rope_type(config) != "default":
        rope["rope_type"] = "longrope"  # Phi-3 once called it su or yarn
        rope["original_max_position_embeddings"] = full["original_max_position_embeddings"]
        rope.pop("type", None)
    for key in ROPE - {"original_max_position_embeddings"}:
        full.pop(key, None)
    if "rope_parameters" in config and not config.get("rope_scaling"):
        rope = {"rope_type": rope_type(config), **rope, "rope_theta": theta}
        rope.pop("partial_rotary_factor", None)
        full["rope_parameters"] = rope | ({"partial_rotary_factor": share} if share != 1 else {})
    else:
        full |= {"rope_theta": theta, "rope_scaling": rope or None}
        if share != 1:
            full["partial_rotary_factor"] = share


def _windows(full: Mapping[str, Any], model_type: str) -> list[str]:
    """For each layer, `full_attention` or `sliding_attention`."""
    layers, window = full.get("num_hidden_layers") or 0, full.get("sliding_window")
    stated = full.get("layer_types")
    if not window or full.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    if stated:
        return list(map(str, stated))
    first = layers if model_type == "smollm3" else 0
    if model_type in ("qwen2", "qwen3"):
        first = full.get("max_window_layers") or 0
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
