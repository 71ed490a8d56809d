"""config.json from the keys of a GGUF file, and the keys from config.json.

The keys say less than config.json: llama.cpp knows the rest from the family, as transformers' classes do by default. What a
model has otherwise is rejected when a GGUF file of it is planned, because llama.cpp would compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.families import ARCHITECTURES, FAMILIES, MODEL_TYPES, Family, Key
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.values import Config, Floats, Values

_MOST_LAYERS = 100_000

_COUNTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_ALIASES = {"intermediate_size": "block_ff_dim"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all of Meta's models with scaled frequencies have; a GGUF file has only the quotients that follow."""
_LOCAL_BASE = 10_000.0
_BIG = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the 27B models, whose attention is scaled by the mean width of a head."""
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"} | {
    "rope.scaling.yarn_attn_factor": "attention_factor"
}
_MINISTRAL = {"rope.scaling.yarn_log_multiplier": "mscale_all_dim", "attention.temperature_scale": "llama_4_scaling_beta"}
"""Numbers of Ministral's YaRN, and how its queries grow with the position."""


# ---- reading


def family_of_keys(keys: Mapping[str, Any], where: str) -> Family:
    """The family of a GGUF file. Raises Unsupported for one that is not read, FormatError if it is not stated."""
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str):
        raise FormatError(f"general.architecture is {show(architecture)}, and not a name", where=where, fix=DAMAGED)
    experts = keys.get(f"{architecture}.expert_count")
    with_experts = isinstance(experts, np.ndarray) or bool(experts)
    readable = [each for each in FAMILIES if each.is_read]
    alike = [
        each for each in readable if each.architecture == architecture and (each.either or bool(each.count) == with_experts)
    ]
    found = Values(keys, where, DAMAGED, f"{architecture}.")
    for family in sorted(alike, key=lambda each: not each.told_by):
        constant = family.constants.get(family.told_by)
        if not family.told_by or (family.told_by in found and (constant is None or found.equals(family.told_by, constant))):
            return family
    what = f"a GGUF file of the architecture {show(architecture)}{' with experts' if with_experts else ''}"
    fix = f"Use the model's original checkpoint. GGUF files of these are read: {', '.join(ARCHITECTURES)}."
    raise Unsupported(what, where=where, fix=fix)


def token_id(keys: Mapping[str, Any], name: str, tokens: int, where: str) -> int | None:
    """The number of a token of special meaning, one of `tokens`; None if there is none. Raises FormatError."""
    value = keys.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < tokens:
        what = f"tokenizer.ggml.{name}_token_id is {show(value)}, and there are {tokens:,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    return value


def predicting_layers(keys: Mapping[str, Any], family: Family, where: str) -> int:
    """The number of layers at the end of a GGUF file that predict several tokens at a time. Raises FormatError."""
    found = Values(keys, where, DAMAGED, f"{family.architecture}.")
    several = found.count("nextn_predict_layers", 0, least=0)
    if several >= found.count("block_count"):
        raise found.wrong("nextn_predict_layers", several, "and there are no other layers")
    return several


