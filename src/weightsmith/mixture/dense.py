"""The parts of a dense decoder: gate, up and down of every layer's MLP, and the rest. Fused matrices are taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith.errors import ShapeError, WeightsmithError
from weightsmith.mixture.assembly import Donor
from weightsmith.planner.match import is_buffer
from weightsmith.planner.steps import Window

PARTS = ("gate", "up", "down")

MOST = 12
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix or vector inside a tensor. window: None for the whole tensor."""

    tensor: str
    shape: tuple[int, ...]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    mlp   `gate` [I, H], `up` [I, H], `down` [H, I]; I: intermediate size, H: hidden size
    rest  everything else, by its name inside the layer in the unfused form
    """

    mlp: Mapping[str, Block]
    rest: Mapping[str, Block]


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense model.

    prefix   before the layer number: `model.layers.`
    outside  tensors outside the layers
    dropped  buffers that models compute for themselves
    """

    donor: Donor
    prefix: str
    layers: tuple[Layer, ...]
    outside: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def hidden(self) -> int:
        """H."""
        return self.layers[0].mlp["gate"].shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.layers[0].mlp["gate"].shape[0]

    def used(self, *, mlp: bool, rest: bool) -> set[str]:
        """Names of the tensors that the MLPs, or the rest, are made of."""
        names = {b.tensor for layer in self.layers for b in layer.mlp.values()} if mlp else set()
        if rest:
            names |= {b.tensor for layer in self.layers for b in layer.rest.values()} | set(self.outside)
        return names


def dense_parts(donor: Donor) -> Dense | WeightsmithError:
    """The parts of a donor, or why it has them not."""
    stack = donor.structure.main
    if stack is None:
        return ShapeError("it has no single stack of decoder layers", where=donor.label)
    found: list[dict[str, Block]] = [{} for _ in range(stack.n_layers)]
    outside, dropped = [], []
    for name, step in donor.steps.items():
        place = donor.structure.locate(name)
        if is_buffer(step.out):
            dropped.append(name)
        elif place is not None and place[0] == stack:
            for suffix, block in _blocks(donor.structure.suffix(name) or "", name, step.out.shape, donor.config):
                found[place[1]][suffix] = block
        else:
            outside.append(name)
    layers = []
    for i, blocks in enumerate(found):
        mlp = {part: blocks.pop(f"mlp.{part}_proj.weight", None) for part in PARTS}
        whole = {part: block for part, block in mlp.items() if block is not None}
        if len(whole) < len(PARTS):
            missing = ", ".join(f"mlp.{part}_proj.weight" for part in PARTS if part not in whole)
            if any("experts" in name.split(".") for name in blocks):
                what = f"layer {i} has experts: it is a mixture already, and experts are made of dense models"
                fix = "name a dense model; prune_experts and merge_experts work on mixtures, and so does weightsmith merge"
                return ShapeError(what, where=donor.label, fix=fix)
            what = f"layer {i} has no {missing}: an expert is made of a dense MLP of gate, up and down"
            there = ", ".join(sorted(blocks)[:MOST]) or "nothing"
            more = f" and {len(blocks) - MOST:,} more" if len(blocks) > MOST else ""
            fix = "name a model whose MLPs have these three"
            return ShapeError(what, where=donor.label, details=[f"it has {there}{more}"], fix=fix)
        layers.append(Layer(whole, blocks))
    if not layers:
        return ShapeError("it has no decoder layers", where=donor.label)
    return _uneven(donor, layers) or Dense(donor, stack.prefix, tuple(layers), tuple(outside), tuple(dropped))


def _uneven(donor: Donor, layers: Sequence[Layer]) -> ShapeError | None:
    """MLPs that are not all of one width: config.json has one number for all experts of all layers."""
    shape = layers[0].mlp["gate"].shape
    if len(shape) != 2:
        what = f"{layers[0].mlp['gate'].tensor} is {list(shape)} and no matrix"
        return ShapeError(what, where=donor.label, fix="an expert needs its weights as they are before they are quantised")
    wanted = {"gate": shape, "up": shape, "down": shape[::-1]}
    for i, layer in enumerate(layers):
        for part, block in layer.mlp.items():
            if block.shape != wanted[part]:
                what = f"{block.tensor} of layer {i} has the {part} projection {list(block.shape)}, not {list(wanted[part])}"
                return ShapeError(what, where=donor.label, fix="an expert needs MLPs of one width in all layers")
    return None


def _blocks(suffix: str, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> list[tuple[str, Block]]:
    """The unfused parts of one tensor of a layer, each with its name inside the layer."""
    if suffix == "mlp.gate_up_proj.weight" and len(shape) == 2 and shape[0] % 2 == 0:
        half = shape[0] // 2
        return [(f"mlp.{part}_proj.weight", _rows(name, shape, k * half, half)) for k, part in enumerate(("gate", "up"))]
    if suffix == "self_attn.qkv_proj.weight" and len(shape) == 2:
        heads = int(config.get("num_attention_heads") or 0)
        kv = int(config.get("num_key_value_heads") or heads)
        if heads and shape[0] % (heads + 2 * kv) == 0:
            size = shape[0] // (heads + 2 * kv)
            starts = (0, heads * size, (heads + kv) * size)
            return [
                (f"self_attn.{part}_proj.weight", _rows(name, shape, start, n * size))
                for part, start, n in zip("qkv", starts, (heads, kv, kv), strict=True)
            ]
    return [(suffix, Block(name, shape))]


def _rows(name: str, shape: tuple[int, ...], start: int, rows: int) -> Block:
    cols = shape[1]
    return Block(name, (rows, cols), Window(start * cols, rows, cols, cols))
