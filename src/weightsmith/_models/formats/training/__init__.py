"""Checkpoints of training runs, in which each process has stored its part of every tensor. They are read as one model.

dcp.py        PyTorch's distributed checkpoints, as FSDP and torchtitan write them
deepspeed.py  ZeRO's partitions
fsdp.py       a file of DTensors for each process, as verl writes them
megatron.py   tensor-parallel slices, pipeline stages and experts of Megatron-LM
megatron_names.py  Megatron's names as the Hub's
processes.py  tensors in parts; what checkpoints with a file for each process have in common

No pickle is run.
"""

from __future__ import annotations

from weightsmith._models.formats.training import dcp, deepspeed, fsdp, megatron
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat("training", "training checkpoints", files=(dcp.KIND, deepspeed.KIND, fsdp.KIND, megatron.KIND))
