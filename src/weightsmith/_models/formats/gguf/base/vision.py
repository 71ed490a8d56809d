"""The base of the vision halves in `mmproj.gguf`, a second file that llama.cpp reads: names of tensors, types and keys.

llama.cpp stores the weights of a vision half as the Hub does, with these exceptions:

* The rows of q and k of Pixtral are reordered within each head, as those of Llama are.
* One norm of Gemma 3 is stored with 1 added.
* q, k and v of Qwen2-VL, which are one tensor there, are three, and the two frames of its first convolution are two.
* The row of the embedding of Pixtral's token [IMG_BREAK] is a vector of the vision half.

A vision half is a class in a file of `architectures/`, if its tensors differ from the Hub's by no more than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.layout import Value

PROCESSOR = ("preprocessor_config.json", "processor_config.json")
"""Files that say how images are prepared. The later one wins."""

MOST = 1 << 16
"""The most layers, and the largest scale."""
_SIZES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
"""Keys under `clip.vision.` and the field of vision_config that each is."""


@dataclass(frozen=True, slots=True)
class Images:
    """The settings of a model's vision half.

    whole      config.json
    vision     its `vision_config`
    processor  the files of `PROCESSOR`, merged
    """

    whole: GgufConfig
    vision: GgufConfig
    processor: GgufConfig


def attention(module: str, out: str) -> dict[str, str]:
    """The projections of an attention block, under llama.cpp's names. out: what the Hub calls the last one."""
    return {f"attn_{p}": f"{module}.{p}_proj" for p in "qkv"} | {"attn_out": f"{module}.{out}"}


def gated(module: str) -> dict[str, str]:
    """The three projections of a gated MLP, under llama.cpp's names."""
    return {f"ffn_{p}": f"{module}.{p}_proj" for p in ("gate", "up", "down")}


TWO_LAYERS = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
SIGLIP = {"ln1": "layer_norm1", "ln2": "layer_norm2", **attention("self_attn", "out_proj"), **TWO_LAYERS}
TANH_ONLY = {"gelu_pytorch_tanh": "use_gelu"}
GELU_OR_SILU = {"gelu": "use_gelu", "silu": "use_silu"}
VIT_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,5})\.")


