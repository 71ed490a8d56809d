"""Sources of tensors. One interface, `Tensors`; one file for each kind; composition, no inheritance.

base.py          the interface
kind.py          the description of a kind
files.py         tensors stored as plain bytes in files
safetensors.py   the safetensors format
pytorch.py       PyTorch's format: .bin, .pt, .pth and .ckpt, read without executing code
gguf.py          GGUF files, dequantised on read, with config.json and tokenizer made from their keys
decoded.py       what sources of quantised weights have in common, which decode them on each read: scaled.py (FP8 and
                 compressed-tensors), gptq.py, awq.py, bitsandbytes.py, exl2.py, exl3.py, mlx.py, modelopt.py
adapted.py       a source with a LoRA adapter applied
memory.py        state dicts; views.py streams the bytes of a tensor in memory

To add a file format, add a file with a `KIND` and an entry in `KINDS`. To add an encoding of tensors, add a file with a
`WRAPPER` and an entry in `WRAPPERS`. Test either with a subclass of `weightsmith.testing.SourceTests`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith.errors import Unsupported
from weightsmith.formats.files import Opener, open_local
from weightsmith.formats.hf_folder import Weights, natural_key, no_weights, read_index
from weightsmith.sources import awq, bitsandbytes, exl2, exl3, gguf, gptq, mlx, modelopt, pytorch, safetensors, scaled
from weightsmith.sources.base import Tensors
from weightsmith.sources.kind import FileKind, Index, Opened, Wrapped, Wrapper

__all__ = [
    "KINDS",
    "WRAPPERS",
    "FileKind",
    "Opened",
    "Tensors",
    "WeightFiles",
    "Wrapped",
    "Wrapper",
    "choose_kind",
    "find_weights",
    "open_file",
    "suffixes",
    "wrap",
]

KINDS: tuple[FileKind, ...] = (safetensors.KIND, pytorch.KIND, gguf.KIND)
"""File formats, in order of preference if a folder holds several."""

WRAPPERS: tuple[Wrapper, ...] = (
    scaled.WRAPPER,
    gptq.WRAPPER,
    awq.WRAPPER,
    bitsandbytes.WRAPPER,
    exl2.WRAPPER,
    exl3.WRAPPER,
    mlx.WRAPPER,
    modelopt.WRAPPER,
)
"""Encodings of tensors; the first that recognises a model decodes it."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder, not yet opened.

    kind     their format
    paths    in natural order
    index    the index that lists them, if any
    ignored  names of weight files of this format that are not part of the model
    """

    kind: FileKind
    paths: tuple[Path, ...]
    index: Index | None
    ignored: tuple[str, ...]

    def open(self, where: str, open_file: Opener = open_local) -> Opened:
        """Open them; see `FileKind.open`. where: the model as the user named it."""
        return self.kind.open(self.paths, self.index, where, open_file)


def choose_kind(names: Collection[str], where: str) -> tuple[FileKind, Weights]:
    """The first kind with weights in the folder, and their files. Looks only at names.

    names  relative names of all files in the folder
    where  the folder or hub repository, for messages

    Raises what `FileKind.choose` raises, and the error of `no_weights` if there are no weights.
    """
    listed = list(names)
    for kind in KINDS:
        chosen = kind.choose(listed, where)
        if chosen is not None:
            return kind, chosen
    raise no_weights(listed, where, suffixes())


def find_weights(folder: Path, names: Collection[str], where: str) -> WeightFiles:
    """The weight files of a folder; arguments as for `choose_kind`. Reads only the index, if any.

    Raises as `choose_kind` and `read_index`.
    """
    kind, chosen = choose_kind(names, where)
    index, files = None, chosen.files
    if chosen.index is not None:
        index = folder / chosen.index, read_index(folder / chosen.index, set(names), kind.suffixes)
        files = tuple(sorted(set(index[1].values()), key=natural_key))
    ignored = tuple(name for name in chosen.ignored if name not in files)
    return WeightFiles(kind, tuple(folder / name for name in files), index, ignored)


def open_file(path: Path, where: str, opener: Opener = open_local) -> Opened:
    """Open a single weight file. Raises Unsupported for an unknown suffix, else as `FileKind.open`."""
    for kind in KINDS:
        if path.name.lower().endswith(kind.suffixes):
            return kind.open((path,), None, where, opener)
    *others, last = suffixes()
    raise Unsupported(
        f"not a weight file: its name does not end with {', '.join(others)} or {last}",
        where=where,
        fix="Name a folder, or a weight file in one of these formats.",
    )


def suffixes() -> tuple[str, ...]:
    """The suffixes of weight files of all kinds, lower case."""
    return tuple(suffix for kind in KINDS for suffix in kind.suffixes)


def wrap(source: Tensors, config: Mapping[str, Any] | None, where: str) -> Wrapped:
    """The tensors of a model, decoded by the first wrapper that recognises them, else as stored."""
    for wrapper in WRAPPERS:
        if wrapper.recognises(config or {}, source.specs):
            return replace(wrapper.wrap(source, config or {}, where), kind=wrapper.name)
    return Wrapped(source, config)
