"""The names of diffusion models in folders of diffusers → those in single files, which ComfyUI reads.

A table has modules, or whole names of tensors where the last word differs too. `#` stands for the number of a block. Single
files join some matrices that diffusers stores one by one, and swap the halves of others: scale and shift of the last norm.

Tests convert what is written back, with diffusers' own converters of single files (`loaders/single_file_utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped

_NUMBER = re.compile(r"(?:blocks|layers|refiner|norms)\.([0-9]{1,6})(?=\.)")
_TENSOR = re.compile(r"(.*)(\.(?:weight|bias))")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DiffusersNames:
    """The names of a diffusion model in diffusers, and in single files.

    names    of modules or tensors
    joined   module of a single file → its parts in diffusers, one below the other
    swapped  modules of diffusers whose rows have their halves swapped in single files
    last_swapped  modules for which this is so only in the last block
    """

    names: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()
    last_swapped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SingleFileTensor:
    """A tensor of a single file.

    name     in the single file
    parts    the tensors of diffusers that it consists of, one below the other
    swapped  whether the halves of its rows are swapped
    """

    name: str
    parts: tuple[str, ...]
    swapped: bool = False


def _parts(home: str, names: str = "to_q to_k to_v") -> tuple[str, ...]:
    return tuple(f"{home}.{name}" for name in names.split())


def _pairs(theirs: str, single: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{theirs}.{name}": f"{single}.{new}" for name, new in names.items()}


_SECOND = "add_q_proj add_k_proj add_v_proj"
_DOUBLE, _SINGLE = "transformer_blocks.#", "single_transformer_blocks.#"
_LINEAR1 = "attn.to_q attn.to_k attn.to_v proj_mlp"

# ---- Flux.1, Chroma, Flux.2

_FLUX_DOUBLE = {
    **_pairs(
        _DOUBLE,
        "double_blocks.#",
        {
            "attn.to_out.0": "img_attn.proj",
            "attn.to_add_out": "txt_attn.proj",
            "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
            "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
            "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
            "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
        },
    ),
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
}
_FLUX_MLPS = _pairs(
    _DOUBLE,
    "double_blocks.#",
    {
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    },
)
_FLUX_SINGLE = _pairs(
    _SINGLE,
    "single_blocks.#",
    {
        "attn.norm_q.weight": "norm.query_norm.scale",
        "attn.norm_k.weight": "norm.key_norm.scale",
        "proj_out": "linear2",
    },
)
_FLUX_QKV = {
    "double_blocks.#.img_attn.qkv": _parts(f"{_DOUBLE}.attn"),
    "double_blocks.#.txt_attn.qkv": _parts(f"{_DOUBLE}.attn", _SECOND),
}
_FLUX_JOINED = {**_FLUX_QKV, "single_blocks.#.linear1": _parts(_SINGLE, _LINEAR1)}
_LAST_NORM = {"norm_out.linear": "final_layer.adaLN_modulation.1"}
_FLUX_TIMES = {
    f"time_text_embed.{theirs}_embedder.linear_{k}": f"{single}_in.{end}_layer"
    for theirs, single in {"timestep": "time", "text": "vector", "guidance": "guidance"}.items()
    for k, end in ((1, "in"), (2, "out"))
}

FLUX = DiffusersNames(
    {
        **_FLUX_DOUBLE,
        **_FLUX_MLPS,
        **_FLUX_SINGLE,
        **_FLUX_TIMES,
        **_LAST_NORM,
        f"{_DOUBLE}.norm1.linear": "double_blocks.#.img_mod.lin",
        f"{_DOUBLE}.norm1_context.linear": "double_blocks.#.txt_mod.lin",
        f"{_SINGLE}.norm.linear": "single_blocks.#.modulation.lin",
    },
    _FLUX_JOINED,
    ("norm_out.linear",),
)
_GUIDANCE = "distilled_guidance_layer"
CHROMA = DiffusersNames(
    {
        **_FLUX_DOUBLE,
        **_FLUX_MLPS,
        **_FLUX_SINGLE,
        f"{_GUIDANCE}.in_proj": f"{_GUIDANCE}.in_proj",
        f"{_GUIDANCE}.out_proj": f"{_GUIDANCE}.out_proj",
        f"{_GUIDANCE}.layers.#.linear_1": f"{_GUIDANCE}.layers.#.in_layer",
        f"{_GUIDANCE}.layers.#.linear_2": f"{_GUIDANCE}.layers.#.out_layer",
        f"{_GUIDANCE}.norms.#.weight": f"{_GUIDANCE}.norms.#.scale",
    },
    _FLUX_JOINED,
)
FLUX_2 = DiffusersNames(
    {
        **_FLUX_DOUBLE,
        **_LAST_NORM,
        **_pairs(
            _DOUBLE,
            "double_blocks.#",
            {
                "ff.linear_in": "img_mlp.0",
                "ff.linear_out": "img_mlp.2",
                "ff_context.linear_in": "txt_mlp.0",
                "ff_context.linear_out": "txt_mlp.2",
            },
        ),
        **_pairs(
            _SINGLE,
            "single_blocks.#",
            {
                "attn.to_qkv_mlp_proj": "linear1",
                "attn.to_out": "linear2",
                "attn.norm_q.weight": "norm.query_norm.scale",
                "attn.norm_k.weight": "norm.key_norm.scale",
            },
        ),
        **{
            f"time_guidance_embed.{theirs}_embedder.linear_{k}": f"{single}_in.{end}_layer"
            for theirs, single in {"timestep": "time", "guidance": "guidance"}.items()
            for k, end in ((1, "in"), (2, "out"))
        },
        **{
            f"{name}.linear": f"{name}.lin"
            for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
        },
    },
    _FLUX_QKV,
    ("norm_out.linear",),
)

# ---- Stable Diffusion 3, AuraFlow

_X, _CONTEXT = "joint_blocks.#.x_block", "joint_blocks.#.context_block"
SD3 = DiffusersNames(
    {
        **_pairs(
            _DOUBLE,
            _X,
            {
                "attn.norm_q": "attn.ln_q",
                "attn.norm_k": "attn.ln_k",
                "attn.to_out.0": "attn.proj",
                "attn2.norm_q": "attn2.ln_q",
                "attn2.norm_k": "attn2.ln_k",
                "attn2.to_out.0": "attn2.proj",
                "ff.net.0.proj": "mlp.fc1",
                "ff.net.2": "mlp.fc2",
                "norm1.linear": "adaLN_modulation.1",
            },
        ),
        **_pairs(
            _DOUBLE,
            _CONTEXT,
            {
                "attn.norm_added_q": "attn.ln_q",
                "attn.norm_added_k": "attn.ln_k",
                "attn.to_add_out": "attn.proj",
                "ff_context.net.0.proj": "mlp.fc1",
                "ff_context.net.2": "mlp.fc2",
                "norm1_context.linear": "adaLN_modulation.1",
            },
        ),
        **_LAST_NORM,
        **{
            f"time_text_embed.{theirs}_embedder.linear_{k + 1}": f"{single}_embedder.mlp.{2 * k}"
            for theirs, single in {"timestep": "t", "text": "y"}.items()
            for k in range(2)
        },
        "pos_embed.pos_embed": "pos_embed",
        "pos_embed.proj": "x_embedder.proj",
        "context_embedder": "context_embedder",
        "proj_out": "final_layer.linear",
    },
    {
        f"{_X}.attn.qkv": _parts(f"{_DOUBLE}.attn"),
        f"{_X}.attn2.qkv": _parts(f"{_DOUBLE}.attn2"),
        f"{_CONTEXT}.attn.qkv": _parts(f"{_DOUBLE}.attn", _SECOND),
    },
    ("norm_out.linear",),
    (f"{_DOUBLE}.norm1_context.linear",),
)

_AURA_MLP = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
_AURA_JOINT, _AURA_DOUBLE, _AURA_SINGLE = "joint_transformer_blocks.#", "double_layers.#", "single_layers.#"
AURA = DiffusersNames(
    {
        **_pairs(f"{_AURA_JOINT}.ff", f"{_AURA_DOUBLE}.mlpX", _AURA_MLP),
        **_pairs(f"{_AURA_JOINT}.ff_context", f"{_AURA_DOUBLE}.mlpC", _AURA_MLP),
        **_pairs(
            f"{_AURA_JOINT}.attn",
            f"{_AURA_DOUBLE}.attn",
            {"to_q": "w2q", "to_k": "w2k", "to_v": "w2v", "to_out.0": "w2o"}
            | {"add_q_proj": "w1q", "add_k_proj": "w1k", "add_v_proj": "w1v", "to_add_out": "w1o"},
        ),
        f"{_AURA_JOINT}.norm1.linear": f"{_AURA_DOUBLE}.modX.1",
        f"{_AURA_JOINT}.norm1_context.linear": f"{_AURA_DOUBLE}.modC.1",
        **_pairs(f"{_SINGLE}.ff", f"{_AURA_SINGLE}.mlp", _AURA_MLP),
        **_pairs(f"{_SINGLE}.attn", f"{_AURA_SINGLE}.attn", {"to_q": "w1q", "to_k": "w1k", "to_v": "w1v", "to_out.0": "w1o"}),
        f"{_SINGLE}.norm1.linear": f"{_AURA_SINGLE}.modCX.1",
        "register_tokens": "register_tokens",
        "time_step_proj.linear_1": "t_embedder.mlp.0",
        "time_step_proj.linear_2": "t_embedder.mlp.2",
        "context_embedder": "cond_seq_linear",
        "pos_embed.pos_embed": "positional_encoding",
        "pos_embed.proj": "init_x_linear",
        "proj_out": "final_linear",
        "norm_out.linear": "modF.1",
    },
    swapped=("norm_out.linear",),
)

# ---- Lumina 2, Z-Image

_LUMINA_STACKS = ("layers", "noise_refiner", "context_refiner")
_CAPTION, _TIME = "time_caption_embed.caption_embedder", "time_caption_embed.timestep_embedder"
LUMINA_2 = DiffusersNames(
    {
        **{
            name: new
            for stack in _LUMINA_STACKS
            for name, new in _pairs(
                f"{stack}.#",
                f"{stack}.#",
                {
                    "attn.to_out.0": "attention.out",
                    "attn.norm_q": "attention.q_norm",
                    "attn.norm_k": "attention.k_norm",
                    "feed_forward.linear_1": "feed_forward.w1",
                    "feed_forward.linear_2": "feed_forward.w2",
                    "feed_forward.linear_3": "feed_forward.w3",
                    "norm2": "attention_norm2",
                    "ffn_norm1": "ffn_norm1",
                    "ffn_norm2": "ffn_norm2",
                }
                | (
                    {"norm1": "attention_norm1"}
                    if stack == "context_refiner"
                    else {"norm1.norm": "attention_norm1", "norm1.linear": "adaLN_modulation.1"}
                ),
            ).items()
        },
        f"{_CAPTION}.0": "cap_embedder.0",
        f"{_CAPTION}.1": "cap_embedder.1",
        f"{_TIME}.linear_1": "t_embedder.mlp.0",
        f"{_TIME}.linear_2": "t_embedder.mlp.2",
        "x_embedder": "x_embedder",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
    },
    {f"{stack}.#.attention.qkv": _parts(f"{stack}.#.attn") for stack in _LUMINA_STACKS},
)
Z_IMAGE = DiffusersNames(
    {
        **{
            f"{stack}.#.{name}": f"{stack}.#.{new}"
            for stack in _LUMINA_STACKS
            for name, new in {
                "attention.to_out.0": "attention.out",
                "attention.norm_q": "attention.q_norm",
                "attention.norm_k": "attention.k_norm",
                **{
                    name: name
                    for name in (
                        "feed_forward.w1 feed_forward.w2 feed_forward.w3 attention_norm1 attention_norm2 ffn_norm1 ffn_norm2 "
                        "adaLN_modulation.0"
                    ).split()
                },
            }.items()
        },
        **{name: name for name in ("cap_embedder.0", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")},
        **{name: name for name in ("cap_pad_token", "x_pad_token")},
        "all_x_embedder.2-1": "x_embedder",
        "all_final_layer.2-1.linear": "final_layer.linear",
        "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
    },
    {f"{stack}.#.attention.qkv": _parts(f"{stack}.#.attention") for stack in _LUMINA_STACKS},
)

# ---- video: Wan, HunyuanVideo, LTX-Video, Cosmos Predict 2

_WAN_ATTENTION = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
}
_IMAGE = "condition_embedder.image_embedder"
_WAN_BLOCK = {
    **_pairs("attn1", "self_attn", _WAN_ATTENTION),
    **_pairs("attn2", "cross_attn", _WAN_ATTENTION),
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
    "scale_shift_table": "modulation",
}
WAN = DiffusersNames(
    {
        **_pairs("blocks.#", "blocks.#", _WAN_BLOCK),
        **_pairs("vace_blocks.#", "vace_blocks.#", _WAN_BLOCK | {"proj_in": "before_proj", "proj_out": "after_proj"}),
        **{
            f"condition_embedder.{name}_embedder.linear_{k + 1}": f"{name}_embedding.{2 * k}"
            for name in ("time", "text")
            for k in range(2)
        },
        "condition_embedder.time_proj": "time_projection.1",
        f"{_IMAGE}.norm1": "img_emb.proj.0",
        f"{_IMAGE}.ff.net.0.proj": "img_emb.proj.1",
        f"{_IMAGE}.ff.net.2": "img_emb.proj.3",
        f"{_IMAGE}.norm2": "img_emb.proj.4",
        f"{_IMAGE}.pos_embed": "img_emb.emb_pos",
        "patch_embedding": "patch_embedding",
        "vace_patch_embedding": "vace_patch_embedding",
        "scale_shift_table": "head.modulation",
        "proj_out": "head.head",
    },
)

_REFINER, _THEIR_REFINER = "txt_in.individual_token_refiner.blocks.#", "context_embedder.token_refiner.refiner_blocks.#"
HUNYUAN_VIDEO = DiffusersNames(
    {
        **_pairs(
            _DOUBLE,
            "double_blocks.#",
            {
                "attn.norm_q": "img_attn_q_norm",
                "attn.norm_k": "img_attn_k_norm",
                "attn.norm_added_q": "txt_attn_q_norm",
                "attn.norm_added_k": "txt_attn_k_norm",
                "attn.to_out.0": "img_attn_proj",
                "attn.to_add_out": "txt_attn_proj",
                "norm1.linear": "img_mod.linear",
                "norm1_context.linear": "txt_mod.linear",
                "ff.net.0.proj": "img_mlp.fc1",
                "ff.net.2": "img_mlp.fc2",
                "ff_context.net.0.proj": "txt_mlp.fc1",
                "ff_context.net.2": "txt_mlp.fc2",
            },
        ),
        **_pairs(
            _SINGLE,
            "single_blocks.#",
            {"attn.norm_q": "q_norm", "attn.norm_k": "k_norm", "norm.linear": "modulation.linear", "proj_out": "linear2"},
        ),
        **_pairs(
            _THEIR_REFINER,
            _REFINER,
            {
                "norm1": "norm1",
                "norm2": "norm2",
                "attn.to_out.0": "self_attn_proj",
                "ff.net.0.proj": "mlp.fc1",
                "ff.net.2": "mlp.fc2",
                "norm_out.linear": "adaLN_modulation.1",
            },
        ),
        "context_embedder.proj_in": "txt_in.input_embedder",
        "context_embedder.time_text_embed.timestep_embedder.linear_1": "txt_in.t_embedder.mlp.0",
        "context_embedder.time_text_embed.timestep_embedder.linear_2": "txt_in.t_embedder.mlp.2",
        "context_embedder.time_text_embed.text_embedder.linear_1": "txt_in.c_embedder.linear_1",
        "context_embedder.time_text_embed.text_embedder.linear_2": "txt_in.c_embedder.linear_2",
        "time_text_embed.timestep_embedder.linear_1": "time_in.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "time_in.mlp.2",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.mlp.0",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.mlp.2",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "x_embedder.proj": "img_in.proj",
        "proj_out": "final_layer.linear",
        **_LAST_NORM,
    },
    {
        "double_blocks.#.img_attn_qkv": _parts(f"{_DOUBLE}.attn"),
        "double_blocks.#.txt_attn_qkv": _parts(f"{_DOUBLE}.attn", _SECOND),
        "single_blocks.#.linear1": _parts(_SINGLE, _LINEAR1),
        f"{_REFINER}.self_attn_qkv": _parts(f"{_THEIR_REFINER}.attn"),
    },
    ("norm_out.linear",),
)

_LTX_ATTENTION = {**{name: name for name in ("to_q", "to_k", "to_v", "to_out.0")}, "norm_q": "q_norm", "norm_k": "k_norm"}
LTX = DiffusersNames(
    {
        **_pairs(f"{_DOUBLE}.attn1", f"{_DOUBLE}.attn1", _LTX_ATTENTION),
        **_pairs(f"{_DOUBLE}.attn2", f"{_DOUBLE}.attn2", _LTX_ATTENTION),
        **{name: name for name in (f"{_DOUBLE}.ff.net.0.proj", f"{_DOUBLE}.ff.net.2", f"{_DOUBLE}.scale_shift_table")},
        **{
            name: name
            for name in ("caption_projection.linear_1", "caption_projection.linear_2", "scale_shift_table", "proj_out")
        },
        **_pairs(
            "time_embed",
            "adaln_single",
            {f"emb.timestep_embedder.linear_{k}": f"emb.timestep_embedder.linear_{k}" for k in (1, 2)},
        ),
        "time_embed.linear": "adaln_single.linear",
        "proj_in": "patchify_proj",
    },
)

_COSMOS_ATTENTION = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "output_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_COSMOS_NORMS = {"norm1": "self_attn", "norm2": "cross_attn", "norm3": "mlp"}
COSMOS = DiffusersNames(
    {
        **_pairs(f"{_DOUBLE}.attn1", "blocks.#.self_attn", _COSMOS_ATTENTION),
        **_pairs(f"{_DOUBLE}.attn2", "blocks.#.cross_attn", _COSMOS_ATTENTION),
        f"{_DOUBLE}.ff.net.0.proj": "blocks.#.mlp.layer1",
        f"{_DOUBLE}.ff.net.2": "blocks.#.mlp.layer2",
        **{
            f"{_DOUBLE}.{norm}.linear_{k}": f"blocks.#.adaln_modulation_{part}.{k}"
            for norm, part in _COSMOS_NORMS.items()
            for k in (1, 2)
        },
        "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
        "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
        "time_embed.norm": "t_embedding_norm",
        "patch_embed.proj": "x_embedder.proj.1",
        "norm_out.linear_1": "final_layer.adaln_modulation.1",
        "norm_out.linear_2": "final_layer.adaln_modulation.2",
        "proj_out": "final_layer.linear",
    },
)

TABLES = (FLUX, FLUX_2, CHROMA, SD3, AURA, LUMINA_2, Z_IMAGE, WAN, HUNYUAN_VIDEO, LTX, COSMOS)
"""For models whose single files have other names than diffusers."""
_SAME = DiffusersNames()
"""For models whose single files have the names of diffusers."""

CLASSES: Mapping[str, DiffusersNames] = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX_2,
    "ChromaTransformer2DModel": CHROMA,
    "SD3Transformer2DModel": SD3,
    "AuraFlowTransformer2DModel": AURA,
    "Lumina2Transformer2DModel": LUMINA_2,
    "ZImageTransformer2DModel": Z_IMAGE,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "LTXVideoTransformer3DModel": LTX,
    "CosmosTransformer3DModel": COSMOS,
    "HiDreamImageTransformer2DModel": _SAME,
    "QwenImageTransformer2DModel": _SAME,
    "UNet2DConditionModel": _SAME,
}
"""Class of diffusers → its names. ComfyUI reads UNets under both names."""


def single_file_tensors(table: DiffusersNames, names: Sequence[str], where: str) -> Iterator[SingleFileTensor]:
    """The tensors of a single file, from the names of a folder of diffusers.

    Raises Unsupported for names that are not known, and for parts that are missing.

    >>> names = ["norm_out.linear.weight", *(f"transformer_blocks.3.attn.to_{part}.bias" for part in "kqv")]
    >>> [tensor.name for tensor in single_file_tensors(FLUX, names, "flux")]
    ['final_layer.adaLN_modulation.1.weight', 'double_blocks.3.img_attn.qkv.bias']
    """
    if table is _SAME:
        yield from (SingleFileTensor(name, (name,)) for name in names)
        return
    wholes = {part: whole for whole, parts in table.joined.items() for part in parts}
    doubles = (_NUMBER.match(name, len(_DOUBLE) - len("blocks.#")) for name in names if name.startswith(_DOUBLE[:-1]))
    last = max((int(block[1]) for block in doubles if block), default=-1)
    joined, unknown = list[tuple[tuple[str, str, str], str]](), list[str]()
    for name in names:
        block = _NUMBER.search(name)
        number = block[1] if block else ""
        written = f"{name[: block.start(1)]}#{name[block.end(1) :]}" if block else name
        module, end = tensor.groups() if (tensor := _TENSOR.fullmatch(written)) else (written, "")
        if written in table.names:
            yield SingleFileTensor(table.names[written].replace("#", number), (name,))
        elif module in table.names:
            swapped = module in table.swapped or (module in table.last_swapped and number == str(last))
            yield SingleFileTensor(table.names[module].replace("#", number) + end, (name,), swapped)
        elif module in wholes:
            joined.append(((wholes[module], number, end), name))
        else:
            unknown.append(name)
    if unknown:
        what = f"{len(unknown):,} of its {len(names):,} tensors have no name in single files"
        fix = "merge or quantise the model's single file instead"
        raise Unsupported(what, where=where, details=[show(name) for name in unknown[:_SHOWN]], fix=fix)
    for (whole, number, end), parts in grouped(joined).items():
        ordered = tuple(f"{part.replace('#', number)}{end}" for part in table.joined[whole])
        if missing := sorted(set(ordered) - set(parts)):
            what = f"{missing[0]} is missing, and {whole.replace('#', number)}{end} is made of it"
            raise Unsupported(what, where=where, fix="download the folder again")
        yield SingleFileTensor(f"{whole.replace('#', number)}{end}", ordered)
