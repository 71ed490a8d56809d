"""Names of modules of diffusion models, in their first implementation and in diffusers: tables.

`#` stands for the number of a block. Files of kohya's scripts and ComfyUI have the names of the first implementation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

_NUMBER = re.compile(r"((?<![^._])(?:\w+_)?blocks)([._])(\d+)(?=[._])")


@dataclass(frozen=True, slots=True)
class Family:
    """A diffusion model.

    title   for messages
    names   module of the first implementation → in diffusers
    fused   matrix of the first implementation → its parts in diffusers, one below the other
    blocks  kind of blocks → how many of them models have: it decides where names fit several families
    proof   modules that this model alone has, in both vocabularies; () for a model whose names no other one has
    widths  in place of a module of `proof`: how many blocks there are → the inputs of one of `wide`
    wide    names in a block
    """

    title: str
    names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    proof: tuple[str, ...] = ()
    widths: Mapping[int, int] = field(default_factory=dict)
    wide: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.title)

    @property
    def first(self) -> Iterator[str]:
        """All names in the first implementation."""
        yield from self.names
        yield from self.fused

    @property
    def theirs(self) -> Iterator[str]:
        """All names in diffusers."""
        yield from self.names.values()
        for parts in self.fused.values():
            yield from parts


def _attention(home: str, theirs: str, names: str = "q k v o") -> dict[str, str]:
    return {
        f"{home}.{name}": f"{theirs}.{new}"
        for name, new in zip(names.split(), ("to_q", "to_k", "to_v", "to_out.0"), strict=True)
    }


def _same(block: str, names: str) -> dict[str, str]:
    return {f"{block}.#.{name}": f"{block}.#.{name}" for name in names.split()}


_SD3_X, _SD3_CONTEXT, _THEIRS = "joint_blocks.#.x_block", "joint_blocks.#.context_block", "transformer_blocks.#"
_REFINER, _THEIR_REFINER = "txt_in.individual_token_refiner.blocks.#", "context_embedder.token_refiner.refiner_blocks.#"

STABLE_DIFFUSION_3 = Family(
    "Stable Diffusion 3",
    {
        f"{_SD3_X}.attn.proj": f"{_THEIRS}.attn.to_out.0",
        f"{_SD3_X}.attn2.proj": f"{_THEIRS}.attn2.to_out.0",
        f"{_SD3_X}.mlp.fc1": f"{_THEIRS}.ff.net.0.proj",
        f"{_SD3_X}.mlp.fc2": f"{_THEIRS}.ff.net.2",
        f"{_SD3_X}.adaLN_modulation.1": f"{_THEIRS}.norm1.linear",
        f"{_SD3_CONTEXT}.attn.proj": f"{_THEIRS}.attn.to_add_out",
        f"{_SD3_CONTEXT}.mlp.fc1": f"{_THEIRS}.ff_context.net.0.proj",
        f"{_SD3_CONTEXT}.mlp.fc2": f"{_THEIRS}.ff_context.net.2",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
    },
    {
        f"{_SD3_X}.attn.qkv": tuple(f"{_THEIRS}.attn.to_{part}" for part in "qkv"),
        f"{_SD3_X}.attn2.qkv": tuple(f"{_THEIRS}.attn2.to_{part}" for part in "qkv"),
        f"{_SD3_CONTEXT}.attn.qkv": tuple(f"{_THEIRS}.attn.add_{part}_proj" for part in "qkv"),
    },
    {"transformer_blocks": (24, 38)},
)
"""Without the modulation of the context: diffusers has its halves in another order in the last block."""

WAN = Family(
    "Wan",
    {
        **_attention("blocks.#.self_attn", "blocks.#.attn1"),
        **_attention("blocks.#.cross_attn", "blocks.#.attn2"),
        "blocks.#.cross_attn.k_img": "blocks.#.attn2.add_k_proj",
        "blocks.#.cross_attn.v_img": "blocks.#.attn2.add_v_proj",
        "blocks.#.ffn.0": "blocks.#.ffn.net.0.proj",
        "blocks.#.ffn.2": "blocks.#.ffn.net.2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "head.head": "proj_out",
        "patch_embedding": "patch_embedding",
    },
)

QWEN_IMAGE = Family(
    "Qwen-Image",
    {
        **_same(
            "transformer_blocks",
            "attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out "
            "img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2 img_mod.1 txt_mod.1",
        ),
        "img_in": "img_in",
        "txt_in": "txt_in",
        "time_text_embed.timestep_embedder.linear_1": "time_text_embed.timestep_embedder.linear_1",
        "time_text_embed.timestep_embedder.linear_2": "time_text_embed.timestep_embedder.linear_2",
        "norm_out.linear": "norm_out.linear",
        "proj_out": "proj_out",
    },
    blocks={"transformer_blocks": (60,)},
)

LTX = Family(
    "LTX",
    {
        **_same(
            "transformer_blocks",
            " ".join(f"attn{k}.to_{part}" for k in (1, 2) for part in ("q", "k", "v", "out.0")) + " ff.net.0.proj ff.net.2",
        ),
        "patchify_proj": "proj_in",
        "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1",
        "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
        "adaln_single.linear": "time_embed.linear",
        "caption_projection.linear_1": "caption_projection.linear_1",
        "caption_projection.linear_2": "caption_projection.linear_2",
        "proj_out": "proj_out",
    },
    blocks={"transformer_blocks": (28, 48)},
    proof=("patchify_proj", "proj_in"),
    widths={28: 2_048, 48: 4_096},
    wide=("attn2.to_k", "attn2.to_v"),
)
"""PixArt, CogVideoX, Sana, Mochi and Cosmos have these names in blocks, too, and PixArt as many blocks; Sana has `time_embed`,
and Cosmos 28 blocks of the same size, with 1,024 inputs from the text.
"""

HUNYUAN_VIDEO = Family(
    "HunyuanVideo",
    {
        "double_blocks.#.img_attn_proj": f"{_THEIRS}.attn.to_out.0",
        "double_blocks.#.txt_attn_proj": f"{_THEIRS}.attn.to_add_out",
        "double_blocks.#.img_mlp.fc1": f"{_THEIRS}.ff.net.0.proj",
        "double_blocks.#.img_mlp.fc2": f"{_THEIRS}.ff.net.2",
        "double_blocks.#.txt_mlp.fc1": f"{_THEIRS}.ff_context.net.0.proj",
        "double_blocks.#.txt_mlp.fc2": f"{_THEIRS}.ff_context.net.2",
        "double_blocks.#.img_mod.linear": f"{_THEIRS}.norm1.linear",
        "double_blocks.#.txt_mod.linear": f"{_THEIRS}.norm1_context.linear",
        "single_blocks.#.linear2": "single_transformer_blocks.#.proj_out",
        "single_blocks.#.modulation.linear": "single_transformer_blocks.#.norm.linear",
        f"{_REFINER}.self_attn_proj": f"{_THEIR_REFINER}.attn.to_out.0",
        f"{_REFINER}.mlp.fc1": f"{_THEIR_REFINER}.ff.net.0.proj",
        f"{_REFINER}.mlp.fc2": f"{_THEIR_REFINER}.ff.net.2",
        f"{_REFINER}.adaLN_modulation.1": f"{_THEIR_REFINER}.norm_out.linear",
        "txt_in.input_embedder": "context_embedder.proj_in",
        "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        "time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "guidance_in.mlp.0": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.mlp.2": "time_text_embed.guidance_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
    },
    {
        "double_blocks.#.img_attn_qkv": tuple(f"{_THEIRS}.attn.to_{part}" for part in "qkv"),
        "double_blocks.#.txt_attn_qkv": tuple(f"{_THEIRS}.attn.add_{part}_proj" for part in "qkv"),
        "single_blocks.#.linear1": tuple(
            f"single_transformer_blocks.#.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        ),
        f"{_REFINER}.self_attn_qkv": tuple(f"{_THEIR_REFINER}.attn.to_{part}" for part in "qkv"),
    },
    {"transformer_blocks": (20,), "single_transformer_blocks": (40,), "double_blocks": (20,), "single_blocks": (40,)},
)

FAMILIES = (STABLE_DIFFUSION_3, WAN, QWEN_IMAGE, LTX, HUNYUAN_VIDEO)


@cache
def _known(family: Family, flat: bool) -> dict[str, str]:
    """Names as files have them → with dots. Names of the first implementation come first: kohya's files have these."""
    names = [*family.first, *family.theirs]
    return {(name.replace(".", "_") if flat else name): name for name in reversed(names)}


def template(family: Family, name: str, *, flat: bool) -> tuple[str, str] | None:
    """A module's name in a family, with `#` for the number of its block, and that number; None for a name that it has not.

    >>> template(WAN, "blocks_12_self_attn_q", flat=True), template(WAN, "blocks.0.attn1.norm_q", flat=False)
    (('blocks.#.self_attn.q', '12'), None)
    """
    match = _NUMBER.search(name)
    number = match[3] if match else ""
    written = f"{name[: match.start(3)]}#{name[match.end(3) :]}" if match else name
    dotted = _known(family, flat).get(written)
    return None if dotted is None else (dotted, number)
