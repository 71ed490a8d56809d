"""Which type llama.cpp gives each tensor of a GGUF file: its mixtures of types.

The rules are those of llama.cpp's `llama_model_quantize` (src/llama-quant.cpp), so that a file has the same types and the same
bytes as one that llama.cpp makes from the model's F32 file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weightsmith._base.errors import nearest
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.base.tensors import is_norm, is_router
from weightsmith._models.formats.gguf.writing import TYPES


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of types, as llama.cpp calls it.

    name     Q4_K_M
    number   llama.cpp's, in general.file_type
    default  the type of what no rule names
    """

    name: str
    number: int
    default: str


MIXTURES = tuple(
    Mixture(*mixture)
    for mixture in (
        ("F32", 0, "F32"),
        ("F16", 1, "F16"),
        ("BF16", 32, "BF16"),
        ("Q8_0", 7, "Q8_0"),
        ("Q6_K", 18, "Q6_K"),
        ("Q5_K_M", 17, "Q5_K"),
        ("Q5_K_S", 16, "Q5_K"),
        ("Q5_1", 9, "Q5_1"),
        ("Q5_0", 8, "Q5_0"),
        ("Q4_K_M", 15, "Q4_K"),
        ("Q4_K_S", 14, "Q4_K"),
        ("Q4_1", 3, "Q4_1"),
        ("Q4_0", 2, "Q4_0"),
        ("MXFP4_MOE", 38, "MXFP4"),
        ("NVFP4", 39, "NVFP4"),
        ("IQ4_NL", 25, "IQ4_NL"),
        ("IQ4_XS", 30, "IQ4_XS"),
        ("Q3_K_L", 13, "Q3_K"),
        ("Q3_K_M", 12, "Q3_K"),
        ("Q3_K_S", 11, "Q3_K"),
        ("IQ3_M", 27, "IQ3_S"),
        ("IQ3_S", 26, "IQ3_S"),
        ("IQ3_XS", 22, "IQ3_S"),
        ("IQ3_XXS", 23, "IQ3_XXS"),
        ("Q2_K", 10, "Q2_K"),
        ("Q2_K_S", 21, "Q2_K"),
        ("IQ2_M", 29, "IQ2_S"),
        ("IQ2_S", 28, "IQ2_XS"),
        ("IQ2_XS", 20, "IQ2_XS"),
        ("IQ2_XXS", 19, "IQ2_XXS"),
    )
)
COPIED = Mixture("COPY", 0, "BF16")
"""As llama.cpp calls it: the types of the inputs. The default is for what no GGUF file has; `file_type` gives the number."""

_FALLBACK = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    **dict.fromkeys(("Q6_K", "NVFP4"), "Q8_0"),
}
"""Where the rows are no multiple of 256, or of 64."""

_CHOOSES = re.compile(r"\.indexer\.proj\.weight$|hc_[a-z_]+\.weight$|_compressor_ape\.weight$")
"""What llama.cpp's converter stores as F32; its quantiser does not. It decides what a token attends to, or mixes streams."""
_PLAIN = (
    *(".ssm_conv1d.weight", ".ssm_conv1d_q.weight", ".ssm_conv1d_k.weight", ".ssm_conv1d_v.weight", ".shortconv.conv.weight"),
    *("position_embd.weight", "token_types.weight", ".altup_correct_coef.weight", ".altup_predict_coef.weight"),
    *(".indexer.q_proj.weight", ".indexer.k_proj.weight"),
)
"""Endings of the names of weights that llama.cpp leaves unquantised, besides vectors, norms and routers."""

_TABLE = ".ffn_gate_tid2eid.weight"
"""The experts of each token, in layers that choose them so."""
_KEPT = re.compile(r"per_layer_model_proj|altup|laurel")
"""Matrices that llama.cpp leaves as they are, too: plain numbers in files of plain numbers, else F32."""

TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
"""Embeddings of tokens."""

_TINY = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})
_IQ4 = frozenset({"IQ4_NL", "IQ4_XS"})
_OF_EIGHT = frozenset("Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS".split())
"""Mixtures that store the attention's output of eight experts' models as Q5_K."""

