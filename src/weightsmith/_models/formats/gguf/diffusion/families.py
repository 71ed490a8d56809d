"""The diffusion models that ComfyUI-GGUF loads: recognised by the names of their tensors in single files, and their types."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.types import Chosen, Mixture
from weightsmith._models.formats.gguf.writing import PLAIN, TYPES

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "net.")
"""Prefixes that some programs give the names of a diffusion model. The first that any name has counts."""


@dataclass(frozen=True, slots=True)
class DiffusionFamily:
    """A diffusion model, or several with the same names.

    name     general.architecture
    title    for messages
    marks    sets of names: a model of the family has all names of one set
    kept     parts of the names of matrices that are not stored as blocks
    kept_whole  whole names of such matrices
    precise  parts of the names of tensors that are always F32, because programs read them as they are
    ignored  parts of the names of tensors that are left out
    markers  names of tensors outside the model that tell ComfyUI how to sample
    folds    whether matrices and convolutions are stored as rows of 256 numbers, where their own rows are no multiple of it
    """

    name: str
    title: str
    marks: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]
    kept_whole: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    folds: bool = False


_UNET_KEPT = ("class_embedding.", "time_embedding.", "add_embedding.", "time_embed.", "label_emb.", "conv_in.", "conv_out.")
_UNET_ENDS = ("input_blocks.0.0.weight", "out.2.weight")
_FLUX_KEPT = ("txt_in.", "img_in.", "time_in.", "vector_in.", "guidance_in.", "final_layer.")

FAMILIES = (
    DiffusionFamily(
        "hyvid",
        "HunyuanVideo",
        (
            ("double_blocks.0.img_attn_proj.weight", "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"),
            ("double_blocks.0.img_attn.proj.weight", "txt_in.individual_token_refiner.blocks.1.self_attn.qkv.weight"),
        ),
        _FLUX_KEPT,
    ),
    DiffusionFamily("flux", "Flux.1, Flux.2, Chroma", (("double_blocks.0.img_attn.proj.weight",),), _FLUX_KEPT),
    DiffusionFamily(
        "sd3",
        "Stable Diffusion 3",
        (("joint_blocks.0.x_block.attn.qkv.weight",),),
        ("final_layer.", "time_text_embed.", "context_embedder.", "t_embedder.", "y_embedder.", "x_embedder."),
        ("proj_out.weight", "pos_embed"),
    ),
    DiffusionFamily(
        "aura",
        "AuraFlow",
        (("double_layers.3.modX.1.weight",),),
        ("t_embedder.", "init_x_linear."),
        ("modF.1.weight", "cond_seq_linear.weight", "final_linear.weight", "positional_encoding", "register_tokens"),
    ),
    DiffusionFamily(
        "hidream",
        "HiDream",
        (("caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),),
        ("p_embedder.", "t_embedder.", "x_embedder.", "final_layer.", ".ff_i.gate.weight", "caption_projection."),
        precise=(".ff_i.gate.weight", "img_emb.emb_pos"),
    ),
    DiffusionFamily(
        "cosmos",
        "Cosmos Predict 2",
        (("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),),
        ("p_embedder.", "t_embedder.", "t_embedding_norm.", "x_embedder.", "pos_embedder.", "final_layer."),
        precise=("pos_embedder",),
        ignored=("_extra_state", "accum_"),
    ),
    DiffusionFamily(
        "ltxv",
        "LTX-Video",
        (
            (
                "adaln_single.emb.timestep_embedder.linear_2.weight",
                "transformer_blocks.27.scale_shift_table",
                "caption_projection.linear_2.weight",
            ),
        ),
        ("adaln_single.", "caption_projection.", "patchify_proj.", "proj_out.", "scale_shift_table"),
        precise=("scale_shift_table",),
    ),
    DiffusionFamily(
        "wan",
        "Wan",
        (("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),),
        ("modulation.", "patch_embedding.", "text_embedding.", "time_projection.", "time_embedding.", "img_emb.", "head."),
        precise=(".modulation",),
    ),
    DiffusionFamily(
        "sdxl",
        "Stable Diffusion XL",
        (
            ("down_blocks.0.downsamplers.0.conv.weight", "add_embedding.linear_1.weight"),
            (
                *("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight"),
                *("output_blocks.2.2.conv.weight", "output_blocks.5.2.conv.weight"),
            ),
            ("label_emb.0.0.weight",),
        ),
        _UNET_KEPT,
        _UNET_ENDS,
        markers=("v_pred", "ztsnr", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "edm_mean", "edm_std"),
        folds=True,
    ),
    DiffusionFamily(
        "sd1",
        "Stable Diffusion 1 and 2",
        (
            ("down_blocks.0.downsamplers.0.conv.weight",),
            (
                *("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "input_blocks.9.0.op.weight"),
                *("output_blocks.2.1.conv.weight", "output_blocks.5.2.conv.weight", "output_blocks.8.2.conv.weight"),
            ),
        ),
        _UNET_KEPT,
        _UNET_ENDS,
        folds=True,
    ),
    DiffusionFamily(
        "lumina2",
        "Lumina 2, Z-Image",
        (("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),),
        ("t_embedder.", "x_embedder.", "final_layer.", "cap_embedder.", "context_refiner.", "noise_refiner."),
    ),
    DiffusionFamily(
        "qwen_image",
        "Qwen-Image",
        (
            (
                "time_text_embed.timestep_embedder.linear_2.weight",
                "transformer_blocks.0.attn.norm_added_q.weight",
                "transformer_blocks.0.img_mlp.net.0.proj.weight",
            ),
        ),
        ("time_text_embed.", "img_in.", "txt_in.", "norm_out."),
        ("proj_out.weight",),
    ),
)
"""Tried in this order: HunyuanVideo, as ComfyUI saves it, also has the names of Flux, and Stable Diffusion XL those of Stable
Diffusion 1.

