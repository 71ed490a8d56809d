"""(IA)³: a factor on each output of a module, or on each input of a feed-forward module (Liu et al. 2022, arXiv 2205.05638)."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes


def on_inputs(module: AdapterModule) -> bool:
    """Whether the factors scale the inputs. For linear layers their shape tells, for convolutions the config does."""
    shape, outputs, inputs = module.parts["ia3_l"].shape, module.shape[0], module.shape[1]
    if module.tensor == "bias":
        return False
    if len(module.shape) == 2:
        return shape == (1, inputs) and shape != (outputs, 1)
    if outputs != inputs:
        return len(shape) > 1 and shape[1] == inputs
    ends = module.settings.get("feedforward_modules") or []
    if not isinstance(ends, list):
        raise ValueError("feedforward_modules is a pattern, and both directions fit the weight: write a list of names")
    return module.name.endswith(tuple(map(str, ends)))


def shapes(module: AdapterModule) -> Shapes:
    """[outputs, 1] or [1, inputs] of linear layers, [1, outputs or inputs, 1, 1] of convolutions."""
    if not module.has("ia3_l"):
        raise ValueError("it has no ia3_l")
    number = module.shape[1] if on_inputs(module) else module.outputs
    if len(module.shape) > 2 or (module.tensor == "bias" and len(module.parts["ia3_l"].shape) > 2):
        return {"ia3_l": (1, number, *(1 for _ in module.parts["ia3_l"].shape[2:]))}
    return {"ia3_l": (1, number) if on_inputs(module) else (number, 1)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The factors of all columns of a row, or of all rows."""
    factors = arrays["ia3_l"].ravel()
    return (np.repeat(factors, module.inputs // module.shape[1]) if on_inputs(module) else factors,)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Multiply columns or rows."""
    (factors,) = arrays
    rows *= factors if on_inputs(module) else factors[first : first + len(rows), None]


def has_bias(module: AdapterModule) -> bool:
    """The bias of a module whose outputs are multiplied is multiplied too."""
    return not on_inputs(module)


KIND = AdapterKind(
    title="IA3",
    types=("IA3",),
    parts=("ia3_l",),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"feedforward_modules"}),
    unused=frozenset({"init_ia3_weights"}),
    biases=has_bias,
)
