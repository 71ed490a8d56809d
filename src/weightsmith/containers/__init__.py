"""How tensors are laid out in files, one file per kind of container. Does no I/O.

A container is a function `(specs, max_shard_bytes) -> Layout`, which determines every offset and header byte before the
first tensor byte is written. To add one, add a file and its name to `CONTAINERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weightsmith.containers.base import Layout as Layout
from weightsmith.containers.base import ShardLayout as ShardLayout
from weightsmith.containers.base import TensorPlace as TensorPlace
from weightsmith.containers.safetensors import make_layout as make_layout
from weightsmith.tensors import TensorSpec

SAFETENSORS = "safetensors"

CONTAINERS: Mapping[str, Callable[[Sequence[TensorSpec], int], Layout]] = {SAFETENSORS: make_layout}
"""Name in `Plan.container` → layout function."""
