"""The base of the architectures of models that GGUF files are read and written for: `architectures/` has a file for each.

An architecture says three things: which tensors a model has, under both names; which keys of a GGUF file follow from
config.json; and config.json from the keys. The keys say less than config.json: llama.cpp knows the rest from the architecture,
as transformers' classes do by default. What a model has otherwise is rejected when a GGUF file of it is planned, because
llama.cpp would compute something else.

`GgufArchitecture` does what most have in common. A class of an architecture sets what is its own, and overrides a `put_…` that
writes keys with the `take_…` that reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL, put_quotients, put_scaling, take_scaling
from weightsmith._models.formats.gguf.base.tensors import (
    EMBEDDINGS,
    ENDS,
    LAYER_SHAPES,
    LAYERS,
    LLAMA_LAYER,
    NEXTN,
    WIDTH,
    WINDOWS,
    GgufPlace,
    LayerSizes,
    Predicting,
    SplitTensor,
    TensorShape,
    check_shape,
    first_incomplete,
    is_norm,
    predicts,
    text_name,
)
from weightsmith._models.formats.gguf.base.values import Floats, GgufConfig, GgufKeys, GgufValues, token_id
from weightsmith._models.formats.gguf.layout import Value

if TYPE_CHECKING:
    from weightsmith._models.formats.gguf.base.vision import VisionHalf
    from weightsmith._models.formats.gguf.cuts import HeadOrder
    from weightsmith._models.formats.gguf.writing import Multiplied

LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
"""`GgufArchitecture.eps` of models with layer norms."""
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
GELU = "gelu_pytorch_tanh"
COMPUTED = "llama.cpp computes it"
"""Why a tensor is left out of which users need not hear."""
NOT_ADDED = "biases that llama.cpp does not add"
"""Why a tensor is left out that changes what the model computes."""
SIGMOID_ROUTER = {"expert_gating_func": 2}
"""`GgufArchitecture.constants` of models whose routers' scores are sigmoids."""
NORMALISED = "expert_weights_norm"
"""The key for dividing the weights of a token's experts by their sum."""

_DENSE = "leading_dense_block_count"
MOST_LAYERS = 100_000
"""More are an error."""
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_SETTING_NAMES = {
    **dict.fromkeys(("attention.key_length", "attention.value_length"), "head_dim"),
    **{"expert_feed_forward_length": "moe_intermediate_size"},
}
"""What config.json calls keys of most architectures."""
_DEPTHWISE = {"ssm_conv1d.weight", "shortconv.conv.weight"}
"""Convolutions [channels, 1, width], whose middle dimension a GGUF file does not have."""


@dataclass(frozen=True, slots=True)
class GgufKey:
    """A number or truth value that both formats have.

    name     of the key in the GGUF file, without the architecture
    setting  in config.json
    kind     u32: a whole number; f32: any number above 0; bool
    default  where config.json or the file lacks it; None: it is required
    least    the smallest u32
    times    another setting, by which the number is multiplied in the GGUF file; "": none
    """

    name: str
    setting: str
    kind: Literal["u32", "f32", "bool"] = "u32"
    default: float | None = None
    least: int = 1
    times: str = ""

    def of(self, values: GgufValues, name: str, number: Callable[[str, float | None], float]) -> int | float | bool:
        """Its value, checked. name: in either format; number: how an f32 is taken."""
        if self.kind == "bool":
            return values.truth(name, self.default)
        return number(name, self.default) if self.kind == "f32" else values.count(name, self.default, least=self.least)


@dataclass(frozen=True, slots=True)
class KeyTensor:
    """A tensor of each layer whose only number a GGUF file has in a key.

    name   of the tensor, in a layer
    shape  of the tensor: (), or dimensions of 1
    """

    name: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers attend to a window: all but the last of every so many.

    stated   unless the file says which
    default  the window that llama.cpp takes where a file has none; None: no layer has one then
    first    all but the first of every so many
    """

    every: int
    stated: bool = False
    default: int | None = None
    first: bool = False

    def layer_types(self, layers: int, *, slides: bool) -> list[str]:
        """What each layer attends to. slides: whether the model has a window at all."""
        return [_layer_type(slides and (i + (not self.first)) % self.every != 0) for i in range(layers)]


def _layer_type(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of a GGUF file that is read.

    shapes   by the file's names
    factors  those that follow from config.json, such as rope_freqs.weight, if the file has them
    """

    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, Floats] = field(default_factory=dict)