ComfyUI-GGUF loads Qwen-Image, but has no rules for it. The 6 matrices outside the blocks are kept, as in the files that its
author published: https://github.com/ggml-org/llama.cpp/issues/15143 counts their types.
"""

_LTX_2 = "audio_adaln_single.linear.weight"
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "clip_txt_mapper.weight": "Stable Cascade",
        "down_blocks.1.0.channelwise.0.weight": "Stable Cascade",
        "blocks.0.attn.qkv_x.weight": "Mochi",
        "blocks.0.cross_attn.q_linear.weight": "PixArt or Sana",
        "blocks.block1.blocks.0.block.attn.to_q.0.weight": "Cosmos 1",
        _LTX_2: "LTX-2",
        "txt_in.text_norm.weight": "Qwen-Image 2.1",
        "txtfusion.projector.weight": "Krea 2",
        "token_refiner.blocks.0.attn.qkv_proj.weight": "MiniMax H3",
        "down_blocks.0.motion_modules.0.temporal_transformer.norm.weight": "AnimateDiff",
    }
)
"""Name of a tensor → the diffusion model that has it, which ComfyUI-GGUF does not load."""


def prefix_of(names: Collection[str]) -> str:
    """The prefix of the diffusion model's tensors in a file; "" if they have none.

    >>> prefix_of(["model.diffusion_model.img_in.weight", "vae.decoder.conv_in.weight"]), prefix_of(["img_in.weight"])
    ('model.diffusion_model.', '')
    """
    for prefix in _PREFIXES[:-1]:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return _PREFIXES[-1] if names and all(name.startswith(_PREFIXES[-1]) for name in names) else ""


def find_family(names: Collection[str]) -> DiffusionFamily | None:
    """The family of a model, by its names; None for another model.

    names  of its tensors in a single file, without a prefix

    >>> find_family({"joint_blocks.0.x_block.attn.qkv.weight"}).title
    'Stable Diffusion 3'
    """
    known = set(names)
    if _LTX_2 in known:  # its other names are LTX-Video's, and ComfyUI needs settings that ComfyUI-GGUF does not give to it
        return None
    alike = (family for family in FAMILIES if any(known.issuperset(mark) for mark in family.marks))
    return next(alike, None)


def family_of(names: Collection[str], where: str, kind: str = "") -> DiffusionFamily:
    """`find_family`. Raises Unsupported for a model that ComfyUI-GGUF does not load.

    where  of the error
    kind   what config.json calls the model: a class of diffusers; "" for a single file
    """
    if family := find_family(names):
        return family
    other = kind or next((title for name, title in _OTHERS.items() if name in names), "")
    what = f"ComfyUI-GGUF does not load {show(other) if kind else other}"
    if not other:
        what = "it has no config.json, as language models have it, and names of tensors that no diffusion model has"
    known = "; ".join(family.title for family in FAMILIES)
    fix = f"choose another format, such as comfyui-fp8. GGUF files can be written for these diffusion models: {known}"
    raise Unsupported(what, where=where, fix=fix)


# ---- Which type each tensor gets
#
#     convert.py                          lcpp.patch, for matrices in the blocks
#     vectors, up to 1,024 elements  F32  mixtures of types by names: values and MLPs' outputs have more bits
#     BF16 models                    BF16 rows that are no multiple of 256, in a mixture of types of 256  F16
#     others                         F16
#     convolutions over time         F32
#
# Vectors of F16 models stay F16.
#
# Differences, on purpose:
#
# * A tensor outside layers, such as `x_pad_token`, is F32 where `convert.py` writes BF16: ComfyUI-GGUF decodes BF16 only in
#   weights and biases of layers, and had to name three exceptions.
# * Rows that are no multiple of 32 are F16, in types of 32. llama-quantize aborts.


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
