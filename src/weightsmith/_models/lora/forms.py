"""How files name the factors of an adapter, and what names show that something else than B @ A was trained.

A new way to name factors is a line of `PAIRS`; a kind of adapter that is not read is a line of `OTHER_KINDS`. Names alone are
looked at, so both serve files of adapters and models that hold an adapter which was never merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from weightsmith._base.files import show
from weightsmith._base.text import count


@dataclass(frozen=True, slots=True)
class FactorNames:
    """How the factors of a module are named: its name, and one of two endings. The update of its weight is B @ A.

    a, b       endings of A [rank, inputs] and B [outputs, rank]
    embedding  A is [rank, tokens] and B [hidden, rank]: the update of an embedding is the transpose
    """

    a: str
    b: str
    embedding: bool = False


PAIRS = (
    FactorNames(".lora_A.weight", ".lora_B.weight"),  # PEFT, diffusers, AI Toolkit
    FactorNames(".lora_A.default.weight", ".lora_B.default.weight"),  # PEFT, while it trains
    FactorNames(".lora_embedding_A", ".lora_embedding_B", embedding=True),
    FactorNames(".lora_embedding_A.default", ".lora_embedding_B.default", embedding=True),
    FactorNames(".lora_down.weight", ".lora_up.weight"),  # kohya's scripts, musubi-tuner
    FactorNames(".lora.down.weight", ".lora.up.weight"),  # diffusers, with to_q.lora.down
    FactorNames(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),  # diffusers, text encoders
    FactorNames("_lora.down.weight", "_lora.up.weight"),  # diffusers until 2023: attn1.processor.to_q_lora.down
    FactorNames(".lora_A", ".lora_B"),  # genmo's Mochi
)

ALPHA = ".alpha"
"""Ending of a number of a module: B @ A is multiplied with it over the rank."""

DORA = "DoRA"

OTHER_KINDS: Mapping[str, str] = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "a Tucker decomposition (LoCon's lora_mid)",
    "dora_scale": DORA,
    "lora_magnitude_vector": DORA,
    "oft_": "OFT",
    "boft_": "BOFT",
    "ia3_": "IA3",
    "on_input": "IA3",
    "vera_": "VeRA",
    "pvera_": "PVeRA",
    "randlora_": "RandLora",
    "vblora_": "VB-LoRA",
    "tinylora_": "TinyLoRA",
    "unilora_": "UniLoRA",
    "delora_": "DeLoRA",
    "gralora_": "GraLoRA",
    "glora_": "GLoRA",
    "poly_lora_": "Poly",
    "fourierft_": "FourierFT",
    "waveft_": "WaveFT",
    "shira_": "SHiRA",
    "c3a_": "C3A",
    "hra_u": "HRA",
    "hira_": "HiRA",
    "bone_": "Bone",
    "miss_block": "MiSS",
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "lora_a": "a LoRA of MLX, [inputs, rank]",
    "lora_b": "a LoRA of MLX, [rank, outputs]",
    "trainable_tokens_": "single rows of an embedding, trained apart",
    "diff": "whole differences",
    "diff_b": "differences of biases",
    "diff_m": "differences of modulations",
    "w_norm": "whole norms",
    "b_norm": "whole norms",
    "set_weight": "whole weights in place of the model's",
    "reshape_weight": "a weight that is enlarged first",
}
"""The last part of a name, or its beginning if it ends with `_` → what the tensor is of: no B @ A that is added to a weight."""

_GENERAL = frozenset({"diff", "diff_b", "diff_m", "w_norm", "b_norm", "set_weight", "reshape_weight", "on_input", "ranknum"})
"""Endings that some models' tensors have, too: by themselves they are no sign of an adapter."""

_TRAINED = ("lora_", "lycoris_")
"""What names of all tensors begin with in the files of kohya's scripts and of LyCORIS."""

_ENDINGS = {ending: (pair, part) for pair in PAIRS for ending, part in ((pair.a, "A"), (pair.b, "B"))}
_ALL_ENDINGS = tuple(_ENDINGS)
_PREFIXES = tuple(key for key in OTHER_KINDS if key.endswith("_"))
_NAMED = re.compile(r"(.+)\.lora_([AB])\.(\w[\w-]*)\.weight", re.ASCII)
_HINT = re.compile(
    "|".join(("lora", "dora", "lycoris_", "base_layer", *(re.escape(k) for k in OTHER_KINDS if k not in _GENERAL)))
)

