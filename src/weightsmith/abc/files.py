"""The description of a file format, which a stored format lists in `StoredFormat.files`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightsmith._base.errors import Finding
from weightsmith._base.files import Opener
from weightsmith._files.hf_folder import Weights
from weightsmith.abc.tensors import Tensors

Index = tuple[Path, Mapping[str, str]]
"""The path of an index file, and its map of tensor name → file name."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Open weight files.

    source    their tensors
    metadata  the files' metadata
    notes     warnings for the user
    files     config.json, the tokenizer and other files, of a format whose weight files contain all of the model: name →
              content. They take the place of what is in the folder
    decoded   the quantisation of the weights, which the source decodes; "" if there is none
    """

    source: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Finding, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    decoded: str = ""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A file format.

    name      for messages: `safetensors`
    suffixes  of its weight files, lower case; a path with such a suffix is opened as a single file
    indexes   patterns of its index files, which are downloaded first to determine the weight files
    choose    the weight files among the files of a folder: (names, where for messages) → None if there are none of this
              format (as with an adapter). Looks only at names, so it works before a hub repository is downloaded. Raises
              FormatError for files that contradict each other
    open      the tensors of its files: (paths, index or None, the model as the user named it, opener of files). Reads only
              headers. Raises FormatError, Unsupported, NotFound, CheckpointError
    """

    name: str
    suffixes: tuple[str, ...]
    indexes: tuple[str, ...]
    choose: Callable[[Sequence[str], str], Weights | None]
    open: Callable[[Sequence[Path], Index | None, str, Opener], Opened]
