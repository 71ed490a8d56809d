"""MLX's weights: rows of codes packed along the inputs, in groups with a scale.

X.weight U32 [outputs, inputs · bits / 32]   each row is a stream of bits, the lowest bit of a word first
X.scales     [outputs, inputs / group_size]
X.biases     [outputs, inputs / group_size]  of mode affine

mode    bits           group_size   a weight is
affine  2 3 4 5 6 8    any          code · scale + bias
mxfp4   4              32           float4 · 2 ^ (scale - 127)
mxfp8   8              32           float8 (E4M3) · 2 ^ (scale - 127)
nvfp4   4              16           float4 · scale, a float8 (E4M3)

config.json has the settings of the model, and under the names of modules those that differ, as the program that wrote it names
them, which may put its model into another one: `language_model.model.layers.0…` for `model.layers.0…`. Codes of 4 bits in
groups of 64 have the shapes of 8 bits in groups of 32. So settings that belong to no module are an error, and widths are
compared with those that must be equal. Embeddings are quantised too.

mlx-4bit and mlx-8bit are affine codes with scales and biases of the weight's dtype. The bias is the end of the group's range
that has the larger magnitude, which is exact, and the scale is adjusted so that 0 is a multiple of it; the scale is negative if
that end is the positive one. Codes are computed from scale and bias as stored. As mlx-lm does, embeddings and heads are
quantised too. The matrices of one projection of all experts are one tensor [experts, outputs, inputs] where mlx-lm's own files
have them so: mlx-lm 0.32.2 joins quantised experts of some models while it loads them (`engines`), and of others plain experts
alone.

**Error.** |code · scale + bias - x| ≤ (1 + 2^(bits - 8)) · |scale| for weights of bfloat16: half a step; up to one at the far
end of the range, because the adjusted scale may be smaller by 1/16; and the rounding of the scale, which grows with the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._models.formats.config import DAMAGED_CHECKPOINT, adapt_to_mlx_lm, config_entries, plain_dtype
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, bands, read_all, reader, refuse_transposed
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP, SUFFIX, MatrixEncoding, powers_of_two
from weightsmith._models.sources.composed import PartTensors, TensorPart, renamed
from weightsmith._models.structure.configs import EXPERT_COUNTS, text_sections, whole_number
from weightsmith._models.structure.projections import BEFORE_DOWN, MIXTRAL
from weightsmith._models.structure.projections import JOINED as JOINED_PROJECTIONS
from weightsmith._plans import JOIN, PLAIN, PlanDraft, Step
from weightsmith.abc.stored import Bytes, Config, Encoding, Rows, Specs, StoredFormat, Wrapped, Writing
from weightsmith.abc.tensors import StoredPart, Tensors

_BITS = (2, 3, 4, 5, 6, 8)
_FIXED = {"mxfp4": (4, MXFP4_GROUP), "mxfp8": (8, MXFP4_GROUP), "nvfp4": (4, NVFP4_GROUP)}
"""Bits and group size of the modes that have only one."""
_MODES = ("affine", *_FIXED)

GROUPS = (64, 32, 128)
"""Group sizes, the default first."""

STACK = "switch_mlp"
"""The module of experts whose matrices are one tensor [experts, outputs, inputs]."""

JOINED = frozenset(
    """
    afmoe bailing_hybrid bailing_moe bailing_moe_linear deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe
    glm4_moe_lite hunyuan jamba kimi_k2 kimi_vl longcat_flash mimo_v2_flash mistral4 mixtral olmoe phimoe phixtral qwen2_moe
    """.split()
)
"""Values of `model_type` of which mlx-lm 0.32.2 joins codes, scales and biases of experts while it loads them (`sanitize`)."""

STACKED = frozenset({"ernie4_5_moe", "qwen3_moe"})
"""Values of `model_type` of which it joins plain experts only, so quantised ones must be stacked. Qwen3-Next and LFM2-MoE are
not among them: if their experts are stacked, mlx-lm does not convert other tensors either.
"""

_READ: Mapping[str, Mapping[str, str]] = {
    **{model_type: {} for model_type in ("glm4_moe", "olmoe", "qwen2_moe", *STACKED)},
    "mixtral": MIXTRAL,
}
"""Values of `model_type` whose stacked experts are read, with projections that have other names. Nothing else in their files
from mlx-lm differs from those of transformers; of Ernie 4.5 it leaves tensors out (`_refuse_other_weights`).
"""

_NAME_THE_ORIGINAL = "Name the model of the Hub that was converted for MLX."

_PREFIXES: Mapping[str, Mapping[str, str]] = {
    "gemma4": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        **{f"{module}.": f"model.{module}." for module in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")},
    },
    **{
        model_type: {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
        for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    },
    "gpt_neox": {"model.h.": "gpt_neox.layers.", "model.embed_out.": "embed_out.", "model.": "gpt_neox."},
    "gptj": {"model.": "transformer.", "lm_head.": "lm_head."},
}
"""Value of `model_type` → how names of mlx-lm and mlx-vlm begin, and those that transformers loads. The first that fits counts.
"""

_SMALLEST_SCALE = np.float32(1e-7)
"""MLX's."""


