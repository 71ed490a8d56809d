"""Every key of adapter_config.json, and every kind of PEFT adapter: what each means for the weights.

A key of LoRA's config is used, or has no effect on the weights, or is refused with its reason. A key that is in no list may
change what the factors mean, as Unsloth's `lora_B_layout` does, so it is refused too, unless its value turns it off.

The lists hold the fields of PEFT 0.0.1 to 0.21.2 and the keys that Unsloth adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show

_MERGE_WITH_PEFT = "Merge it with peft (merge_and_unload, then save_pretrained), and name that folder."
_REPAIR = "Repair it, or download the adapter again."

USED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",  # Unsloth marks its adapters there
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_B_layout",  # Unsloth's
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "target_parameters",
        "task_type",
        "unsloth_fused_expert_lora",  # Unsloth's
        "use_dora",
        "use_rslora",
    }
)

WITHOUT_EFFECT = frozenset(
    {
        "corda_config",  # of initialisations: `init_lora_weights` says whether one was used
        "eva_config",
        "exclude_modules",  # which modules have factors is seen in the file
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",  # of PEFT up to 0.2: whether `eval()` merges
        "qalora_group_size",  # without `use_qalora`
        "revision",
        "runtime_config",
        "target_modules",
        "velora_config",  # changes the backward pass alone
    }
)


@dataclass(frozen=True, slots=True)
class NotApplied:
    """Why a setting is refused. by_peft: PEFT can merge it"""

    why: str
    by_peft: bool = True


NOT_APPLIED: Mapping[str, NotApplied] = {
    "lora_bias": NotApplied("a bias of B, which is added to the layer's own"),
    "use_qalora": NotApplied("QA-LoRA, which pools the inputs of A"),
    "use_bdlora": NotApplied("block-diagonal factors", by_peft=False),
    "layer_replication": NotApplied("layers that are repeated before the adapter is applied, and share weights", by_peft=False),
    "trainable_token_indices": NotApplied("single rows of the embedding, trained apart"),
    "alora_invocation_tokens": NotApplied("an activated LoRA, which is on for some tokens only", by_peft=False),
    "arrow_config": NotApplied("Arrow routing between several adapters", by_peft=False),
    "kasa_config": NotApplied("KaSA, which changes the base weights"),
    "monteclora_config": NotApplied("MonteCLoRA's sampled factors"),
    "megatron_config": NotApplied("layers of Megatron, which are split between devices"),
    "ensure_weight_tying": NotApplied("factors that embedding and head share"),
    "enable_lora": NotApplied("factors of some parts of a layer, as PEFT up to 0.2 had them", by_peft=False),
}
"""Settings with which B @ A is not all that the adapter does; each must be false, none or empty."""

PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base weights alone."""

CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Those that subtract their first B @ A from the base weights: the adapter is to that residual, which is not in any file."""

BIASES = ("none", "all", "lora_only")
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")

CONVERTED_KINDS = frozenset(
    "C3A DELORA FOURIERFT GRALORA LOHA LOKR MISS PSOFT RANDLORA TINYLORA UNILORA VBLORA VERA WAVEFT".split()
)
"""Types that `peft.convert_to_lora` converts (PEFT 0.21)."""

MERGED_KINDS = frozenset(
    "ADALORA ADAMSS BEFT BOFT DEFT FROD GLORA HIRA HRA IA3 LN_TUNING OFT OSF PEANUT PVERA ROAD SHIRA SUPERTUNING "
    "TRAINABLE_TOKENS".split()
)
"""Types that PEFT cannot convert, and merges."""

UNMERGED_KINDS = frozenset(
    "ADAPTION_PROMPT CARTRIDGE CPT LILY MULTITASK_PROMPT_TUNING POLY PREFIX_TUNING PROMPT_TUNING P_TUNING SHADOW XLORA".split()
)
"""Types that are no change of weights: prompts, routers and modules beside the model."""


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise Unsupported for an adapter that is not plain LoRA, with every reason, FormatError for values of a wrong type."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"an adapter of peft_type {show(kind)}, not LORA", where=where, fix=_fix_of_kind(kind))
    reasons = dict(_not_applied(config))
    unknown = [f"{show(key)}: {show(value)}" for key, value in config.items() if _unknown(key, value)]
    if reasons:
        fix = _MERGE_WITH_PEFT if all(reasons.values()) else "Use the adapter with peft, which cannot merge it either."
        what = "the adapter does more than LoRA, and would be applied wrongly"
        raise Unsupported(what, where=where, details=[*reasons, *unknown], fix=fix)
    if unknown:
        what = "keys that weightsmith does not know may change what the adapter's factors mean"
        fix = "Merge the adapter with the program that wrote it. If a key changes no weights, remove it from the file."
        raise Unsupported(what, where=where, details=unknown, fix=fix)
    if problems := list(_wrong_values(config)):
        raise FormatError("values that PEFT does not know", where=where, details=problems, fix=_REPAIR)


def _unknown(key: str, value: object) -> bool:
    """Whether a key may mean anything: new settings of PEFT are none, false or empty unless they are used."""
    return bool(value) and key not in USED | WITHOUT_EFFECT and key not in NOT_APPLIED


def _not_applied(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Reason → whether PEFT can merge the adapter all the same."""
    for key, reason in NOT_APPLIED.items():
        if config.get(key):
            yield f"{key}: {reason.why}", reason.by_peft
    bias = config.get("bias", "none")
    if bias in BIASES[1:]:
        yield f"bias: {show(bias)}: biases are trained too", True
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(CHANGING_INITS):
        yield f"init_lora_weights: {show(init)}: the base weights were changed before training", True


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    """What PEFT would not have written."""
    for key in ("fan_in_fan_out", "use_dora", "use_rslora"):
        if not isinstance(value := config.get(key), bool | None):
            yield f"{key} is {show(value)}, not true or false"
    if (bias := config.get("bias")) not in (None, *BIASES):
        yield f"bias is {show(bias)}, none of {', '.join(BIASES)}"
    if (init := config.get("init_lora_weights")) is not None and init not in PLAIN_INITS:
        yield f"init_lora_weights is {show(init)}: whether it changes the base weights is not known"
    if (task := config.get("task_type")) not in (None, *TASKS):
        yield f"task_type is {show(task)}, none of {', '.join(TASKS)}"
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
        yield f"modules_to_save is {show(saved)}, not a list of names"


def _fix_of_kind(kind: object) -> str:
    """What to do with an adapter of another type."""
    if not isinstance(kind, str):
        return "Name a folder that PEFT's save_pretrained has written."
    if kind in CONVERTED_KINDS:
        return f"Convert it with peft's convert_to_lora, and name the folder of the result. Or: {_MERGE_WITH_PEFT}"
    if kind in MERGED_KINDS:
        return _MERGE_WITH_PEFT
    if kind in UNMERGED_KINDS:
        return "Use the adapter with peft: it is no change of weights, so neither peft nor weightsmith can merge it."
    return "Merge it with the program that wrote it, and name the folder of the result."
