"""Modules that transformers fuses, with one nn.Linear for each matrix of the checkpoint.

transformers stacks the weights of all experts in one parameter, and Phi-3 has one matrix for q, k and v. A checkpoint, or a
plan that stores matrices one by one, has them apart. The modules here compute the same from separate matrices, so each has
its own inputs, weights and hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from weightsmith._models.structure.projections import FUSED, MIXTRAL


class Expert(nn.Module):  # type: ignore[misc,unused-ignore]  # torch has no types for it
    """One gated MLP."""

    def __init__(self, hidden: int, inner: int, act: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """float32 [tokens, hidden] → the same."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class PlainExpert(nn.Module):  # type: ignore[misc,unused-ignore]
    """One MLP without a gate."""

    def __init__(self, hidden: int, inner: int, act: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """float32 [tokens, hidden] → the same."""
        return self.down_proj(self.act(self.up_proj(x)))


class Experts(nn.ModuleList):  # type: ignore[misc,unused-ignore]
    """Routed experts, called as transformers calls its fused ones."""

    def __init__(self, fused: Any) -> None:
        count, hidden, inner = fused.down_proj.shape
        expert = Expert if hasattr(fused, "gate_up_proj") else PlainExpert
        super().__init__(expert(hidden, inner, fused.act_fn) for _ in range(count))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, added expert by expert."""
        out = torch.zeros_like(hidden_states)
        for e, expert in enumerate(self):
            rows, places = torch.where(top_k_index == e)
            if len(rows):
                out.index_add_(0, rows, expert(hidden_states[rows]) * top_k_weights[rows, places, None])
        return out


class Parts(nn.Module):  # type: ignore[misc,unused-ignore]
    """Linear layers with the same input, in place of one with all of their rows."""

    def __init__(self, fused: nn.Linear, names: tuple[str, ...], heights: list[int]) -> None:
        super().__init__()
        self.names = names
        for name, height in zip(names, heights, strict=True):
            self.add_module(name, nn.Linear(fused.in_features, height, bias=fused.bias is not None))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs, side by side."""
        return torch.cat([self.get_submodule(name)(x) for name in self.names], dim=-1)


def unfuse(
    layer: nn.Module, prefix: str, shapes: Mapping[str, tuple[int, ...]], renamed: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """Replace the fused modules of a layer whose matrices are stored apart.

    prefix   of the layer's tensors: `model.layers.3.`
    shapes   of all stored tensors
    renamed  ends of names: in the module → in files, if they are not the same

    Returns parameter name → stored name, and the modules that were replaced, for `put_back`.
    """
    replaced: dict[str, nn.Module] = {}
    for name, module in list(layer.named_modules()):
        owner, _, leaf = name.rpartition(".")
        within = f"{owner}." if owner else ""
        if leaf == "experts" and hasattr(module, "down_proj") and f"{prefix}{name}.down_proj" not in shapes:
            layer.get_submodule(owner).experts = Experts(module)
            replaced[name] = module
        elif leaf in FUSED and isinstance(module, nn.Linear) and f"{prefix}{name}.weight" not in shapes:
            parts = FUSED[leaf]
            heights = [shapes.get(f"{prefix}{within}{part}.weight", (0,))[0] for part in parts]
            setattr(layer.get_submodule(owner), leaf, Parts(module, parts, heights))
            replaced[name] = module
    _take_stored_buffers(layer, prefix, shapes, renamed)
    return {name: prefix + stored_name(name, prefix, shapes, renamed) for name, _ in layer.named_parameters()}, replaced


def _take_stored_buffers(layer: nn.Module, prefix: str, shapes: Collection[str], renamed: Mapping[str, str]) -> None:
    """Make parameters of the buffers that a checkpoint stores numbers for, such as biases of routers: they are loaded then."""
    kept = layer.state_dict(keep_vars=True).keys()
    for name, buffer in list(layer.named_buffers()):
        if name in kept and buffer.is_floating_point() and prefix + stored_name(name, prefix, shapes, renamed) in shapes:
            owner, _, leaf = name.rpartition(".")
            module = layer.get_submodule(owner)
            delattr(module, leaf)
            module.register_parameter(leaf, nn.Parameter(buffer.to("meta"), requires_grad=False))


def put_back(layer: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Undo `unfuse`: another plan may store the same model's matrices fused."""
    for name, module in replaced.items():
        owner, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, module)


def stored_name(name: str, prefix: str, stored: Collection[str], renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """A parameter's name in the checkpoint: without the module of fused parts, and with Mixtral's names of experts.

    renamed  as for `unfuse`

    >>> stored_name("self_attn.qkv_proj.q_proj.weight", "l.", ())
    'self_attn.q_proj.weight'
    >>> stored_name("mlp.experts.3.up_proj.weight", "l.", {"l.block_sparse_moe.experts.3.w3.weight"})
    'block_sparse_moe.experts.3.w3.weight'
    >>> stored_name("feed_forward.experts.3.up_proj.weight", "l.", {"l.feed_forward.experts.3.w3.weight"})
    'feed_forward.experts.3.w3.weight'
    >>> stored_name("self_attn.sinks", "l.", {"l.self_attn.sink_bias"}, {"self_attn.sinks": "self_attn.sink_bias"})
    'self_attn.sink_bias'
    """
    parts = name.split(".")
    if len(parts) > 2 and parts[-3] in FUSED and parts[-2] in FUSED[parts[-3]]:
        del parts[-3]
    plain = ".".join(parts)
    if prefix + plain in stored:
        return plain
    in_files = renamed.get(plain, plain)
    mixtral = ".".join([parts[0], *(MIXTRAL.get(part, part) for part in parts[1:])])
    others = (in_files, mixtral, f"block_sparse_moe.{mixtral.removeprefix('mlp.')}" if parts[0] == "mlp" else mixtral)
    return next((other for other in others if prefix + other in stored), plain)
