"""VB-LoRA: factors that are mixtures of a few vectors of a bank, which all modules share (Li et al. 2024, arXiv 2405.15179)."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes

_LOGITS, _BANK = ("vblora_logits_A", "vblora_logits_B"), "vblora_vector_bank"
_INDICES, _WEIGHTS = "_topk_indices", "_topk_weights"


def shapes(module: AdapterModule) -> Shapes:
    """Logits [r, inputs / length, vectors] and [outputs / length, r, vectors], or which are the largest and their weights."""
    rank, vectors, length, top = (module.whole(key) for key in ("r", "num_vectors", "vector_length", "topk"))
    if module.inputs % length or module.outputs % length or top > vectors:
        raise ValueError(f"vectors of {length}, {top} of {vectors}, do not fit a weight {list(module.shape)}")
    sizes = (rank, module.inputs // length), (module.outputs // length, rank)
    expected: dict[str, tuple[int, ...]] = {_BANK: (vectors, length)}
    for part, size in zip(_LOGITS, sizes, strict=True):
        if module.has(part):
            expected[part] = (*size, vectors)
        else:
            expected |= {part + _INDICES: (*size, top), part + _WEIGHTS: (*size, top - 1)}
    return expected


def _mixtures(module: AdapterModule, arrays: Arrays, part: str) -> Rows:
    """The vectors […, length] that logits choose."""
    top, bank = module.whole("topk"), arrays[_BANK]
    if part in arrays:
        logits = arrays[part]
        chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :top]
        shares = np.take_along_axis(logits, chosen, axis=-1)
        shares = np.exp(shares - shares[..., :1])
        shares /= shares.sum(axis=-1, keepdims=True)
    else:
        chosen, shares = arrays[part + _INDICES].astype(np.int64), arrays[part + _WEIGHTS]
        shares = np.concatenate((shares, 1.0 - shares.sum(axis=-1, keepdims=True)), axis=-1)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(bank):
            raise ValueError(f"{part}{_INDICES} has a number that is none of {len(bank)} vectors")
    mixed: Rows = (shares[..., None] * bank[chosen]).sum(axis=-2)
    return mixed


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """B [outputs, r] and A [r, inputs]."""
    right, left = (_mixtures(module, arrays, part) for part in _LOGITS)
    return np.ascontiguousarray(left.transpose(0, 2, 1)).reshape(module.outputs, -1), right.reshape(-1, module.inputs)


def exact_shape(module: AdapterModule) -> tuple[int, int]:
    """The shape of the weight: as many vectors as there are logits."""
    parts = [part if module.has(part) else part + _INDICES for part in _LOGITS]
    if not module.has(*parts):
        raise ValueError(f"it has no {' or no '.join(parts)}")
    (_, inputs, *_), (outputs, *_) = (module.parts[part].shape for part in parts)
    return outputs * module.whole("vector_length"), inputs * module.whole("vector_length")


KIND = AdapterKind(
    title="VB-LoRA",
    types=("VBLORA",),
    parts=(*_LOGITS, *(part + end for part in _LOGITS for end in (_INDICES, _WEIGHTS))),
    shared=(_BANK,),
    shapes=shapes,
    prepare=prepare,
    exact=ExactFactors(exact_shape, lambda module: module.whole("r"), prepare),
    used=frozenset({"r", "num_vectors", "vector_length", "topk"}),
    unused=frozenset({"save_only_topk_weights", "vblora_dropout", "init_vector_bank_bound", "init_logits_std"}),
    integers=frozenset(part + _INDICES for part in _LOGITS),
)
