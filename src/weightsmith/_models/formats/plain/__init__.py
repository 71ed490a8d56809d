"""Plain numbers, in safetensors files and PyTorch's: weights that are not quantised."""

from __future__ import annotations

from weightsmith._models.formats.plain.writing import ENCODING, parse
from weightsmith._models.sources import pytorch, safetensors
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat("plain", "plain numbers", files=(safetensors.KIND, pytorch.KIND), unlisted=(ENCODING,), parse=parse)
