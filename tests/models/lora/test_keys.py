"""Keys of adapter_config.json and kinds of adapters: each is in one list, and PEFT has no others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.lora.test_lora import H, P, Q, adapter, baked, base, factors, normal, refusal
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.lora import config as keys
from weightsmith._models.lora import open_adapter

LISTS = {"used": keys.USED, "without effect": keys.WITHOUT_EFFECT, "not applied": frozenset(keys.NOT_APPLIED)}
KINDS = {"converted": keys.CONVERTED_KINDS, "merged": keys.MERGED_KINDS, "unmerged": keys.UNMERGED_KINDS}


@pytest.mark.parametrize("lists", [LISTS, KINDS], ids=["keys", "kinds"])
def test_nothing_is_in_two_lists(lists: dict[str, frozenset[str]]) -> None:
    assert len(frozenset().union(*lists.values())) == sum(map(len, lists.values()))


def test_every_key_of_peft_s_config_is_in_a_list() -> None:
    """A new version of PEFT that adds a key fails here: decide what the key means for the weights."""
    peft = pytest.importorskip("peft")
    known = frozenset().union(*LISTS.values())
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert names <= known
    ours = {"lora_B_layout", "unsloth_fused_expert_lora", "merge_weights", "enable_lora"}  # Unsloth's, and of old versions
    assert known - names == ours


def test_every_variant_of_peft_s_lora_is_a_decision() -> None:
    """PEFT marks the settings that make other layers of LoRA's: they are not in the list of keys without effect by accident."""
    peft = pytest.importorskip("peft")
    variants = {f.name for f in dataclasses.fields(peft.LoraConfig) if f.metadata.get("is_lora_variant")}
    assert variants - frozenset(keys.NOT_APPLIED) <= {"use_dora", "velora_config"}


def test_every_kind_of_peft_s_adapters_is_in_a_list() -> None:
    peft = pytest.importorskip("peft")
    assert {kind.value for kind in peft.PeftType} - {"LORA"} == frozenset().union(*KINDS.values())


