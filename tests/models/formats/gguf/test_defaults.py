"""What config.json leaves out: GGUF files get what transformers' class of the model has, or an error names it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest

from tests.models.formats.gguf import defaults
from tests.models.formats.gguf.test_encoders import ENCODERS
from tests.models.formats.gguf.test_gguf_files import FAMILIES, OWN
from tests.zoo import ENCODER, ZOO
from weightsmith._base.errors import FormatError, WeightsmithError
from weightsmith._models.formats.gguf.architectures import architecture_of_config, architectures, find_vision, text_config
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.structure.configs import rope_settings

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 5e5, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
DEEP_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "exaone4-llama3": ("exaone4", {"rope_parameters": LLAMA3}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "mistral-linear": ("mistral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}),
    "phi3-long": ("phi3-tied", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "deepseek-v2-yarn": ("deepseek-v2", {"rope_parameters": DEEP_YARN}),
}
"""Models with scaled frequencies: a model of the zoo, with what is different."""
LANGUAGE = {name: (ZOO[name][0], ZOO[name][1], {**ZOO[name][2], **OWN.get(name, {})}) for name in FAMILIES}
LANGUAGE |= {
    name: (LANGUAGE[other][0], LANGUAGE[other][1], LANGUAGE[other][2] | changes) for name, (other, changes) in SCALED.items()
}
MODELS = LANGUAGE | {
    name: (model, config, ({} if name == "distilbert" else ENCODER) | changes)
    for name, (model, config, _, changes) in ENCODERS.items()
}
VISION = ("gemma3-vl", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")
UNSTATED = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path")
"""Settings that say which class it is, and those of no class."""
PARTS = ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention")


def without(settings: Mapping[str, Any], parts: tuple[str, ...] = PARTS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting, and config.json without it."""
    for name, value in settings.items():
        if name in UNSTATED:
            continue
        if name in parts and isinstance(value, dict):
            for inner, rest in without(value, parts):
                yield inner, {**settings, name: rest}
        if name not in ("text_config", "vision_config"):
            yield name, {other: stated for other, stated in settings.items() if other != name}


