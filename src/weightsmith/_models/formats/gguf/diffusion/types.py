"""Which type each tensor of a diffusion model gets in a GGUF file for ComfyUI.

    convert.py                          lcpp.patch, for matrices in the blocks
    vectors, up to 1,024 elements  F32  mixtures of types by names: values and MLPs' outputs have more bits
    BF16 models                    BF16 rows that are no multiple of 256, in a mixture of types of 256  F16
    others                         F16
    convolutions over time         F32

Vectors of F16 models stay F16.

Differences, on purpose:

* A tensor outside layers, such as `x_pad_token`, is F32 where `convert.py` writes BF16: ComfyUI-GGUF decodes BF16 only in
  weights and biases of layers, and had to name three exceptions.
* Rows that are no multiple of 32 are F16, in types of 32. llama-quantize aborts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.diffusion.families import DiffusionFamily
from weightsmith._models.formats.gguf.types import Chosen, Mixture
from weightsmith._models.formats.gguf.writing import PLAIN, TYPES

MIXTURES = frozenset(
    "F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 Q3_K_L Q3_K_M Q3_K_S Q2_K Q2_K_S".split()
)
"""The mixtures that diffusion models can be written in. There are no rules for others."""

FOLDED_ROW = 256
_SMALL = 1024
"""A tensor of up to this many elements is always F32."""
_LEAST_FOLDED = 512
"""A tensor of fewer elements is not folded."""
_MOST_DIMENSIONS = 4

_VALUES = ("attn_v.weight", ".to_v.weight", ".v.weight", ".attn.w1v.weight", ".attn.w2v.weight", "_attn.v_proj.weight")
_JOINED = ("attn_qkv.weight", "attn.qkv.weight", "attention.qkv.weight")
_DOWN = (
    "ffn_down",
    ".ffn.2.weight",
    ".ff.net.2.weight",
    ".mlp.layer2.weight",
    ".adaln_modulation_mlp.2.weight",
    ".feed_forward.w2.weight",
)

_OF_VALUES: Mapping[str, str] = MappingProxyType({"Q2_K": "Q3_K", "Q3_K_L": "Q5_K", "Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K"})
_OF_FIRST_VALUES: Mapping[str, tuple[int, str, str]] = MappingProxyType(
    {"Q3_K_M": (2, "Q5_K", "Q4_K"), "Q4_K_S": (4, "Q5_K", "Q4_K")}
)
"""Mixture → how many matrices come first, their type, and the type of all others."""
_OF_JOINED: Mapping[str, str] = MappingProxyType({"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"})
_OF_DOWN: Mapping[str, str] = MappingProxyType(
    {"Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "Q4_K_S": "Q5_K", "Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K", "Q4_0": "Q4_1", "Q5_0": "Q5_1"}
)


def folded(family: DiffusionFamily, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor has in the file.

    >>> from weightsmith._models.formats.gguf.diffusion.families import FAMILIES
    >>> unet = next(family for family in FAMILIES if family.name == "sd1")
    >>> folded(unet, (320, 4, 3, 3)), folded(unet, (320, 768))
    ((45, 256), (320, 768))
    """
    size = TensorSpec("", TYPES["F32"], shape).size
    folds = family.folds and len(shape) > 1 and size >= _LEAST_FOLDED and size % FOLDED_ROW == 0 and shape[-1] % FOLDED_ROW
    return (size // FOLDED_ROW, FOLDED_ROW) if folds else shape


def types_of(mixture: Mixture, family: DiffusionFamily, specs: Iterable[TensorSpec], chosen: Chosen = ()) -> list[str]:
    """ggml's names of the types of a model's tensors, in order.

    specs   with the names and dtypes of a single file
    chosen  from `read_types`: for weights with two dimensions or more
    """
    types, values = list[str](), 0
    for spec in specs:
        stored = folded(family, spec.shape)
        asked = next((kind for pattern, kind in reversed(chosen) if pattern.search(spec.name)), "")
        if _is_weight(spec.name, stored) and asked:
            kind = asked
        elif mixture.default in PLAIN or not _is_quantised(family, spec.name, stored):
            kind = _plain(mixture, family, spec)
        else:
            kind = _by_rule(mixture, spec.name, values)
            values += _has(spec.name, _VALUES)
        types.append("F16" if stored and stored[-1] % TYPES[kind].block else kind)
    return types


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def _dimensions(shape: tuple[int, ...]) -> int:
    """As ggml counts dimensions: without leading ones."""
    first = next((i for i, length in enumerate(shape) if length != 1), len(shape))
    return len(shape) - first


def _is_weight(name: str, stored: tuple[int, ...]) -> bool:
    return name.endswith("weight") and 2 <= _dimensions(stored) and len(stored) <= _MOST_DIMENSIONS


def _is_quantised(family: DiffusionFamily, name: str, stored: tuple[int, ...]) -> bool:
    """Whether a tensor is one of the matrices in the blocks. stored: its shape in the file."""
    if not name.endswith("weight") or _dimensions(stored) != 2 or "_norm.weight" in name:
        return False
    return not _has(name, family.kept) and name not in family.kept_whole


def _plain(mixture: Mixture, family: DiffusionFamily, spec: TensorSpec) -> str:
    """The type of a tensor that is not stored as blocks."""
    if len(spec.shape) > _MOST_DIMENSIONS or mixture.name == "F32":
        return "F32"
    if len(spec.shape) < 2 or spec.size <= _SMALL or _has(spec.name, family.precise):
        in_f16 = spec.dtype.name == "F16" or spec.dtype.itemsize == 1  # F16 holds all 8-bit floats
        return "F16" if in_f16 and mixture.name != "BF16" else "F32"
    kind = mixture.name if mixture.name in PLAIN else "BF16" if spec.dtype.name == "BF16" else "F16"
    of_a_layer = spec.name.endswith((".weight", ".bias"))
    return "F32" if kind == "BF16" and not of_a_layer else kind


def _by_rule(mixture: Mixture, name: str, values: int) -> str:
    """The type of a matrix in the blocks. values: how many of `_VALUES` come before it."""
    if _has(name, _VALUES):
        if mixture.name in _OF_FIRST_VALUES:
            count, first, other = _OF_FIRST_VALUES[mixture.name]
            return first if values < count else other
        return _OF_VALUES.get(mixture.name, mixture.default)
    if _has(name, _JOINED):
        return _OF_JOINED.get(mixture.name, mixture.default)
    if _has(name, _DOWN) or ("experts." in name and ".w2.weight" in name):
        return _OF_DOWN.get(mixture.name, mixture.default)
    return mixture.default
