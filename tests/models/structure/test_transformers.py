"""Structures of transformers' own models: every architecture of an auto class, built on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import Structure, analyse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

F32 = DTYPES["F32"]


pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of default configs is not our concern


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


# No single stack can be meant, or the model has none.
NO_MAIN = {
    "BltConfig": "four stacks, each with a config of its own",
    "GitConfig": "its text decoder is called encoder, beside an image encoder",
    "HrmTextConfig": "two stacks that take turns",
    "IdeficsConfig": "decoder layers and cross-attention layers in parallel lists",
    "XLMConfig": "attentions and ffns in parallel lists",
    "EvollaConfig": "its protein encoder is one of two stacks",
}
LANGUAGE_VISION = (
    "AriaConfig BlipConfig Blip2Config Cohere2VisionConfig DeepseekVLConfig Ernie4_5_VLMoeConfig Gemma3Config "
    "Glm4vConfig GotOcr2Config Idefics3Config InternVLConfig Kosmos2Config LlavaConfig LlavaNextConfig "
    "LlavaOnevisionConfig Mistral3Config MllamaConfig Ovis2Config PaliGemmaConfig Qwen2VLConfig Qwen2_5_VLConfig "
    "Qwen3VLConfig Qwen3VLMoeConfig SmolVLMConfig VipLlavaConfig"
).split()


def on_meta(config_class: Any, model_class: Any) -> tuple[Any, Any] | None:
    """A model with default sizes on the meta device, three layers deep if the config allows; None if it cannot be."""
    for sizes in ({"num_hidden_layers": 3}, {}) if not config_class.sub_configs else ({},):
        try:
            config = config_class(**sizes)
            with torch.device("meta"):
                return config, model_class._from_config(config)
        except Exception:  # whatever a config's defaults break on
            continue
    return None


def structure_of(config: Any, model: Any) -> tuple[Structure, list[str]]:
    specs = [TensorSpec(name, F32, tuple(t.shape)) for name, t in model.state_dict().items()]
    return analyse(specs, json.loads(config.to_json_string(use_diff=False))), [spec.name for spec in specs]


def check(config: Any, model: Any) -> str:
    """What is wrong with the structure of a model; "" if nothing."""
    s, names = structure_of(config, model)
    if sorted(n for members in s.modules.values() for n in members) != sorted(names):
        return "modules are no partition"
    located = [name for name in names if s.locate(name)]
    for name in located:
        stack, layer = s.locate(name) or (None, 0)
        if s.rename(name, layer) != name or s.locate(s.rename(name, layer + 1_000)) is not None or stack is None:
            return f"rename of {name}"
    if len({s.rename(name, 10_000 + (s.locate(name) or (None, 0))[1]) for name in located}) != len(located):
        return "rename is not one to one"
    if s.main is None:
        return "no main stack"
    real = len(model.get_submodule(s.main.prefix[:-1]))
    if s.main.n_layers != real or s.main.config_path is None:
        return f"{s.main} but {real} layers"
    value: Any = config.to_dict()
    for key in s.main.config_path:
        value = value[key]
    return "" if real in (value, len(value) if isinstance(value, list) else value) else f"{s.main}: {value}"


def sweep(mapping: Mapping[Any, Any], only: Sequence[str] = ()) -> tuple[dict[str, str], int]:
    problems, built = {}, 0
    for config_class in mapping:
        name = config_class.__name__
        if only and name not in only:
            continue
        model_class = mapping[config_class]
        on_meta_model = on_meta(config_class, model_class[0] if isinstance(model_class, tuple) else model_class)
        if on_meta_model is not None:
            built += 1
            problem = check(*on_meta_model)
            if problem:
                problems[name] = problem
    return problems, built


CAUSAL = "LlamaConfig GPT2Config OPTConfig MambaConfig JambaConfig DeepseekV3Config XLNetConfig".split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mapping", "only"), [("AutoModelForCausalLM", CAUSAL), ("AutoModelForImageTextToText", LANGUAGE_VISION[-2:])]
)
def test_the_main_stack_is_found(mapping: str, only: Sequence[str]) -> None:
    problems, built = sweep(getattr(transformers, mapping)._model_mapping, only)
    assert problems == {}
    assert built >= len(only)  # some classes are listed twice


@pytest.mark.sweep
def test_main_stack_of_every_causal_language_model_is_found() -> None:
    problems, built = sweep(transformers.AutoModelForCausalLM._model_mapping)
    assert {name: problem for name, problem in problems.items() if name not in NO_MAIN} == {}
    assert built > 120


@pytest.mark.sweep
def test_text_stack_of_vision_language_models_is_found() -> None:
    problems, built = sweep(transformers.AutoModelForImageTextToText._model_mapping, LANGUAGE_VISION)
    assert problems == {}
    assert built > 18


@pytest.mark.parametrize(
    "config_class",
    "ViTConfig BertConfig RobertaConfig DistilBertConfig ModernBertConfig Dinov2Config Wav2Vec2Config".split(),
)
def test_only_stack_of_an_encoder_is_its_main_one(config_class: str) -> None:
    built = on_meta(getattr(transformers, config_class), _base_model(config_class))
    assert built is not None
    assert check(*built) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "encoder", "decoder"),
    [
        ("T5Config", "encoder.block.", "decoder.block."),
        ("BartConfig", "encoder.layers.", "decoder.layers."),
        ("WhisperConfig", "encoder.layers.", "decoder.layers."),
        ("T5GemmaConfig", "encoder.layers.", "decoder.layers."),
    ],
)
def test_encoder_decoder_has_two_counted_stacks(config_class: str, encoder: str, decoder: str) -> None:
    built = on_meta(getattr(transformers, config_class), _base_model(config_class))
    assert built is not None
    s, _ = structure_of(*built)
    assert {stack.prefix: stack.kind for stack in s.stacks} == {encoder: "encoder", decoder: "decoder"}
    assert all(stack.config_path for stack in s.stacks)
    assert len({stack.config_path for stack in s.stacks}) == 2
    assert s.main is None


def test_clip_has_two_towers_and_no_main_stack() -> None:
    built = on_meta(transformers.CLIPConfig, transformers.CLIPModel)
    assert built is not None
    s, _ = structure_of(*built)
    assert [stack.module for stack in s.stacks] == ["text_model", "vision_model"]
    assert s.main is None


def _base_model(config_class: str) -> Any:
    return transformers.AutoModel._model_mapping[getattr(transformers, config_class)]
