"""Codes that no format has decoded: tensors that are no weights by themselves, although neither config.json nor a name says so.

Programs call scales by dozens of names, so what is looked for is not a name. A matrix of 8-bit floats is plain numbers only if
it is alone. If its module has another floating-point tensor, that may be a scale, and the numbers are codes:

    X.weight F8_E4M3, with X.scale, X.weight_scales, X.weight._scale or X_scale

A matrix of integers under the name of a weight is codes in any case. Other integers are positions, masks, tables of tokens or
counters. They are codes only if their module has a scale and no other weight. Some programs use names that no plain model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith.abc.stored import Specs

_UNDECODED = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_FLOAT8 = ("F8_E4M3", "F8_E5M2", *_UNDECODED)
_EXPONENTS = "F8_E8M0"
_WEIGHT = "weight"
_CODE_WORDS = frozenset("codes data fp8 int8 packed q qdata quantized values weight".split())
"""Last words of names of codes: the scale of X_qdata is X_scale."""
_SCALE_WORDS = ("scale", "scaling", "amax", "absmax", "zero", "codebook", "lut")
_HARMLESS_WORDS = ("bias", "norm", "gamma", "beta", "running", "correction")
"""Parts of names of tensors that plain weights have beside them."""
_TABLE_WORDS = ("index", "indices", "idx", "ids", "mask", "bias", "position", "coords")
"""Parts of names of integers that are no codes, even beside a learned scale."""

_PROGRAMS = {
    ".dense_weights": "SpQR",
    ".dqweight": "FP-Quant",
    ".forward_hadamard_matrix": "FP-Quant",
    ".centroids.weight": "VPTQ",
}
"""Ends of names of tensors that only one program has."""

_CODES = ("w_q", "b", "blocks")
"""Last components of names of codes: HQQ's, Marlin's and QQQ's, and those of gpt-oss's own files."""

_PARTS = frozenset("absmax centroids codebooks codes g_idx indices qidxs qweight qzeros scales w_q zeros".split())
"""Last components of names of tensors that plain models have not, whatever their dtype."""


def describe_codes(specs: Specs) -> str | None:
    """Which tensor holds codes, and how that shows; None if all tensors are plain numbers.

    >>> from weightsmith._base.tensors import DTYPES
    >>> found = TensorSpec("q.weight", DTYPES["F8_E4M3"], (8, 8)), TensorSpec("q.wscale", DTYPES["F32"], ())
    >>> describe_codes({spec.name: spec for spec in found})
    "F8_E4M3 codes in an unknown layout, beside 'q.wscale' F32 [] (tensor 'q.weight')"
    """
    ends = tuple(_PROGRAMS)
    for spec in specs.values():
        if spec.name.endswith(ends):
            program = next(program for end, program in _PROGRAMS.items() if spec.name.endswith(end))
            return f"{program} (tensor {show(spec.name)})"
        if spec.dtype.name == _EXPONENTS:
            return f"codes with scales in F8_E8M0 (tensor {show(spec.name)})"
        if _is_integer_weight(spec):
            return f"{spec.dtype} codes in an unknown layout (tensor {show(spec.name)})"
        if spec.dtype.name in _UNDECODED and len(spec.shape) > 1 and spec.size:
            return f"numbers in {spec.dtype}, which are not decoded (tensor {show(spec.name)})"
    for codes, scale in _pairs(specs):
        scale_text = f"beside {show(scale.name)} {scale.dtype} {list(scale.shape)}"
        return f"{codes.dtype} codes in an unknown layout, {scale_text} (tensor {show(codes.name)})"
    return None


def are_plain(specs: Specs) -> bool:
    """Weights are floating-point numbers of 16 bits or more, integers are tables, and no name is that of a part of codes.

    >>> from weightsmith._base.tensors import DTYPES
    >>> are_plain({"q.weight": TensorSpec("q.weight", DTYPES["BF16"], (8, 8))})
    True
    >>> are_plain({"q.scales": TensorSpec("q.scales", DTYPES["BF16"], (8, 8))})
    False
    """
    for spec in specs.values():
        leaf = spec.name.rpartition(".")[2].lower()
        table = any(word in leaf for word in _TABLE_WORDS) or spec.dtype.itemsize == 8
        if leaf in _PARTS or (may_be_codes(spec) and not table):
            return False
    return True


def may_be_codes(spec: TensorSpec) -> bool:
    """The tensor is codes if it has scales: 8-bit floats, or a matrix of integers."""
    return spec.dtype.name in _FLOAT8 or _is_integer_matrix(spec)


def _is_integer_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1 and spec.dtype.name[0] in "IU" and spec.size > 0


def _is_integer_weight(spec: TensorSpec) -> bool:
    if not _is_integer_matrix(spec):
        return False
    leaf = spec.name.rpartition(".")[2].lower()
    if any(word in leaf for word in _TABLE_WORDS):
        return False
    return _WEIGHT in leaf or leaf.endswith("_proj") or leaf in _CODES


def _pairs(specs: Specs) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """Codes, each with a tensor that shows what they are."""
    stems: dict[str, TensorSpec] = {}
    for spec in filter(may_be_codes, specs.values()):
        stems |= dict.fromkeys(_stems_of_codes(spec, specs), spec)
    for spec in specs.values() if stems else ():
        if not spec.dtype.floating or spec.dtype.name in _FLOAT8:
            continue
        for stem in _stems(spec.name):
            codes = stems.get(stem)
            if codes is not None and _is_scale(spec.name, stem, codes):
                yield codes, spec


def _stems_of_codes(codes: TensorSpec, specs: Specs) -> Iterator[str]:
    """What the names of the scales of these codes begin with: their own name, less a last word, or the module's."""
    module, _, leaf = codes.name.rpartition(".")
    yield codes.name
    head, _, word = leaf.rpartition("_")
    if head and word in _CODE_WORDS:
        yield f"{module}.{head}" if module else head
    elif leaf == f"_{word}" and word in _CODE_WORDS:  # of Quanto: X.weight._data
        yield module
    if codes.dtype.name in _FLOAT8:
        if leaf == _WEIGHT and len(codes.shape) > 1:
            yield module
    elif codes.dtype.itemsize <= 4 and not any(word in leaf for word in _TABLE_WORDS) and not _has_weight(module, specs):
        yield module


def _has_weight(module: str, specs: Mapping[str, TensorSpec]) -> bool:
    """A module has plain weights, so that its integers are something else: DeepSeek V4's router has a table of tokens."""
    weight = specs.get(f"{module}.{_WEIGHT}")
    return weight is not None and weight.dtype.floating


def _stems(name: str) -> Iterator[str]:
    """Beginnings of a name: up to its last dot, and up to each underscore after it.

    >>> list(_stems("mlp.up_proj.weight_scale"))
    ['mlp.up_proj', 'mlp.up_proj.weight']
    """
    start = max(name.rfind("."), 0)
    yield name[:start]
    while (start := name.find("_", start + 1)) > 0:
        yield name[:start]


def _is_scale(name: str, stem: str, codes: TensorSpec) -> bool:
    """A floating-point tensor may be the scale of codes. stem: of both."""
    rest = name.removeprefix(stem).lower()
    if any(word in rest for word in _HARMLESS_WORDS):
        return False
    belongs = stem == codes.name or not rest.startswith("_") or not stem
    return (belongs and codes.dtype.name in _FLOAT8) or any(word in rest for word in _SCALE_WORDS)