_LAYER = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at besides names.

    layers, heads, kv_heads, experts  of the model; 0 heads of k: those of its first layer, which has no attention
    attention  layers that have a v, in order; (): all
    mlps      layers that have an MLP, in order; (): all
    tied      the embedding is the head too
    weighted  there are importances
    big       Llama's 70B, whose v is small beside q
    plain_heads  Ling, whose heads of a latent vector are not MXFP4 beside experts that are
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool
    weighted: bool
    big: bool
    attention: tuple[int, ...] = ()
    mlps: tuple[int, ...] = ()
    plain_heads: bool = False

    @property
    def group(self) -> int:
        """Heads of q that share one of k."""
        return self.heads // self.kv_heads if self.kv_heads else 0


Chosen = Sequence[tuple[re.Pattern[str], str]]
"""Types that were asked for, by patterns of llama.cpp's names; the last one that matches wins, as in llama.cpp."""


def read_types(texts: Iterable[str]) -> tuple[Chosen, list[str]]:
    """Types from `ffn_down=Q6_K`, and what is wrong with those that are not.

    >>> [(pattern.pattern, kind) for pattern, kind in read_types(["ffn_down=q6_k"])[0]]
    [('ffn_down', 'Q6_K')]
    """
    types, problems = list[tuple[re.Pattern[str], str]](), list[str]()
    for text in texts:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern:
            problems.append(f"'{text}' is not REGEX=TYPE, such as ffn_down=Q6_K")
        elif kind.upper() not in TYPES:
            problems.append(f"'{kind}' is no type of GGUF{nearest(kind.upper(), TYPES)}; the types are {', '.join(TYPES)}")
        else:
            try:
                types.append((re.compile(pattern), kind.upper()))
            except re.error as error:
                problems.append(f"'{pattern}' is not a regular expression: {error}")
    return types, problems


def type_of(mixture: Mixture, spec: TensorSpec, shape: Shape, chosen: Chosen = ()) -> str:
    """The type of a tensor, by ggml's name. Vectors, norms and routers are F32, whatever is asked for.

    spec    under llama.cpp's name
    chosen  from `read_types`
    """
    name = spec.name
    if name.endswith(_TABLE):
        return "I32"
    small = math.prod(spec.shape[:-1]) == 1 or not name.endswith(".weight")  # for ggml, a matrix of one row is a vector
    if small or is_norm(name) or is_router(name) or name.endswith(_PLAIN):  # they decide much
        return "F32"
    asked = next((kind for pattern, kind in reversed(chosen) if pattern.search(name)), "")
    if not asked and mixture.default in ("F32", "F16", "BF16"):
        return "F32" if _CHOOSES.search(name) else mixture.default
    if _KEPT.search(name):
        return "F32"
    several = len(spec.shape) == 3 and spec.shape[0] > 1
    if mixture.name == "MXFP4_MOE":  # experts, and DeepSeek's heads
        ruled = "MXFP4" if several and not (shape.plain_heads and "_exps." not in name) else "Q8_0"
    elif mixture.name == "NVFP4":  # as NVIDIA's checkpoints have it: the embedding and the head have more bits
        ruled = "NVFP4" if _LAYER.match(name) else "Q8_0"
    elif mixture.name == COPIED.name:
        ruled = mixture.default
    else:
        ruled = _by_rule(mixture.name, mixture.default, name, spec.shape[-1], shape)
    return fitting(asked or ruled, spec.shape[-1])


_NOT_WRITTEN = {"IQ1_S": 24, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37}
"""llama.cpp's numbers of mixtures that are read only."""


def file_type(types: Iterable[str]) -> int:
    """llama.cpp's number of the mixture whose default most matrices have.

    >>> file_type(["Q4_K", "Q6_K", "Q4_K"]), file_type(["IQ1_S"]), file_type([])
    (15, 24, 0)
    """
    (most, _), *_ = Counter(types).most_common(1) or [("F32", 0)]
    alike = [mixture for mixture in MIXTURES if mixture.default == most]
    best = [mixture for mixture in alike if mixture.name.endswith("_M")] or alike
    return best[0].number if best else _NOT_WRITTEN[most]