# ---- reading


@dataclass(frozen=True, slots=True)
class MlxWeight(Weight):
    """One weight.

    stored      weight, scales; biases of mode affine
    mode        `affine`, `mxfp4`, …
    bits        of a code
    group_size  inputs of a group
    top         of the stored rows, where those of an expert begin
    """

    mode: str
    bits: int
    group_size: int
    top: int = 0

    def part_of(self, stored: TensorSpec) -> StoredPart:
        return StoredPart(stored.name, stored.dtype, self.top * stored.shape[-1])

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.codes import dequantise_rows

        inputs, table = self.spec.shape[1], self._table()
        width, groups = inputs * self.bits // 32, inputs // self.group_size
        for row, bottom, skip, part in bands(first, values, inputs):
            row, bottom = row + self.top, bottom + self.top
            words = read_all(stored, self.stored[0], row * width, bottom * width)
            scales = self._scales(read_all(stored, self.stored[1], row * groups, bottom * groups))
            biases = np.zeros_like(scales)
            if self.mode == "affine":
                biases = read_all(stored, self.stored[2], row * groups, bottom * groups).astype(np.float32)
            dequantise_rows(words, width, self.bits, table, self.group_size, scales, biases, skip, part)

    def _table(self) -> npt.NDArray[np.float32]:
        """float32 [2 ** bits]: the number that each code is."""
        from weightsmith._kernels.codes import TABLES

        return np.arange(1 << self.bits, dtype=np.float32) if self.mode == "affine" else TABLES[f"float{self.bits}"]

    def _scales(self, scales: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if self.mode in ("mxfp4", "mxfp8"):
            return powers_of_two(scales)
        return (scales.view(DTYPES["F8_E4M3"].numpy) if self.mode == "nvfp4" else scales).astype(np.float32)


def recognises(config: Config, specs: Specs) -> bool:
    entries = config_entries(config)
    named = any(isinstance(entry.get("quant_method"), str) for _, entry in entries)
    return bool(entries) and not named and any(is_quantised(name, specs) for name in specs)


def is_quantised(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """The name is that of the scales of codes in 32-bit words."""
    weight = specs.get(name.removesuffix(".scales") + ".weight")
    return name.endswith(".scales") and weight is not None and weight.dtype.name == "U32"


def weights(model: QuantisedModel) -> list[MlxWeight]:
    modules = [name.removesuffix(".scales") for name in model.specs if is_quantised(name, model.specs)]
    settings_of = own_settings(model)
    read_weights = [weight for module in modules for weight in _weights(model, module, settings_of.get(module, model.entry))]
    check_widths(model, map(_width, read_weights))
    return read_weights


def _width(weight: MlxWeight) -> Width:
    """The shape of a weight, and the inputs that its codes and scales would have with other bits and group sizes."""
    outputs, inputs = weight.spec.shape
    groups, stored_bits = inputs // weight.group_size, inputs * weight.bits
    others = (size * groups for bits in _BITS for size in GROUPS if size * groups * bits == stored_bits)
    return Width(weight.spec.name.removesuffix(".weight"), outputs, inputs, tuple(others) if weight.mode == "affine" else ())


def _weights(model: QuantisedModel, module: str, settings: Mapping[str, Any]) -> Iterator[MlxWeight]:
    """The weight of a module, or those of its experts."""
    mode = model.setting("mode", "affine", _MODES, settings)
    if mode == "affine":
        bits, group_size = model.setting("bits", None, _BITS, settings), model.group_size(entry=settings)
    else:
        bits, group_size = _FIXED[mode]
    codes = model.specs[f"{module}.weight"]
    prefix, stacked, projection = module.partition(f".{STACK}.")
    if len(codes.shape) != (3 if stacked else 2):
        raise model.unsupported(f"tensor {show(codes.name)} is {list(codes.shape)}, and only matrices and {STACK} are read")
    *experts, outputs, width = codes.shape
    inputs = 32 * width // bits
    if inputs * bits != 32 * width or group_size < 1 or inputs % group_size:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, which {bits} bits in groups of {group_size} do not fill"
        raise model.damaged(what)
    shape = (*experts, outputs, inputs // group_size)
    scales = model.part(f"{module}.scales", ("F32", "BF16", "F16") if mode == "affine" else ("U8",), shape)
    names, default = [codes.name, scales.name], DTYPES["BF16"]
    if mode == "affine":
        names.append(model.part(f"{module}.biases", (scales.dtype.name,), shape).name)
        default = scales.dtype
    if stacked:
        counts = [model.config[key] for key in EXPERT_COUNTS if key in model.config]
        if experts[0] not in counts:
            what = f"tensor {show(codes.name)} has {experts[0]:,} experts, and config.json says {show(counts)}"
            raise model.damaged(what)
        other_names = _READ.get(str(model.config.get("model_type")))
        if other_names is None:
            raise model.unsupported(f"experts that MLX has stacked ({STACK}) are not read for this model_type")
        projection = other_names.get(projection, projection)
    written = mode == "affine" and bits in (4, 8) and group_size in GROUPS
    encoding = _encoding(bits, group_size).name if written else ""
    for expert in range(experts[0]) if experts else [0]:
        name = f"{prefix}.experts.{expert}.{projection}.weight" if stacked else codes.name
        if stacked and name in model.specs:
            raise model.damaged(f"tensor {show(name)} is stored twice: by itself, and in {show(codes.name)}")
        spec = TensorSpec(name, F32, (outputs, inputs))
        of_model = plain_dtype(model.config, default)
        yield MlxWeight(spec, tuple(names), of_model, mode, bits, group_size, expert * outputs, encoding=encoding)


_read_codes = reader("MLX", (".weight", ".scales", ".biases"), weights)


def _read(stored: Tensors, config: Config, where: str) -> Wrapped:
    return in_hub_layout(_read_codes(stored, config, where), where)


_CONVOLUTION = re.compile(r".+[._]conv(_?1d)?\.weight")
_ANY_CONVOLUTION = re.compile(r".+\.conv\w*\.weight")
_SCORES = "e_score_correction_bias"
_STACKED_PLAIN = re.compile(r"(.+)\.(?:switch_mlp|switch_glu)\.(\w+)\.weight")
_MOVED_ALONE = frozenset({"lfm2", "mamba", "mamba2", "olmo_hybrid", "recurrent_gemma"})
"""Values of `model_type` for which mlx-lm changes nothing but the layout of the convolutions."""
_LEARNED_ALPHA = re.compile(r".+\.act_fn\.alpha_[np]")
"""Apertus' parameters of an activation: shape (1,), and a scalar in MLX."""
_OF_HEADS = re.compile(r".+\.(k_k|k_a|g_norm\.(weight|bias))")
"""RWKV-7's vectors over all heads, which are [heads, head_dim] in MLX."""

_OTHER_WEIGHTS = (
    ("", re.compile(r".+\.(embed_q|unembed_out)\.weight"), "split kv_b_proj in two"),
    ("", re.compile(r".+\.experts\.(gate|up|down)_proj\.weight"), "stacked experts"),
    ("granitemoehybrid", re.compile(r".+\.layers\.\d+\.mlp\..+"), "split shared_mlp.input_linear in two"),
    ("baichuan_m1", re.compile(r"lm_head\.weight"), "divided the rows of the head by their norms"),
    ("dbrx", re.compile(r".+\.experts\.\d+\.w\d\.weight"), "split experts.mlp"),
    ("hunyuan", re.compile(r".+\.(mlp\.gate_proj|self_attn\.q_proj)\.weight"), "split qkv_proj and gate_and_up_proj"),
    ("muse_spark", re.compile(r".+\.qkvg_proj\.weight"), "joined projections and reordered their rows"),
)
"""What mlx-lm does to weights, and the names that tell: the value of `model_type`, "" for any."""


def in_hub_layout(wrapped: Wrapped, where: str) -> Wrapped:
    """A model that MLX has written, in the Hub's layout: a matrix for each expert, and the Hub's names and convolutions.

    Over time, those are [channels, 1, kernel]; mlx-lm has [channels, kernel, 1]. It also adds 1 to the norms of Qwen3.5 and
    Qwen3-Next, and multiplies weights of Falcon-H1 by factors from config.json; in 16 bits, neither can be undone without loss.
    mlx-vlm has the inputs of all kernels last, such as those that embed patches of images, and renames modules. Raises
    Unsupported for these models, for others whose kernels are moved and that are not known to be the same otherwise, and for
    weights under names that only MLX gives them (`_OTHER_WEIGHTS`).
    """
    refuse_transposed(wrapped.config or {}, "MLX", where)
    wrapped = _with_names_of_the_hub(_with_single_experts(wrapped, where), where)
    specs = wrapped.source.specs
    model_type = (wrapped.config or {}).get("model_type")
    _refuse_other_weights(specs, model_type, where)
    wrapped = _without_towers(wrapped, where)
    moved = [spec for spec in specs.values() if _is_over_time(spec)]
    kernels = [spec for spec in specs.values() if _has_inputs_last(spec)]
    if kernels or (moved and not (isinstance(model_type, str) and model_type in _MOVED_ALONE)):
        spec, layout = (kernels[0], "with its inputs last") if kernels else (moved[0], "[channels, kernel, 1]")
        what = f"MLX has stored {show(spec.name)} as {list(spec.shape)}, {layout}; in some models it also"
        what += f" changes norms and other weights, and for model_type {show(model_type)} what it changes is not undone"
        raise Unsupported(what, where=where, fix=_NAME_THE_ORIGINAL)
    shapes: dict[str, tuple[int, ...]] = {spec.name: (spec.shape[0], 1, spec.shape[1]) for spec in moved}
    shapes |= {name: (1,) for name, spec in specs.items() if not spec.shape and _LEARNED_ALPHA.fullmatch(name)}
    if model_type == "rwkv7":
        of_heads = (spec for spec in specs.values() if len(spec.shape) == 2 and _OF_HEADS.fullmatch(spec.name))
        shapes |= {spec.name: (spec.shape[0] * spec.shape[1],) for spec in of_heads}
    if not shapes:
        return wrapped
    parts = {name: TensorPart(name, shapes.get(name, spec.shape)) for name, spec in specs.items()}
    return replace(wrapped, source=PartTensors(wrapped.source, parts, where))


def _refuse_other_weights(specs: Specs, model_type: object, where: str) -> None:
    """Raise Unsupported for weights that mlx-lm has made of others, or left out."""
    for kind, pattern, done in _OTHER_WEIGHTS:
        if kind not in ("", model_type):
            continue
        name = next((name for name, spec in specs.items() if pattern.fullmatch(name) and (kind or len(spec.shape) == 3)), None)
        if name is not None:
            raise Unsupported(f"MLX has {done}, which is not undone: {show(name)}", where=where, fix=_NAME_THE_ORIGINAL)
    if model_type == "ernie4_5_moe" and any(".experts." in name for name in specs):
        if not any(name.endswith(_SCORES) for name in specs):
            what = f"MLX has left out tensors that routers need: {_SCORES} of each layer with experts"
            raise Unsupported(what, where=where, fix=_NAME_THE_ORIGINAL)


def _without_towers(wrapped: Wrapped, where: str) -> Wrapped:
    """The model, with a note if mlx-lm has left out all but its text model; `vision_config` it leaves out too."""
    if not _has_towers(wrapped.config or {}) or any(word in name for name in wrapped.source.specs for word in _OTHER_TOWERS):
        return wrapped
    fix = "name the model of the Hub that was converted for MLX, to keep them"
    note = Finding("only the text model is here: MLX has left out the parts for images or audio", where, fix=fix)
    return replace(wrapped, notes=(*wrapped.notes, note))


def _has_towers(config: Config) -> bool:
    """Whether it is the config.json of a model with more parts than a text model.

    >>> _has_towers({"model_type": "qwen2_vl"}), _has_towers({"model_type": "gemma3", "text_config": {}})
    (True, True)
    >>> _has_towers({"model_type": "qwen3_5_text", "text_config": {}})
    False
    """
    model_type, architectures = str(config.get("model_type")), config.get("architectures")
    if model_type in _TOWERS_WITHOUT_SECTIONS:
        return True
    names = architectures if isinstance(architectures, list) else []
    of_text = model_type.endswith("_text") or any(str(name).endswith("ForCausalLM") for name in names)
    return not of_text and isinstance(config.get("text_config"), Mapping)


def _with_names_of_the_hub(wrapped: Wrapped, where: str) -> Wrapped:
    """The model with the names of modules on the Hub, if mlx-lm or mlx-vlm has renamed those of its `model_type`."""
    model_type, specs = (wrapped.config or {}).get("model_type"), wrapped.source.specs
    prefixes = _PREFIXES.get(model_type, {}) if isinstance(model_type, str) else {}
    if not prefixes or not all(name.startswith(tuple(prefixes)) for name in specs):
        return wrapped
    names = {}
    for name in specs:
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        names[prefixes[prefix] + name.removeprefix(prefix)] = name
    return replace(wrapped, source=renamed(wrapped.source, names, where))


def _is_over_time(spec: TensorSpec) -> bool:
    """Whether it is a kernel of one channel, as MLX stores it: [channels, kernel, 1]."""
    return len(spec.shape) == 3 and spec.shape[2] == 1 < spec.shape[1] and _CONVOLUTION.fullmatch(spec.name) is not None


def _has_inputs_last(spec: TensorSpec) -> bool:
    """Whether it is a kernel of several channels with the inputs last: [outputs, …, height, width, inputs].

    The shape tells: kernels over images are square, and those over time have fewer positions than inputs. Where both layouts
    have the same shape, it is the Hub's.

    >>> shapes = (8, 2, 14, 14, 3), (8, 3, 2, 14, 14)
    >>> [_has_inputs_last(TensorSpec("patch_embed.proj.weight", DTYPES["F32"], shape)) for shape in shapes]
    [True, False]
    """
    shape = spec.shape
    if len(shape) == 3:
        return 1 < shape[1] < shape[2] and _ANY_CONVOLUTION.fullmatch(spec.name) is not None
    return len(shape) in (4, 5) and spec.name.endswith(".weight") and shape[-3] == shape[-2] != shape[-1]


def _with_single_experts(wrapped: Wrapped, where: str) -> Wrapped:
    """The model with a matrix for each expert where plain ones are stacked; quantised ones are apart already."""
    config, specs = wrapped.config or {}, wrapped.source.specs
    stacked = {name: match for name in specs if (match := _STACKED_PLAIN.fullmatch(name))}
    if not stacked:
        return wrapped
    other_names = _READ.get(str(config.get("model_type")))
    name, _ = next(iter(stacked.items()))
    if other_names is None or any(f".{STACK}." not in name for name in stacked):
        what = f"experts that MLX has stacked ({show(name)}) are not read for model_type {show(config.get('model_type'))}"
        raise Unsupported(what, where=where, fix=_NAME_THE_ORIGINAL)
    counts = [config[key] for key in EXPERT_COUNTS if key in config]
    parts = {name: TensorPart(name, spec.shape) for name, spec in specs.items() if name not in stacked}
    for name, match in stacked.items():
        shape = specs[name].shape
        if len(shape) != 3 or shape[0] not in counts or shape[0] > MAX_STACKED:
            what = f"tensor {show(name)} is {list(shape)}, and config.json says {show(counts)} experts"
            raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
        size = shape[1] * shape[2]
        for expert in range(shape[0]):
            single = f"{match[1]}.experts.{expert}.{other_names.get(match[2], match[2])}.weight"
            if single in specs:
                what = f"tensor {show(single)} is stored twice: by itself, and in {show(name)}"
                raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
            parts[single] = TensorPart(name, shape[1:], ((expert * size, size),))
    return replace(wrapped, source=PartTensors(wrapped.source, parts, where))


# ---- the settings of modules

_WRAPPERS = ("model", "language_model")
"""Modules that hold the others, in any order and number."""
_VOCABULARY = ("embed_tokens", "lm_head", "wte")
_LAYER_INPUTS = ("qkv", "gate_up")
"""Values of `JOINED_PROJECTIONS` of projections whose input is the hidden state."""
_OTHER_TOWERS = ("vision", "visual", "audio", "speech", "image")
"""Parts of names of modules with hidden states of other sizes."""
_TOWERS_WITHOUT_SECTIONS = ("qwen2_vl", "qwen2_5_vl")
"""Values of `model_type` whose config.json has the settings of the text model beside `vision_config`."""
_OTHER_WIDTHS = ("attention_hidden_size", "word_embed_proj_dim", "embedding_size", "embedding_dim")
"""Keys of config.json that say that inputs of some modules are not the hidden state, which they then are no check of."""
_DEFAULTS: Mapping[str, Any] = {"group_size": 64, "bits": 4}
"""MLX's own defaults, for what the settings of a module leave out."""
_FIX = "Repair the settings of the modules in config.json: mlx_lm.convert and mlx_vlm.convert write them."


def own_settings(model: QuantisedModel) -> dict[str, Mapping[str, Any]]:
    """The settings of modules that have their own. Raises FormatError for settings of no module, and for two of one."""
    modules = {name.rpartition(".")[0] for name in model.specs}
    by_module: dict[str, Mapping[str, Any]] = {}
    names: dict[str, str] | None = None
    for key, value in model.entry.items():
        if not isinstance(value, Mapping):
            continue
        if key not in modules and names is None:
            names = _unwrapped(modules)
        module = key if key in modules else (names or {}).get(_unwrap(key), "")
        settings = {**_DEFAULTS, **value}
        if module and by_module.setdefault(module, settings) != settings:
            raise FormatError(f"config.json has two settings of the module {show(module)}", where=model.where, fix=_FIX)
        if not module and not _equal(settings, model.entry):
            what = f"config.json has settings of the module {show(key)}, and the model has no such module"
            raise FormatError(what, where=model.where, fix=_FIX)
    return by_module


def _equal(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(settings.get(key) == others.get(key) for key in ("group_size", "bits")) and (
        settings.get("mode", "affine") == others.get("mode", "affine")
    )


def _unwrap(name: str) -> str:
    """The name of a module without those that hold the whole model.

    >>> _unwrap("language_model.model.layers.0.mlp"), _unwrap("language_model.lm_head")
    ('layers.0.mlp', 'lm_head')
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _unwrapped(modules: Iterable[str]) -> dict[str, str]:
    """Name without wrappers → module; without names that are those of several modules."""
    by_name: dict[str, str] = {}
    for module in modules:
        name = _unwrap(module)
        by_name[name] = "" if name in by_name else module
    return by_name


@dataclass(frozen=True, slots=True)
class Width:
    """The shape of a weight as its settings give it.

    name    of the module
    others  the inputs that its codes and scales would have with other settings
    """

    name: str
    outputs: int
    inputs: int
    others: tuple[int, ...]


def check_widths(model: QuantisedModel, widths: Iterable[Width]) -> None:
    """Raise FormatError for a weight that has the right width only with other settings than config.json's."""
    by_name = {width.name: width for width in widths}
    hidden = 0
    if not any(key in model.config for key in _OTHER_WIDTHS) and not any(
        key.endswith("decoder_config") for key in model.config
    ):
        hidden = next((n for part in text_sections(model.config) if (n := whole_number(part.get("hidden_size")))), 0)
    for width in by_name.values():
        for inputs, why in _known_inputs(width.name, by_name, hidden):
            if inputs != width.inputs and inputs in width.others:
                what = f"tensor {show(width.name + '.weight')} has {width.inputs:,} inputs by its settings in config.json"
                raise FormatError(f"{what}, and {why}: the settings are not its own", where=model.where, fix=_FIX)


def _known_inputs(name: str, widths: Mapping[str, Width], hidden: int) -> Iterator[tuple[int, str]]:
    """What is known of a module's inputs from elsewhere, each with the words that say where."""
    parent, _, leaf = name.rpartition(".")
    joined = JOINED_PROJECTIONS.get(leaf, "")
    if hidden and (leaf in _VOCABULARY or joined in _LAYER_INPUTS) and not any(tower in name for tower in _OTHER_TOWERS):
        yield hidden, f"hidden_size is {hidden:,}"
    for other in JOINED_PROJECTIONS if joined else ():
        sibling = widths.get(f"{parent}.{other}")
        if sibling is not None and JOINED_PROJECTIONS[other] == joined:
            yield sibling.inputs, f"{show(sibling.name)} has {sibling.inputs:,}"
    for before in BEFORE_DOWN.get(leaf, ()):
        if (sibling := widths.get(f"{parent}.{before}")) is not None:
            yield sibling.outputs, f"{show(sibling.name)} has {sibling.outputs:,} outputs"


# ---- writing


def _encoding(bits: int, group: int) -> MatrixEncoding:
    """Codes, scales and biases.

    >>> for out in _encoding(4, 64).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 128))):
    ...     print(out)
    q_proj.weight [64, 16] U32
    q_proj.scales [64, 2] BF16
    q_proj.biases [64, 2] BF16
    """
    entry = {"group_size": group, "bits": bits, "mode": "affine"}
    parts, fill = partial(_parts, bits, group), partial(_fill, bits, group)
    return MatrixEncoding(
        f"mlx-{bits}bit",
        parts,
        fill,
        partial(_settings, entry),
        GROUPS,
        f".{STACK}.",
        kind="integer",
        bits=bits,
        group=group,
        symmetric=False,
        vocabulary=True,
    )


def _settings(entry: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization`, and the same as `quantization_config`, where transformers looks. mlx-lm quantises what has scales."""
    return {"quantization": dict(entry), "quantization_config": dict(entry)}


def _parts(bits: int, group: int, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    *rows, cols = spec.shape
    module, groups = spec.name.removesuffix(SUFFIX), (*rows, cols // group)
    return (
        TensorSpec(spec.name, DTYPES["U32"], (*rows, cols * bits // 32)),
        TensorSpec(f"{module}.scales", spec.dtype, groups),
        TensorSpec(f"{module}.biases", spec.dtype, groups),
    )


def _fill(bits: int, group: int, spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes some code."""
    from weightsmith._kernels import codecs
    from weightsmith._kernels.codes import group_extremes, quantise_affine

    flat, code = rows.reshape(-1), spec.dtype.code
    lows, highs = np.empty((2, flat.size // group), np.float32)
    group_extremes(flat, group, lows, highs)
    scales, biases = _affine_scales(lows, highs, bits)
    for values, out in ((scales, outs[1]), (biases, outs[2])):
        codecs.encode(values, values.size, code, 0, out)
        codecs.decode(out, code, 0, values.size, values)
    zero = scales == 0  # smaller than the dtype's smallest number: every code is the bias
    quantise_affine(flat, group, np.where(zero, np.float32(1), scales), biases, bits, outs[0])


def _affine_scales(lows: Rows, highs: Rows, bits: int) -> tuple[Rows, Rows]:
    """Scales and biases of groups from their smallest and largest numbers, as MLX chooses them: float32.

    The end of the range that is farther from 0 is a whole number of steps, so that it and 0 have exact codes; the scale is
    adjusted to that, and negative where this end is the upper one.
    """
    with np.errstate(all="ignore"):
        scales = np.maximum((highs - lows) / np.float32(2**bits - 1), _SMALLEST_SCALE)
        from_low = np.abs(lows) > np.abs(highs)
        scales = np.where(from_low, scales, -scales)
        edges = np.where(from_low, lows, highs)
        steps = np.rint(edges / scales)
        scales = np.where(steps != 0, edges / np.where(steps != 0, steps, 1), scales).astype(np.float32)
        return scales, np.where(steps != 0, edges, 0).astype(np.float32)


def affine(bits: int) -> dict[int, MatrixEncoding]:
    """mlx-4bit or mlx-8bit, by group size."""
    return {group: _encoding(bits, group) for group in GROUPS}


_EXPERT = re.compile(r"(.+\.)experts\.(\d+)\.(\w+)\.weight")


def _stack_experts(draft: PlanDraft, encoding: Encoding) -> None:
    """Join the encoded experts of a draft, if mlx-lm needs that, and all of a projection are encoded."""
    if (draft.config or {}).get("model_type") not in STACKED:
        return
    stacks: dict[tuple[str, str], dict[int, Step]] = {}
    for step in draft.steps:
        if match := _EXPERT.fullmatch(step.out.name):
            stacks.setdefault((match[1], match[3]), {})[int(match[2])] = step
    joined: dict[str, Step | None] = {}
    for (prefix, projection), of_projection in stacks.items():
        ordered = [of_projection[number] for number in sorted(of_projection)]
        alike = {(step.encoding, step.out.shape, step.out.dtype) for step in ordered}
        complete = sorted(of_projection) == list(range(len(of_projection)))
        if complete and len(alike) == 1 and ordered[0].encoding == encoding.name:
            name = f"{prefix}{STACK}.{projection}.weight"
            joined[ordered[0].out.name] = _joined(name, ordered, encoding)
            joined |= dict.fromkeys(step.out.name for step in ordered[1:])
    draft.steps = [stack for step in draft.steps if (stack := joined.get(step.out.name, step)) is not None]


def _joined(name: str, ordered: list[Step], encoding: Encoding) -> Step:
    first = ordered[0]
    spec = TensorSpec(name, first.out.dtype, (len(ordered), *first.out.shape))
    needs = tuple(dict.fromkeys(need for step in ordered for need in step.needs))
    pieces = tuple(replace(leaf, encoding=PLAIN, stored=()) for step in ordered for leaf in step.leaves)
    joined = Step(spec, JOIN, (), pieces=pieces, needs=needs, role=first.role, layer=first.layer)
    return replace(joined, encoding=first.encoding, stored=encoding.outs(spec))


def _adapt(draft: PlanDraft, encoding: Encoding) -> None:
    adapt_to_mlx_lm(draft)
    _stack_experts(draft, encoding)


_READERS = "MLX, mlx-lm, LM Studio"
FORMAT = StoredFormat(
    "mlx",
    "MLX",
    recognises,
    _read,
    {".scales": lambda name, specs: "MLX" if is_quantised(name, specs) else ""},
    writes=(
        Writing("mlx-8bit", "8-bit integers with a scale and a bias for each group", _READERS, affine(8), _adapt),
        Writing("mlx-4bit", "4-bit integers with a scale and a bias for each group", _READERS, affine(4), _adapt),
    ),
)
