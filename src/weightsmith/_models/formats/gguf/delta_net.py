"""Qwen's linear attention (gated delta nets), and the order of its value heads.

Several value heads share a key head. The Hub has those of the first key head first, then those of the second, and so on;
of Qwen3.5, llama.cpp has the first of every key head first, then the second of every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.decoded import Weight, bands, read_all
from weightsmith._models.formats.gguf.values import Config, Put, Values
from weightsmith.abc.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Order:
    """Rows (axis 0) or columns (axis 1) of a tensor: `before` that stay, then `width` for each value head."""

    axis: Literal[0, 1]
    before: int
    keys: int
    values: int
    width: int

    @property
    def size(self) -> int:
        """Rows or columns of the tensor."""
        return self.before + self.values * self.width

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """int64 [size]: where each of llama.cpp's is in the Hub's."""
        heads = np.arange(self.values * self.width).reshape(self.keys, self.values // self.keys, self.width)
        return np.concatenate([np.arange(self.before), self.before + heads.swapaxes(0, 1).reshape(-1)])


_WIDE = (".attn_gate.weight", ".ssm_out.weight", ".attn_qkv.weight", ".ssm_conv1d.weight")
_NARROW = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")


@dataclass(frozen=True, slots=True)
class OrderedWeight(Weight):
    """A tensor whose rows or columns the file has in another order."""

    order: Order

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        found, rows = np.argsort(self.order.places), self.spec.shape[0]
        cols = self.spec.size // rows
        for row, end, skip, target in bands(first, values, cols):
            if self.order.axis == 1:
                whole = self._read(stored, row * cols, end * cols).reshape(-1, cols)[:, found]
            else:
                own = found[row:end]
                starts = [0, *(np.flatnonzero(np.diff(own) != 1) + 1).tolist(), len(own)]
                runs = [(int(own[a]) * cols, (int(own[b - 1]) + 1) * cols) for a, b in pairwise(starts)]
                whole = np.concatenate([self._read(stored, a, b) for a, b in runs])
            target[:] = whole.reshape(-1)[skip : skip + target.size]

    def _read(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        return read_all(stored, self.stored[0], start, end).astype(np.float32)


def ordered_weight(spec: TensorSpec, name: str, order: Order, natural_dtype: DType, where: str) -> OrderedWeight:
    """A tensor under the Hub's name, from one of the file. Raises FormatError for one of another size than the keys say."""
    matrix = order.axis == 0 or len(spec.shape) == 2
    if not matrix or not spec.shape or spec.shape[order.axis] != order.size:
        heads = f"{order.size:,} for {order.values:,} value heads"
        what = f"tensor {show(spec.name)} has the shape {list(spec.shape)}, and not {heads}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return OrderedWeight(TensorSpec(name, DTYPES["F32"], spec.shape), (spec.name,), natural_dtype, order)


_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families whose value heads llama.cpp has in another order."""


def value_order(name: str, config: Config) -> Order | None:
    """The order of a tensor of a GGUF file; None if it is the Hub's.

    >>> heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 1}
    >>> config = Config({"model_type": "qwen3_5_text", **heads})
    >>> value_order("blk.0.ssm_a", config).places.tolist(), value_order("blk.0.attn_qkv.weight", config).places.tolist()
    ([0, 2, 1, 3], [0, 1, 2, 3, 4, 6, 5, 7])
    """
    if config.get("model_type") not in _TILED or not name.endswith((*_WIDE, *_NARROW)):
        return None
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if keys == values:
        return None
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"and not a multiple of the {keys:,} key heads")
    width = config.count("linear_value_head_dim") if name.endswith(_WIDE) else 1
    before = 2 * keys * config.count("linear_key_head_dim") if name.endswith(_WIDE[2:]) else 0  # queries and keys come first
    return Order(1 if name.endswith(".ssm_out.weight") else 0, before, keys, values, width)


def put_delta_net(given: Config, put: Put) -> None:
    """The keys of a GGUF file that follow from several settings. Raises FormatError, Unsupported."""
    size, heads = given.count("linear_key_head_dim"), given.count("linear_num_value_heads")
    given.need("linear_value_head_dim", given.count("linear_value_head_dim"), size)
    put("ssm.inner_size", "u32", size * heads)
    every, layers = given.count("full_attention_interval", 4), given.count("num_hidden_layers")
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    given.need("layer_types", given.get("layer_types") or types, types)
    put("full_attention_interval", "u32", every)


def key_head_rows(config: Config) -> tuple[int, int, int, int]:
    """Rows of a key head in Qwen3-Next's `in_proj_qkvz`: of its query, its key, its values, and their gates."""
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"and not a multiple of the {keys:,} key heads")
    size, own = config.count("linear_key_head_dim"), values // keys * config.count("linear_value_head_dim")
    return size, size, own, own


def take_delta_net(found: Values, config: dict[str, Any], *_: object) -> None:
    """The settings of config.json. Raises FormatError."""
    inner, heads = found.count("ssm.inner_size"), config["linear_num_value_heads"]
    if inner % heads:
        raise found.wrong("ssm.inner_size", inner, f"and not a multiple of the {heads:,} value heads")
    config["linear_value_head_dim"] = inner // heads
    every = found.count("full_attention_interval", 4)
    layers = range(1, config["num_hidden_layers"] + 1)
    if isinstance(sections := found.get("rope.dimension_sections"), np.ndarray):
        config["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": config.get("partial_rotary_factor", 0.25),
            "mrope_section": sections.tolist()[:3],
        }
    config["layer_types"] = ["linear_attention" if i % every else "full_attention" for i in layers]
