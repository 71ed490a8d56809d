"""Models that Ollama has pulled: a manifest names the GGUF file among its blobs.

models/manifests/registry.ollama.ai/library/llama3.2/1b   JSON: a media type and a digest for each layer of the model
models/blobs/sha256-…                                     the layers; that of type image.model is a GGUF file, and those of
                                                          type image.adapter are adapters, which Ollama applies to it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, NotFound, Unsupported
from weightsmith._base.files import DAMAGED, Opener, expand_user, open_local, show, show_all
from weightsmith._base.strict_json import read_object
from weightsmith._base.text import count
from weightsmith._models.formats.gguf.layout import MAGIC
from weightsmith._models.formats.gguf.reading import open_files
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

MAX_MANIFEST_BYTES = 1 << 20
_MANIFESTS, _BLOBS, _TYPE = "manifests", "blobs", "application/vnd.ollama.image."
_SETTINGS = ("template", "system", "params", "messages")
"""Layers with what Ollama adds to a chat. The model's own chat template is in its GGUF file."""
_READ = ("model", "adapter", "projector")
_WITHOUT_EFFECT = ("license", "prompt", "embed")
"""Layers that change no computation: the licence, and examples of earlier versions."""
MAX_ADAPTERS = 8
_OTHER_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_BLOB = re.compile(r"sha256-[0-9a-f]{64}", re.ASCII)


def owns(path: Path) -> bool:
    """Whether a path is one of Ollama's: a blob, or a manifest. Looks only at names.

    >>> owns(Path("models/manifests/registry.ollama.ai/library/llama3.2/1b")), owns(Path("manifests/1b.gguf"))
    (True, False)
    """
    return is_blob(path) or _is_manifest(path)


def is_blob(path: Path) -> bool:
    """Whether a path is that of one of Ollama's blobs. Looks only at names."""
    return path.parent.name == _BLOBS and _BLOB.fullmatch(path.name) is not None


def _is_manifest(path: Path) -> bool:
    """Whether a path is manifests/HOST/OWNER/MODEL/TAG. Other files may be in a folder of this name, too.

    Tags of models from the Hub may be names of their files, `model-Q4_K_M.gguf`.
    """
    return path.parts[-5:-4] == (_MANIFESTS,) and path.suffix.lower() not in _OTHER_FILES


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest names.

    model     the GGUF file of the model
    adapters  GGUF files of the adapters that Ollama applies, each with scale 1
    notes     warnings about layers that are not read
    """

    model: Path
    adapters: tuple[Path, ...]
    notes: tuple[Finding, ...]


def read_manifest(path: Path, where: str) -> Manifest:
    """The layers of a model. where: as the user named it, for messages.

    Raises FormatError for a damaged manifest and for a blob of another size, Unsupported for a model that is not one GGUF file,
    NotFound for a missing blob. Digests are not checked: Ollama did that.
    """
    layers = read_object(path, MAX_MANIFEST_BYTES, "the manifest", DAMAGED, unique=False).get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    types = [str(entry.get("mediaType")).removeprefix(_TYPE) for entry in entries]
    if types.count("model") != 1 or types.count("adapter") > MAX_ADAPTERS:
        what = f"a manifest whose layers are {show_all(types) or 'none'}, not one GGUF file and what belongs to it"
        raise Unsupported(what, where=where, fix="Name the manifest of a model that Ollama stores as one GGUF file.")
    (model,) = (_blob(path, entry, kind) for entry, kind in zip(entries, types, strict=True) if kind == "model")
    adapters = tuple(_blob(path, entry, kind) for entry, kind in zip(entries, types, strict=True) if kind == "adapter")
    notes = []
    if "projector" in types:
        notes.append(Finding("the model's vision half is another file, which is not read", where))
    if unread := [kind for kind in _SETTINGS if kind in types]:
        notes.append(Finding(f"layers of the manifest are left to Ollama: {show_all(unread)}", where))
    if unknown := [kind for kind in types if kind not in (*_SETTINGS, *_READ, *_WITHOUT_EFFECT)]:
        notes.append(Finding(f"layers of the manifest whose meaning is not known are left out: {show_all(unknown)}", where))
    return Manifest(model, adapters, tuple(notes))


def manifest_with_adapters(name: str) -> Manifest | None:
    """The manifest of a path, if Ollama applies adapters to its model; None for another path. Raises as `read_manifest`."""
    path = expand_user(name)
    if not _is_manifest(path) or not path.is_file() or _is_gguf(path):
        return None
    manifest = read_manifest(path, name)
    return manifest if manifest.adapters else None


def open_model(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors, config.json and tokenizer of the GGUF file that a manifest names, or of a blob.

    Raises Unsupported for a model with adapters, which recipes and commands read with these applied, and otherwise as
    `read_manifest` and `reading.open_files`.
    """
    path = paths[0]
    if _BLOB.fullmatch(path.name) or _is_gguf(path):
        return open_files(paths, index, where, open_file)
    manifest = read_manifest(path, where)
    if manifest.adapters:
        what = f"the model has {count(len(manifest.adapters), 'adapter')}, which Ollama applies while it runs"
        fix = f"Write a copy with weightsmith dequantize {shlex.quote(where)} OUT, and name that."
        raise Unsupported(what, where=where, fix=fix)
    opened = open_files([manifest.model], None, where, open_file)
    return replace(opened, notes=(*opened.notes, *manifest.notes))


def _is_gguf(path: Path) -> bool:
    """Whether a file that has the place of a manifest is a GGUF file itself."""
    if path.suffix.lower() != ".gguf":
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _blob(manifest: Path, entry: dict[str, Any], kind: str) -> Path:
    """The file of a layer. kind: of the layer, for messages. Raises FormatError, NotFound."""
    digest = entry.get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise FormatError(f"the digest of its {kind} is {show(digest)}, not that of a blob", where=str(manifest), fix=DAMAGED)
    blob = manifest.parents[4] / _BLOBS / f"sha256-{match[1]}"
    if not blob.is_file():
        raise NotFound(f"the blob of its {kind} is not there: {blob}", where=str(manifest), fix="Pull the model again.")
    nbytes, size = entry.get("size"), blob.stat().st_size
    if type(nbytes) is int and nbytes != size:
        what = f"{blob.name} has {size:,} bytes, and the manifest says {nbytes:,}"
        raise FormatError(what, where=str(manifest), fix="Pull the model again.")
    return blob


KIND = FileKind("Ollama's manifest", (), (), lambda names, where: None, open_model, owns=owns)
