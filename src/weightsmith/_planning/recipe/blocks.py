"""The blocks of diffusion models, by the names that their users give them: which tensors each block has.

A table is data: its blocks in the order of the lists that SuperMerger and its presets write, and what the names of each block's
tensors begin with, in single files and in the folders of diffusers. A list begins with BASE, the value of all other tensors.

    sd1   26 values  BASE IN00-IN11 M00 OUT00-OUT11                (Stable Diffusion 1 and 2)
    sdxl  20 values  BASE IN00-IN08 M00 OUT00-OUT08
    flux  61 values  CLIP T5 IN D00-D18 S00-S37 OUT
    sd3, wan         names alone, because models of several sizes have several numbers of blocks

Beside these names, those of ComfyUI's nodes are known: `input_blocks.3`, `double_blocks.7`, `time_embed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

ROOTS = ("model.diffusion_model.", "diffusion_model.", "unet/", "transformer/", "transformer_2/", "")
"""What the names of a diffusion model's tensors begin with: in whole files, in files of adapters' programs, in pipelines.
Wan 2.2 has a second transformer, for the steps of little noise."""

BASE = "BASE"


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of a family of models.

    title   of the family
    blocks  name → what its tensors' names begin with, after one of `ROOTS`, or from the start if there is a `:` in front
    order   of the values in a list; () if a list is ambiguous
    """

    title: str
    blocks: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...] = ()

    def starts(self, name: str) -> tuple[str, ...] | None:
        """What names of the tensors of a block begin with; () for all other tensors; None for an unknown name.

        name  of a block, or a name of ComfyUI's nodes or of diffusers, which is the start of the tensors' names

        A start fits a name and a dot: the tensor `pos_embed` is in the block `pos_embed.`

        >>> TABLES["sd1"].starts("IN11")[0], TABLES["flux"].starts("double_blocks.3")[-1], TABLES["sdxl"].starts("IN11")
        ('model.diffusion_model.input_blocks.11.', 'double_blocks.3.', None)
        """
        if name == BASE:
            return ()
        starts = self.blocks.get(name)
        if starts is None:
            single = f"{name.removesuffix('.')}."
            known = any(start.startswith(single) for block in self.blocks.values() for start in block)
            if not known:
                return None
            starts = (single,)
        return tuple(place for start in starts for place in _places(start))

    def expand(self, name: str) -> tuple[str, ...]:
        """The blocks of a range, `IN00-IN05`; any other name alone; () for a range of unknown or unordered blocks.

        >>> TABLES["sdxl"].expand("IN07-M00"), TABLES["sdxl"].expand("IN07")
        (('IN07', 'IN08', 'M00'), ('IN07',))
        """
        first, dash, last = name.partition("-")
        if not dash:
            return (name,)
        names = [*self.blocks]
        if first not in names or last not in names or names.index(first) > names.index(last):
            return ()
        return tuple(names[names.index(first) : names.index(last) + 1])


def _places(start: str) -> tuple[str, ...]:
    return (start.removeprefix(":"),) if start.startswith(":") else tuple(root + start for root in ROOTS)


_TIME = ("time_embed.", "label_emb.", "time_embedding.", "add_embedding.")
_OUT = ("out.", "conv_norm_out.", "conv_out.")


def _unet(levels: int) -> BlockTable:
    """The table of a UNet with so many levels of three blocks on each side.

    diffusers has two of each three input blocks as resnets.N and attentions.N of a level, and its downsampler as the third.
    """
    count = 3 * levels
    blocks: dict[str, tuple[str, ...]] = {"IN00": (*_TIME, "input_blocks.0.", "conv_in.")}
    for n in range(1, count):
        level, part = divmod(n - 1, 3)
        inner = ("downsamplers.",) if part == 2 else (f"resnets.{part}.", f"attentions.{part}.")
        blocks[f"IN{n:02}"] = (f"input_blocks.{n}.", *(f"down_blocks.{level}.{name}" for name in inner))
    blocks["M00"] = ("middle_block.", "mid_block.")
    for n in range(count):
        level, part = divmod(n, 3)
        inner = (f"resnets.{part}.", f"attentions.{part}.", *(("upsamplers.",) if part == 2 else ()))
        last = _OUT if n == count - 1 else ()
        blocks[f"OUT{n:02}"] = (f"output_blocks.{n}.", *(f"up_blocks.{level}.{name}" for name in inner), *last)
    title = "Stable Diffusion 1 and 2" if levels == 4 else "Stable Diffusion XL"
    return BlockTable(title, blocks, (BASE, *blocks))


def _flux() -> BlockTable:
    blocks: dict[str, tuple[str, ...]] = {
        "CLIP": (":text_encoders.clip", ":text_encoder/"),
        "T5": (":text_encoders.t5xxl.", ":text_encoder_2/"),
        "IN": (
            *("img_in.", "time_in.", "vector_in.", "guidance_in.", "txt_in."),
            *("x_embedder.", "context_embedder.", "time_text_embed."),
        ),
    }
    blocks |= {f"D{n:02}": (f"double_blocks.{n}.", f"transformer_blocks.{n}.") for n in range(19)}
    blocks |= {f"S{n:02}": (f"single_blocks.{n}.", f"single_transformer_blocks.{n}.") for n in range(38)}
    blocks["OUT"] = ("final_layer.", "norm_out.", "proj_out.")
    return BlockTable("Flux", blocks, tuple(blocks))


Others = Mapping[str, tuple[str, ...]]
"""ComfyUI's name of a part → its names in diffusers"""


def _numbered(title: str, first: Others, stack: Sequence[str], count: int, last: Others) -> BlockTable:
    """A table without an order of values. stack: the names of the stack of blocks, ComfyUI's first, then diffusers'."""
    blocks: dict[str, tuple[str, ...]] = {name: _within(name, *others) for name, others in first.items()}
    blocks |= {f"{stack[0]}.{n}": _within(*(f"{one}.{n}" for one in stack)) for n in range(count)}
    return BlockTable(title, blocks | {name: _within(name, *others) for name, others in last.items()})


def _within(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


_SD3: Others = {
    "pos_embed": (),
    "x_embedder": (),
    "context_embedder": (),
    "y_embedder": ("time_text_embed.text_embedder",),
    "t_embedder": ("time_text_embed.timestep_embedder",),
}
_WAN: Others = {
    "patch_embedding": (),
    "time_embedding": ("condition_embedder.time_embedder",),
    "time_projection": ("condition_embedder.time_proj",),
    "text_embedding": ("condition_embedder.text_embedder",),
    "img_emb": ("condition_embedder.image_embedder",),
}
TABLES: Mapping[str, BlockTable] = MappingProxyType(
    {
        "sd1": _unet(4),
        "sdxl": _unet(3),
        "flux": _flux(),
        "sd3": _numbered(
            "Stable Diffusion 3", _SD3, ("joint_blocks", "transformer_blocks"), 38, {"final_layer": ("norm_out", "proj_out")}
        ),
        "wan": _numbered("Wan", _WAN, ("blocks",), 40, {"head": ("norm_out", "proj_out", "scale_shift_table")}),
    }
)
"""Family → its blocks"""

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def numbers_in(text: str) -> list[float] | None:
    """The numbers of a text such as a preset of SuperMerger; None if it is something else.

    >>> numbers_in("0.5, 0,1"), numbers_in("0.5 1")
    ([0.5, 0.0, 1.0], None)
    """
    parts = [part.strip() for part in text.split(",")]
    return [float(part) for part in parts] if all(map(_NUMBER.fullmatch, parts)) else None