def config_of_keys(
    keys: Mapping[str, Any],
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Floats],
    dtype: str,
    where: str,
) -> dict[str, Any]:
    """config.json of a GGUF file.

    keys     of the file
    shapes   of its tensors, by the file's names
    factors  rope_freqs.weight, rope_factors_long.weight and rope_factors_short.weight, if the file has them
    dtype    of the model's weights, as torch names it

    Raises FormatError for keys that are missing or no numbers, Unsupported for a model that config.json cannot describe.
    """
    found = Values(keys, where, DAMAGED, f"{family.architecture}.")
    if "token_embd.weight" not in shapes:
        raise FormatError("no tensor token_embd.weight", where=where, fix=DAMAGED)
    vocabulary = shapes["token_embd.weight"][0]
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type, "dtype": dtype}
    for there, here in _COUNTS.items():
        missing = family.count and here == "intermediate_size" and there not in found  # all MLPs are experts
        if here not in family.layered and not missing:
            config[here] = found.count(there)
    if config["num_hidden_layers"] > _MOST_LAYERS:
        raise FormatError(f"{config['num_hidden_layers']:,} layers", where=where, fix=DAMAGED)
    config["num_hidden_layers"] -= predicting_layers(keys, family, where)
    if family.predicting:
        config[family.predicting] = 0
    config["vocab_size"] = vocabulary
    config[family.eps[1]] = found.float32(family.eps[0])
    config["rope_theta"] = found.float32("rope.freq_base", 10_000.0)
    config["tie_word_embeddings"] = "output.weight" not in shapes
    heads = config["num_attention_heads"]
    width = max(1, config["hidden_size"] // heads)
    rope_dimensions = found.count("rope.dimension_count", width)
    if family.widths:
        width = config["head_dim"] = found.count("attention.key_length", width if family.partial else rope_dimensions)
        if width != found.count("attention.value_length", width):
            raise Unsupported("heads of k and v of different widths", where=where, fix="Use the original checkpoint.")
    if family.partial and (share := rope_dimensions / width) != family.partial:
        config["partial_rotary_factor"] = share
    if family.count:
        config[family.count] = found.count("expert_count")
        config[family.used] = found.count("expert_used_count")
    config |= {own.field: _value(found, own, own.name, found.float32) for own in family.keys if not own.times}
    for there, constant in family.constants.items():
        if there in found and not found.equals(there, constant):
            what = f"{family.architecture}.{there} is {show(found.get(there))}, which config.json cannot say"
            raise Unsupported(what, where=where, fix="Use the original checkpoint.")
    config |= {name: value for name, value in family.fixed.items() if name not in config}
    config |= {here: any(name.endswith(f".{there}") for name in shapes) for here, there in family.present.items()}
    if family.model_type == "llama":
        config["attention_bias"] = _all_or_none(shapes, ("attn_q", "attn_k", "attn_v", "attn_output"), where)
        config["mlp_bias"] = _all_or_none(shapes, ("ffn_gate", "ffn_up", "ffn_down"), where)
    slides = "attention.sliding_window" in found
    if family.every or family.model_type == "phi3":
        config["sliding_window"] = found.count("attention.sliding_window") if slides else None
    if family.every:
        config["layer_types"] = _layer_types(family, config["num_hidden_layers"], slides, found)
    if family.model_type in _BIG:
        config |= _gemma(family, config, found)
    if scaling := _scaling(family, config, found, factors):
        config["rope_scaling"] = scaling
    if family.take is not None:
        family.take(found, config, shapes, factors)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := token_id(keys, key, vocabulary, where)) is not None:
            config[f"{name}_token_id"] = token
    return config


def _value(values: Values, key: Key, name: str, number: Callable[[str, float | None], float]) -> int | float | bool:
    """The value of a key, checked. name: of the key in either format; number: how an f32 is taken."""
    if key.kind == "bool":
        return values.truth(name, key.default)
    return number(name, key.default) if key.kind == "f32" else values.count(name, key.default, least=key.least)


def _all_or_none(shapes: Mapping[str, tuple[int, ...]], modules: Sequence[str], where: str) -> bool:
    """Whether the modules of a layer have biases. Raises Unsupported if only some have."""
    present = [f"blk.0.{module}.bias" in shapes for module in modules]
    if any(present) and not all(present):
        raise Unsupported(f"biases in some of {', '.join(modules)} only", where=where, fix="Use the original checkpoint.")
    return present[0]


def _gemma(family: Family, config: Mapping[str, Any], found: Values) -> dict[str, Any]:
    scalar = _query_scalar(family.model_type, config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"])
    own = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar or config["head_dim"]}
    if family.model_type == "gemma2":
        own["attn_logit_softcapping"] = found.float32("attn_logit_softcapping", 50.0)
        own["final_logit_softcapping"] = found.float32("final_logit_softcapping", 30.0)
    else:
        own["rope_local_base_freq"] = found.float32("rope.freq_base_swa", _LOCAL_BASE)
        if "final_logit_softcapping" in found:
            own["final_logit_softcapping"] = found.float32("final_logit_softcapping")
    return own


_PATTERN = "attention.sliding_window_pattern"


def _layer_types(family: Family, layers: int, slides: bool, found: Values) -> list[str]:
    """What each layer attends to. slides: whether the model has a window at all."""
    pattern = found.get(_PATTERN) if family.stated else None
    if pattern is not None and (not isinstance(pattern, np.ndarray) or pattern.shape != (layers,)):
        raise found.wrong(_PATTERN, pattern, f"and not a truth value for each of {layers:,} layers")
    window = [slides and (i + 1) % family.every != 0 if pattern is None else bool(pattern[i]) for i in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in window]


def _query_scalar(model_type: str, layers: int, width: int, heads: int) -> int:
    """What attention is divided by the root of, for the largest models; 0 for all others: the width of a head."""
    return width // heads if layers == _BIG.get(model_type) else 0