def test_convert_to_lora_is_recommended_for_what_it_converts() -> None:
    peft = pytest.importorskip("peft")
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTunerLayer

    def converts(layer: Any) -> bool:
        """Whether its class overrides the answer no; SHiRA and HiRA give the same answer in a method of their own."""
        return layer.supports_lora_conversion is not BaseTunerLayer.supports_lora_conversion

    def layers(cls: type) -> set[type]:
        return {cls}.union(*(layers(subclass) for subclass in cls.__subclasses__()))

    module_of = {kind.value: PEFT_TYPE_TO_TUNER_MAPPING[kind].__module__.rpartition(".")[0] for kind in peft.PeftType}
    able = {layer.__module__.rpartition(".")[0] for layer in layers(BaseTunerLayer) if converts(layer)}
    convertible = {kind for kind, module in module_of.items() if module in able} - {"LORA", "SHIRA", "HIRA"}
    assert convertible == keys.CONVERTED_KINDS


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("GRALORA", "convert_to_lora"),
        ("GLORA", "Merge it with peft (merge_and_unload"),
        ("PROMPT_TUNING", "neither peft nor weightsmith can merge it"),
        ("SOMETHING", "Merge it with the program that wrote it"),
        (["LORA"], "Name a folder that PEFT's save_pretrained has written"),
        (None, "Name a folder that PEFT's save_pretrained has written"),
    ],
)
def test_other_kinds_are_refused_with_advice_that_works(kind: Any, fix: str, tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", peft_type=kind))
    assert isinstance(problem, Unsupported)
    assert "an adapter of peft_type" in str(problem)
    assert fix in problem.finding.fix
    assert ("convert_to_lora" in problem.finding.fix) == (kind == "GRALORA")


@pytest.mark.parametrize(
    ("config", "words", "by_peft"),
    [
        ({"use_qalora": True}, "use_qalora: QA-LoRA", True),
        ({"megatron_config": {"x": 1}}, "megatron_config: ", True),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4': the base weights were changed", True),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights: 'lora_ga': the base weights were changed", True),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication: layers that are repeated", False),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: an activated LoRA", False),
    ],
)
def test_what_is_more_than_lora_is_refused(config: dict[str, Any], words: str, by_peft: bool, tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", **config))
    assert isinstance(problem, Unsupported)
    assert words in str(problem)
    assert ("merge_and_unload" in problem.finding.fix) == by_peft
    assert ("peft, which cannot merge it either" in problem.finding.fix) == (not by_peft)


@pytest.mark.parametrize("value", ["x", 1, 0.5, True, ["x"], {"a": None}], ids=repr)
def test_a_key_that_nobody_knows_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", lora_C_layout=value))
    assert isinstance(problem, Unsupported)
    assert f"'lora_C_layout': {value!r}" in str(problem)
    assert "remove it from the file" in problem.finding.fix


@pytest.mark.parametrize("value", [None, False, "", [], {}], ids=repr)
def test_a_setting_of_a_later_peft_that_is_off_is_fine(value: Any, tmp_path: Path) -> None:
    open_adapter(str(adapter(tmp_path / "a", lora_C_layout=value)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_rslora": "true"}, "use_rslora is 'true', not true or false"),
        ({"use_dora": 1}, "use_dora is 1, not true or false"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out is 'no', not true or false"),
        ({"bias": "some"}, "bias is 'some', none of none, all, lora_only"),
        ({"init_lora_weights": "better"}, "init_lora_weights is 'better': whether it changes the base weights is not known"),
        ({"init_lora_weights": {"a": 1}}, "init_lora_weights is {'a': 1}: whether"),
        ({"task_type": "CHAT"}, "task_type is 'CHAT', none of SEQ_CLS"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', not a list of names"),
    ],
)
def test_values_that_peft_does_not_know_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", **config))
    assert isinstance(problem, FormatError)
    assert words in str(problem)


def test_peft_s_own_lists_of_tasks_and_biases() -> None:
    peft = pytest.importorskip("peft")
    from typing import get_args, get_type_hints

    assert set(keys.TASKS) == {task.value for task in peft.TaskType}
    assert keys.BIASES == get_args(get_type_hints(peft.LoraConfig)["bias"])


@pytest.mark.parametrize("init", keys.PLAIN_INITS, ids=repr)
def test_initialisations_that_leave_the_base_alone_are_fine(init: Any, tmp_path: Path) -> None:
    open_adapter(str(adapter(tmp_path / "a", init_lora_weights=init)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "mica", "velora"])
def test_what_peft_merges_as_plain_factors_is_merged_so(init: str, tmp_path: Path) -> None:
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    from peft.tuners.lora.config import VeloraConfig

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, hidden_size=H, intermediate_size=40, **heads))
    model.save_pretrained(tmp_path / "base")
    setting = {"velora_config": VeloraConfig(num_groups=4)} if init == "velora" else {"init_lora_weights": init}
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **setting))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "peft")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    for name, want in load_file(tmp_path / "peft/model.safetensors").items():
        np.testing.assert_allclose(weights[name], want, rtol=2e-6, atol=1e-6, err_msg=name)


def test_what_velora_saves_of_its_training_is_left_out(tmp_path: Path) -> None:
    tensors = factors(Q, H, H)
    model = base(tmp_path / "base")
    want = baked(model, adapter(tmp_path / "a", tensors), tmp_path / "one")
    extended = tensors | {f"{P}{Q}.lora_velora_embed": normal(4, 6)}
    weights = baked(model, adapter(tmp_path / "b", extended, velora_config={"num_groups": 6}), tmp_path / "two")
    assert {n: a.tobytes() for n, a in weights.items()} == {n: a.tobytes() for n, a in want.items()}
    assert "lora_velora_embed' is no A or B of a LoRA" in str(refusal(model, adapter(tmp_path / "c", extended)))
