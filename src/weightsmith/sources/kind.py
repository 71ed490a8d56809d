"""What describes a kind of source: one file of this folder, and an entry in `sources.KINDS` or `sources.WRAPPERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsmith.errors import Finding
from weightsmith.formats.files import Opener
from weightsmith.formats.hf_folder import Weights
from weightsmith.sources.base import Tensors
from weightsmith.tensors import TensorSpec

Index = tuple[Path, Mapping[str, str]]
"""Path of an index file, and its map of tensor name → file name."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Weight files that are open.

    source    their tensors
    metadata  what the files say of themselves
    notes     what the user should know
    """

    source: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A file format.

    name      for messages: `safetensors`
    suffixes  of its weight files, lower case; a single file of such a name is opened alone
    indexes   patterns of its index files, which are downloaded before it is known which weight files are needed
    choose    which of the files of a folder are its weights: (names, where for messages) → None where there are none of this
              format (an adapter has none). By names alone, so that a hub repository is judged before it is downloaded. Raises
              FormatError for files that contradict each other
    open      the tensors of its files: (paths, index if there is one, the model as the user named it, what opens the files to
              read their headers). Reads no tensor data. Raises FormatError, Unsupported, NotFound, CheckpointError
    """

    name: str
    suffixes: tuple[str, ...]
    indexes: tuple[str, ...]
    choose: Callable[[Sequence[str], str], Weights | None]
    open: Callable[[Sequence[Path], Index | None, str, Opener], Opened]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A source around another one.

    source  its tensors; it closes the other one
    config  config.json as it is for these tensors
    notes   what the user should know
    """

    source: Tensors
    config: Mapping[str, Any] | None
    notes: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A way to read tensors that are stored encoded, whatever the file format.

    name        for messages: `FP8 in blocks`
    recognises  from config.json and the stored tensors, before any is read
    wrap        the tensors decoded: (stored, config, the model as the user named it). Raises FormatError, Unsupported
    """

    name: str
    recognises: Callable[[Mapping[str, Any], Mapping[str, TensorSpec]], bool]
    wrap: Callable[[Tensors, Mapping[str, Any], str], Wrapped]
