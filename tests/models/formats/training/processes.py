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
    _start(2, folder, state, "dcp")


def write_ranks(folder: Path, state: Mapping[str, Any], world: int = 2, *, mesh: str = "") -> None:
    """The same, with a file for each process, as verl's FSDP engine saves it. mesh: "two dimensions" is that of HSDP."""
    folder.mkdir(parents=True, exist_ok=True)
    _start(world, folder, state, mesh or "ranks")


def _start(world: int, folder: Path, state: Mapping[str, Any], how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked: two more processes that import torch take minutes on a loaded machine.
    torch.multiprocessing.start_processes(_write, (world, port, str(folder), dict(state), how), world, start_method="fork")


def _write(rank: int, world: int, port: int, folder: str, state: dict[str, Any], how: str) -> None:
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, world) if how == "two dimensions" else (world,))

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(key, inner) for key, inner in value.items()}
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        axis = 1 if name == "columns" else 0
        placement = Replicate() if name == "long" else Shard(axis)
        return distribute_tensor(value, mesh, [placement] if mesh.ndim == 1 else [Replicate(), placement])

    parts = {name: cut(name, value) for name, value in state.items()}
    if how == "dcp":
        checkpoint.save(parts, checkpoint_id=folder)
    else:
        torch.save(parts, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()