class GgufArchitecture:
    """A kind of model, under its names in both formats.

    name          of the GGUF file: `general.architecture`
    class_name    of transformers' class, in config.json
    model_types   in config.json; the first is the one that config.json of a file that is read gets
    layer         modules of a layer: llama.cpp's name → the Hub's, with `{}` for the number of an expert
    bare          tensors of a layer whose names are not a module's with `.weight` or `.bias`: llama.cpp's name → the Hub's
    splits        tensors of a layer that llama.cpp stores in parts
    multipliers   settings by which llama.cpp has weights multiplied: its name of a module → the Hub's, one after the other
    in_keys       tensors of a layer with one number: the whole name of the key with those of all layers → the Hub's tensor
    ends          modules outside of the layers: llama.cpp's name → the Hub's, with `{}` for the number of one of a stack
    prefixes      (the Hub's, that of the tables) of names that begin otherwise than the tables', the longest first
    shapes        of weights of a layer that llama.cpp loads, by its names
    setting_names  what config.json calls keys of sizes: those that are neither in `sizes` nor in `numbers`
    square        whether llama.cpp loads only models whose heads together are as wide as the model
    rotated       whether the rows of q and k are reordered
    shift         what is added to norms
    eps           key of the number that norms add, and its name in config.json
    experts       config.json's number of experts; "": there are none
    experts_used  config.json's number of experts for a token
    numbers       that other architectures do not have
    constants     numbers that the GGUF file has, and config.json has not: they are those of the architecture
    fixed         settings that the GGUF file does not have: llama.cpp has them in its code
    activation    of the MLP; `activations` has other names of it
    partial       share of a head that RoPE turns, where config.json does not say it; 0: all of it, always
    scaled        whether frequencies of RoPE may be scaled as Llama 3's
    windows       which layers attend to a window; None: none does
    linear        numbers of a model's layers with linear attention, where names depend on them: `with_linear` sets it
    predicting    layers behind the others, which predict several tokens at a time; None: there are none
    predictors    how many of these the GGUF file of a model has: `with_predictors` sets it, and `trunk`
    trunk         the number of the model's own layers, in an architecture with predictors
    tokenizer     llama.cpp's name of tokenizers with a fallback to bytes; those of "llama" have scores, others merges
    readable      whether files are read, too
    sizes         numbers that every model has: llama.cpp's name → config.json's
    rotary        whether there is RoPE
    bidirectional  whether config.json says that tokens attend to what follows them
    encodes       whether it is an encoder, which makes vectors or scores of a text
    factored      whether llama.cpp multiplies what leaves each linear layer by its factor, as NVFP4 needs it
    deepened      convolutions [channels, 1, width] of a layer that are [1, channels, 1, width] in a GGUF file, by its names
    flat          vectors of a layer that are matrices in a GGUF file: llama.cpp's name → the number of their columns
    differs       what llama.cpp computes otherwise than transformers in every model of it, for a warning; "": nothing
    unused        patterns of the Hub's names of tensors that llama.cpp does not store, and why; names as `canonical` gives them
    """

    name: ClassVar[str]
    class_name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    layer: ClassVar[Mapping[str, str]] = LLAMA_LAYER
    bare: ClassVar[Mapping[str, str]] = {}
    splits: ClassVar[tuple[SplitTensor, ...]] = ()
    multipliers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    in_keys: ClassVar[Mapping[str, KeyTensor]] = {}
    ends: ClassVar[Mapping[str, str]] = ENDS
    prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()
    shapes: ClassVar[Mapping[str, TensorShape]] = LAYER_SHAPES
    setting_names: ClassVar[Mapping[str, str]] = {}
    square: ClassVar[bool] = False
    rotated: ClassVar[bool] = False
    shift: ClassVar[float] = 0.0
    eps: ClassVar[tuple[str, str]] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    experts: ClassVar[str] = ""
    experts_used: ClassVar[str] = "num_experts_per_tok"
    numbers: ClassVar[tuple[GgufKey, ...]] = ()
    constants: ClassVar[Mapping[str, int]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    activation: ClassVar[str] = "silu"
    activations: ClassVar[Mapping[str, str]] = {"swish": "silu"}
    partial: ClassVar[float] = 0.0
    scaled: ClassVar[bool] = False
    windows: ClassVar[Windows | None] = None
    predicting: ClassVar[Predicting | None] = None
    tokenizer: ClassVar[str] = "llama"
    readable: ClassVar[bool] = True
    sizes: ClassVar[Mapping[str, str]] = _SIZES
    rotary: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    factored: ClassVar[bool] = False
    deepened: ClassVar[frozenset[str]] = frozenset()
    flat: ClassVar[Mapping[str, Callable[[GgufConfig], int]]] = {}
    differs: ClassVar[str] = ""
    unused: ClassVar[Mapping[str, str]] = {}
    predictors: int = 0
    linear: frozenset[int] = frozenset()
    trunk: int = 0

    # ---- which models

    def owns(self, values: GgufValues) -> bool:
        """Whether a GGUF file with its name is one of this class: several classes of transformers may have one name."""
        return ("expert_count" in values) == bool(self.experts)

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a model with one of `model_types` is of this class: several classes may have one."""
        return True

    def holds(self, tensors: Container[str]) -> bool:
        """Whether a GGUF file that `owns` accepts has the tensors of this class. tensors: their names in the file"""
        return True

    def of_config(self, config: Mapping[str, Any]) -> Self:
        """The architecture of a model, where names of its tensors depend on config.json."""
        return self

    def of_keys(self, values: GgufValues) -> Self:
        """The architecture of a GGUF file, where names of its tensors depend on its keys."""
        return self

    def with_linear(self, layers: Iterable[bool]) -> Self:
        """The architecture of a model in which these layers have linear attention: whether, for each layer."""
        bound = copy(self)
        bound.linear = frozenset(number for number, is_linear in enumerate(layers) if is_linear)
        return bound

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with settings under their present names, and with defaults that are not in `defaults.json`."""
        kinds, setting = config.get("mlp_layer_types"), self._setting_of_dense_layers()
        if not setting or not isinstance(kinds, list):
            return config
        return {**config, setting: next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))}

    def _setting_of_dense_layers(self) -> str:
        """config.json's number of layers before those with experts; "" if there is none."""
        return next((number.setting for number in self.numbers if number.name == _DENSE), "")

    # ---- layers that predict

    def with_predictors(self, trunk: int, count: int) -> Self:
        """The architecture of a model with so many layers behind its own that predict, which its GGUF file has."""
        if not count:
            return self
        bound = copy(self)
        bound.trunk, bound.predictors = trunk, count
        return bound

    def of_model(self, config: Mapping[str, Any], names: Iterable[str]) -> Self:
        """The architecture of one model: with its predictors, if llama.cpp would load them.

        names  of its tensors, in the Hub's layout
        """
        trunk, names = config.get("num_hidden_layers"), list(names)
        if self.predicting is None or type(trunk) is not int or trunk < 1:
            return self
        stated = 1 if self.predicting.stack else config.get(self.predicting.setting)  # `fc` of a stack is there once
        if type(stated) is not int or stated < 1 or not any(predicts(name, trunk) for name in names):
            return self
        bound = self.with_predictors(trunk, stated)
        layers = bound.layers_of(names)
        behind = [number for number in sorted(layers) if number >= trunk]
        complete = behind == [*range(trunk, trunk + len(behind))] and first_incomplete(layers, trunk) is None
        return bound if complete and len(behind) == stated else self

    def layers_of(self, names: Iterable[str]) -> dict[int, set[str]]:
        """The tensors of each layer in a GGUF file, without its number. names: in the Hub's layout."""
        layers = dict[int, set[str]]()
        for name in names:
            split, place = self.split_of(name), self.place(name)
            stored = [f"blk.{split[1]}.{part.name}" for part in split[0].parts] if split else [place.name] if place else []
            for match in filter(None, map(_BARE.fullmatch, stored)):
                layers.setdefault(int(match[1]), set()).add(match[2])
        return layers

    def predicts(self, name: str) -> bool:
        """Whether a tensor of a GGUF file is of one of the predictors."""
        match = _BARE.fullmatch(name)
        return match is not None and self.predictors > 0 and int(match[1]) >= self.trunk

    def _modules(self, number: int) -> Mapping[str, str]:
        """Modules of a layer."""
        if not self.predictors or number < self.trunk:
            return self.layer
        renamed = {} if self.predicting is None or self.predicting.stack else self.predicting.renamed
        return {**self.layer, **{name: renamed.get(module, module) for name, module in NEXTN.items()}}

    # ---- keys from config.json

    def keys(self, settings: Mapping[str, Any], file_type: int) -> tuple[dict[str, Value], dict[str, Floats]]:
        """The keys of a GGUF file that describe the model, and tensors that exist in GGUF files alone.

        settings   config.json of the language model
        file_type  llama.cpp's number of the mixture of types

        Raises FormatError for values that are missing or no numbers, Unsupported for settings that llama.cpp does not know.
        """
        config, keys = GgufConfig(settings), GgufKeys()
        if (layers := config.count("num_hidden_layers")) > MOST_LAYERS:
            raise config.wrong("num_hidden_layers", layers, f"more than {MOST_LAYERS:,}")
        self.put_sizes(config, keys)
        self.check(config)
        if config.get("is_causal") is False:
            keys.put("attention.causal", "bool", False)
        self.put_heads(config, keys)
        if self.rotated:
            keys.u32("vocab_size", config.count("vocab_size"))
            keys.u32("rope.dimension_count", head_dim(config))
        if self.partial:
            keys.u32("rope.dimension_count", self.turned(config))
        self.put_attention(config, keys)
        self.put_more(config, keys)
        if self.rotary:
            self.put_rope(config, keys)
        if self.predictors:
            keys.u32("block_count", layers + self.predictors)
            keys.u32("nextn_predict_layers", self.predictors)
        values = {"general.architecture": Value("str", self.name), "general.type": Value("str", "model")}
        values |= {f"{self.name}.{name}": value for name, value in keys.values.items()}
        values |= {"general.file_type": Value("u32", file_type), "general.quantization_version": Value("u32", 2)}
        return values, keys.tensors

    def put_sizes(self, config: GgufConfig, keys: GgufKeys) -> None:
        """The numbers that most models have, and `numbers` and `constants`."""
        heads = config.count("num_attention_heads")
        for name, setting in self.sizes.items():
            default = heads if setting == "num_key_value_heads" else None
            if not (self.experts and setting == "intermediate_size" and config.get(setting) is None):  # all MLPs are experts
                keys.u32(name, config.count(setting, default))
        if self.rotary:
            keys.f32("rope.freq_base", config.number("rope_theta", within=self.rope(config)))
        keys.f32(self.eps[0], config.number(self.eps[1]))
        if self.experts:  # under either of two names
            either = config.get("num_local_experts", config.get("num_experts"))
            keys.u32("expert_count", config.count(self.experts, either))
            keys.u32("expert_used_count", config.count(self.experts_used, config.get("num_experts_per_tok")))
        for number in self.numbers:
            value = number.of(config, number.setting, config.number)
            if not number.times:
                keys.put(number.name, number.kind, value)
            elif times := config.count(number.times, least=0):
                keys.put(number.name, number.kind, times * value)
        for name, constant in self.constants.items():
            keys.u32(name, constant)

    def check(self, config: GgufConfig) -> None:
        """Raise Unsupported for a setting that is another in llama.cpp's code."""
        config.need_all(self.fixed)
        config.need("use_bidirectional_attention", bool(config.get("use_bidirectional_attention")), self.bidirectional)
        name = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
        stated = config.get(name, self.activation)
        activation = self.activations.get(stated, stated) if isinstance(stated, str) else stated
        config.need(name, activation, self.activation)

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        """The width of a head."""
        keys.u32("attention.key_length", head_dim(config))
        keys.u32("attention.value_length", head_dim(config))

    def put_attention(self, config: GgufConfig, keys: GgufKeys) -> None:
        """The window of layers that slide. Raises Unsupported for one that llama.cpp would not use."""
        window = config.get("sliding_window")
        if self.windows is not None:
            self._put_windows(config, self.windows, keys)
        elif self.uses_window(config) and window and _any_slides(config):
            # Mistral's first version: as long as nobody's context is longer
            if not isinstance(window, int) or window < config.count("max_position_embeddings"):
                config.need("sliding_window", window, None)

    def uses_window(self, config: GgufConfig) -> bool:
        """Whether a window that config.json states is used."""
        return bool(config.get("use_sliding_window", True))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        """Keys that follow from several settings."""

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        """How frequencies are scaled. Raises Unsupported for a way that llama.cpp does not know."""
        rope = self.rope(config)
        if self.scaled and rope["rope_type"] == "llama3":
            put_quotients(config, rope, head_dim(config), keys)
        else:
            put_scaling(config, rope, keys, self.turned_by(config, rope))

    def turned_by(self, config: GgufConfig, rope: Mapping[str, Any]) -> float | None:
        """What llama.cpp multiplies sines and cosines by under YaRN, unless it is what YaRN's paper says."""

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        """The settings of RoPE in layers that attend to everything."""
        return config.rope()[0]

    def turned(self, config: GgufConfig) -> int:
        """How many numbers of a head RoPE turns."""
        if not self.partial:
            return head_dim(config)
        stated = config.number("partial_rotary_factor", self.partial)
        share = config.number("partial_rotary_factor", stated, self.rope(config))
        if share > 1:
            what = f"partial_rotary_factor is {share:g}, which is more than 1"
            raise FormatError(what, where="config.json", fix="repair it")
        return int(share * head_dim(config))

    def _put_windows(self, config: GgufConfig, windows: Windows, keys: GgufKeys) -> None:
        layers = config.count("num_hidden_layers")
        slides = config.get("sliding_window") is not None or not windows.stated
        types = windows.layer_types(layers, slides=slides)
        stated = config.get("layer_types") or types
        if stated is types:  # an older setting, which transformers reads where the layers are not listed
            config.need("sliding_window_pattern", config.get("sliding_window_pattern", windows.every), windows.every)
        if not isinstance(stated, list) or not all(
            layer_type in ("sliding_attention", "full_attention") for layer_type in stated
        ):
            raise config.wrong("layer_types", stated, "not a list of sliding_attention and full_attention")
        if not windows.stated or len(stated) != layers:
            config.need("layer_types", stated, types)
        if windows.stated and windows.default is None:  # llama.cpp does not run a model with a window that no layer has
            slides = slides and "sliding_attention" in stated
        if slides:
            keys.u32("attention.sliding_window", config.count("sliding_window"))
        if slides and windows.stated:
            keys.put(WINDOWS, "bool", [layer_type == "sliding_attention" for layer_type in stated])
        self.check_local_rope(config)

    def check_local_rope(self, config: GgufConfig) -> None:
        """Raise Unsupported if RoPE has another base in layers that slide."""
        full, local = config.rope()
        if local.get("rope_theta") is not None:
            config.need("rope_theta of sliding_attention", local["rope_theta"], full["rope_theta"])

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise FormatError if the tensors of a planned GGUF file are not of as many layers as config.json says."""
        layers = config.count("num_hidden_layers") + self.predictors
        numbers = {int(match[1]) for name in shapes if (match := _BARE.fullmatch(name))}
        if other := sorted(numbers.symmetric_difference(range(layers))):
            what = f"num_hidden_layers is {layers:,}, and there are tensors of {len(numbers):,} layers: "
            what += f"layer {other[0]:,} {'is not one of those' if other[0] >= layers else 'is missing'}"
            raise FormatError(what, where="config.json", fix="repair num_hidden_layers, or download the model again")
        if setting := self._setting_of_dense_layers():
            self._check_experts(config.count(setting, 0, least=0), setting, layers - self.predictors, shapes)

    def _check_experts(self, dense: int, setting: str, layers: int, shapes: Container[str]) -> None:
        """Raise FormatError if other layers than those behind the first `dense` ones have experts."""
        for number in range(layers):
            has_experts = f"blk.{number}.ffn_gate_inp.weight" in shapes
            if has_experts != (number >= dense):
                what = f"{setting} is {dense:,}, and layer {number:,} has {'' if has_experts else 'no '}experts"
                raise FormatError(what, where="config.json", fix=f"repair {setting} or mlp_layer_types, or use another format")

    def check_sizes(self, config: GgufConfig, keys: Mapping[str, Value], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise FormatError if a tensor of a planned GGUF file has another shape than its keys say, as llama.cpp does.

        Raises Unsupported for heads that llama.cpp does not load in this architecture.

        keys  of `keys`, which follow from config.json
        """
        numbers = {name.removeprefix(f"{self.name}."): value.value for name, value in keys.items()}
        for name in (*map("{}.weight".format, EMBEDDINGS), *shapes):
            module, _, kind = name.rpartition(".")
            match = _BARE.fullmatch(module)
            dimensions = (None, WIDTH) if module in EMBEDDINGS else self.shapes.get(match[2]) if match is not None else None
            if name not in shapes or kind != "weight" or dimensions is None:
                continue
            split = self.part_of(name)
            hub_name = f"{LAYERS}{split[1]}.{split[0].name}" if split is not None else (self.hub_name(name) or name)
            sizes = LayerSizes(numbers, int(match[1]) if match else 0, lambda key: self.setting_of(key, config))
            check_shape(shapes[name], dimensions, sizes, hub_name.replace("{}", "0"), name)
        if self.square:
            together = config.count("num_attention_heads") * head_dim(config)
            config.need("num_attention_heads * head_dim", together, config.count("hidden_size"))

    def setting_of(self, key: str, config: GgufConfig) -> str:
        """What config.json calls a size. key: of the GGUF file."""
        names = {**_SETTING_NAMES, "expert_count": self.experts or "num_experts", **self.sizes}
        for number in self.numbers:
            names[number.name] = f"{number.times} * {number.setting}" if number.times else number.setting
        return {**names, **self.setting_names}.get(key, key)

    # ---- config.json from the keys

    def config(self, keys: Mapping[str, Any], contents: Contents, dtype: str, where: str) -> dict[str, Any]:
        """config.json of a GGUF file. dtype: of the model's weights, as torch names it.

        Raises FormatError for keys that are missing or no numbers, Unsupported for a model that config.json cannot describe.
        """
        values, shapes = self.values(keys, where), contents.shapes
        if "token_embd.weight" not in shapes:
            raise FormatError("no tensor token_embd.weight", where=where, fix=DAMAGED)
        vocabulary = shapes["token_embd.weight"][0]
        config: dict[str, Any] = {"architectures": [self.class_name], "model_type": self.model_types[0], "dtype": dtype}
        self.take_sizes(values, config)
        if config["num_hidden_layers"] > MOST_LAYERS:
            raise FormatError(f"{config['num_hidden_layers']:,} layers", where=where, fix=DAMAGED)
        config["num_hidden_layers"] -= self.predicted_layers(values)
        if self.predicting and (self.predictors or not self.predicting.stack):
            config[self.predicting.setting] = self.predictors
        config["vocab_size"] = vocabulary
        config[self.eps[1]] = values.float32(self.eps[0])
        if self.rotary:
            config["rope_theta"] = values.float32("rope.freq_base", 10_000.0)
        config["tie_word_embeddings"] = "output.weight" not in shapes
        width = max(1, config["hidden_size"] // config["num_attention_heads"])
        turned = values.count("rope.dimension_count", values.count("attention.key_length", width))
        width = self.take_heads(values, config, width if self.partial else turned)
        if self.partial and (share := turned / width) != self.partial:
            config["partial_rotary_factor"] = share
        self._take_numbers(values, config)
        self.take_tensors(config, contents, where)
        self.take_attention(values, config)
        if self.rotary:
            self.take_rope(values, config, contents)
        self.take_more(values, config, contents)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            if (token := token_id(keys, key, vocabulary, where)) is not None:
                config[f"{name}_token_id"] = token
        return config

    def values(self, keys: Mapping[str, Any], where: str) -> GgufValues:
        """The keys of a file that are the architecture's own."""
        return GgufValues(keys, where, DAMAGED, f"{self.name}.")

    def predicted_layers(self, values: GgufValues) -> int:
        """The number of layers at the end of a GGUF file that predict several tokens at a time. Raises FormatError."""
        layers = values.count("nextn_predict_layers", 0, least=0)
        if layers >= values.count("block_count"):
            raise values.wrong("nextn_predict_layers", layers, "and there are no other layers")
        return layers

    def take_sizes(self, values: GgufValues, config: dict[str, Any]) -> None:
        """The numbers that most models have."""
        for name, setting in self.sizes.items():
            if not (self.experts and setting == "intermediate_size" and name not in values):  # all MLPs are experts
                self.take_size(values, config, name, setting)

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        """One of the numbers that most models have."""
        alike = config.get("num_attention_heads") if setting == "num_key_value_heads" else None  # as llama.cpp takes it
        config[setting] = values.count(name, alike)

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        """The width of a head, which it also returns. Raises Unsupported for widths that are not equal."""
        width = values.count("attention.key_length", default)
        if width != values.count("attention.value_length", width):
            raise Unsupported("heads of k and v of different widths", where=values.where, fix=USE_ORIGINAL)
        config["head_dim"] = width
        return width

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        """Settings that say which tensors there are."""

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        """The window of layers that slide."""
        if self.windows is None:
            return
        slides = "attention.sliding_window" in values or self.windows.default is not None
        config["sliding_window"] = values.count("attention.sliding_window", self.windows.default) if slides else None
        layers = config["num_hidden_layers"]
        pattern = values.get(WINDOWS) if self.windows.stated else None
        if pattern is not None and (not isinstance(pattern, np.ndarray) or pattern.shape != (layers,)):
            raise values.wrong(WINDOWS, pattern, f"not a truth value for each of {layers:,} layers")
        stated = None if pattern is None else [_layer_type(bool(slides_there)) for slides_there in pattern]
        config["layer_types"] = stated or self.windows.layer_types(layers, slides=slides)

    def take_rope(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        """How frequencies are scaled."""
        if scaling := take_scaling(values, config, contents.factors):
            config["rope_scaling"] = scaling

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        """Settings from several keys."""

    def _take_numbers(self, values: GgufValues, config: dict[str, Any]) -> None:
        if self.experts:
            config[self.experts] = values.count("expert_count")
            config[self.experts_used] = values.count("expert_used_count")
        config |= {
            number.setting: number.of(values, number.name, values.float32) for number in self.numbers if not number.times
        }
        for name, constant in self.constants.items():
            if name in values and not values.equals(name, constant):
                what = f"{self.name}.{name} is {show(values.get(name))}, which config.json cannot say"
                raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config |= {name: value for name, value in self.fixed.items() if name not in config}

    # ---- tensors

    def canonical(self, name: str) -> str:
        """A tensor's name in the Hub's layout as the tables have it, with layers in `model.layers.`.

        >>> from weightsmith._models.formats.gguf.architectures.qwen_next import Qwen35
        >>> Qwen35().with_predictors(24, 1).canonical("mtp.fc.weight")
        'model.layers.24.eh_proj.weight'
        """
        name = _with_prefix(name, self.prefixes)
        stack = "" if self.predicting is None else self.predicting.stack
        if self.predicting is None or not self.predictors or not stack:
            return text_name(name)
        stacked = name.removeprefix("model.")
        if not stacked.startswith(stack):
            return text_name(name)
        module, _, kind = stacked.removeprefix(stack).rpartition(".")
        if (alone := _key_of(self.predicting.renamed, module)) is not None:
            return f"{LAYERS}{self.trunk}.{alone}.{kind}"
        number, _, rest = stacked.removeprefix(f"{stack}layers.").partition(".")
        return f"{LAYERS}{self.trunk + int(number)}.{rest}" if _SMALL_NUMBER.fullmatch(number) else name

    def reason_unused(self, name: str) -> str:
        """Why llama.cpp does not store a tensor of the Hub's layout; "" if it does, or if there is no such tensor."""
        canonical = self.canonical(name)
        return next((reason for pattern, reason in self.unused.items() if re.fullmatch(pattern, canonical)), "")

    def hub_name(self, name: str) -> str | None:
        """The Hub's name of a tensor of a GGUF file, with `{}` for an expert's number; None if there is no such tensor.

        >>> from weightsmith._models.formats.gguf.architectures.llama import Llama, Mixtral
        >>> Llama().hub_name("blk.3.attn_q.weight"), Mixtral().hub_name("blk.0.ffn_up_exps.weight")
        ('model.layers.3.self_attn.q_proj.weight', 'model.layers.0.block_sparse_moe.experts.{}.w3.weight')
        """
        module, _, kind = name.rpartition(".")
        if module in self.ends and kind in ("weight", "bias"):
            return self.published(f"{self.ends[module]}.{kind}")
        match, bare = _LAYER.fullmatch(name), _BARE.fullmatch(name)
        if match is not None and match[2] in self._modules(int(match[1])):
            return self.published(f"{LAYERS}{match[1]}.{self._modules(int(match[1]))[match[2]]}.{match[3]}")
        known = bare is not None and bare[2] in self.bare
        return self.published(f"{LAYERS}{bare[1]}.{self.bare[bare[2]]}") if bare is not None and known else None

    def published(self, canonical: str) -> str:
        """The Hub's name of a tensor: as the tables have it, but for layers that predict in a stack of their own."""
        match, predicting = _IN_LAYER.fullmatch(canonical), self.predicting
        if predicting is None or not predicting.stack or match is None or not self.predictors or int(match[1]) < self.trunk:
            return _with_prefix(canonical, [(here, there) for there, here in self.prefixes])
        module, _, kind = match[2].rpartition(".")
        if module in predicting.renamed:
            return f"{predicting.stack}{predicting.renamed[module]}.{kind}"
        return f"{predicting.stack}layers.{int(match[1]) - self.trunk}.{match[2]}"

    def place(self, name: str) -> GgufPlace | None:
        """Where a tensor of the Hub's layout is in a GGUF file; None if there is no such tensor.

        >>> from weightsmith._models.formats.gguf.architectures.llama import Mixtral
        >>> Mixtral().place("model.layers.0.block_sparse_moe.experts.7.w3.weight")
        GgufPlace(name='blk.0.ffn_up_exps.weight', expert=7)
        """
        name = self.canonical(name)
        module, _, kind = name.rpartition(".")
        stacked = _NUMBERED.fullmatch(module)
        end = _key_of(self.ends, module) or (stacked and _key_of(self.ends, f"{stacked[1]}.{{}}"))
        if end and kind in ("weight", "bias"):
            return GgufPlace(f"{end}.{kind}", int(stacked[2]) if stacked else -1)
        bare = _HUB_BARE.fullmatch(name)
        if bare is not None and (tensor := _key_of(self.bare, bare[2])) is not None:
            return GgufPlace(f"blk.{bare[1]}.{tensor}")
        match = _HUB_LAYER.fullmatch(name)
        if match is None:
            return None
        modules = self._modules(int(match[1]))
        expert, module = _EXPERT.search(match[2]), _key_of(modules, _EXPERT.sub(r"\1{}\3", match[2])) or ""
        return GgufPlace(f"blk.{match[1]}.{module}.{match[3]}", int(expert[2]) if expert else -1) if module else None

    def split_of(self, name: str) -> tuple[SplitTensor, str] | None:
        """How a tensor of the Hub's layout is split, and its layer number; None if it is stored whole."""
        match = _HUB_BARE.fullmatch(self.canonical(name))
        split = next((tensor for tensor in self.splits if match is not None and tensor.name == match[2]), None)
        return None if split is None or match is None else (split, match[1])

    def cut(self, split: SplitTensor, config: GgufConfig, shape: tuple[int, ...]) -> SplitTensor:
        """How a tensor of this shape is split, of models that are published in two layouts."""
        return split

    def part_of(self, name: str) -> tuple[SplitTensor, str] | None:
        """The tensor that a GGUF tensor is part of, and its layer number; None if it is whole."""
        match = _BARE.fullmatch(name)
        if match is None or "{}" in self.layer.get(match[2].removesuffix(".weight"), ""):  # experts are read one by one
            return None
        split = next((tensor for tensor in self.splits if match[2] in [part.name for part in tensor.parts]), None)
        return None if split is None else (split, match[1])

    def key_of(self, name: str) -> tuple[str, int] | None:
        """The key that has the number of a tensor of the Hub's layout, and the layer; None if there is no such key.

        >>> from weightsmith._models.formats.gguf.architectures.apertus import Apertus
        >>> Apertus().key_of("model.layers.3.mlp.act_fn.beta")
        ('xielu.beta', 3)
        """
        match = _HUB_BARE.fullmatch(self.canonical(name))
        key = next((key for key, tensor in self.in_keys.items() if match is not None and tensor.name == match[2]), None)
        return None if key is None or match is None else (key, int(match[1]))

    def keys_of_numbers(self, numbers: Mapping[str, float], layers: int) -> dict[str, Value]:
        """The keys that `in_keys` lists. Raises FormatError if a layer lacks a tensor, or its number is not finite.

        numbers  by the Hub's names of the tensors
        """
        if unusable := next((name for name, number in numbers.items() if not math.isfinite(number)), None):
            raise FormatError(f"its number is {numbers[unusable]}", where=unusable, fix="download the model again")
        placed = {place: number for name, number in numbers.items() if (place := self.key_of(name)) is not None}
        keys = {}
        for key, tensor in self.in_keys.items():
            if missing := [i for i in range(layers) if (key, i) not in placed]:
                where = self.published(f"{LAYERS}{missing[0]}.{tensor.name}")
                what = f"the model has no such tensor, and llama.cpp needs its number in {key}"
                raise FormatError(what, where=where, fix="download the model again")
            keys[key] = Value("f32", [placed[key, i] for i in range(layers)])
        return keys

    def numbers_of_keys(self, values: GgufValues, layers: int) -> dict[str, tuple[float, tuple[int, ...]]]:
        """The numbers of the tensors that `in_keys` lists, and their shapes, by the Hub's names. Raises FormatError.

        values  all keys of the file
        """
        return {
            self.published(f"{LAYERS}{i}.{tensor.name}"): (number, tensor.shape)
            for key, tensor in self.in_keys.items()
            for i, number in enumerate(values.numbers_by_layer(key, layers))
        }

    def knows(self, name: str) -> bool:
        """Whether there is a tensor of this name in the Hub's layout."""
        return any(find(name) is not None for find in (self.place, self.split_of, self.key_of))

    def hub_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor of a GGUF file in the Hub's layout."""
        match = _BARE.fullmatch(name)
        if match is not None and match[2] in self.flat and len(shape) == 2:
            return (shape[0] * shape[1],)
        if match is None or match[2] not in _DEPTHWISE | self.deepened:
            return shape
        channels, *others = [n for n in shape if n != 1] or [1]
        return channels, 1, *others

    def is_deepened(self, name: str) -> bool:
        """Whether a tensor of a GGUF file is one of `deepened`."""
        match = _BARE.fullmatch(name)
        return match is not None and match[2] in self.deepened

    def columns_of(self, name: str, config: GgufConfig) -> int:
        """The columns of a matrix of a GGUF file that is a vector of the Hub's, as `flat` lists them; 0: it is no such one."""
        match = _BARE.fullmatch(name)
        columns = self.flat.get(match[2]) if match is not None else None
        return columns(config) if columns is not None else 0

    def shift_of(self, name: str) -> float:
        """What is added to a tensor of a GGUF file."""
        return self.shift if is_norm(name) and not name.endswith(".ssm_norm.weight") else 0.0

    def power_of(self, name: str) -> int:
        """1 or -1 if exp or -exp of a tensor's values is stored in a GGUF file, else 0."""
        return -1 if name.endswith(".ssm_a") else 0

    def rotated_heads(self, name: str, heads: int, kv_heads: int) -> int:
        """The number of heads whose rows are reordered in a tensor of a GGUF file; 0 if none are."""
        return {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2], 0) if self.rotated else 0

    def times(self, name: str, config: GgufConfig) -> tuple[Multiplied, ...]:
        """By what rows of a tensor of a GGUF file are multiplied, one after the other. They are read as they are stored."""
        settings = self.multipliers.get(name.removesuffix(".weight").rpartition(".")[2], ())
        numbers = [config.number(setting, 1.0) for setting in settings]
        return tuple(((0, number),) for number in numbers if number != 1)

    def rows_skipped(self, name: str, config: GgufConfig) -> int:
        """The number of rows at the start of a tensor that the GGUF file does not have."""
        return 0

    def rows_of(self, name: str, config: GgufConfig) -> int:
        """The rows that llama.cpp needs of a tensor of a GGUF file: those that the Hub's does not have are 0. 0: as it has."""
        return 0

    def unread(self, config: GgufConfig) -> Mapping[str, str]:
        """Tensors of a GGUF file that llama.cpp loads and never reads, and one of the same shape each.

        Those that the model does not have are 0 in the file. Models that are read do not have them, as in transformers.
        """
        return {}

    def order(self, name: str, config: GgufConfig) -> HeadOrder | None:
        """The order of rows or columns of a tensor of a GGUF file; None if it is the Hub's."""
        return None


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)\.(weight|bias)")
_HUB_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-zA-Z_.0-9]+)\.(weight|bias)")
_HUB_BARE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-zA-Z_.0-9]+)")
_BARE = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)")
_NUMBERED = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})")
_IN_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_SMALL_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")
_EXPERT = re.compile(r"(\.experts\.)(0|[1-9][0-9]{0,5})(\.)")