class VisionHalf:
    """The vision half of a kind of model, under its names in both formats.

    model_type   in config.json
    vision_type  in its vision_config; "": any
    name         llama.cpp's, in `clip.projector_type`
    blocks       how the Hub's names of tensors in layers begin, before the number
    layer        modules of a layer: llama.cpp's name → the Hub's. Several of one are pieces of it, in their order
    ends         modules outside of the layers: llama.cpp's name → the Hub's
    bare         tensors whose names are not those of a module: llama.cpp's → the Hub's; `{}` is the layer
    activations  value of hidden_act → key that is true for it; "": llama.cpp's default
    unused       how the Hub's names of tensors begin that llama.cpp does not use
    types        tensors that always have one type, by llama.cpp's name
    shifted      tensors to which 1 is added, by llama.cpp's name
    rotated      whether the rows of q and k are reordered
    token        whose row of the embedding is a vector of the vision half; "": none
    sizes        fields of vision_config under other names than most have
    defaults     of vision_config in transformers, on which published config.json files rely
    """

    model_type: ClassVar[str]
    vision_type: ClassVar[str] = ""
    name: ClassVar[str]
    blocks: ClassVar[str]
    layer: ClassVar[Mapping[str, str]]
    ends: ClassVar[Mapping[str, str]]
    bare: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[Mapping[str, str]]
    unused: ClassVar[tuple[str, ...]] = ()
    types: ClassVar[Mapping[str, str]] = {}
    shifted: ClassVar[tuple[str, ...]] = ()
    rotated: ClassVar[bool] = False
    token: ClassVar[str] = ""
    sizes: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}

    def check(self, images: Images) -> None:
        """Raise Unsupported for a setting that is another in llama.cpp's code."""

    def keys_of(self, images: Images) -> Mapping[str, int | list[bool] | None]:
        """What other vision halves do not have, by names of keys after `clip.`; None: the file lacks the key."""
        return {}

    def images(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Images:
        """Read the settings of a vision half. config: all of config.json; processor: the files of `PROCESSOR`, merged."""
        vision = {**self.defaults, **config["vision_config"]}
        for name in ("image_size", "patch_size"):
            if isinstance(sides := vision.get(name), list) and sides and all(side == sides[0] for side in sides):
                vision[name] = sides[0]
        prefix = "vision_config."
        settings = GgufConfig({f"{prefix}{name}": value for name, value in vision.items()}, prefix=prefix)
        return Images(GgufConfig(config), settings, GgufConfig(processor, where=PROCESSOR[0]))

    def keys(self, images: Images, width: int, file_type: int) -> dict[str, Value]:
        """The keys of a `mmproj.gguf`.

        width      of the language model
        file_type  llama.cpp's number of the type that most matrices have

        Raises FormatError for values that are missing or no numbers, Unsupported for settings that llama.cpp does not know.
        """
        self.check(images)
        values = {
            "general.architecture": Value("str", "clip"),
            "general.type": Value("str", "mmproj"),
            "general.file_type": Value("u32", file_type),
            "clip.has_vision_encoder": Value("bool", True),
            "clip.vision.projection_dim": Value("u32", width),
        }
        sizes = {**_SIZES, **self.sizes}
        values |= {f"clip.vision.{name}": Value("u32", images.vision.count(setting)) for name, setting in sizes.items()}
        values |= {f"clip.vision.{name}": Value("f32", _three(images.processor, name)) for name in ("image_mean", "image_std")}
        values["clip.projector_type"] = Value("str", self.name)
        values["clip.vision.attention.layer_norm_epsilon"] = Value("f32", images.vision.number("layer_norm_eps"))
        activation = images.vision.get("hidden_act")
        if not isinstance(activation, str) or activation not in self.activations:
            known = " or ".join(self.activations)
            what = f"vision_config.hidden_act is {show(activation)}, and llama.cpp takes {known} for granted"
            raise Unsupported(what, where="config.json")
        if key := self.activations[activation]:
            values[f"clip.{key}"] = Value("bool", True)
        for name, value in self.keys_of(images).items():
            if value is not None:
                values[f"clip.{name}"] = Value("bool" if isinstance(value, list) else "u32", value)
        values["general.quantization_version"] = Value("u32", 2)
        return values

    def size(self, images: Images, name: str) -> int:
        """A number under the name that most vision halves have."""
        return images.vision.count(self.sizes.get(name, _SIZES[name]))

    def names(self, name: str, images: Images) -> tuple[str, ...] | None:
        """The names in a `mmproj.gguf` of a tensor of the Hub's layout; () if llama.cpp does not use it, None if unknown.

        >>> from weightsmith._models.formats.gguf.architectures.gemma import Gemma3Vision
        >>> images = Gemma3Vision().images({"vision_config": {}}, {})
        >>> Gemma3Vision().names("model.vision_tower.vision_model.encoder.layers.3.mlp.fc1.bias", images)
        ('v.blk.3.ffn_up.bias',)
        """
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
        if name.startswith(self.unused):
            return ()
        number, modules = "", self.ends
        if name.startswith(self.blocks) and (match := _NUMBER.match(name, len(self.blocks))):
            number, layer = match[1], f"{self.blocks}{{}}."
            modules = {f"v.blk.{{}}.{module}": f"{layer}{hub}" for module, hub in self.layer.items()}
            name = f"{layer}{name[match.end() :]}"
        module, _, kind = name.rpartition(".")
        names = [stored for stored, hub in self.bare.items() if hub == name]
        if not names and kind in ("weight", "bias"):
            names = [f"{stored}.{kind}" for stored, hub in modules.items() if hub == module]
        return tuple(stored.replace("{}", number) for stored in names) or None

    def type_of(self, name: str, dimensions: int, plain: str) -> str:
        """The type of a tensor. name: in the file; plain: F32, F16 or BF16, which most matrices have.

        >>> from weightsmith._models.formats.gguf.architectures.gemma import Gemma3Vision
        >>> half = Gemma3Vision()
        >>> half.type_of("v.blk.0.ffn_up.weight", 2, "BF16"), half.type_of("v.post_ln.bias", 1, "F16")
        ('BF16', 'F32')
        """
        if name in self.types:
            return self.types[name]
        if dimensions < 2 or ".weight" not in name or name.endswith(("_norm.weight", "position_embd.weight")):
            return "F32"
        if name.startswith(("v.patch_embd.", "mm.patch_merger.")):
            return "F16" if plain == "F16" else "F32"
        return plain


def _is_number(value: object) -> bool:
    """Whether float32 holds a value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def _three(processor: GgufConfig, name: str) -> list[float]:
    """A number for each colour. Raises Unsupported where they are missing."""
    numbers = processor.get(name)
    if numbers is None:
        what, fix = f"{name} of the images is missing", f"add the model's {PROCESSOR[0]} to its folder"
        raise Unsupported(what, where=PROCESSOR[0], fix=fix)
    if not isinstance(numbers, list) or len(numbers) != 3 or not all(map(_is_number, numbers)):
        raise processor.wrong(name, numbers, "not three numbers")
    return [float(number) for number in numbers]
