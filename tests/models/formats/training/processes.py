"""Checkpoints as two processes of a training run write them, with PyTorch's own writers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def tensors() -> dict[str, torch.Tensor]:
    """Tensors in model order, of sizes that two processes do not share evenly."""
    torch.manual_seed(0)
    return {
        "columns": torch.randn(6, 34),
        "layers.2.w": torch.randn(7, 5).bfloat16(),
        "layers.10.w": torch.randn(3, 5, 4).half(),
        "long": torch.arange(9),
        "one": torch.randn(1, 3),
        "scalar": torch.tensor(2.5),
        "w": torch.randn(301, 70),
    }


def write_sharded(folder: Path, state: Mapping[str, Any]) -> None:
    """Save a state dict by two processes. Tensors are cut into rows, `columns` into columns, the shortest are in both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked: two more processes that import torch take minutes on a loaded machine.
    torch.multiprocessing.start_processes(_write, (2, port, str(folder), dict(state)), 2, start_method="fork")


def _write(rank: int, world: int, port: int, folder: str, state: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(key, inner) for key, inner in value.items()}
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        axis = 1 if name == "columns" else 0
        return distribute_tensor(value, mesh, [Replicate() if name == "long" else Shard(axis)])

    checkpoint.save({name: cut(name, value) for name, value in state.items()}, checkpoint_id=folder)
    dist.destroy_process_group()
