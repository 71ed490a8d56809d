"""The vision halves that llama.cpp reads from a file of their own, `mmproj.gguf`: names of tensors, types and keys.

llama.cpp stores the weights of a vision half as the Hub does, with two exceptions: the rows of q and k of Pixtral are reordered
within each head, as those of Llama are, and one norm of Gemma 3 is stored with 1 added.

A new family is an entry of `PROJECTORS`, if its tensors differ from the Hub's by no more than that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._models.formats.gguf.config import Config
from weightsmith._models.formats.gguf.families import Fixed
from weightsmith._models.formats.gguf.layout import Value, ValueType

PROCESSOR = ("preprocessor_config.json", "processor_config.json")
"""Files that say how images are prepared. The later one wins."""

_SIZES = MappingProxyType(
    {
        "image_size": "image_size",
        "patch_size": "patch_size",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
    }
)
"""Keys under `clip.vision.` and the field of vision_config that each is."""


@dataclass(frozen=True, slots=True)
class Images:
    """What a model's files say of its vision half.

    whole      config.json
    vision     its `vision_config`
    processor  the files of `PROCESSOR`, as one
    """

    whole: Config
    vision: Config
    processor: Config


@dataclass(frozen=True, slots=True)
class ImageKey:
    """A key that only some vision halves have.

    name  in the file, after `clip.`
    kind  of its value
    read  the value; None: the file lacks the key
    """

    name: str
    kind: ValueType
    read: Callable[[Images], int | float | None]


@dataclass(frozen=True, slots=True)
class Projector:
    """The vision half of a family of models, under its names in both formats.

    model_type    in config.json
    vision_type   in its vision_config; "": any
    name          llama.cpp's, in `clip.projector_type`
    blocks        how the Hub's names of tensors in layers begin, before the number
    layer         modules of a layer: llama.cpp's name → the Hub's
    ends          modules outside of the layers: llama.cpp's name → the Hub's
    bare          tensors whose Hub name has no `.weight`: llama.cpp's name → the Hub's; `{}` is the layer
    activations   value of hidden_act → key that is true for it; "": llama.cpp's default
    unused        how the Hub's names of tensors begin that llama.cpp does not use
    types         tensors that always have one type, by llama.cpp's name
    shifted       tensors to which 1 is added, by llama.cpp's name
    rotated       whether the rows of q and k are reordered
    row_of        tensor that is a row of the embedding → the token's text
    defaults      of transformers, on which published config.json files rely
    keys          that other families do not have
    fixed         settings of config.json that the file does not hold
    """

    model_type: str
    name: str
    blocks: str
    layer: Mapping[str, str]
    ends: Mapping[str, str]
    activations: Mapping[str, str]
    bare: Mapping[str, str] = field(default_factory=dict)
    vision_type: str = ""
    unused: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    shifted: tuple[str, ...] = ()
    rotated: bool = False
    row_of: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[ImageKey, ...] = ()
    fixed: tuple[Fixed, ...] = ()


def _gemma_scale(images: Images) -> int | None:
    """How many patches become one row on each side, where it is not llama.cpp's 4."""
    side = math.isqrt(images.processor.count("image_seq_length", 256))
    found = images.vision.count("image_size") // images.vision.count("patch_size") // side
    return None if found in (0, 4) else found


_SIGLIP = {"ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"} | {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
}
_TANH = "gelu_pytorch_tanh"