def older(settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of transformers 4, which has the base of RoPE beside its scaling."""
    rope = settings.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    outside = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in outside}
    kept = {name: value for name, value in settings.items() if name != "rope_parameters"}
    return kept | outside | {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def written(settings: Mapping[str, Any]) -> object:
    """All that a GGUF file takes from config.json, or the error."""
    try:
        text = text_config(settings)
        architecture = architecture_of_config(text)
        keys, tensors = architecture.keys(text, 0)
        config = GgufConfig(text)
        parts = [part.rows(config) for split in architecture.splits for part in split.parts if part.rows is not None]
    except WeightsmithError as error:
        return str(error)
    values = {name.removeprefix(f"{architecture.name}."): value.value for name, value in keys.items()}
    if architecture.name == "llama":  # llama.cpp infers it
        width = values["embedding_length"] // values["attention.head_count"]
        values = {"attention.key_length": width, "attention.value_length": width, **values}
    tied = not architecture.encodes and bool(text.get("tie_word_embeddings"))
    first = architecture.rows_skipped("position_embd.weight", config)
    return values, {name: tensor.tolist() for name, tensor in tensors.items()}, parts, tied, first


def complete(config_class: str, settings: Mapping[str, Any], model_class: str) -> dict[str, Any] | None:
    """config.json with all that transformers' class has by itself; None if the class refuses it."""
    import transformers

    try:
        config = getattr(transformers, config_class).from_dict(deepcopy(dict(settings)))
    except Exception:  # each class has errors of its own
        return None
    stated = json.loads(config.to_json_string(use_diff=False), object_hook=_infinite)
    return {**stated, "architectures": [model_class]}


def _infinite(value: dict[str, Any]) -> object:
    """Infinity, which transformers writes as an object."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@pytest.mark.long
def test_the_table_is_that_of_the_installed_transformers() -> None:
    assert defaults.stored() == defaults.text(defaults.table()), "python -m tests.models.formats.gguf.defaults --write"


@pytest.mark.matrix("llama*", "deepseek*")
@pytest.mark.parametrize("name", MODELS)
def test_what_config_json_leaves_out_is_that_of_transformers(name: str) -> None:
    import transformers

    model_class, config_class, arguments = MODELS[name]
    full = complete(config_class, {**arguments, "model_type": getattr(transformers, config_class).model_type}, model_class)
    assert full is not None
    assert not isinstance(written(full), str), written(full)
    sparse = {**arguments, "model_type": full["model_type"], "architectures": [model_class]}
    # What both forms have is left out of the newer one.
    rope = ((setting, settings) for setting, settings in without(older(full)) if setting not in full)
    cases = [("", sparse), *without(full), ("", older(full)), *rope]
    compared = 0
    for setting, settings in cases:
        if not settings or (expected := complete(config_class, settings, model_class)) is None:
            continue
        outcome, everything = written(settings), written(expected)
        compared += 1
        if isinstance(outcome, str):
            assert setting in outcome or isinstance(everything, str), (setting, outcome)  # what is wrong then is wrong in both
        else:
            assert outcome == everything, setting
    assert compared > 15


@pytest.mark.long
@pytest.mark.parametrize("name", VISION)
def test_what_vision_config_leaves_out_is_that_of_transformers(name: str) -> None:
    model_class, config_class, arguments = ZOO[name]
    full = complete(config_class, arguments, model_class)
    assert full is not None
    half = find_vision(full)
    assert half is not None
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

    def keys(settings: Mapping[str, Any]) -> object:
        try:
            return half.keys(half.images(settings, colours), 32, 0)
        except WeightsmithError as error:
            return str(error)

    assert not isinstance(keys(full), str), keys(full)
    for setting, vision in without(full["vision_config"]):
        if (expected := complete(config_class, {**full, "vision_config": vision}, model_class)) is not None:
            outcome = keys({**full, "vision_config": vision})
            assert outcome == keys(expected) or (isinstance(outcome, str) and setting in outcome), setting


@pytest.mark.parametrize("model_type", ["gemma3_text", "cohere2"])
def test_an_older_pattern_of_windows_is_not_overlooked(model_type: str) -> None:
    settings = text_config({"model_type": model_type, "sliding_window_pattern": 3, "query_pre_attn_scalar": 256})
    with pytest.raises(WeightsmithError, match="sliding_window_pattern is 3"):
        architecture_of_config(settings).keys(settings, 0)


def test_an_architecture_without_defaults_names_what_is_missing() -> None:
    """That of a package: nobody knows what its models take by themselves."""
    llama = next(architecture for architecture in architectures() if architecture.class_name == "LlamaForCausalLM")
    sizes = {name: 8 for name in llama.sizes.values()}
    with pytest.raises(FormatError, match=r"rope_theta is missing\n  -> Add it to config.json, as the model was trained"):
        llama.keys(sizes, 0)
    with pytest.raises(FormatError, match="rms_norm_eps is missing"):
        llama.keys({**sizes, "rope_theta": 1e4}, 0)


BASE = {"rope_type": "default", "rope_theta": 1e6}
ADDED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": BASE, "rope_scaling": ADDED | {"rope_theta": 1e6}}, ""),
        ({"rope_parameters": BASE, "rope_scaling": ADDED | {"rope_theta": 5e5}}, ""),
        ({"rope_parameters": BASE, "rope_scaling": ADDED, "rope_theta": 1e6}, ""),
        ({"rope_parameters": BASE | {"rope_theta": 1e4}, "rope_scaling": ADDED}, ""),
        (
            {"rope_parameters": BASE, "rope_scaling": ADDED},
            "rope_theta of rope_parameters is 1000000.0, and transformers would",
        ),
        ({"rope_parameters": BASE, "rope_scaling": "dynamic"}, "rope_scaling is 'dynamic', not an object"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], not an object"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', not an object"),
        ({"rope_parameters": {"full_attention": "x"}}, "full_attention is 'x', not an object"),
        (
            {"rope_parameters": {"full_attention": BASE, "sliding_attention": BASE}, "rope_scaling": ADDED},
            "rope_parameters and rope_scaling differ",
        ),
        (
            {"rope_parameters": {"full_attention": BASE, "sliding_attention": BASE}, "rope_scaling": {"full_attention": BASE}},
            "rope_parameters and rope_scaling differ",
        ),
    ],
)
def test_rope_scaling_beside_rope_parameters(changes: dict[str, Any], words: str) -> None:
    model_class, config_class, arguments = LANGUAGE["qwen3"]
    settings = {**arguments, "model_type": "qwen3", "architectures": [model_class], **changes}
    if words:
        outcome = written(settings)
        assert isinstance(outcome, str)
        assert words in outcome
    else:
        expected = complete(config_class, settings, model_class)
        assert expected is not None
        assert written(settings) == written(expected)
        assert "yarn" in str(written(expected))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("qwen3-moe", "num_local_experts", "num_experts"),
        ("gpt-oss", "num_local_experts", "num_experts"),
        ("deepseek-v3", "n_routed_experts", "num_local_experts"),
    ],
)
def test_two_numbers_of_experts(name: str, one: str, other: str) -> None:
    model_class, config_class, arguments = LANGUAGE[name]
    full = complete(config_class, arguments, model_class)
    assert full is not None
    assert not isinstance(written({**full, one: 8, other: 8}), str)
    outcome = written({**full, one: 8, other: 4})
    assert isinstance(outcome, str)
    assert f"{other} is 4, and {one}, which means the same, is 8" in outcome


def test_deepseek_has_no_factor_of_its_own_under_yarn() -> None:
    model_class, config_class, arguments = LANGUAGE["deepseek-v2-yarn"]
    for factor, words in ((1.0, None), (2.0, "attention_factor is 2.0, and llama.cpp takes 1 for granted")):
        full = complete(config_class, {**arguments, "rope_parameters": {**DEEP_YARN, "attention_factor": factor}}, model_class)
        assert full is not None
        outcome = written(full)
        assert words in outcome if words and isinstance(outcome, str) else not words and not isinstance(outcome, str)


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rope_scaling_may_repeat_the_settings_of_full_attention(name: str) -> None:
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": BASE}
    config = {"rope_parameters": ropes, "rope_scaling": {name: "linear", "factor": 8.0}}
    assert rope_settings(config) == ropes
    with pytest.raises(FormatError, match="rope_parameters and rope_scaling differ"):
        rope_settings({**config, "rope_scaling": {name: "linear", "factor": 4.0}})
