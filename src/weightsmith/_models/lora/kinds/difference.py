"""Whole differences of weights, biases and norms, as LyCORIS's `full` and ComfyUI's `diff` store them: W + diff."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes

_WEIGHTS, _BIASES = ("diff", "w_norm"), ("diff_b", "b_norm")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A kernel of one pixel is a matrix."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def shapes(module: AdapterModule) -> Shapes:
    """The shape of the weight; of a bias one number for each output."""
    parts = {part: spec.shape for part, spec in module.parts.items()}
    for pair in (_WEIGHTS, _BIASES):
        if module.has(*pair):
            raise ValueError(f"it has {' and '.join(pair)}")
    expected = dict.fromkeys((part for part in _WEIGHTS if part in parts), module.shape)
    alike = {part: parts[part] for part, shape in expected.items() if _without_ones(parts[part]) == _without_ones(shape)}
    return expected | alike | dict.fromkeys((part for part in _BIASES if part in parts), (module.outputs,))


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """What is added, as rows."""
    names = _WEIGHTS if module.tensor == "weight" else _BIASES
    difference = next(arrays[part] for part in names if part in arrays)
    scale = float(module.settings.get("scale", 1.0))  # the scaling of a LoRA whose B has a bias
    return (np.ascontiguousarray(difference.reshape(module.outputs, -1)) * scale,)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add these rows."""
    rows += arrays[0][first : first + len(rows)]


KIND = AdapterKind(
    title="whole differences",
    types=(),
    parts=(*_WEIGHTS, *_BIASES),
    shapes=shapes,
    prepare=prepare,
    change=change,
    biases=lambda module: any(part in module.parts for part in _BIASES),
    of_biases=frozenset(_BIASES),
    vectors=True,
)
