"""What PEFT calls the tensors of an adapter, and its adapter_config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weightsmith.adapters.factors import Form

PREFIX = "base_model.model."


def factor_names(module: str, form: Form) -> tuple[str, str]:
    """The names of A and B of a module.

    >>> factor_names("lm_head", "linear")
    ('base_model.model.lm_head.lora_A.weight', 'base_model.model.lm_head.lora_B.weight')
    """
    inner = "lora_embedding_{}" if form == "embedding" else "lora_{}.weight"
    a, b = (f"{PREFIX}{module}.{inner.format(part)}" for part in "AB")
    return a, b


def norms_name(module: str) -> str:
    """The name of DoRA's norms of a module."""
    return f"{PREFIX}{module}.lora_magnitude_vector"


def adapter_config(
    base: str,
    revision: str,
    ranks: Mapping[str, int],
    whole: Sequence[str],
    modules: Sequence[str],
    *,
    transposed: bool,
    causal: bool,
    parameters: Sequence[str] = (),
    rank: int | None = None,
    dora: bool = False,
) -> dict[str, Any]:
    """adapter_config.json. Every scaling is 1: alpha is the rank.

    base        name of the base model, `revision` of it on the Hub
    ranks       of each module with factors, and of each of `parameters`
    whole       modules that are saved whole
    modules     names for the modules with factors (`targets`)
    transposed  weights are [inputs, outputs]
    causal      the base is a causal language model
    parameters  those of `ranks` that hold all experts: `target_parameters`
    rank        `r`, if not the largest
    dora        factors come with norms
    """
    largest = rank or max(ranks.values(), default=1)
    others = {module: rank for module, rank in ranks.items() if rank != largest}
    # PEFT looks for the rank of a parameter, readers of the factors of a matrix for that of its module.
    others |= {name.removesuffix(".weight"): rank for name, rank in others.items() if name in parameters}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base,
        "revision": revision or None,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": list(modules),
        **({"target_parameters": list(parameters)} if parameters else {}),
        "modules_to_save": list(whole) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "use_dora": dora,
        "init_lora_weights": True,
    }
    return config


def targets(chosen: Collection[str], modules: Collection[str]) -> list[str]:
    """Names for `target_modules`, which match the ends of the names of modules: the last component where that is enough.

    >>> targets(["l.0.q", "l.1.q", "l.0.up"], ["l.0.q", "l.1.q", "l.0.up", "l.1.up"])
    ['l.0.up', 'q']
    """
    wanted, last = set(chosen), {module: module.rpartition(".")[2] for module in modules}
    shared = {last[module] for module in modules if module not in wanted and module in last}
    return sorted({module if (end := module.rpartition(".")[2]) in shared else end for module in wanted})