def fitting(kind: str, cols: int) -> str:
    """The type for rows of this width: the type itself, or what llama.cpp takes where the rows have no whole blocks.

    >>> fitting("Q4_K", 4096), fitting("Q4_K", 576), fitting("Q4_K", 100)
    ('Q4_K', 'Q5_0', 'F16')
    """
    if cols % TYPES[kind].block:
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if cols % TYPES[kind].block else kind


def _by_rule(mix: str, default: str, name: str, cols: int, shape: Shape) -> str:
    """The type before it is known whether the rows have whole blocks."""
    match = _LAYER.match(name)
    i, n = (int(match[1]), shape.layers) if match else (0, shape.layers)
    eight, four = shape.experts == 8, shape.group >= 4
    if name == "output.weight" or (shape.tied and name in TABLES):
        if cols % TYPES[default].block or default == "Q8_0":
            return "Q8_0"
        return "Q5_K" if mix in _TINY or mix == "IQ3_XXS" else "Q6_K"
    if name in TABLES:
        small = {"IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S", "IQ3_XXS": "IQ3_S"}
        return small.get(mix, default)
    part = name.split(".")[-2]
    if part.startswith("ffn_") and shape.experts < 2 and i in shape.mlps:  # llama.cpp counts them, but not in mixtures
        i = shape.mlps.index(i)
    if mix in _TINY:
        better = "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else "Q2_K"
        if part in ("attn_v", "attn_qkv"):
            return "Q4_K" if four or shape.experts >= 4 else better
        if part == "attn_k" and eight:
            return "Q4_K"
        if part.startswith("ffn_down") and i < n // 8:
            return better
        if part == "attn_output":
            return "Q5_K" if eight else "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else default
        return default
    if part in ("attn_v", "attn_qkv"):
        if i in shape.attention:  # llama.cpp counts them
            i, n = shape.attention.index(i), len(shape.attention)
        return _of_v(mix, default, i, n, shape)
    if part in ("attn_k", "attn_q"):
        if part == "attn_k" and eight:
            return "Q8_0"
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(mix, default)
    if part.startswith("ffn_down"):
        return _of_down(mix, default, i, n, shape)
    if part == "attn_output":
        if eight:
            return "Q5_K" if mix in _OF_EIGHT else default
        finer = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
        return finer.get(mix, default)
    if part.startswith(("ffn_gate", "ffn_up")) and mix == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
        return "IQ3_XXS"
    return default


def _more_bits(i: int, n: int) -> bool:
    """Layers where more bits help most: the first and the last eighth, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _of_v(mix: str, default: str, i: int, n: int, shape: Shape) -> str:
    four = shape.group >= 4
    kind = default
    if mix == "Q2_K":
        kind = "Q4_K" if four else "Q3_K"
    elif mix == "Q2_K_S" and four:
        kind = "Q4_K"
    elif mix == "IQ3_XXS":
        kind = "Q4_K" if four else "IQ3_XXS" if shape.weighted else "IQ3_S"
    elif (mix in ("IQ3_XS", "IQ3_S") and four) or mix == "IQ3_M":
        kind = "Q4_K"
    elif mix == "Q3_K_M":
        kind = "Q5_K" if i < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (mix in _IQ4 and four):
        kind = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(i, n):
        kind = "Q6_K"
    elif mix == "Q4_K_S" and i < 4:
        kind = "Q5_K"
    if shape.big and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if shape.experts == 8 else kind


def _of_down(mix: str, default: str, i: int, n: int, shape: Shape) -> str:
    in_first_eighth = i < n // 8
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S":
        return "Q4_K" if in_first_eighth else default
    if mix == "IQ3_XXS" and not shape.weighted:
        return "Q4_K" if in_first_eighth else "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    if mix == "IQ3_M":
        return "Q4_K" if in_first_eighth or (shape.experts == 8 and _more_bits(i, n)) else default
    if mix == "Q3_K_L":
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _more_bits(i, n) else default
    if in_first_eighth and ((mix in _IQ4 and not shape.weighted) or mix == "Q4_K_S"):
        return "Q5_K"
    if in_first_eighth and shape.weighted:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}.get(mix, default)
    return default