BASE_LAYER = ".base_layer."
"""What PEFT puts into the names of tensors of a module that it has wrapped."""


def as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A kernel [outputs, inputs, height, width] as the matrix that it is for factors: [outputs, all else].

    >>> as_matrix((8, 4, 3, 3)), as_matrix((8, 4))
    ((8, 36), (8, 4))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape


def split_factor(name: str) -> tuple[str, str, FactorNames] | None:
    """The module of a factor, `A` or `B`, and how it is named; None for another tensor.

    >>> split_factor("lora_unet_mid_block_attn.lora_up.weight")[:2], split_factor("model.norm.weight")
    (('lora_unet_mid_block_attn', 'B'), None)
    """
    if not name.endswith(_ALL_ENDINGS):
        return None
    ending = max((ending for ending in _ALL_ENDINGS if name.endswith(ending)), key=len)
    pair, part = _ENDINGS[ending]
    module = name.removesuffix(ending)
    return (module, part, pair) if module else None


def other_kind(name: str) -> str:
    """What a tensor is part of that is no B @ A; "" for one that is of no known kind.

    >>> other_kind("lora_unet_x.hada_w1_a"), other_kind("a.oft_R.default.weight"), other_kind("a.soft_cap.weight")
    ('LoHa', 'OFT', '')
    """
    last = name.rsplit(".", 3)[1:]
    for part in last:
        if part in OTHER_KINDS:
            return OTHER_KINDS[part]
        if part.startswith(_PREFIXES):
            return next(OTHER_KINDS[prefix] for prefix in _PREFIXES if part.startswith(prefix))
    return ""


@dataclass(frozen=True, slots=True)
class Factored:
    """The tensors of a model or a file that are of an adapter.

    modules   with A and B
    adapters  their names: "" for the only one, and for PEFT's `default`. A model may have several of its own
    kinds     of the tensors of adapters of other kinds
    layers    modules that PEFT has wrapped: `base_layer` is in the names of their tensors
    """

    modules: tuple[str, ...]
    adapters: tuple[str, ...]
    kinds: tuple[str, ...]
    layers: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.modules or self.kinds or self.layers)

    def has_base_in(self, names: Container[str]) -> bool:
        """Whether the weights that the factors are of are among some tensors too."""
        return any(f"{module}.weight" in names for module in self.modules)

    def __str__(self) -> str:
        parts = [f"factors of {count(len(self.modules), 'module')}, such as {show(self.modules[0])}"] if self.modules else []
        parts += [f"tensors of {', '.join(self.kinds)}"] if self.kinds else []
        return " and ".join(parts) or f"names with {BASE_LAYER.strip('.')}, such as {show(self.layers[0])}"


def find_factors(names: Iterable[str]) -> Factored:
    """What of some tensors is an adapter's. Cost: about 0.3 µs a name if nothing is."""
    hinting = [name for name in names if _HINT.search(name)]
    parts = [factor for name in hinting if (factor := _factor_of(name))]
    of_b = {(module, adapter) for module, part, adapter in parts if part == "B"}
    both = [(module, adapter) for module, part, adapter in parts if part == "A" and (module, adapter) in of_b]
    return Factored(
        tuple(dict.fromkeys(module for module, _ in both)),
        tuple(dict.fromkeys(adapter for _, adapter in both)),
        tuple(dict.fromkeys(_kinds(hinting))),
        tuple(dict.fromkeys(name.partition(BASE_LAYER)[0] for name in hinting if BASE_LAYER in name)),
    )


def unnamed(name: str) -> str:
    """The name of a factor without that of its adapter.

    >>> unnamed("layers.0.q.lora_A.speech.weight")
    'layers.0.q.lora_A.weight'
    """
    match = _NAMED.fullmatch(name)
    return f"{match[1]}.lora_{match[2]}.weight" if match else name


def _factor_of(name: str) -> tuple[str, str, str] | None:
    """Module, `A` or `B`, and name of the adapter."""
    if factor := split_factor(name):
        return factor[0], factor[1], ""
    match = _NAMED.fullmatch(name)
    return (match[1], match[2], match[3]) if match else None


def _kinds(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        of_adapter = name.rpartition(".")[2] not in _GENERAL or name.startswith(_TRAINED)
        if of_adapter and (kind := other_kind(name)):
            yield kind
