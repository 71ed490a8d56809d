"""Plain numbers, in safetensors files and PyTorch's: weights that are not quantised."""

from __future__ import annotations

from weightsmith.sources import pytorch, safetensors
from weightsmith.stored.base import StoredFormat
from weightsmith.stored.plain.writing import ENCODING, parse

FORMAT = StoredFormat("plain", "plain numbers", files=(safetensors.KIND, pytorch.KIND), unlisted=(ENCODING,), parse=parse)