def _scaling(family: Family, config: dict[str, Any], found: Values, factors: Mapping[str, Floats]) -> dict[str, Any]:
    """`rope_scaling`; {} if there is none."""
    kind = found.get("rope.scaling.type")
    kind = kind if isinstance(kind, str) else ""
    if family.model_type == "phi3":
        original = found.count("rope.scaling.original_context_length", config["max_position_embeddings"])
        config["original_max_position_embeddings"] = original
        names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
        if not all(name in factors for name in names.values()):
            return {}
        return {"type": "longrope"} | {key: _short(factors[name]) for key, name in names.items()}
    if "rope_freqs.weight" in factors and family.rope == "default":
        return _llama3(config, factors["rope_freqs.weight"], found.where)
    if kind == "linear":
        return {"rope_type": "linear", "factor": found.float32("rope.scaling.factor")}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": found.float32("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = found.count("rope.scaling.original_context_length")
        scaling |= {here: found.float32(there) for there, here in _YARN.items() if there in found}
        if family.model_type == "ministral3":
            scaling |= {here: found.float32(there) for there, here in _MINISTRAL.items()}
            scaling["mscale"] = scaling["mscale_all_dim"]
        return scaling
    if kind in ("", "none"):
        return {}
    raise Unsupported(f"RoPE scaling of the type {show(kind)}", where=found.where, fix="Use the original checkpoint.")


def _short(values: Floats) -> list[float]:
    return [float(str(value)) for value in values]


def _llama3(config: Mapping[str, Any], quotients: Floats, where: str) -> dict[str, Any]:
    """The settings of Llama 3's scaling, from the quotients that follow from them."""
    if not quotients.size or quotients.size != config["head_dim"] // 2 or not np.isfinite(quotients).all():
        what = (
            f"rope_freqs.weight has {quotients.size:,} numbers, or one that is not finite, for heads of {config['head_dim']:,}"
        )
        raise FormatError(what, where=where, fix=DAMAGED)
    scaling = {"rope_type": "llama3", "factor": float(str(quotients.max())), **_LLAMA3}
    if not np.allclose(llama3_quotients(config["head_dim"], config["rope_theta"], scaling), quotients, rtol=1e-5):
        fix = "Use the original checkpoint."
        raise Unsupported("RoPE frequencies that are not scaled as Llama 3's (rope_freqs.weight)", where=where, fix=fix)
    return scaling


def llama3_quotients(width: int, theta: float, scaling: Mapping[str, Any]) -> Floats:
    """By what Llama 3's scaling divides each frequency of a head: float32 [width / 2].

    High frequencies stay, low ones are divided by `factor`, and those between are interpolated (Meta's `apply_scaling`).
    """
    factor, low, high = float(scaling["factor"]), float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    lengths = 2 * math.pi * theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(lengths < context / high, 1.0, np.where(lengths > context / low, factor, between)).astype(np.float32)


# ---- writing


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""What config.json of a model of several parts says beside its `text_config`."""


def text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of the language model: `text_config`, if config.json has one, else config.json itself.

    With the defaults of transformers that published files of the family rely on.
    """
    whole = config or {}
    text = whole.get("text_config")
    if isinstance(text, dict):
        whole = {**text, **{name: whole[name] for name in _TOKENS if whole.get(name) is not None}}
    family = _family(whole.get("model_type"))
    return whole if family is None else {**family.defaults, **whole}


