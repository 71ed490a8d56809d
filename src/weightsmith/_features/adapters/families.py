"""Names of modules of diffusion models in files of adapters, in their first implementation and in diffusers.

`#` stands for the number of a block. Files of kohya's scripts and ComfyUI have the names of the first implementation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from weightsmith._models.structure import diffusers_names
from weightsmith._models.structure.diffusers_names import DiffusersNames

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


_NO_MATRIX = re.compile(r"(.*\.)?(norm\w*|scale_shift_table|pos_embed)")
"""Modules and tensors of diffusers that adapters do not change."""


def _family(title: str, table: DiffusersNames, left_out: tuple[str, ...] = (), **fields: Any) -> Family:
    """A family with the matrices of a table, but for those that diffusers has in another order.

    left_out  how names in diffusers begin that are left out, too
    """
    names = {
        first: theirs
        for theirs, first in table.names.items()
        if theirs not in (*table.swapped, *table.last_swapped)
        and not _NO_MATRIX.fullmatch(theirs)
        and not theirs.startswith(left_out)
    }
    return Family(title, names, table.joined, **fields)


STABLE_DIFFUSION_3 = _family(
    "Stable Diffusion 3", diffusers_names.SD3, ("pos_embed.",), blocks={"transformer_blocks": (24, 38)}
)
"""Without the modulation of the context: diffusers has its halves in another order in the last block."""

WAN = _family("Wan", diffusers_names.WAN, ("vace_", "blocks.#.attn1.add_"))

_QWEN_BLOCK = (
    "attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out "
    "img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2 img_mod.1 txt_mod.1"
)
_QWEN_TIMES = "time_text_embed.timestep_embedder.linear_1 time_text_embed.timestep_embedder.linear_2"
_QWEN = [
    *(f"transformer_blocks.#.{name}" for name in _QWEN_BLOCK.split()),
    *f"img_in txt_in {_QWEN_TIMES} norm_out.linear proj_out".split(),
]
QWEN_IMAGE = Family("Qwen-Image", {name: name for name in _QWEN}, blocks={"transformer_blocks": (60,)})

LTX = _family(
    "LTX",
    diffusers_names.LTX,
    blocks={"transformer_blocks": (28, 48)},
    proof=("patchify_proj", "proj_in"),
    widths={28: 2_048, 48: 4_096},
    wide=("attn2.to_k", "attn2.to_v"),
)
"""PixArt, CogVideoX, Sana, Mochi and Cosmos have these names in blocks, too, and PixArt as many blocks; Sana has `time_embed`,
and Cosmos 28 blocks of the same size, with 1,024 inputs from the text.
"""

HUNYUAN_VIDEO = _family(
    "HunyuanVideo",
    diffusers_names.HUNYUAN_VIDEO,
    ("x_embedder.",),
    blocks={"transformer_blocks": (20,), "single_transformer_blocks": (40,), "double_blocks": (20,), "single_blocks": (40,)},
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
