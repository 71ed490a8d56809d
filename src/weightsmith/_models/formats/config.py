"""What config.json says of quantisation, and checks of the stored tensors that it describes; config.json for other readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding, FormatError, PlanError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec
from weightsmith._models.structure.configs import MAX_DEPTH, rope_settings
from weightsmith._plans import PlanDraft
from weightsmith.abc.stored import Config, Specs

PLAIN_FIX = "name an unquantised checkpoint of the same model"
DAMAGED_CHECKPOINT = "The checkpoint is damaged or incomplete: download it again."

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_WEIGHT_DTYPES = ("BF16", "F16", "F32")

SETTINGS_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that describe the quantisation in place of config.json → `quant_method`: ModelOpt's, AutoGPTQ's and AutoAWQ's."""


SETTINGS_METADATA = {"_quantization_metadata": "comfyui", "_hqq": "hqq"}
"""Keys of the metadata of weight files that do the same."""


def config_entries(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What config.json says of quantisation, each with its place: at the top level, then in sub-configs.

    >>> config_entries({"thinker_config": {"text_config": {"quantization_config": {"bits": 4}}}})
    [('thinker_config.text_config.quantization_config', {'bits': 4})]
    """
    return list(_entries(config, "", MAX_DEPTH))


def _entries(config: Mapping[str, Any], where: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _CONFIG_KEYS:
        if isinstance(entry := config.get(key), Mapping) and entry:
            yield where + key, entry
    for key, value in config.items() if depth else ():
        if isinstance(value, Mapping) and key not in _CONFIG_KEYS:
            yield from _entries(value, f"{where}{key}.", depth - 1)


def without_entries(config: Mapping[str, Any], depth: int = MAX_DEPTH) -> dict[str, Any]:
    """config.json of the same model with plain weights. depth: of the sub-configs that entries are taken from.

    >>> without_entries({"hidden_size": 8, "text_config": {"quantization_config": {"bits": 4}}})
    {'hidden_size': 8, 'text_config': {}}
    """
    return {
        key: without_entries(value, depth - 1) if isinstance(value, Mapping) and depth else value
        for key, value in config.items()
        if key not in _CONFIG_KEYS
    }


def method_of(config: Mapping[str, Any]) -> str:
    """The `quant_method` that config.json names, else "".

    >>> method_of({"text_config": {"quantization_config": {"quant_method": "gptq"}}}), method_of({"quantization": {"bits": 4}})
    ('gptq', '')
    """
    methods = [entry.get("quant_method") for _, entry in config_entries(config)]
    return next((method for method in methods if isinstance(method, str)), "")


def damaged(what: str, where: str) -> FormatError:
    """The error of tensors that contradict each other or config.json."""
    return FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)


def unsupported(what: str, where: str) -> Unsupported:
    """The error of weights that are stored in a way that is not read."""
    return Unsupported(what, where=where, fix=PLAIN_FIX)


def recogniser(codes: Callable[[TensorSpec], bool], *methods: str) -> Callable[[Config, Specs], bool]:
    """`StoredFormat.recognises`: config.json names one of these methods, and some tensors are its codes, or may be."""
    return lambda config, specs: method_of(config) in methods and any(map(codes, specs.values()))


def ending(suffix: str) -> Callable[[TensorSpec], bool]:
    """Whether the name of a tensor ends so."""
    return lambda spec: spec.name.endswith(suffix)


def dropped_scales(dropped: Sequence[str], where: str) -> list[Finding]:
    """A note on stored tensors that are no part of the plain model, if there are any."""
    what = f"{len(dropped)} scale(s) of activations or of the KV cache are dropped: plain weights have none"
    return [Finding(what, where, (f"the first is {show(dropped[0])}",))] if dropped else []


def quantisation_entry(config: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """What config.json says of quantisation, and its place; it must have an entry. Raises Unsupported if two entries differ."""
    (place, entry), *others = config_entries(config)
    for other, content in others:
        if content != entry:
            raise unsupported(f"{place} and {other} in config.json say different things", where)
    return place, entry


def setting(entry: Mapping[str, Any], key: str, default: object, allowed: Sequence[object], where: str) -> Any:
    """A value of the entry, one of `allowed`; `default` if missing or null. Raises Unsupported for another value or type.

    >>> setting({"bits": 4}, "bits", None, (2, 4, 8), "m")
    4
    """
    value = default if entry.get(key) is None else entry[key]
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        *others, last = map(repr, allowed)
        choices = f"{', '.join(others)} and {last}" if others else last
        raise unsupported(f"weights with {key} {show(value)} are not read, only {choices}", where)
    return value


def plain_dtype(config: Mapping[str, Any], default: DType = DTYPES["BF16"]) -> DType:
    """The dtype in which loaders compute with the weights: config.json's, else `default`.

    >>> plain_dtype({"text_config": {"torch_dtype": "float16"}}).name
    'F16'
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            dtype = BY_TORCH_NAME.get(value) if isinstance(value := part.get(key), str) else None
            if dtype is not None and dtype.name in _WEIGHT_DTYPES:
                return dtype
    return default


# ---- config.json as programs with readers of their own take it: ExLlamaV2 0.3.2, exllamav3 1.6.5 and mlx-lm 0.32.2.
#
# **Older keys.** ExLlamaV2 and most models of mlx-lm know no `rope_parameters`: without `rope_theta` they take a default, and
# the model computes something else. So config.json has the keys of transformers 4 as well as those of transformers 5.
#
# **Sliding windows.** ExLlamaV2 and exllamav3 have those of Gemma alone, and ignore others: read in ExLlamaV2's
# architecture.py, where `swa` is always false, and in exllamav3's architecture/, where gemma2.py alone reads the size of a
# window.


_DROPPED = ("rope_theta", "type", "rope_type", "partial_rotary_factor")

_SCALED_IN_FULL = ("gemma3", "olmo3")
"""Beginnings of types whose `rope_scaling` is that of layers that attend to everything. In others (Gemma 4, Laguna, MiMo V2),
transformers takes it in place of what `rope_parameters` says of each kind of layers, also if it is None."""


def older_config(config: Mapping[str, Any], scaling_key: str = "rope_type") -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and other older keys, also of its `text_config`.

    Keys that it has are kept, but for those of RoPE where it states `rope_parameters`: they get what transformers takes.

    scaling_key  of the type in `rope_scaling`. Some models of mlx-lm require `type`; ExLlamaV2 refuses both at once

    Raises PlanError for settings of RoPE that contradict each other.

    >>> older_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})["rope_theta"]
    100000.0
    >>> older_config({"model_type": "qwen3_moe", "num_local_experts": 8})["num_experts"]
    8
    """
    older = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        older["text_config"] = older_config(config["text_config"], scaling_key)
    older |= _rope(config, scaling_key)  # None as well: some models of mlx-lm require the key
    for key, value in _layers(config).items():
        if older.get(key) is None:
            older[key] = value
    return older


def _rope(config: Mapping[str, Any], scaling_key: str) -> dict[str, Any]:
    """The older keys for the settings that take effect; {} if config.json has the older keys alone."""
    try:
        rope = rope_settings(config)
    except FormatError as error:
        raise PlanError([error]) from None
    if not config.get("rope_parameters"):
        return {}
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    main = full if isinstance(full, Mapping) else rope
    older = {key: main[key] for key in ("rope_theta", "partial_rotary_factor") if key in main}
    if isinstance(full, Mapping) and isinstance(sliding, Mapping) and "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    if config.get("model_type") == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        older |= {name: older[key] for key, name in names.items() if key in older}
    if main is full and not str(config.get("model_type")).startswith(_SCALED_IN_FULL):
        return older
    kind = main.get("rope_type", main.get("type"))
    older["rope_scaling"] = None
    if kind not in (None, "default"):
        rest = {key: value for key, value in main.items() if key not in _DROPPED}
        older["rope_scaling"] = {scaling_key: kind, **rest}
        original = "original_max_position_embeddings"
        if kind == "longrope" and original in main and config.get(original) is None:  # ExLlamaV2 asserts that it is there
            older[original] = main[original]
    return older


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The older keys for the pattern of full attention and the number of experts."""
    older = {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds and (pattern := full_attention_every(kinds)) is not None:
        older["sliding_window_pattern"] = pattern
    if str(config.get("model_type")).startswith("qwen") and "num_local_experts" in config:
        older["num_experts"] = config["num_local_experts"]
    return older


def full_attention_every(kinds: Sequence[Any]) -> int | None:
    """n if every n-th layer has full attention, and no other; else None. kinds: `layer_types` of config.json.

    >>> full_attention_every(["sliding_attention", "full_attention"] * 2)
    2
    """
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    pattern = full[0] if full else len(kinds) + 1
    return pattern if full == list(range(pattern, len(kinds) + 1, pattern)) else None


def adapt_to_mlx_lm(draft: PlanDraft) -> None:
    """Give a draft the older keys. Warn of a Gemma 3 whose full attention mlx-lm expects in other layers, as after layers were
    stacked."""
    config = draft.config = older_config(draft.config or {}, scaling_key="type")
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    kinds = text.get("layer_types")
    if str(text.get("model_type")).startswith("gemma3") and isinstance(kinds, list) and full_attention_every(kinds) is None:
        what = "full attention is not in every n-th layer, where mlx-lm expects it: it computes something else"
        draft.warn(what, "layer_types in config.json")


# ---- sliding windows

_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
_IF_USED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with a window only if `use_sliding_window` says so; but for Qwen3-MoE, in some layers."""

_MISTRAL_WINDOW = 4096
_FULL_LAYERS = 28
"""Defaults of transformers if config.json lacks `sliding_window` (Mistral) or `max_window_layers` (Qwen)."""


def window_difference(config: Mapping[str, Any], reader: str) -> list[tuple[str, str, str]]:
    """A finding if `reader` ignores a window that transformers applies: (what, where, fix), else nothing.

    >>> config = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 32768}
    >>> [where for _, where, _ in window_difference(config, "ExLlamaV2 0.3.2")]
    ['sliding_window in config.json']
    """
    window, longest = _window(config), config.get("max_position_embeddings")
    if window is None or (isinstance(longest, int) and window >= longest):
        return []
    what = f"{reader} ignores the sliding window of {window:,} tokens, and transformers applies it"
    return [(what, "sliding_window in config.json", f"keep texts within {window:,} tokens")]


def _window(config: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one, in tokens, including the current one; None if no layer does."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    window = config.get("sliding_window", _MISTRAL_WINDOW if name == _WINDOWED[0] else None)
    if not isinstance(window, int) or name not in (*_WINDOWED, *_IF_USED):
        return None
    if name in _IF_USED and not (config.get("use_sliding_window") and (name == _IF_USED[2] or _some_slide(config))):
        return None
    return window


def _some_slide(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds
    return bool(config.get("num_hidden_layers", 0) > config.get("max_window_layers", _FULL_LAYERS))
