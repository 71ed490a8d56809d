"""How tensors are laid out in files, one file per kind of container. Does no I/O.

A container is a function `(specs, max_shard_bytes, naming, header, mmproj) -> Layout`, which determines every offset and header
byte before the first tensor byte is written. To add one, add a file and its name to `CONTAINERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from weightsmith._base.tensors import TensorSpec
from weightsmith._files.containers.base import PLAIN_NAMES as PLAIN_NAMES
from weightsmith._files.containers.base import Layout as Layout
from weightsmith._files.containers.base import Naming as Naming
from weightsmith._files.containers.base import ShardLayout as ShardLayout
from weightsmith._files.containers.base import TensorPlace as TensorPlace
from weightsmith._files.containers.safetensors import DIFFUSERS_LORA_NAME, KOHYA_NAME, make_adapter_layout
from weightsmith._files.containers.safetensors import make_layout as make_layout

SAFETENSORS = "safetensors"
GGUF = "gguf"
PEFT = "peft"
KOHYA = "kohya"
DIFFUSERS_LORA = "diffusers-lora"
ADAPTERS = frozenset({PEFT, KOHYA, DIFFUSERS_LORA})
"""Those that hold an adapter."""


CONTAINERS: Mapping[str, Callable[[Sequence[TensorSpec], int, Naming, bytes, bytes], Layout]] = {
    SAFETENSORS: lambda specs, max_shard_bytes, naming, *headers: make_layout(specs, max_shard_bytes, naming=naming),
    # The stored format lays out its files; it is further down.
    GGUF: lambda specs, max_shard_bytes, naming, *headers: import_module("weightsmith._models.formats.gguf.layout").make_layout(
        specs, max_shard_bytes, *headers
    ),
    PEFT: lambda specs, *rest: make_adapter_layout(specs),
    KOHYA: lambda specs, *rest: make_adapter_layout(specs, KOHYA_NAME),
    DIFFUSERS_LORA: lambda specs, *rest: make_adapter_layout(specs, DIFFUSERS_LORA_NAME),
}
"""Name in `Plan.container` → layout function of the stored tensors, the maximum of a file, `Plan.naming`, `header`, `mmproj`"""
