"""Which features of a layer can be scaled without a change of what it computes, by following one forward pass.

A feature can be divided by a number where it is made, if everything that reads it multiplies by that number. It is made by a
norm, or by a linear layer; linear layers read it. Between them, features may be moved and copied (heads of keys and values
that several queries share), weighted by an attention, and multiplied by other numbers (a gate). Any other operation that sees
them rules them out: a router, a residual stream, an activation function.

The layer runs on torch's `meta` device, which computes shapes only. Every call of a torch function that gets such a tensor is
seen. Beside each tensor goes one of the same shape with the numbers of the features, to which the same moves are applied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from weightsmith._activations.decoder import Features, Maker, spread
from weightsmith._activations.decoder.unfused import Experts


def scalable(
    layer: nn.Module, names: Mapping[str, str], call: tuple[Sequence[Any], Mapping[str, Any]], hidden: int, tokens: int = 3
) -> list[Features]:
    """The features of a layer that can be scaled.

    layer   with parameters on the meta device
    names   stored names of its parameters
    call    what it is called with, besides hidden states
    hidden  size of a hidden state

    [] if it cannot run on the meta device.
    """
    tracer = _Tracer({id(layer.get_parameter(name)): stored for name, stored in names.items()})
    hooks = [
        module.register_forward_hook(lambda _module, _args, out, made=made: tracer.begin(made, out))
        for name, module in layer.named_modules()
        if (made := _norm(name, module, names)) is not None
    ]
    experts = [module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    for module in experts:
        module.forward = partial(_all_experts, module if isinstance(module, Experts) else (), tracer)
    buffers = [(module, key, buffer) for module in layer.modules() for key, buffer in module._buffers.items()]
    for module, key, buffer in buffers:
        module._buffers[key] = None if buffer is None else buffer.to("meta")
    args, kwargs = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, (call[0], dict(call[1])))
    try:
        with torch.no_grad(), tracer:
            tracer.end(layer(torch.empty(1, tokens, hidden, device="meta"), *args, **kwargs))
    except Exception:  # transformers' code may raise anything where there are no numbers
        return []
    finally:
        for hook in hooks:
            hook.remove()
        for module in experts:
            del module.forward
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
    return [features for made in tracer.made if (features := made.features) is not None]


def _all_experts(experts: Iterable[nn.Module], tracer: _Tracer, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """What leaves all experts, none of which is left out: which of them a token reaches depends on numbers."""
    out = torch.zeros_like(hidden)
    for expert in experts:
        out = out + expert(hidden)
    if not isinstance(experts, Experts):  # one tensor has the weights of all
        tracer.lose([hidden])
    return out


@dataclass(eq=False, slots=True)
class _Made:
    """Features of a norm or a linear layer, and who reads them.

    width    how many there are
    readers  for each input of a reader, the feature that it is: int64 [K]
    lost     whether something else reads them
    """

    maker: Maker
    weight: str
    bias: str
    width: int
    readers: dict[str, Tensor] = field(default_factory=dict)
    lost: bool = False

    @property
    def features(self) -> Features | None:
        maps = list(self.readers.values())
        if self.lost or not maps or any(not torch.equal(maps[0], other) for other in maps[1:]):
            return None
        heads = _heads(maps[0], self.width)
        return None if heads is None else Features(self.maker, self.weight, self.bias, tuple(self.readers), heads)


def _heads(numbers: Tensor, width: int) -> tuple[int, int] | None:
    """`Features.heads` of the numbers of features, of which there are `width`; None for another order, or not all of them.

    >>> [_heads(torch.tensor(numbers), 4) for numbers in ([0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3], [1, 0, 2, 3])]
    [(1, 1), (2, 2), None]
    """
    if len(numbers) % width:
        return None
    again = (numbers == 0).nonzero().flatten()
    heads = len(numbers) // width, int(again[1]) if len(again) > 1 else 1
    return heads if width % heads[1] == 0 and np.array_equal(numbers.numpy(), spread(np.arange(width), heads)) else None


def _norm(name: str, module: nn.Module, names: Mapping[str, str]) -> _Made | None:
    """The features of a norm; None for a module that is none, or that computes something else with its weight."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or parameters.keys() - {"weight", "bias"} or len(list(module.modules())) > 1:
        return None
    prefix = f"{name}." if name else ""
    if (maker := _maker(module, len(weight))) is None:
        return None
    return _Made(maker, names[f"{prefix}weight"], names[f"{prefix}bias"] if "bias" in parameters else "", len(weight))


