"""Models that Ollama has pulled: a manifest names the GGUF file among its blobs.

models/manifests/registry.ollama.ai/library/llama3.2/1b   JSON: a media type and a digest for each layer of the model
models/blobs/sha256-…                                     the layers; that of type image.model is a GGUF file
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, NotFound, Unsupported
from weightsmith._base.files import DAMAGED, Opener, open_local, show, show_all
from weightsmith._base.strict_json import read_object
from weightsmith._base.text import count
from weightsmith._models.formats.gguf.reading import open_files
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

MAX_MANIFEST_BYTES = 1 << 20
_MANIFESTS, _BLOBS, _TYPE = "manifests", "blobs", "application/vnd.ollama.image."
_SETTINGS = ("template", "system", "params", "messages")
"""Layers with what Ollama adds to a chat. The model's own chat template is in its GGUF file."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_BLOB = re.compile(r"sha256-[0-9a-f]{64}", re.ASCII)


def owns(path: Path) -> bool:
    """Whether a path is one of Ollama's: a blob, or what is below a folder `manifests`. Looks only at names.

    >>> owns(Path("models/manifests/registry.ollama.ai/library/llama3.2/1b")), owns(Path("models/1b"))
    (True, False)
    """
    return is_blob(path) or _MANIFESTS in path.parts[:-1]


def is_blob(path: Path) -> bool:
    """Whether a path is that of one of Ollama's blobs. Looks only at names."""
    return path.parent.name == _BLOBS and _BLOB.fullmatch(path.name) is not None


def open_model(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors, config.json and tokenizer of the GGUF file that a manifest names, or of a blob.

    Raises FormatError for what is no manifest and for a blob of another size, Unsupported for adapters and for tensors in other
    files, NotFound for a blob that is not there; and as `reading.open_files`. Ollama has checked the digests.
    """
    path = paths[0]
    if _BLOB.fullmatch(path.name):
        return open_files(paths, index, where, open_file)
    layers = read_object(path, MAX_MANIFEST_BYTES, "the manifest", DAMAGED, unique=False).get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    types = [str(entry.get("mediaType")).removeprefix(_TYPE) for entry in entries]
    if "adapter" in types and types.count("model") == 1:
        layers = [_blob(path, entries[i]) for kind in ("model", "adapter") for i, name in enumerate(types) if name == kind]
        what = f"the model has {count(len(layers) - 1, 'adapter')}, which Ollama applies while it runs"
        raise Unsupported(what, where=where, fix=f"Write {shlex.quote('+'.join(map(str, layers)))} in place of the manifest.")
    if types.count("model") != 1:
        what = f"a manifest whose layers are {show_all(types) or 'none'}, not one GGUF file and what belongs to it"
        raise Unsupported(what, where=where, fix="Name the manifest of a model that Ollama stores as one GGUF file.")
    blob = _blob(path, entries[types.index("model")])
    opened = open_files([blob], None, where, open_file)
    notes = list(opened.notes)
    if "projector" in types:
        notes.append(Finding("the model's vision half is another file, which is not read", where))
    if unread := [kind for kind in _SETTINGS if kind in types]:
        notes.append(Finding(f"layers of the manifest are left to Ollama: {show_all(unread)}", where))
    return replace(opened, notes=tuple(notes))


def _blob(manifest: Path, entry: dict[str, Any]) -> Path:
    """The file of a layer. Raises FormatError, NotFound."""
    digest = entry.get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise FormatError(f"the digest of its model is {show(digest)}, not that of a blob", where=str(manifest), fix=DAMAGED)
    models = next(folder.parent for folder in manifest.parents if folder.name == _MANIFESTS)
    blob = models / _BLOBS / f"sha256-{match[1]}"
    if not blob.is_file():
        raise NotFound(f"the blob of its model is not there: {blob}", where=str(manifest), fix="Pull the model again.")
    nbytes, size = entry.get("size"), blob.stat().st_size
    if type(nbytes) is int and nbytes != size:
        what = f"{blob.name} has {size:,} bytes, and the manifest says {nbytes:,}"
        raise FormatError(what, where=str(manifest), fix="Pull the model again.")
    return blob


KIND = FileKind("Ollama's manifest", (), (), lambda names, where: None, open_model, owns=owns)
