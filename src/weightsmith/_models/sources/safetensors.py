"""safetensors: one file, or shards with or without an index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weightsmith._base.files import Opener, open_local
from weightsmith._files.hf_folder import choose_weights
from weightsmith._files.safetensors import Header, read_header
from weightsmith._models.sources.files import PlainFiles, SourceFile, unite
from weightsmith.abc.files import FileKind, Index, Opened


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> Opened:
    """The tensors of safetensors files; paths in natural order. Reads and checks only headers.

    `metadata` is the files' `__metadata__` without keys on which files disagree. Raises as `read_header` and `unite`.
    """
    headers = {path: read_header(path, open_file) for path in paths}
    stored = unite((header.tensors for header in headers.values()), paths[0].parent, index)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    return Opened(PlainFiles(stored, files, where), _common_metadata(headers.values()))


def _common_metadata(headers: Iterable[Header]) -> dict[str, str]:
    common: dict[str, str] = {}
    disputed = set()
    for header in headers:
        for key, value in header.metadata.items():
            if common.setdefault(key, value) != value:
                disputed.add(key)
    return {key: value for key, value in common.items() if key not in disputed}


KIND = FileKind("safetensors", (".safetensors",), ("*.safetensors.index.json",), choose_weights, open_files)