def _maker(module: nn.Module, width: int) -> Maker | None:
    """What a norm does with its weight, by trying it on numbers."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in (width, width, (2, width)))
    scales = torch.exp2(torch.randint(-2, 3, (width,), generator=generator).float())
    tried = copy.deepcopy(module)
    kinds: tuple[tuple[Maker, Tensor], ...] = (("norm", weight / scales), ("offset norm", (1 + weight) / scales - 1))

    def run(new_weight: Tensor, new_bias: Tensor) -> Tensor:
        for leaf, value in (("weight", new_weight), ("bias", new_bias)):
            if getattr(module, leaf, None) is not None:
                tried.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        out = tried(x)
        return out if isinstance(out, Tensor) and out.shape == x.shape else torch.full_like(x, torch.nan)

    try:
        with torch.no_grad():
            plain = run(weight, bias)
            return next(
                (kind for kind, scaled in kinds if torch.allclose(run(scaled, bias / scales) * scales, plain, 1e-4, 1e-5)), None
            )
    except Exception:  # one with other arguments
        return None


_Marked = tuple[Tensor, _Made, Tensor]
"""A tensor, the maker of its features, and the number of the feature at each of its places: int64, of the same shape."""

_MOVES = frozenset(
    """view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze expand expand_as repeat repeat_interleave
    swapaxes movedim chunk split narrow clone detach __getitem__""".split()
)
"""Functions that move or copy numbers."""

_CASTS = frozenset("to float type type_as bfloat16 half".split())
"""Functions that change the dtype only, of what is moved to no other device."""

_SHAPES = frozenset("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full".split())
"""Functions that look at no numbers."""

_PRODUCTS = frozenset("mul __mul__ __rmul__ multiply".split())

_VALUES = {"scaled_dot_product_attention": 2, "matmul": 1, "__matmul__": 1}
"""Functions that compute weighted sums of the rows of one argument, and the position of that argument."""


class _Tracer(TorchFunctionMode):  # type: ignore[misc,unused-ignore]  # torch has no types for it
    """Follows features through the functions of torch.

    names  stored names of the parameters, by identity
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = dict(names)
        self._kept: list[Tensor] = []
        self._marks: dict[int, _Marked] = {}
        self._by_weight: dict[str, _Made] = {}
        self._entering: dict[str, list[_Made | None]] = {}
        self._exposed: set[str] = set()

    @property
    def made(self) -> list[_Made]:
        """The features of all norms and linear layers, except those whose weights are also used in another way."""
        for weight, entering in self._entering.items():
            if weight in self._exposed or any(one is not entering[0] for one in entering):
                for one in entering:
                    if one is not None:
                        one.lost = True
        return [made for made in self._by_weight.values() if made.maker != "linear" or made.weight not in self._exposed]

    def begin(self, made: _Made, out: Any) -> None:
        """Follow what a norm or a linear layer gives."""
        if isinstance(out, Tensor):
            made = self._by_weight.setdefault(made.weight, made)
            self._mark(out, made, torch.arange(out.shape[-1]).expand(out.shape))

    def end(self, outputs: Any) -> None:
        """What leaves the layer is read by others."""
        self.lose(tree_leaves(outputs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors, name = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)], func.__name__
        marked = [value for value in tensors if id(value) in self._marks]
        if name == "__setitem__":  # what is written there is read by who reads the rest
            self.lose(marked)
        if name in _SHAPES or not any(isinstance(value, Tensor) for value in tree_leaves(result)):
            return result
        if func.__name__ in _CASTS and id(args[0]) in self._names:
            self._names[id(result)] = self._names[id(args[0])]
            self._kept.append(result)
            return result
        weight = self._names.get(id(args[1])) if name == "linear" and len(args) > 1 else None
        self._exposed |= {self._names[id(value)] for value in tensors[weight is not None :] if id(value) in self._names} - {
            weight
        }
        if weight is not None:
            self._entering.setdefault(weight, []).append(self._marks[id(marked[0])][1] if marked else None)
        if marked:
            marked = self._values_alone(name, args, marked)
            try:
                passed_on = len(marked) == 1 and self._pass_on(func, args, kwargs, result, marked[0])
            except Exception:  # moves that depend on numbers
                passed_on = False
            if not passed_on:
                self.lose(marked)
        if weight is not None:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.begin(_Made("linear", weight, self._names.get(id(bias), ""), result.shape[-1]), result)
        return result

    def _values_alone(self, name: str, args: Any, marked: list[Tensor]) -> list[Tensor]:
        """Keep only the values among the marked inputs of an attention.

        Without rotary embeddings, queries and keys arrive marked as well. Attention reads their numbers, so these are lost.
        """
        place = _VALUES.get(name, -1)
        if not 0 <= place < len(args) or id(args[place]) not in self._marks:
            return marked
        made = self._marks[id(args[place])][1]
        others = [x for x in marked if x is not args[place]]
        if any(self._marks[id(x)][1] is made for x in others):
            return marked
        self.lose(others)
        return [args[place]]

    def _pass_on(self, func: Any, args: Any, kwargs: Any, result: Any, x: Tensor) -> bool:
        """Mark the result of a function that gets one marked tensor. False: its features are lost."""
        name, (_, made, numbers) = func.__name__, self._marks[id(x)]
        if result is x:  # as it was, or changed in place
            return name in _MOVES or name in _CASTS or name == "dropout"
        if name in _MOVES:
            moved = func(*tree_map(lambda value: numbers if value is x else value, args), **kwargs)
            for part, part_numbers in zip(tree_leaves(result), tree_leaves(moved), strict=True):
                self._mark(part, made, part_numbers)
            return True
        if name in _CASTS and args[0] is x:
            self._mark(result, made, numbers)
            return True
        if name in _PRODUCTS:
            self._mark(result, made, numbers.expand(result.shape))
            return True
        if name == "linear" and args[0] is x:
            rows, weight = numbers.reshape(-1, numbers.shape[-1]), self._names.get(id(args[1]))
            alike = bool((rows == rows[0]).all())
            return alike and weight is not None and torch.equal(made.readers.setdefault(weight, rows[0]), rows[0])
        place = _VALUES.get(name, -1)
        if place < 0 or place >= len(args) or args[place] is not x:
            return False
        token = numbers[..., :1, :]
        if not bool((numbers == token).all()):
            return False
        groups = result.shape[1] // numbers.shape[1] if result.dim() == numbers.dim() == 4 else 1
        self._mark(result, made, token.repeat_interleave(groups, dim=1).expand(result.shape))
        return True

    def _mark(self, tensor: Tensor, made: _Made, numbers: Tensor) -> None:
        assert tensor.shape == numbers.shape
        known = self._marks.get(id(tensor))
        if known is not None and known[1] is not made and not known[1].lost:  # a norm's weight alone follows what it is given
            made.lost = known[1].lost = True
        self._marks[id(tensor)] = tensor, made, numbers

    def lose(self, tensors: Sequence[Any]) -> None:
        """Something else reads these."""
        for tensor in tensors:
            if id(tensor) in self._marks:
                self._marks[id(tensor)][1].lost = True
