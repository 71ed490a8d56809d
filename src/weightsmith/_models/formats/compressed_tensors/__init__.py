"""compressed-tensors, the library of vLLM: codes with scales, of matrices, rows, groups of a row, or blocks.

config.py   the entry of config.json, read and written; which of its groups a module belongs to
writing.py  the encodings; scales of activations and of the KV cache

Reading is that of `formats/scaled.py`, which `fp8` shares.
"""

from __future__ import annotations

from weightsmith._models.formats.compressed_tensors.config import METHOD, mixed_config, read_entry, read_groups
from weightsmith._models.formats.compressed_tensors.writing import (
    BLOCK,
    CACHE,
    DYNAMIC,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4A16,
    STATIC,
    packed,
    packed_rows,
    stored_by,
)
from weightsmith._models.formats.config import config_entries, method_of
from weightsmith._models.formats.scaled import TITLE, is_codes, read_scaled
from weightsmith.abc.stored import Config, Specs, StoredFormat, Writing, labelled

_ENGINES = "transformers, vLLM, SGLang"


def _scaled(name: str, specs: Specs) -> str:
    """A learned scale of a plain weight may be called X.weight_scale too."""
    weight = specs.get(name.removesuffix("_scale"))
    return f"{weight.dtype} with scales" if weight is not None and weight.dtype.itemsize == 1 else ""


def recognises(config: Config, specs: Specs) -> bool:
    """Weights are codes; or they are plain, and the entry in config.json is that of a KV cache with scales."""
    if method_of(config) != METHOD:
        return False
    if any(map(is_codes, specs.values())):
        return True
    groups = any(entry.get("config_groups") for _, entry in config_entries(config))
    return not groups and any(name.endswith((".k_scale", ".v_scale")) for name in specs)


FORMAT = StoredFormat(
    "compressed_tensors",
    TITLE,
    recognises,
    read_scaled(read_entry, groups=read_groups, named=stored_by),
    {".weight_packed": labelled("compressed-tensors"), ".weight_scale": _scaled},
    writes=(
        Writing("fp8-dynamic", "8-bit floats with a scale for each row (W8A8)", _ENGINES, {0: DYNAMIC}),
        Writing("fp8-static", "8-bit floats with a scale for each weight, and its input (W8A8)", _ENGINES, {0: STATIC}),
        Writing("fp8-block", "8-bit floats with a scale for each block of 128 by 128 (W8A8)", _ENGINES, {0: BLOCK}),
        Writing("int8", "8-bit integers with a scale for each row (W8A8)", _ENGINES, {0: INT8}),
        Writing("w8a16", "8-bit integers with a scale for each group of a row", _ENGINES, packed(8), rows=packed_rows(8)),
        Writing("w4a16", "4-bit integers with a scale for each group of a row", _ENGINES, packed(4), rows=packed_rows(4)),
        Writing("nvfp4a16", "4-bit floats with a scale for 16 elements, and one for the weight", _ENGINES, {0: NVFP4A16}),
        Writing("nvfp4", "nvfp4a16, with a scale for the input: 4-bit activations (W4A4)", _ENGINES, {0: NVFP4}),
        Writing("mxfp4", "4-bit floats with a power of two for 32 elements", "transformers, vLLM", {0: MXFP4}),
        Writing("mxfp8", "8-bit floats with a power of two for 32 elements (W8A8)", "transformers, vLLM", {0: MXFP8}),
    ),
    caches=(CACHE,),
    mixed=mixed_config,
)
