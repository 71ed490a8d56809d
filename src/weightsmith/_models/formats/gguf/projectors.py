"""Vision halves in `mmproj.gguf`, a second file that llama.cpp reads: names of tensors, types and keys.

llama.cpp stores the weights of a vision half as the Hub does, with these exceptions:

* The rows of q and k of Pixtral are reordered within each head, as those of Llama are.
* One norm of Gemma 3 is stored with 1 added.
* q, k and v of Qwen2-VL, which are one tensor there, are three, and the two frames of its first convolution are two.
* The row of the embedding of Pixtral's token [IMG_BREAK] is a vector of the vision half.

A new family is an entry of `PROJECTORS`, if its tensors differ from the Hub's by no more than that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._models.formats.gguf.layout import Value, ValueType
from weightsmith._models.formats.gguf.values import Config

PROCESSOR = ("preprocessor_config.json", "processor_config.json")
"""Files that say how images are prepared. The later one wins."""

TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
"""Files that list added tokens."""

_MOST = 1 << 16
"""The most layers, and the largest scale."""
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
    """The settings of a model's vision half.

    whole      config.json
    vision     its `vision_config`
    processor  the files of `PROCESSOR`, merged
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
    layer         modules of a layer: llama.cpp's name → the Hub's. Several of one are pieces of it, in their order
    ends          modules outside of the layers: llama.cpp's name → the Hub's
    bare          tensors whose names are not those of a module: llama.cpp's → the Hub's; `{}` is the layer
    activations   value of hidden_act → key that is true for it; "": llama.cpp's default
    unused        how the Hub's names of tensors begin that llama.cpp does not use
    types         tensors that always have one type, by llama.cpp's name
    shifted       tensors to which 1 is added, by llama.cpp's name
    rotated       whether the rows of q and k are reordered
    token         whose row of the embedding is a vector of the vision half; "": none
    sizes         fields of vision_config under other names than most families have
    defaults      of vision_config in transformers, on which published config.json files rely
    keys          that other families do not have
    fixed         settings of config.json that the file does not hold
    assumed       those of them that transformers takes to be something else where config.json lacks them
    fixed_vision  the same of vision_config
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
    token: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[ImageKey, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    fixed_vision: Mapping[str, Any] = field(default_factory=dict)


def _gemma_scale(images: Images) -> int | None:
    """The width in patches of the square that is pooled into one row; None if it is llama.cpp's default, 4."""
    side = math.isqrt(images.processor.count("image_seq_length", 256))
    found = images.vision.count("image_size") // images.vision.count("patch_size") // side
    return None if found in (0, 4) else found


def _intern_scale(images: Images) -> int:
    """The width in patches of the square that becomes one row."""
    ratio = images.whole.number("downsample_ratio", 0.5)
    if not 1 / _MOST < ratio <= 1:
        raise images.whole.wrong("downsample_ratio", ratio, "and not a share")
    return int(1 / ratio)


def _optional_count(name: str) -> Callable[[Images], int | None]:
    """A number of config.json, where it is above 0."""
    return lambda images: images.whole.count(name) if images.whole.get(name) else None


def _longest_edge(images: Images) -> int:
    """The longest side, in pixels, to which an image is scaled before it is cut into tiles."""
    size = images.processor.get("size")
    default = images.vision.count("image_size")
    return images.processor.count("longest_edge", default, size) if isinstance(size, dict) else default


def _window_pattern(images: Images) -> int:
    """The interval of the layers that attend to the whole image; the others attend to windows."""
    name = "fullatt_block_indexes"
    layers = images.vision.get(name)
    if not isinstance(layers, list) or not layers or not all(type(each) is int and 0 <= each < _MOST for each in layers):
        raise images.vision.wrong(name, layers, "and not a list of layers")
    every = layers[0] + 1
    images.vision.need(name, layers, [every * (i + 1) - 1 for i in range(len(layers))])
    return int(every)


def _attention(module: str, out: str) -> dict[str, str]:
    """The projections of an attention block, under llama.cpp's names. out: what the Hub calls the last one."""
    return {f"attn_{p}": f"{module}.{p}_proj" for p in "qkv"} | {"attn_out": f"{module}.{out}"}


def _gated(module: str) -> dict[str, str]:
    """The three projections of a gated MLP, under llama.cpp's names."""
    return {f"ffn_{p}": f"{module}.{p}_proj" for p in ("gate", "up", "down")}


_TWO_LAYERS = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_SIGLIP = {"ln1": "layer_norm1", "ln2": "layer_norm2", **_attention("self_attn", "out_proj"), **_TWO_LAYERS}
_TANH = "gelu_pytorch_tanh"
_TANH_ONLY = {_TANH: "use_gelu"}
_GELU_OR_SILU = {"gelu": "use_gelu", "silu": "use_silu"}
_LAST_LAYER, _GELU = {"vision_feature_layer": -1}, {"projector_hidden_act": "gelu"}
_VIT_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_PIXTRAL_ENDS = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_QWEN_SIZES = {"block_count": "depth", "attention.head_count": "num_heads"}
_QWEN_DEFAULTS = {"depth": 32, "num_heads": 16, "patch_size": 14, "image_size": 560, "layer_norm_eps": 1e-6}
_MERGES_TWO = {"spatial_merge_size": 2}

_pixtral = partial(
    Projector,
    name="pixtral",
    vision_type="pixtral",
    blocks="vision_tower.transformer.layers.",
    layer={"ln1": "attention_norm", "ln2": "ffn_norm", **_attention("attention", "o_proj"), **_gated("feed_forward")},
    activations=_GELU_OR_SILU,
    rotated=True,
    token="[IMG_BREAK]",
    defaults={**_VIT_LARGE, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
)
_idefics = partial(
    Projector,
    name="idefics3",
    blocks="vision_model.encoder.layers.",
    layer=_SIGLIP,
    ends={
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd": "vision_model.embeddings.position_embedding",
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    },
    activations=_TANH_ONLY,
    types={"v.patch_embd.weight": "F32"},
    defaults={"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16}
    | {"image_size": 224, "patch_size": 32, "hidden_act": _TANH, "layer_norm_eps": 1e-6},
    keys=(
        ImageKey("vision.projector.scale_factor", "u32", lambda images: images.whole.count("scale_factor", 2)),
        ImageKey("vision.preproc_image_size", "u32", _longest_edge),
    ),
)
_qwen = partial(
    Projector,
    blocks="visual.blocks.",
    ends={"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"},
    bare=dict.fromkeys(("v.patch_embd.weight", "v.patch_embd.weight.1"), "visual.patch_embed.proj.weight"),
)
_QWEN = {"ln1": "norm1", "ln2": "norm2", **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv"), "attn_out": "attn.proj"}

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
        _TANH_ONLY,
        bare={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
        unused=("vision_tower.head.", "vision_tower.embeddings.position_ids"),
        types={"mm.input_projection.weight": "F16", "v.patch_embd.weight": "F32"},
        shifted=("mm.soft_emb_norm.weight",),
        defaults={"hidden_act": _TANH, "layer_norm_eps": 1e-6},
        keys=(ImageKey("vision.projector.scale_factor", "u32", _gemma_scale),),
    ),
    _pixtral(
        "llava",
        ends=_PIXTRAL_ENDS,
        fixed={**_LAST_LAYER, "vision_feature_select_strategy": "full", **_GELU},
        assumed={"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    ),
    _pixtral(
        "mistral3",
        ends={
            **_PIXTRAL_ENDS,
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        keys=(ImageKey("vision.spatial_merge_size", "u32", lambda images: images.whole.count("spatial_merge_size", 2)),),
        fixed={**_LAST_LAYER, **_GELU},
    ),
    Projector(
        "internvl",
        "internvl",
        "vision_tower.encoder.layer.",
        {"ln1": "layernorm_before", "ln2": "layernorm_after", **_attention("attention", "projection_layer"), **_TWO_LAYERS}
        | {"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"},
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        _GELU_OR_SILU,
        bare={
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "v.blk.{}.ls1.weight": "vision_tower.encoder.layer.{}.lambda_1",
            "v.blk.{}.ls2.weight": "vision_tower.encoder.layer.{}.lambda_2",
        },
        defaults={**_VIT_LARGE, "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
        keys=(
            ImageKey("vision.projector.scale_factor", "u32", _intern_scale),
            ImageKey("vision.preproc_min_tiles", "u32", _optional_count("min_dynamic_patch")),
            ImageKey("vision.preproc_max_tiles", "u32", _optional_count("max_dynamic_patch")),
        ),
        fixed={**_LAST_LAYER, "vision_feature_select_strategy": "default", **_GELU},
    ),
    _idefics("idefics3"),
    _idefics("smolvlm"),
    _qwen(
        "qwen2_vl",
        name="qwen2vl_merger",
        layer={**_QWEN, **_TWO_LAYERS},
        activations={"quick_gelu": ""},
        sizes={**_QWEN_SIZES, "embedding_length": "embed_dim", "feed_forward_length": "hidden_size"},
        defaults={**_QWEN_DEFAULTS, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu"},
        fixed_vision=_MERGES_TWO,
    ),
    _qwen(
        "qwen2_5_vl",
        name="qwen2.5vl_merger",
        layer={**_QWEN, **_gated("mlp")},
        activations={"silu": "use_silu"},
        sizes=_QWEN_SIZES,
        defaults={**_QWEN_DEFAULTS, "hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu"}
        | {"fullatt_block_indexes": [7, 15, 23, 31]},
        keys=(ImageKey("vision.n_wa_pattern", "u32", _window_pattern),),
        fixed_vision={**_MERGES_TWO, "window_size": 112},
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


def vision_names(projector: Projector, name: str) -> tuple[str, ...] | None:
    """The names in a `mmproj.gguf` of a tensor of the Hub's layout; () if llama.cpp does not use it, None if it is unknown.

    >>> vision_names(PROJECTORS[0], "model.vision_tower.vision_model.encoder.layers.3.mlp.fc1.bias")
    ('v.blk.3.ffn_up.bias',)
    """
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    if name.startswith(projector.unused):
        return ()
    number, layers = "", dict[str, str]()
    if name.startswith(projector.blocks) and (match := _NUMBER.match(name, len(projector.blocks))):
        number, layers = (
            match[1],
            {f"v.blk.{{}}.{there}": f"{projector.blocks}{{}}.{here}" for there, here in projector.layer.items()},
        )
        name = f"{projector.blocks}{{}}.{name[match.end() :]}"
    module, _, kind = name.rpartition(".")
    found = [there for there, here in projector.bare.items() if here == name]
    if not found and kind in ("weight", "bias"):
        found = [f"{there}.{kind}" for there, here in (layers or projector.ends).items() if here == module]
    return tuple(there.replace("{}", number) for there in found) or None


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
    """Read the settings of a vision half. processor: the files of `PROCESSOR`, merged."""
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
    images.whole.need_all(projector.fixed, projector.assumed)
    images.vision.need_all(projector.fixed_vision, {})
    values = {
        "general.architecture": Value("str", "clip"),
        "general.type": Value("str", "mmproj"),
        "general.file_type": Value("u32", file_type),
        "clip.has_vision_encoder": Value("bool", True),
        "clip.vision.projection_dim": Value("u32", width),
    }
    sizes = {**_SIZES, **projector.sizes}
    values |= {f"clip.vision.{there}": Value("u32", images.vision.count(here)) for there, here in sizes.items()}
    values |= {f"clip.vision.{name}": Value("f32", _three(images.processor, name)) for name in ("image_mean", "image_std")}
    values["clip.projector_type"] = Value("str", projector.name)
    values["clip.vision.attention.layer_norm_epsilon"] = Value("f32", images.vision.number("layer_norm_eps"))
    activation = images.vision.get("hidden_act")
    if not isinstance(activation, str) or activation not in projector.activations:
        known = " or ".join(projector.activations)
        what = f"vision_config.hidden_act is {show(activation)}, and llama.cpp takes {known} for granted"
        raise Unsupported(what, where="config.json")
    if key := projector.activations[activation]:
        values[f"clip.{key}"] = Value("bool", True)
    found = ((own, own.read(images)) for own in projector.keys)
    values |= {f"clip.{own.name}": Value(own.kind, value) for own, value in found if value is not None}
    values["general.quantization_version"] = Value("u32", 2)
    return values


def _is_number(value: object) -> bool:
    """Whether float32 holds a value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def _three(processor: Config, name: str) -> list[float]:
    """A number for each colour. Raises Unsupported where they are missing."""
    numbers = processor.get(name)
    if numbers is None:
        what, fix = f"{name} of the images is missing", f"add the model's {PROCESSOR[0]} to its folder"
        raise Unsupported(what, where=PROCESSOR[0], fix=fix)
    if not isinstance(numbers, list) or len(numbers) != 3 or not all(map(_is_number, numbers)):
        raise processor.wrong(name, numbers, "and not three numbers")
    return [float(each) for each in numbers]