def head_dim(config: GgufConfig) -> int:
    """The width of a head."""
    default = max(1, config.count("hidden_size") // config.count("num_attention_heads"))
    return config.count("head_dim", default)


def _with_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """The name with the second prefix of the first pair whose first one it has."""
    return next((f"{new}{name.removeprefix(old)}" for old, new in prefixes if name.startswith(old)), name)


def _key_of(names: Mapping[str, str], value: str) -> str | None:
    return next((name for name, known in names.items() if known == value), None)


def _any_slides(config: GgufConfig) -> bool:
    """Whether a layer of a model with a window uses it."""
    types = config.get("layer_types")
    if types is not None:
        return bool(types != ["full_attention"] * config.count("num_hidden_layers"))
    return config.count("max_window_layers", 0, least=0) < config.count("num_hidden_layers")


def need_normalised(values: GgufValues) -> None:
    """Raise Unsupported for a file without the key for dividing the weights of experts by their sum.

    transformers always does in some models, and llama.cpp does not where a file does not say it.
    """
    if not values.truth(NORMALISED, False):
        what = f"{values.prefix}{NORMALISED} is not true, and transformers always normalises"
        raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)


def need_window(config: GgufConfig) -> None:
    """Raise FormatError for a model without a window, and Unsupported where no layer has it."""
    config.count("sliding_window")
    types = config.get("layer_types")
    if types is not None and "sliding_attention" not in types:
        config.need("layers with sliding_attention", "none", "some")


def as_many_kv_heads(config: GgufConfig) -> None:
    """Raise Unsupported unless each head of a query has one of keys."""
    heads = config.count("num_attention_heads")
    config.need("num_key_value_heads", config.count("num_key_value_heads", heads), heads)


def all_or_none(shapes: Mapping[str, tuple[int, ...]], modules: Sequence[str], where: str) -> bool:
    """Whether the modules of a layer have biases. Raises Unsupported if only some have."""
    present = [f"blk.0.{module}.bias" in shapes for module in modules]
    if any(present) and not all(present):
        raise Unsupported(f"biases in some of {', '.join(modules)} only", where=where, fix=USE_ORIGINAL)
    return present[0]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What a file of `architectures/` brings, as its `FAMILY`.

    architectures  of several with one name, a GGUF file is of the first that owns it
    vision         halves of models with images, which `mmproj.gguf` has
    """

    architectures: tuple[GgufArchitecture, ...]
    vision: tuple[VisionHalf, ...] = ()