def _family(model_type: object) -> Family | None:
    return next((each for each in FAMILIES if model_type in (each.model_type, *each.also)), None)


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a model. config: from `text_config`. Raises Unsupported for one that cannot be written."""
    model_type = config.get("model_type")
    if family := _family(model_type):
        return family
    fix = f"choose another format; GGUF files are written of these: {', '.join(MODEL_TYPES)}"
    raise Unsupported(f"no GGUF file can be written of a model of the type {show(model_type)}", where="config.json", fix=fix)


def keys_of_config(config: Mapping[str, Any], family: Family, file_type: int) -> tuple[dict[str, Value], dict[str, Floats]]:
    """The keys of a GGUF file that describe the model, and tensors that exist in GGUF files alone.

    file_type  llama.cpp's number of the mixture of types

    Raises FormatError for values that are missing or no numbers, Unsupported for settings that llama.cpp does not know.
    """
    given, arch = Config(config), family.architecture
    values: dict[str, Value] = {}
    extra: dict[str, Floats] = {}

    def put(name: str, kind: Any, value: Any) -> None:
        values[f"{arch}.{name}"] = Value(kind, value)

    values["general.architecture"] = Value("str", arch)
    values["general.type"] = Value("str", "model")
    heads, width = given.count("num_attention_heads"), given.count("hidden_size")
    if (layers := given.count("num_hidden_layers")) > _MOST_LAYERS:
        raise given.wrong("num_hidden_layers", layers, f"more than {_MOST_LAYERS:,}")
    head_dim = given.count("head_dim", max(1, width // heads))
    for there, here in _COUNTS.items():
        default = heads if here == "num_key_value_heads" else given.get(_ALIASES.get(here, here))
        if not (family.count and here == "intermediate_size" and given.get(here, default) is None):  # all MLPs are experts
            put(there, "u32", given.count(here, default))
    rope, slides = given.rope()
    base = given.number("rope_theta", 10_000.0, rope)
    if family.model_type == "hunyuan_v1_dense" and rope["rope_type"] == "dynamic" and rope.get("alpha") is not None:
        alpha = given.number("alpha", None, rope)
        base *= alpha ** (head_dim / (head_dim - 2)) if head_dim > 2 else 1.0
        if base >= 3e38:
            raise given.wrong("alpha", alpha, f"with which float32 cannot hold the base of RoPE, {base:g}")
        rope["rope_type"] = "default"
    put("rope.freq_base", "f32", base)
    put(family.eps[0], "f32", given.number(family.eps[1], 1e-6))
    if family.count:
        put(
            "expert_count", "u32", given.count(family.count, given.get("num_local_experts", given.get("num_experts")))
        )  # either is written
        put("expert_used_count", "u32", given.count(family.used, given.get("num_experts_per_tok")))
    for own in family.keys:
        value = _value(given, own, own.field, given.number)
        if not own.times:
            put(own.name, own.kind, value)
        elif times := given.count(own.times, least=0):
            put(own.name, own.kind, times * value)
    for there, constant in family.constants.items():
        put(there, "u32", constant)
    _check_fixed(given, family)
    if given.get("is_causal") is False:
        put("attention.causal", "bool", False)
    if family.widths and (given.get("head_dim") is not None or family.architecture != "llama"):
        put("attention.key_length", "u32", head_dim)
        put("attention.value_length", "u32", head_dim)
    if family.rotated:
        put("vocab_size", "u32", given.count("vocab_size"))
        put("rope.dimension_count", "u32", head_dim)
    turned = head_dim
    if family.partial:
        share = given.number("partial_rotary_factor", given.number("partial_rotary_factor", family.partial), rope)
        if share > 1:
            what = f"partial_rotary_factor is {share:g}, which is more than 1"
            raise FormatError(what, where="config.json", fix="repair it")
        turned = int(share * head_dim)
        put("rope.dimension_count", "u32", turned)
    _put_window(given, family, put)
    if family.put is not None:
        extra |= family.put(given, put) or {}
    if family.sections:
        _put_sections(given, family, rope, turned, put)
    if family.model_type in _BIG:
        _put_gemma(given, family, head_dim, slides, put)
    elif family.every and family.rope == "default" and slides.get("rope_theta") is not None:
        given.need("rope_theta of sliding_attention", slides["rope_theta"], rope["rope_theta"])
    _put_scaling(given, family, rope, head_dim, put, extra)
    values["general.file_type"] = Value("u32", file_type)
    values["general.quantization_version"] = Value("u32", 2)
    return values, extra


def _check_fixed(given: Config, family: Family) -> None:
    """Raise Unsupported for a setting that is another in llama.cpp's code."""
    given.need_all(family.fixed, family.assumed)
    given.need("use_bidirectional_attention", bool(given.get("use_bidirectional_attention")), False)
    name = "hidden_activation" if given.get("hidden_activation") is not None else "hidden_act"
    alike = {"gelu": "gelu_pytorch_tanh"} if family.architecture == "gemma" else {"swish": "silu"}  # of Gemma, so transformers
    found = given.get(name, family.activation)
    given.need(name, alike.get(found, found) if isinstance(found, str) else found, family.activation)
    if family.implied is not None:
        given.need(*family.implied(given))


def _put_window(given: Config, family: Family, put: Any) -> None:
    """The window of layers that slide. Raises Unsupported for one that llama.cpp would not use."""
    window = given.get("sliding_window")
    if family.model_type == "phi3":
        put("attention.sliding_window", "u32", 0 if window is None else given.count("sliding_window"))
    elif family.every:
        layers = given.count("num_hidden_layers")
        slides = window is not None or not family.stated
        types = _layer_types(family, layers, slides, Config({}))
        stated = given.get("layer_types") or types
        if not isinstance(stated, list) or not all(each in ("sliding_attention", "full_attention") for each in stated):
            raise given.wrong("layer_types", stated, "and not a list of sliding_attention and full_attention")
        if not family.stated or len(stated) != layers:
            given.need("layer_types", stated, types)
        if slides:
            put("attention.sliding_window", "u32", given.count("sliding_window", 4096))
        if slides and family.stated:
            put(_PATTERN, "bool", [each == "sliding_attention" for each in stated])
    elif given.get("use_sliding_window", not family.model_type.startswith("qwen2")) and window and _any_slides(given):
        # Mistral's first version: as long as nobody's context is longer
        if not isinstance(window, int) or window < given.count("max_position_embeddings"):
            given.need("sliding_window", window, None)


