"""Adapters in GGUF files, as llama.cpp has them, as those of PEFT's folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.lora.adapter import Adapter, Factors

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file: by the end of its name, or as one of Ollama's blobs. Looks only at names."""
    if path.name.lower().endswith(SUFFIX):
        return True
    if not path.name.startswith("sha256-"):
        return False
    from weightsmith._models.formats.gguf.ollama import is_blob

    return is_blob(path)


def is_gguf_adapter(path: Path) -> bool:
    """Whether a file is a GGUF file of an adapter. False for one that cannot be read: opening it says why."""
    if not is_gguf(path):
        return False
    from weightsmith._models.formats.gguf.header import is_adapter_header

    try:
        return is_adapter_header(path)
    except (OSError, WeightsmithError):
        return False


def open_gguf(ref: str, path: Path) -> Adapter:
    """Open an adapter. Reads its header. Raises as `open_gguf_adapter`."""
    from weightsmith._models.formats.gguf.adapter_file import open_gguf_adapter

    opened = open_gguf_adapter(path, str(path))
    config = {"base_model_name_or_path": opened.base} if opened.base else {}
    updates = {pair.module: Factors(pair.a, pair.b, pair.embedding, pair.scaling) for pair in opened.factors}
    checkpoint = Checkpoint(ref, opened.source, ModelFolder(path.parent, config=config))
    return Adapter(checkpoint, updates, turned=opened.turned, heads=opened.heads)


def check_heads(adapter: Adapter, config: Mapping[str, Any] | None) -> None:
    """Raise MismatchError if the file states other numbers of heads than its base."""
    if adapter.heads is not None and config is not None:
        from weightsmith._models.formats.gguf import adapter_file

        adapter_file.check_heads(adapter.heads, config, adapter.checkpoint.ref)


def in_hub_order(adapter: Adapter, config: Mapping[str, Any] | None) -> Adapter:
    """The adapter with the rows of q and k in the Hub's order; itself if they are. config: config.json of its base.

    Raises Unsupported without a config, and as `adapter_file.in_hub_order` and `check_heads`. Closing it closes the adapter.
    """
    check_heads(adapter, config)
    if not adapter.turned:
        return adapter
    checkpoint = adapter.checkpoint
    if config is None:
        what = "its rows of q and k are in llama.cpp's order, which depends on the number of heads, and no config.json says it"
        raise Unsupported(what, where=checkpoint.ref, fix="name a base that has a config.json")
    from weightsmith._models.formats.gguf import adapter_file

    source = adapter_file.in_hub_order(checkpoint.source, adapter.turned, config, checkpoint.ref)
    ordered = Checkpoint(
        checkpoint.ref, source, ModelFolder(checkpoint.folder, config=checkpoint.config), notes=checkpoint.notes
    )
    return replace(adapter, checkpoint=ordered, turned={})