PROJECTORS = (
    Projector(
        "gemma3",
        "gemma3",
        "vision_tower.encoder.layers.",
        _SIGLIP,
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.embeddings.position_embedding",
            "v.post_ln": "vision_tower.post_layernorm",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        {_TANH: "use_gelu"},
        bare={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
        unused=("vision_tower.head.", "vision_tower.embeddings.position_ids"),
        types={"mm.input_projection.weight": "F16", "v.patch_embd.weight": "F32"},
        shifted=("mm.soft_emb_norm.weight",),
        defaults={"hidden_act": _TANH, "layer_norm_eps": 1e-6},
        keys=(ImageKey("vision.projector.scale_factor", "u32", _gemma_scale),),
    ),
)


def find_projector(config: Mapping[str, Any]) -> Projector | None:
    """The vision half of a model; None if it has none, or one that is not written. config: all of config.json."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    own = (each for each in PROJECTORS if each.model_type == config.get("model_type"))
    return next((each for each in own if each.vision_type in ("", vision.get("model_type"))), None)


_NUMBER = re.compile(r"(0|[1-9][0-9]{0,5})\.")


def vision_name(projector: Projector, name: str) -> str | None:
    """The name in a `mmproj.gguf` of a tensor of the Hub's layout; "" if llama.cpp does not use it, None if it is unknown.

    >>> vision_name(PROJECTORS[0], "model.vision_tower.vision_model.encoder.layers.3.mlp.fc1.bias")
    'v.blk.3.ffn_up.bias'
    """
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    if name.startswith(projector.unused):
        return ""
    number, layers = "", dict[str, str]()
    if name.startswith(projector.blocks) and (match := _NUMBER.match(name, len(projector.blocks))):
        number, layers = (
            match[1],
            {f"v.blk.{{}}.{there}": f"{projector.blocks}{{}}.{here}" for there, here in projector.layer.items()},
        )
        name = f"{projector.blocks}{{}}.{name[match.end() :]}"
    module, _, kind = name.rpartition(".")
    for there, here in projector.bare.items():
        if here == name:
            return there.replace("{}", number)
    if kind in ("weight", "bias"):
        for there, here in (layers or projector.ends).items():
            if here == module:
                return f"{there.replace('{}', number)}.{kind}"
    return None


def vision_type(projector: Projector, name: str, dimensions: int, plain: str) -> str:
    """The type of a tensor. name: in the file; plain: F32, F16 or BF16, which most matrices have.

    >>> vision_type(PROJECTORS[0], "v.blk.0.ffn_up.weight", 2, "BF16"), vision_type(PROJECTORS[0], "v.post_ln.bias", 1, "F16")
    ('BF16', 'F32')
    """
    if own := projector.types.get(name):
        return own
    if dimensions < 2 or ".weight" not in name or name.endswith(("_norm.weight", "position_embd.weight")):
        return "F32"
    if name.startswith(("v.patch_embd.", "mm.patch_merger.")):
        return "F16" if plain == "F16" else "F32"
    return plain


def images_of(config: Mapping[str, Any], projector: Projector, processor: Mapping[str, Any]) -> Images:
    """What the files of a model say. processor: the files of `PROCESSOR`, as one."""
    vision = {**projector.defaults, **config["vision_config"]}
    for name in ("image_size", "patch_size"):
        if isinstance(sides := vision.get(name), list) and sides and all(each == sides[0] for each in sides):
            vision[name] = sides[0]
    prefix = "vision_config."
    own = Config({f"{prefix}{name}": value for name, value in vision.items()}, prefix=prefix)
    return Images(Config(config), own, Config(processor, where=PROCESSOR[0]))


def vision_keys(images: Images, projector: Projector, width: int, file_type: int) -> dict[str, Value]:
    """The keys of a `mmproj.gguf`.

    width      of the language model
    file_type  llama.cpp's number of the type that most matrices have

    Raises FormatError for values that are missing or no numbers, Unsupported for settings that llama.cpp does not know.
    """
    for each in projector.fixed:
        images.whole.need(each.field, images.whole.get(each.field, each.default), each.value)
    values = {
        "general.architecture": Value("str", "clip"),
        "general.type": Value("str", "mmproj"),
        "general.file_type": Value("u32", file_type),
        "clip.has_vision_encoder": Value("bool", True),
        "clip.vision.projection_dim": Value("u32", width),
    }
    values |= {f"clip.vision.{there}": Value("u32", images.vision.count(here)) for there, here in _SIZES.items()}
    values |= {f"clip.vision.{name}": Value("f32", _three(images.processor, name)) for name in ("image_mean", "image_std")}
    values["clip.projector_type"] = Value("str", projector.name)
    values["clip.vision.attention.layer_norm_epsilon"] = Value("f32", images.vision.number("layer_norm_eps"))
    activation = images.vision.get("hidden_act")
    if activation not in projector.activations:
        known = " or ".join(projector.activations)
        what = f"vision_config.hidden_act is {show(activation)}, and llama.cpp takes {known} for granted"
        raise Unsupported(what, where="config.json")
    if key := projector.activations[activation]:
        values[f"clip.{key}"] = Value("bool", True)
    found = ((own, own.read(images)) for own in projector.keys)
    values |= {f"clip.{own.name}": Value(own.kind, value) for own, value in found if value is not None}
    values["general.quantization_version"] = Value("u32", 2)
    return values


def _three(processor: Config, name: str) -> list[float]:
    """A number for each colour. Raises Unsupported where they are missing."""
    numbers = processor.get(name)
    if numbers is None:
        what, fix = f"{name} of the images is missing", f"add the model's {PROCESSOR[0]} to its folder"
        raise Unsupported(what, where=PROCESSOR[0], fix=fix)
    if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(each) in (int, float) for each in numbers):
        raise processor.wrong(name, numbers, "and not three numbers")
    return [float(each) for each in numbers]
