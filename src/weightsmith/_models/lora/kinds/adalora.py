"""AdaLoRA: a LoRA in the form of a singular value decomposition, whose rank was shared out during training (Zhang et al. 2023,
arXiv 2303.10512): W + lora_alpha / init_r · B @ (E ∘ A).
"""

from __future__ import annotations

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes


def shapes(module: AdapterModule) -> Shapes:
    """A [r, inputs], E [r, 1] and B [outputs, r]: r is what training has left of `init_r`, possibly nothing."""
    shape = module.parts["lora_A"].shape if module.has("lora_A") else ()
    if len(shape) != 2:
        raise ValueError(f"lora_A is {list(shape)}, not [r, inputs]")
    return {"lora_A": (shape[0], module.inputs), "lora_E": (shape[0], 1), "lora_B": (module.outputs, shape[0])}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """B, and E ∘ A times the scaling."""
    rank = module.whole("init_r", 12)
    alpha = module.number("lora_alpha", 8)
    # PEFT takes the rank of the module where alpha is no positive number, and adds 1e-5 to what it divides by.
    scaling = (alpha if alpha > 0 else arrays["lora_A"].shape[0]) / (rank + 1e-5)
    return arrays["lora_B"], scaling * (arrays["lora_A"] * arrays["lora_E"])


def exact_shape(module: AdapterModule) -> tuple[int, int]:
    """The shape of the weight."""
    if not module.has("lora_A", "lora_B"):
        raise ValueError("it has no lora_A, or no lora_B")
    return module.parts["lora_B"].shape[0], module.parts["lora_A"].shape[-1]


KIND = AdapterKind(
    title="AdaLoRA",
    types=("ADALORA",),
    parts=("lora_A", "lora_B", "lora_E"),
    shapes=shapes,
    prepare=prepare,
    exact=ExactFactors(exact_shape, lambda module: module.parts["lora_A"].shape[0], prepare),
    used=frozenset({"init_r", "lora_alpha"}),
    unused=frozenset(
        "target_r tinit tfinal deltaT beta1 beta2 orth_reg_weight total_step rank_pattern r lora_dropout alpha_pattern "
        "init_lora_weights loftq_config megatron_core qalora_group_size".split()
    ),
)
