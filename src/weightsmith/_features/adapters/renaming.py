"""Names of modules in single files of factors, from one program's to another's: kohya's scripts, diffusers, ComfyUI.

A file names a module by its network and its name there. kohya's scripts write `_` for each dot. The names are of one of two
vocabularies: that of diffusers (`down_blocks`, `transformer_blocks`), or that of the model's first implementation
(`input_blocks`, `double_blocks`). Flux has matrices of several in its first implementation that diffusers has one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from weightsmith._base.errors import MismatchError, Unsupported
from weightsmith._base.files import show
from weightsmith._features.adapters.families import FAMILIES, Family, template
from weightsmith._models.lora.networks import (
    DENOISER,
    DENOISER_BLOCKS,
    NETWORKS,
    PUT_PREFIX,
    TEXT_ENCODER_2,
    UNKNOWN,
    Network,
    network_of,
)

KOHYA, DIFFUSERS, COMFYUI = "kohya", "diffusers", "comfyui"
FLUX_T5 = "text_encoder_2.encoder.block."
"""How diffusers' names of modules of Flux's T5 begin."""

_WORDS = frozenset(
    # diffusers, UNets
    "down_blocks up_blocks mid_block attentions resnets transformer_blocks attn1 attn2 to_q to_k to_v to_out ff net proj "
    "proj_in proj_out conv conv1 conv2 conv_in conv_out conv_shortcut time_emb_proj time_embedding add_embedding "
    "linear_1 linear_2 downsamplers upsamplers norm1 norm2 norm3 "
    # diffusers, Flux
    "single_transformer_blocks attn add_q_proj add_k_proj add_v_proj to_add_out ff_context proj_mlp norm linear norm1_context "
    "x_embedder context_embedder time_text_embed timestep_embedder guidance_embedder text_embedder norm_out "
    # the first implementations
    "input_blocks middle_block output_blocks in_layers out_layers emb_layers skip_connection op time_embed label_emb out "
    "double_blocks single_blocks img_attn txt_attn img_mlp txt_mlp img_mod txt_mod qkv lin linear1 linear2 modulation img_in "
    "txt_in time_in vector_in guidance_in in_layer out_layer final_layer adaLN_modulation "
    # text encoders
    "text_model encoder layers self_attn q_proj k_proj v_proj out_proj mlp fc1 fc2 text_projection embeddings block layer "
    "SelfAttention DenseReluDense wi_0 wi_1 wo q k v o".split()
)
_LONGEST = max(word.count("_") for word in _WORDS) + 1

_FLUX = {
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
}
_FLUX_SINGLE = {"linear2": "proj_out", "modulation.lin": "norm.linear"}
_FLUX_FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_FLUX_LINEAR1 = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
_MLP_RATIO = 4  # of all of Flux: rows of `proj_mlp` over the inputs of `linear1`
_FLUX_ROWS = {
    **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), 1),
    **dict.fromkeys(("img_attn.qkv", "txt_attn.qkv", "modulation.lin", "norm.linear"), 3),
    **dict.fromkeys(("img_mlp.0", "txt_mlp.0", "ff.net.0.proj", "ff_context.net.0.proj", "proj_mlp"), _MLP_RATIO),
    **dict.fromkeys(("img_mod.lin", "txt_mod.lin", "norm1.linear", "norm1_context.linear"), 6),
    "linear1": 3 + _MLP_RATIO,
}
"""Matrix of a block → rows over columns, in all of Flux. Models of other sizes have these names too, and other matrices."""
_FLUX_COLUMNS = {
    **dict.fromkeys(("linear2", "proj_out"), 1 + _MLP_RATIO),
    **dict.fromkeys(("img_mlp.2", "txt_mlp.2", "ff.net.2", "ff_context.net.2"), _MLP_RATIO),
}
"""Matrix of a block → columns over rows."""
_FLUX_BLOCKS = {
    "double_blocks": 19,
    "transformer_blocks": 19,
    "single_blocks": 38,
    "single_transformer_blocks": 38,
}
"""Blocks of Flux. `transformer_blocks` alone are no evidence: Stable Diffusion 3, Qwen-Image and LTX have them too."""
_FLUX_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
}
_RESNET = {
    "in_layers.2": "conv1",
    "out_layers.3": "conv2",
    "emb_layers.1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
_UNET_OUTSIDE = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.2": "conv_out",
}
_SHOWN = 8
_STAGES = 3  # of the UNet of Stable Diffusion XL
_LAYERS = 2  # of resnets in each block of a UNet, and one more on the way up


@dataclass(frozen=True, slots=True)
class RenamedModule:
    """A module of the output.

    name   as the program has it
    parts  modules of the input whose factors it has, one below the other; "" for one that the input lacks
    rows   of each part; of one part, the first and the number of its rows of B, () for all
    """

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...] = ()


def renamed(shapes: Mapping[str, tuple[int, int]], layout: str, where: str, *, flat: bool) -> list[RenamedModule]:
    """The modules of a file under the names of another program.

    shapes  module → outputs and inputs
    flat    the file's names have `_` for each dot

    Raises Unsupported for names that are not known, and for networks that the program names otherwise.
    """
    known: dict[str, tuple[Network, str]] = {}
    unknown: list[str] = []
    inside = {module: network_of(module, flat=flat) for module in shapes}
    _check_networks(inside, where)
    for module, (network, inner) in inside.items():
        dotted = _dotted(inner) if flat else _modern(inner)
        if network is UNKNOWN or not dotted:
            unknown.append(module)
        else:
            known[module] = network, dotted
    names = [inner for network, inner in known.values() if network is DENOISER]
    of_denoiser = {module: inner for module, (network, inner) in inside.items() if network is DENOISER}
    if of_denoiser and (unknown or not _are_of_flux(names) or not all(map(_has_flux, names))):
        others = {module: place for module, place in inside.items() if module not in of_denoiser}
        if modules_of_family := _of_family(shapes, of_denoiser, others, layout, where, flat=flat):
            return modules_of_family
    is_flux = _are_of_flux(names)
    if not is_flux:
        unknown += [module for module, (network, inner) in known.items() if not _is_of_unet(network, inner)]
    if unknown:
        what = f"{len(unknown):,} of its {len(shapes):,} modules have names that are not known"
        titles = ", ".join(family.title for family in FAMILIES)
        fix = f"convert adapters of Stable Diffusion 1, Stable Diffusion XL, Flux, {titles}; for language models: --for peft"
        raise Unsupported(what, where=where, details=[show(module) for module in unknown[:_SHOWN]], fix=fix)
    is_xl, networks = False, {network for network, _ in known.values()}
    modules = _Modules(shapes, known, where)
    if is_flux:
        modules.of_flux(split=layout == DIFFUSERS)
    elif layout == DIFFUSERS:
        modules.of_unet(_unet_name)
    elif is_xl := TEXT_ENCODER_2 in networks or any(map(_DEEP.search, names)):
        modules.of_unet(_first_name)
    elif layout == COMFYUI and names:
        what = "ComfyUI reads Stable Diffusion 1 under the names of kohya's scripts and of diffusers"
        raise Unsupported(what, where=where, fix="write --for kohya")
    prefixes = _prefixes(layout, several=is_flux or is_xl, is_flux=is_flux)
    return [
        RenamedModule(_written(prefixes[network], name, layout), parts, rows) for network, name, parts, rows in modules.all()
    ]


def _check_networks(inside: Mapping[str, tuple[Network, str]], where: str) -> None:
    """Raise Unsupported for modules of a second diffusion model, and for those of a diffusion model that name no network."""
    if second := [show(module) for module, (network, _) in inside.items() if network is NETWORKS[1]]:
        whole = f"{len(second):,} of its {len(inside):,} modules"
        what = f"{whole} are of the second diffusion model, whose factors programs load from a separate file"
        fix = "write these modules into another file, with transformer. in place of transformer_2., and convert each file"
        raise Unsupported(what, where=where, details=second[:_SHOWN], fix=fix)
    bare = [show(module) for module, (network, inner) in inside.items() if network is UNKNOWN and DENOISER_BLOCKS.match(inner)]
    if bare and len(bare) == len(inside):
        what = "the names of its modules are those of a diffusion model without the prefix of the network"
        raise Unsupported(what, where=where, details=bare[:_SHOWN], fix=PUT_PREFIX)


def _has_flux(name: str) -> bool:
    """Whether Flux has a module."""
    block, _, inner = _block(name)
    if block in ("double_blocks", "transformer_blocks"):
        theirs = (*_FLUX.values(), *(part for parts in _FLUX_FUSED.values() for part in parts))
        return inner in ((*_FLUX, *_FLUX_FUSED) if block == "double_blocks" else theirs)
    if block in ("single_blocks", "single_transformer_blocks"):
        theirs = (*_FLUX_SINGLE.values(), *_FLUX_LINEAR1)
        return inner in ((*_FLUX_SINGLE, "linear1") if block == "single_blocks" else theirs)
    return name in _FLUX_OUTSIDE or name in _FLUX_OUTSIDE.values()


def _of_family(
    shapes: Mapping[str, tuple[int, int]],
    denoiser: Mapping[str, str],
    others: Mapping[str, tuple[Network, str]],
    layout: str,
    where: str,
    *,
    flat: bool,
) -> list[RenamedModule]:
    """The modules of a file that is of one of `FAMILIES`; [] if it is of none.

    denoiser  modules of the diffusion model → their names in it
    others    modules of other networks → the network, and their names in it

    Raises Unsupported for names that several families have, where these have other names for the output, and for names that
    models have that are of no family.
    """
    results: dict[Family, list[RenamedModule]] = {}
    for family in FAMILIES:
        places = {module: template(family, name, flat=flat) for module, name in denoiser.items()}
        if all(places.values()):
            known = {module: place for module, place in places.items() if place is not None}
            results[family] = _FamilyModules(family, shapes, where).renamed(known, layout)
    counted = [family for family in results if _has_all_blocks(family, denoiser.values())]
    chosen = counted if len(counted) == 1 else list(results)
    if len({repr(results[family]) for family in chosen}) > 1:
        titles = ", ".join(family.title for family in chosen)
        what = f"its names are those of {titles}, which have other names in {layout}, and it does not have all blocks of one"
        raise Unsupported(what, where=where, fix="load it in the program that it was made for")
    if not chosen:
        return []
    if len(chosen) == 1 and not _is_proven(chosen[0], shapes, denoiser, flat=flat):
        if layout != DIFFUSERS or not all(module.startswith(_THEIR_DENOISER) for module in denoiser):
            what = f"its names are those of {chosen[0].title}, and of {_OTHERS}: nothing in the file says which"
            raise Unsupported(what, where=where, fix="load it in the program that it was made for")
        results[chosen[0]] = [RenamedModule(_modern(name), (module,)) for module, name in denoiser.items()]
    prefixes, beginning = _prefixes(layout, several=True, is_flux=False), {DIFFUSERS: _THEIR_DENOISER}
    modules = [
        replace(module, name=_written(beginning.get(layout, prefixes[DENOISER]), module.name, layout))
        for module in results[chosen[0]]
    ]
    for module, (network, inner) in others.items():
        dotted = _dotted(inner) if flat else _modern(inner)
        if network is UNKNOWN or not dotted:
            what = f"a name of the file is not known: {show(module)}"
            raise Unsupported(what, where=where, fix=f"leave out modules that {chosen[0].title} does not have")
        modules.append(RenamedModule(_written(prefixes[network], dotted, layout), (module,)))
    return modules


def _has_all_blocks(family: Family, names: Iterable[str]) -> bool:
    """Whether names have the numbers of all blocks of a model of a family."""
    highest = _block_counts(names)
    return bool(highest) and all(count in family.blocks.get(block, ()) for block, count in highest.items())


def _block_counts(names: Iterable[str]) -> dict[str, int]:
    """Kind of blocks → one more than the highest number."""
    highest: dict[str, int] = {}
    for block, number in (match.groups() for match in map(_BLOCK.match, names) if match):
        highest[block] = max(highest.get(block, 0), int(number) + 1)
    return highest


def _is_proven(family: Family, shapes: Mapping[str, tuple[int, int]], denoiser: Mapping[str, str], *, flat: bool) -> bool:
    """Whether modules are those of a family and of no other model.

    denoiser  module → its name in the diffusion model
    """
    if not family.proof:
        return True
    names = {module: place[0] for module, name in denoiser.items() if (place := template(family, name, flat=flat))}
    if any(name in family.proof for name in names.values()):
        return True
    width = family.widths.get(max(_block_counts(denoiser.values()).values(), default=0))
    inputs = {shapes[module][1] for module, name in names.items() if name.endswith(family.wide)}
    return inputs == {width}


_BLOCK = re.compile(r"((?:\w+_)?blocks)[._](\d{1,4})(?=[._])")


class _FamilyModules:
    """The modules of a family, on the way to the names of another program."""

    def __init__(self, family: Family, shapes: Mapping[str, tuple[int, int]], where: str) -> None:
        self._family, self._shapes, self._where = family, shapes, where

    def renamed(self, places: Mapping[str, tuple[str, str]], layout: str) -> list[RenamedModule]:
        """places: module → its template, and the number of its block. Raises MismatchError for two modules of one name."""
        new = list(self._split(places) if layout == DIFFUSERS else self._joined(places))
        counts = Counter(module.name for module in new)
        if twice := next((name for name, count in counts.items() if count > 1), ""):
            raise MismatchError(f"two modules of the file are {twice}", where=self._where, fix="repair the file")
        return new

    def _split(self, places: Mapping[str, tuple[str, str]]) -> Iterator[RenamedModule]:
        """The names of diffusers."""
        for module, (name, number) in places.items():
            parts = self._family.fused.get(name, ())
            for i, part in enumerate(parts):
                rows = self._rows(module, name, len(parts))
                yield RenamedModule(part.replace("#", number), (module,), (sum(rows[:i]), rows[i]))
            if not parts:
                yield RenamedModule(self._family.names.get(name, name).replace("#", number), (module,))

    def _joined(self, places: Mapping[str, tuple[str, str]]) -> Iterator[RenamedModule]:
        """The names of the first implementation."""
        family = self._family
        first = set(family.first)
        theirs = {new: old for old, new in family.names.items()}
        wholes = {part: whole for whole, parts in family.fused.items() for part in parts}
        joined: dict[tuple[str, str], dict[str, str]] = {}
        for module, (name, number) in places.items():
            if name not in first and name in wholes:
                joined.setdefault((wholes[name], number), {})[name] = module
            else:
                yield RenamedModule((name if name in first else theirs[name]).replace("#", number), (module,))
        for (whole, number), known in joined.items():
            parts = tuple(known.get(part, "") for part in family.fused[whole])
            inputs = {self._shapes[module][1] for module in known.values()}
            if len(inputs) > 1:
                what = f"parts of {whole.replace('#', number)} have {sorted(inputs)} inputs"
                raise Unsupported(what, where=self._where, fix="repair the file")
            usual = [*inputs] * 3 + [_MLP_RATIO * max(inputs)]
            rows = tuple(self._shapes[module][0] if module else usual[i] for i, module in enumerate(parts))
            yield RenamedModule(whole.replace("#", number), parts, rows)

    def _rows(self, module: str, name: str, count: int) -> list[int]:
        """The rows of each part: as many as there are inputs, and of a fourth part the rest."""
        outputs, inputs = self._shapes[module]
        rest = outputs - 3 * inputs
        if rest < 0 or bool(rest) != (count > 3):
            what = f"{name} has {outputs:,} rows of B, and {inputs:,} columns of A: its parts are not square"
            raise MismatchError(what, where=self._where, fix=f"name an adapter of {self._family.title}, or repair the file")
        return [inputs] * 3 + [rest] * (count > 3)


_THEIR_DENOISER = "transformer."
_OTHERS = "PixArt, CogVideoX, Sana, Mochi and Cosmos"
"""Models without a table that have the names of LTX."""
_FIRST = ("input_blocks", "middle_block", "output_blocks", "time_embed.", "label_emb", "out.")
_UNET = ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out", "time_embedding.", "add_embedding.", *_FIRST)


def _are_of_flux(names: Iterable[str]) -> bool:
    """Whether names of a diffusion model's modules are Flux's.

    >>> _are_of_flux(["single_blocks.37.linear1"]), _are_of_flux(["transformer_blocks.0.attn.to_q"])
    (True, False)
    """
    numbers = [(block, number) for block, number, _ in map(_block, names) if block in _FLUX_BLOCKS]
    fitting = all(number.isdecimal() and int(number) < _FLUX_BLOCKS[block] for block, number in numbers)
    return fitting and any(block != "transformer_blocks" for block, _ in numbers)


def _is_of_unet(network: Network, name: str) -> bool:
    """Whether a module may be of Stable Diffusion 1 or XL."""
    return network is not DENOISER or name.startswith(_UNET)


def _written(prefix: str, name: str, layout: str) -> str:
    return f"{prefix}{name.replace('.', '_') if layout == KOHYA else name}"


def _dotted(flat: str) -> str:
    """The name with dots, of words that are known; "" for another.

    >>> _dotted("down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0"), _dotted("down_nonsense")
    ('down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0', '')
    """
    tokens, words = flat.split("_"), list[str]()
    while tokens:
        for count in range(min(_LONGEST, len(tokens)), 0, -1):
            word = "_".join(tokens[:count])
            if word in _WORDS or (count == 1 and word.isdigit()):
                words.append(word)
                del tokens[:count]
                break
        else:
            return ""
    return ".".join(words)


def _modern(name: str) -> str:
    """The name without what diffusers put into it until 2023."""
    plain = name.replace(".processor.", ".")
    return f"{plain}.0" if plain.endswith(".to_out") else plain


def _prefixes(layout: str, *, several: bool, is_flux: bool) -> dict[Network, str]:
    """What names begin with, by network. several: the model has several text encoders"""
    first, _, third, fourth, fifth = NETWORKS
    if layout == DIFFUSERS:
        denoiser = "transformer." if is_flux else "unet."
        return {
            first: denoiser,
            third: third.dotted[0],
            fourth: fourth.dotted[0],
            fifth: "text_encoder_2." if is_flux else "text_encoder_3.",
        }
    if layout == COMFYUI:
        encoders = {network: network.dotted[-1] for network in (third, fourth, fifth)}
        return {first: "diffusion_model.", **encoders}
    encoders = {third: "lora_te1_" if several else "lora_te_", fourth: "lora_te2_", fifth: "lora_te3_"}
    return {first: "lora_unet_", **encoders}


_DEEP = re.compile(r"transformer_blocks\.[1-9]|(?:input|output)_blocks|label_emb|add_embedding")
"""Found in names of Stable Diffusion XL, but not of Stable Diffusion 1."""


class _Modules:
    """The modules of a file, on the way to other names."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], known: Mapping[str, tuple[Network, str]], where: str) -> None:
        self._shapes, self._where = shapes, where
        self._renamed: list[tuple[Network, str, tuple[str, ...], tuple[int, ...]]] = []
        self._unchanged = dict(known)

    def all(self) -> list[tuple[Network, str, tuple[str, ...], tuple[int, ...]]]:
        """Network, name, parts and rows of each module; those that keep their name come last."""
        return [*self._renamed, *((network, name, (module,), ()) for module, (network, name) in self._unchanged.items())]

    def _take(self, module: str, name: str, rows: tuple[int, ...] = ()) -> None:
        self._unchanged.pop(module, None)
        self._renamed.append((DENOISER, name, (module,), rows))

    def _denoiser(self) -> dict[str, str]:
        return {name: module for module, (network, name) in self._unchanged.items() if network is DENOISER}

    def of_flux(self, *, split: bool) -> None:
        """Rename modules of Flux. split: into those of diffusers, else into those of the first implementation."""
        for name, module in self._denoiser().items():
            block, number, inner = _block(name)
            self._check_rows(module, name, inner if block in _FLUX_BLOCKS else "")
            if split:
                self._split(module, name, block, number, inner)
            else:
                self._unsplit(module, name, block, number, inner)
        if not split:
            self._fuse()

    def _check_rows(self, module: str, name: str, inner: str) -> None:
        """Raise MismatchError for a matrix of a block that Flux has in another shape."""
        outputs, inputs = self._shapes[module]
        rows, columns = _FLUX_ROWS.get(inner, 0), _FLUX_COLUMNS.get(inner, 0)
        if (rows and outputs != rows * inputs) or (columns and inputs != columns * outputs):
            times, side = max(rows, columns), "rows" if rows else "columns"
            of_flux = f"{times} times as many" if times > 1 else "as many"
            what = f"{name} has {outputs:,} rows of B, and {inputs:,} columns of A: there are {of_flux} {side} in Flux"
            raise MismatchError(what, where=self._where, fix="name an adapter of Flux, or repair the file")

    def _split(self, module: str, name: str, block: str, number: str, inner: str) -> None:
        outputs, inputs = self._shapes[module]
        if block == "double_blocks" and inner in _FLUX_FUSED:
            for i, part in enumerate(_FLUX_FUSED[inner]):
                self._take(module, f"transformer_blocks.{number}.{part}", (i * (outputs // 3), outputs // 3))
        elif block == "single_blocks" and inner == "linear1":
            for i, part in enumerate(_FLUX_LINEAR1):
                rows = (i * inputs, inputs if i < 3 else outputs - 3 * inputs)
                self._take(module, f"single_transformer_blocks.{number}.{part}", rows)
        elif block == "double_blocks" and inner in _FLUX:
            self._take(module, f"transformer_blocks.{number}.{_FLUX[inner]}")
        elif block == "single_blocks" and inner in _FLUX_SINGLE:
            self._take(module, f"single_transformer_blocks.{number}.{_FLUX_SINGLE[inner]}")
        elif name in _FLUX_OUTSIDE:
            self._take(module, _FLUX_OUTSIDE[name])
        elif block not in ("transformer_blocks", "single_transformer_blocks") and name not in _FLUX_OUTSIDE.values():
            raise self._unknown(name)

    def _unsplit(self, module: str, name: str, block: str, number: str, inner: str) -> None:
        double, single = ({new: old for old, new in table.items()} for table in (_FLUX, _FLUX_SINGLE))
        outside = {new: old for old, new in _FLUX_OUTSIDE.items()}
        if block == "transformer_blocks" and inner in double:
            self._take(module, f"double_blocks.{number}.{double[inner]}")
        elif block == "single_transformer_blocks" and inner in single:
            self._take(module, f"single_blocks.{number}.{single[inner]}")
        elif name in outside:
            self._take(module, outside[name])

    def _fuse(self) -> None:
        """Matrices that diffusers has one by one: their factors become those of one matrix."""
        names = self._denoiser()
        wholes: dict[str, tuple[str, ...]] = {}
        for name in names:
            block, number, inner = _block(name)
            if block == "transformer_blocks":
                fused = next((fused for fused, parts in _FLUX_FUSED.items() if inner in parts), "")
                if not fused:
                    raise self._unknown(name)
                parts = tuple(f"{block}.{number}.{part}" for part in _FLUX_FUSED[fused])
                wholes[f"double_blocks.{number}.{fused}"] = parts
            elif block == "single_transformer_blocks":
                if inner not in _FLUX_LINEAR1:
                    raise self._unknown(name)
                wholes[f"single_blocks.{number}.linear1"] = tuple(f"{block}.{number}.{part}" for part in _FLUX_LINEAR1)
            elif block not in ("double_blocks", "single_blocks") and name not in _FLUX_OUTSIDE:
                raise self._unknown(name)
        for whole, parts in wholes.items():
            modules = tuple(names.get(part, "") for part in parts)
            inputs = {self._shapes[module][1] for module in modules if module}
            if len(inputs) > 1:
                raise Unsupported(f"parts of {whole} have {sorted(inputs)} inputs", where=self._where, fix="repair the file")
            hidden = inputs.pop()
            usual = [hidden] * 3 + [_MLP_RATIO * hidden]
            rows = tuple(self._shapes[module][0] if module else usual[i] for i, module in enumerate(modules))
            for module in filter(None, modules):
                self._unchanged.pop(module)
            self._renamed.append((DENOISER, whole, modules, rows))

    def of_unet(self, name_of: Callable[[str], str]) -> None:
        """Rename modules of a UNet. name_of: the other name of one in the other vocabulary; "" without one"""
        first = name_of is _first_name
        for name, module in self._denoiser().items():
            if name.startswith(_FIRST) == first:
                continue
            if (new := name_of(name)) == "":
                raise self._unknown(name)
            self._take(module, new)

    def _unknown(self, name: str) -> Unsupported:
        return Unsupported(f"{name} has no name there", where=self._where, fix="leave out --for, or name another program")


def _block(name: str) -> tuple[str, str, str]:
    """The kind of a block, its number, and the name in it.

    >>> _block("double_blocks.3.img_attn.qkv")
    ('double_blocks', '3', 'img_attn.qkv')
    """
    block, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    return block, number, inner


def _unet_name(name: str) -> str:
    """The name that diffusers has for a module of a UNet; "" for one that it has not.

    >>> _unet_name("input_blocks.4.1.transformer_blocks.0.attn1.to_q"), _unet_name("output_blocks.2.2.conv")
    ('down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q', 'up_blocks.0.upsamplers.0.conv')
    """
    if name in _UNET_OUTSIDE:
        return _UNET_OUTSIDE[name]
    block, number, rest = _block(name)
    place, _, inner = rest.partition(".")
    if block == "middle_block":
        home = {"0": "mid_block.resnets.0", "1": "mid_block.attentions.0", "2": "mid_block.resnets.1"}.get(number, "")
        return _inside(home, rest) if home else ""
    if not number.isdigit() or block not in ("input_blocks", "output_blocks"):
        return ""
    if block == "input_blocks":
        stage, layer = divmod(int(number) - 1, _LAYERS + 1)
        if layer == _LAYERS:
            return f"down_blocks.{stage}.downsamplers.0.conv" if rest == "0.op" else ""
        kind = {"0": "resnets", "1": "attentions"}.get(place, "")
        return _inside(f"down_blocks.{stage}.{kind}.{layer}", inner) if kind else ""
    stage, layer = divmod(int(number), _LAYERS + 1)
    if place in ("1", "2") and inner == "conv":
        return f"up_blocks.{stage}.upsamplers.0.conv"
    kind = {"0": "resnets", "1": "attentions"}.get(place, "")
    return _inside(f"up_blocks.{stage}.{kind}.{layer}", inner) if kind else ""


@cache
def _first_homes() -> dict[str, str]:
    """Places in diffusers' UNet of Stable Diffusion XL → in that of the first implementation."""
    homes = {f"mid_block.{home}": f"middle_block.{i}" for i, home in enumerate(("resnets.0", "attentions.0", "resnets.1"))}
    for stage in range(_STAGES):
        for layer in range(_LAYERS + 1):
            for place, kind in enumerate(("resnets", "attentions")):
                homes[f"up_blocks.{stage}.{kind}.{layer}"] = f"output_blocks.{stage * (_LAYERS + 1) + layer}.{place}"
                if layer < _LAYERS:
                    homes[f"down_blocks.{stage}.{kind}.{layer}"] = f"input_blocks.{1 + stage * (_LAYERS + 1) + layer}.{place}"
        homes[f"down_blocks.{stage}.downsamplers.0"] = f"input_blocks.{(stage + 1) * (_LAYERS + 1)}.0"
        homes[f"up_blocks.{stage}.upsamplers.0"] = f"output_blocks.{stage * (_LAYERS + 1) + _LAYERS}.2"
    return homes


def _first_name(name: str) -> str:
    """The name of a module of diffusers' UNet in the first implementation of Stable Diffusion XL; "" for one that it has not.

    >>> _first_name("down_blocks.1.attentions.0.proj_in"), _first_name("up_blocks.0.upsamplers.0.conv")
    ('input_blocks.4.1.proj_in', 'output_blocks.2.2.conv')
    """
    outside = {new: old for old, new in _UNET_OUTSIDE.items()}
    if name in outside:
        return outside[name]
    parts = 2 if name.startswith("mid_block.") else 3
    pieces = name.split(".")
    home, inner = ".".join(pieces[: parts + 1]), ".".join(pieces[parts + 1 :])
    first = _first_homes().get(home, "")
    if ".resnets." in home:
        inner = {new: old for old, new in _RESNET.items()}.get(inner, "")
    elif ".downsamplers." in home:
        inner = "op" if inner == "conv" else ""
    return f"{first}.{inner}" if first and inner else ""


def _inside(home: str, inner: str) -> str:
    if ".attentions." in home:
        return f"{home}.{inner}"
    return f"{home}.{_RESNET[inner]}" if inner in _RESNET else ""
