"""Models of several parts that names tell apart: the folders of a pipeline of diffusers, and the prefixes of a single file.

A pipeline's tensors are named after its folders: `unet/conv_in.weight`. A single file of the programs before diffusers (Stable
Diffusion, SD3, Flux, Wan) holds a diffusion model, and perhaps a VAE and text encoders, under the prefixes of `PREFIXES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from weightsmith._models.structure.stacks import Stack, find_stacks

DIFFUSION = "model.diffusion_model."
"""The prefix of the diffusion model of a single file. A file without it has one part."""

EMA_PREFIX = "model_ema."
PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        DIFFUSION: "diffusion",
        EMA_PREFIX: "ema",
        "first_stage_model.": "vae",
        "vae.": "vae",
        "cond_stage_model.": "text_encoders",
        "conditioner.": "text_encoders",
        "text_encoders.": "text_encoders",
    }
)
"""Prefix of names in a single file → module"""
VAE = "vae"
"""The module of a VAE, in single files and in pipelines. A file has one, whatever its prefix; the text encoders of different
prefixes are different models."""
OTHER = "other"
"""The module of all else in a single file: the steps of the noise schedule."""

_SPELLINGS = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""The attention of a VAE in files of older diffusers → in those of newer, whose loader renames the old ones."""
_SPELLED = re.compile(r"(.*\battentions\.\d+\.)(query|key|value|proj_attn|to_q|to_k|to_v|to_out\.0)(\.(?:weight|bias))")


def other_spelling(name: str) -> str:
    """The name of a tensor of a VAE's attention in files of other releases of diffusers; "" for all other tensors.

    >>> other_spelling("vae/encoder.mid_block.attentions.0.proj_attn.bias")
    'vae/encoder.mid_block.attentions.0.to_out.0.bias'
    >>> other_spelling("decoder.mid_block.attentions.0.to_q.weight"), other_spelling("conv_in.weight")
    ('decoder.mid_block.attentions.0.query.weight', '')
    """
    match = _SPELLED.fullmatch(name)
    if match is None:
        return ""
    older = {new: old for old, new in _SPELLINGS.items()}
    return f"{match[1]}{_SPELLINGS.get(match[2]) or older[match[2]]}{match[3]}"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model.

    prefixes  of the names of each part's tensors → its module, in model order; "" for all that no other fits
    """

    prefixes: Mapping[str, str]

    @property
    def aliases(self) -> Mapping[str, str]:
        """No other names of the modules."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The modules, in model order."""
        return tuple(dict.fromkeys(self.prefixes.values()))

    def of_path(self, path: str) -> str:
        """The module of a tensor; `OTHER` for a name of another model that fits no part of this one."""
        return self.prefixes.get(self.prefix_of(path), OTHER)

    def prefix_of(self, path: str) -> str:
        """The prefix of a tensor's name."""
        return next((prefix for prefix in self.prefixes if prefix and path.startswith(prefix)), "")

    def renamed_in(self, other: Parts) -> tuple[tuple[str, str], ...]:
        """The prefixes of the parts that another model has too, but under another prefix, and this other one.

        >>> names = "model.diffusion_model.x", "vae.x"
        >>> find_parts(names).renamed_in(find_parts([*names[:1], "first_stage_model.x"]))
        (('vae.', 'first_stage_model.'),)
        """
        renamed = []
        for prefix, module in self.prefixes.items():
            same = [known for known, part in other.prefixes.items() if part == module]
            if module == VAE and len(same) == 1 and prefix not in same and same[0] not in self.prefixes:
                renamed.append((prefix, same[0]))
        return tuple(renamed)

    def find_stacks(self, names: Iterable[str]) -> tuple[Stack, ...]:
        """The stacks of layers of all parts, each looked for as if its part were a model without config.json."""
        stacks: list[Stack] = []
        for prefix, part in groupby(sorted(names, key=self.prefix_of), self.prefix_of):
            inner, _ = find_stacks([name.removeprefix(prefix) for name in part], None)
            stacks += (replace(stack, prefix=f"{prefix}{stack.prefix}") for stack in inner)
        return tuple(stacks)


def find_parts(names: Sequence[str]) -> Parts | None:
    """The parts of a model; None for a model of one, or of parts that its layers tell apart.

    >>> find_parts(["unet/conv_in.weight", "vae/encoder.conv_in.weight"]).names
    ('unet', 'vae')
    >>> find_parts(["model.diffusion_model.out.2.weight", "vae.decoder.conv_in.weight", "betas"]).names
    ('diffusion', 'vae', 'other')
    >>> find_parts(["lm_head.weight", "2_Dense/linear.weight"])
    """
    if names and all("/" in name for name in names):
        folders = dict.fromkeys(name.partition("/")[0] for name in names)
        return Parts({f"{folder}/": folder for folder in folders})
    if not any(name.startswith(DIFFUSION) for name in names):
        return None
    single = Parts({**PREFIXES, "": OTHER})
    used = dict.fromkeys(map(single.prefix_of, names))
    return Parts({prefix: single.prefixes[prefix] for prefix in (*filter(None, used), *([""] if "" in used else []))})