def _any_slides(given: Config) -> bool:
    """Whether a layer of a model with a window uses it."""
    types = given.get("layer_types")
    if types is not None:
        return bool(types != ["full_attention"] * given.count("num_hidden_layers"))
    return given.count("max_window_layers", 0, least=0) < given.count("num_hidden_layers")


def _put_sections(given: Config, family: Family, rope: dict[str, Any], turned: int, put: Any) -> None:
    """The shares of RoPE that images use. turned: numbers of a head that RoPE turns."""
    if rope["rope_type"] == "mrope":  # what older versions of transformers call it
        rope["rope_type"] = "default"
    sections = rope.get("mrope_section") or [*family.sections]
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(each) is int and each >= 0 for each in sections):
        raise given.wrong("mrope_section", sections, "and not three whole numbers")
    given.need("sum of mrope_section", sum(sections), turned // 2)
    put("rope.dimension_sections", "i32", [*sections, 0])


def _put_gemma(given: Config, family: Family, head_dim: int, slides: Mapping[str, Any], put: Any) -> None:
    layers, width = given.count("num_hidden_layers"), given.count("hidden_size")
    scalar = _query_scalar(family.model_type, layers, width, given.count("num_attention_heads")) or head_dim
    given.need("query_pre_attn_scalar", given.number("query_pre_attn_scalar", 256), float(scalar))
    if family.model_type == "gemma2":
        put("attn_logit_softcapping", "f32", given.number("attn_logit_softcapping", 50.0))
        put("final_logit_softcapping", "f32", given.number("final_logit_softcapping", 30.0))
        return
    given.need("attn_logit_softcapping", given.get("attn_logit_softcapping"), None)
    if given.get("final_logit_softcapping") is not None:
        put("final_logit_softcapping", "f32", given.number("final_logit_softcapping"))
    put("rope.freq_base_swa", "f32", given.number("rope_theta", _LOCAL_BASE, slides))


def _put_scaling(
    given: Config, family: Family, rope: Mapping[str, Any], head_dim: int, put: Any, extra: dict[str, Floats]
) -> None:
    kind = rope["rope_type"]
    if family.model_type == "ministral3":
        given.need("rope_type", kind, "yarn")
        given.need("mscale", rope.get("mscale"), rope.get("mscale_all_dim"))
        for there, here in _MINISTRAL.items():
            put(there, "f32", given.number(here, None, rope))
    if family.model_type == "phi3":
        context = given.count("max_position_embeddings")
        original = given.count("original_max_position_embeddings", context)
        original = given.count("original_max_position_embeddings", original, rope)
        put("rope.scaling.original_context_length", "u32", original)
        if kind not in ("default", "longrope", "su"):
            given.need("rope_type", kind, "longrope")
        if kind == "default":
            return
        scale = context / original
        factor = math.sqrt(1 + math.log(scale) / math.log(max(2, original))) if scale > 1 else 1.0
        put("rope.scaling.attn_factor", "f32", factor)
        for name in ("long", "short"):
            extra[f"rope_factors_{name}.weight"] = given.numbers(f"{name}_factor", rope)
    elif kind == "llama3" and family.scaled:
        scaling = {name: given.number(name, default, rope) for name, default in {**_LLAMA3, "factor": 8.0}.items()}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            what = (
                f"low_freq_factor {scaling['low_freq_factor']:g} is not below high_freq_factor {scaling['high_freq_factor']:g}"
            )
            raise FormatError(what, where="config.json", fix="repair it")
        extra["rope_freqs.weight"] = llama3_quotients(head_dim, given.number("rope_theta", 10_000.0, rope), scaling)
    elif kind in ("linear", "yarn"):
        put("rope.scaling.type", "str", kind)
        put("rope.scaling.factor", "f32", given.number("factor", None, rope))
        if kind == "yarn":
            context = given.count("max_position_embeddings")
            put("rope.scaling.original_context_length", "u32", given.count("original_max_position_embeddings", context, rope))
            for there, here in _YARN.items():
                if rope.get(here) is not None:
                    put(there, "f32", given.number(here, None, rope))
    else:
        given.need("rope_type", kind, family.rope)
