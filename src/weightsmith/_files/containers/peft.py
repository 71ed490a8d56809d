"""A PEFT adapter: all tensors in one safetensors file, `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith._base.tensors import TensorSpec
from weightsmith._files.containers.base import Layout
from weightsmith._files.containers.safetensors import make_layout as make_safetensors_layout

WEIGHTS_NAME = "adapter_model.safetensors"


def make_layout(specs: Sequence[TensorSpec], max_shard_bytes: int, header: bytes = b"") -> Layout:
    """Lay out tensors in one file, whatever the maximum: PEFT reads no other. Raises StoreError as for safetensors.

    >>> make_layout([], 1).shards[0].name
    'adapter_model.safetensors'
    """
    layout = make_safetensors_layout(specs, sum(spec.nbytes for spec in specs) + 1)
    return replace(layout, shards=tuple(replace(shard, name=WEIGHTS_NAME) for shard in layout.shards))
