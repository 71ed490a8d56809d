"""A model's folder behind https or in an object store: its weights are read where they are, other files are brought here."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from weightsmith._base.errors import CheckpointError, Finding, FormatError, NotFound
from weightsmith._base.files import FileState, RandomAccess, open_local, show
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._files.remote.addresses import STORES, Address, is_file_name
from weightsmith._files.remote.http import HttpFile, ask, check_status, tag_of
from weightsmith._files.remote.retries import Ranges, fetch, fetch_into, retry_request
from weightsmith._files.remote.stores import Store
from weightsmith._files.subfolders import MAX_FILES, MAX_MODULES, MAX_SETTINGS_BYTES, MODULES, PIPELINE, TEMPLATES, folders_in

# ---- A file elsewhere, as sources read it


HEAD_BYTES = 128 << 10  # read at once from the start of a file: the header of most shards
RANGE_BYTES = 4 << 10  # read at least, elsewhere
_STARTS_AT_ONCE = 8


def read_starts(files: Iterable[RemoteFile]) -> None:
    """Read the start of each file, several at a time. Raises CheckpointError."""
    with ThreadPoolExecutor(_STARTS_AT_ONCE) as pool:
        for _ in pool.map(lambda file: file.read_at(0, 1), files):
            pass


@contextmanager
def opened(files: Mapping[str, RemoteFile], name: str, path: Path) -> Iterator[RandomAccess]:
    """Open a file to read parts of it: the remote one of its name, else the one on this disk."""
    if name in files:
        yield files[name]
        files[name].forget()
    else:
        with open_local(path) as file:
            yield file


class Ahead(Protocol):
    """What fetches bytes before they are read: `ahead.ReadAhead`."""

    def read_into(self, file: RemoteFile, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `offset` on. Raises CheckpointError."""


class RemoteFile:
    """A file that is read by byte ranges: `base.files.RandomAccess` while its header is read, then `RemoteBytes`.

    streams  tensors may be read from here; else only headers
    ahead    fetches what the present run will read; None outside of a run
    header_requests, header_bytes   of `read_at`, so far
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.streams = False
        self.ahead: Ahead | None = None
        self.header_requests = self.header_bytes = 0
        self._parts: list[tuple[int, bytes]] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """Equal for the same content at the same place: a model may be opened twice."""
        return self.ranges.where, self.ranges.version, self.ranges.nbytes

    @property
    def nbytes(self) -> int:
        return self.ranges.nbytes

    @property
    def version(self) -> str:
        return self.ranges.version

    @property
    def state(self) -> FileState:
        return FileState.of_remote(self)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """What was read is remembered until `forget`."""
        end = min(offset + nbytes, self.nbytes)
        if end <= offset:
            return b""
        for start, part in self._parts:
            if start <= offset and end <= start + len(part):
                return part[offset - start : end - start]
        first = offset if offset + RANGE_BYTES <= self.nbytes else max(0, self.nbytes - RANGE_BYTES)
        last = min(max(end, first + (RANGE_BYTES if offset else HEAD_BYTES)), self.nbytes)
        if not offset and end < last == self.nbytes:
            last -= 1  # a part, even of a small file: the answer shows that there are ranges
        data = bytearray(last - first)
        fetch_into(self.ranges, first, memoryview(data))
        self.header_requests += 1
        self.header_bytes += len(data)
        self._parts.append((first, bytes(data)))
        return self._parts[-1][1][offset - first : end - first]

    def stream(self) -> None:
        """Let tensors be read from here. Raises CheckpointError if the server has no byte ranges."""
        self.ranges.check_parts()
        self.streams = True

    def forget(self) -> None:
        """Drop what `read_at` remembers: the header was read."""
        self._parts.clear()

    def read_into(self, offset: int, out: memoryview) -> None:
        if not len(out):
            return
        if self.ahead is None:
            fetch_into(self.ranges, offset, out)
        else:
            self.ahead.read_into(self, offset, out)

    def check_unchanged(self) -> None:
        retry_request(self.ranges.check_unchanged, self.ranges.where)


class FetchedFiles:
    """What models elsewhere have in common: the files that a plan needs, and where each of them is.

    folder  of the files that were brought here
    sizes   of all files, by name
    """

    folder: Path
    sizes: dict[str, int]
    _files: dict[str, RemoteFile]
    _requested: dict[str, None]

    def want(self, names: Iterable[str]) -> None:
        """Name files that are needed: `download` brings those that are not read where they are."""
        self._requested |= dict.fromkeys(name for name in names if name in self.sizes)

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Let single numbers of weights that are not here be read where they are. Raises CheckpointError."""
        files = [file for name, file in self._files.items() if not file.streams and not (self.folder / name).is_file()]
        try:
            for file in files:
                file.stream()
            yield
        finally:
            for file in files:
                file.streams = False

    @property
    def headers(self) -> tuple[int, int]:
        """Requests for headers of weight files so far, and their bytes."""
        files = self._files.values()
        return sum(file.header_requests for file in files), sum(file.header_bytes for file in files)

    @property
    def brought(self) -> tuple[int, int]:
        """Other files that every run brings again, and were brought so far, and their bytes."""
        return 0, 0

    @property
    def missing(self) -> dict[str, int]:
        """The files that are needed and are still to be brought, and their sizes."""
        unread = (name for name in self._requested if name not in self._files or not self._files[name].streams)
        return {name: self.sizes[name] for name in unread if not (self.folder / name).is_file()}

    def to_bring(self, patterns: Sequence[str] | None) -> list[str]:
        """The missing files; or those whose names match, and that are not here. For subfolders, a pattern has as many `/`."""
        if patterns is None:
            return list(self.missing)
        depths = [(pattern, pattern.count("/")) for pattern in patterns]
        absent = [(name, name.count("/")) for name in self.sizes if not (self.folder / name).is_file()]
        return [
            name for name, depth in absent if any(depth == n and fnmatch.fnmatchcase(name, pattern) for pattern, n in depths)
        ]

    def open(self, path: Path) -> AbstractContextManager[RandomAccess]:
        """Open a file of `folder` to read parts of it: the one that is here, else the one elsewhere."""
        return opened(self._files, path.relative_to(self.folder).as_posix(), path)


MAX_INDEX_BYTES = 64 << 20
_CONNECTIONS = 16

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PROBED = (
    *_INDEXES,
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{TEMPLATES}/tool_use.jinja",
    f"{TEMPLATES}/rag.jinja",
    MODULES,
    PIPELINE,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
"""Files to look for on a web server, which does not list its files; those named by an index and by modules.json are added."""
_IN_MODULES = ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json")
_IN_PARTS = (
    *(*_IN_MODULES, "model.safetensors.index.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", "scheduler_config.json"),
    *("diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.fp16.safetensors", "model.fp16.safetensors"),
    *("vocab.json", "merges.txt", "spiece.model", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json"),
)
"""Files to look for in the parts of a pipeline."""


class RemoteFolder(FetchedFiles):
    """A folder elsewhere, with what `hub.Repository` has. Made by `open_folder`.

    name    its address
    commit  a digest of the versions of all weight files, after `read_starts`
    folder  a temporary one, with the files that were brought here
    sizes   of the files by name
    """

    def __init__(self, address: Address, files: Mapping[str, Ranges]) -> None:
        self.name = str(address)
        self.commit = ""
        self.folder = Path(tempfile.mkdtemp(prefix="weightsmith-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.sizes = {name: file.nbytes for name, file in files.items()}
        self.notes: tuple[Finding, ...] = ()
        self._ranges = files
        self._files = {}
        self._requested = {}
        self._brought: dict[str, int] = {}

    @property
    def brought(self) -> tuple[int, int]:
        """Those of `folder`, which is removed with this object."""
        return len(self._brought), sum(self._brought.values())

    def download(self, patterns: Sequence[str] | None = None, *, quiet: bool = False) -> None:
        """Bring what is missing, or the files of these patterns. Raises CheckpointError."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for _ in pool.map(self._bring, self.to_bring(patterns)):
                pass

    def stream(self) -> None:
        """Weights are always read where they are."""

    def read_starts(self, names: Iterable[str]) -> None:
        """Read the start of each weight file."""
        self._files = {name: RemoteFile(self._ranges[name]) for name in names if name in self.sizes}
        read_starts(self._files.values())
        for file in self._files.values():
            file.stream()
        versions = sorted((name, file.nbytes, file.version) for name, file in self._files.items())
        self.commit = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:40]
        unknown = [name for name, _, version in versions if not version]
        if unknown:
            what = f"the server gives no version of {show(unknown[0])}: a change that leaves its size is not noticed"
            self.notes = (Finding(what, self.name),)

    def _bring(self, name: str) -> None:
        if self.sizes[name] > MAX_COPIED_BYTES:
            what = f"{self.sizes[name]:,} bytes, and a file that goes along with the weights has at most {MAX_COPIED_BYTES:,}"
            raise FormatError(what, where=f"{self.name}/{name}")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part-{threading.get_ident()}")
        with part.open("wb") as file:

            def put(at: int, piece: bytes) -> None:
                file.write(piece)

            fetch(self._ranges[name], 0, self.sizes[name], put)
        part.replace(path)
        self._brought[name] = self.sizes[name]


def open_folder(address: Address, only: str = "") -> RemoteFolder:
    """The folder at an address. only: the name of the one file of it that is wanted.

    Raises NotFound if nothing of a model is there, CheckpointError, Unsupported without the package that reads it.
    """
    list_files = _in_store if address.scheme in STORES else _behind_http
    files = list_files(address, only)
    if not files:
        what = f"{only} is not there" if only else "no file of a model is there"
        fix = "Check the address." if address.scheme in STORES else f"Name a folder with config.json and {_INDEXES[0]}."
        raise NotFound(what, where=str(address), fix=fix)
    return RemoteFolder(address, files)


def _in_store(address: Address, only: str) -> dict[str, Ranges]:
    store = Store(address)
    files: dict[str, Ranges] = {}

    def look(subfolder: str) -> list[str]:
        """Add the files of a folder. Returns its subfolders."""
        listings: list[tuple[list[dict[str, object]], list[str]]] = []
        retry_request(lambda: listings.append(store.objects(subfolder)), str(address))
        for meta in listings[-1][0][: MAX_FILES if subfolder else None]:
            name, size, tag = str(meta["path"]), meta["size"], str(meta.get("e_tag") or "")
            if is_file_name(name) and name.rpartition("/")[0] == subfolder and isinstance(size, int) and only in ("", name):
                files[name] = store.file(name, size, tag)
        return listings[-1][1]

    there = look("")
    named = [name for name in there if name == TEMPLATES or "tokenizer" in name]
    for subfolder in () if only else dict.fromkeys((*_modules(files), *named[:MAX_MODULES])):
        look(subfolder)
    return files


def _behind_http(address: Address, only: str) -> dict[str, Ranges]:
    files: dict[str, Ranges] = {}

    def look(names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for name, file in pool.map(lambda name: (name, _probe(address, name)), names):
                if file is not None:
                    files[name] = file

    look([only] if only else _PROBED)
    shards = {name for index in _INDEXES if index in files for name in _shards(files[index])}
    within = _IN_PARTS if PIPELINE in files else _IN_MODULES
    inner = {f"{subfolder}/{name}" for subfolder in _modules(files) for name in within}
    look(sorted((shards | inner) - files.keys()))
    indexes = [name for name in files if "/" in name and name.endswith(".index.json")]
    look(sorted({f"{name.rpartition('/')[0]}/{shard}" for name in indexes for shard in _shards(files[name])} - files.keys()))
    return files


def _probe(address: Address, name: str) -> HttpFile | None:
    """A file behind http; None if there is none."""
    where, url = f"{address}/{name}", address.url(name)
    files: list[HttpFile] = []

    def look() -> None:
        with ask("HEAD", url, {}, url, where) as (response, _):
            if response.status_code in (403, 404, 410):  # a static site in a store answers 403 for what it does not have
                return
            check_status(response, where)
            length = response.headers.get("content-length", "")
            if not length.isascii() or not length.isdigit():
                raise CheckpointError("the server does not say how large the file is", where=where, fix="Download it first.")
            tag = tag_of(response.headers)
            files.append(HttpFile(url, where, int(length), tag, {}, tag=tag))

    retry_request(look, where)
    return files[0] if files else None


def _modules(files: Mapping[str, Ranges]) -> tuple[str, ...]:
    """The subfolders that modules.json and model_index.json name."""
    listed = [files[name] for name in (MODULES, PIPELINE) if name in files]
    return tuple(folder for file in listed if file.nbytes <= MAX_SETTINGS_BYTES for folder in folders_in(_content(file)))


def _content(file: Ranges) -> bytes:
    data = bytearray()
    fetch(file, 0, file.nbytes, lambda at, piece: data.extend(piece))
    return bytes(data)


def _shards(index: Ranges) -> set[str]:
    """The files that an index names, as far as it can be read; opening the model says what is wrong with it."""
    if index.nbytes > MAX_INDEX_BYTES:
        return set()
    data = _content(index)
    try:
        weight_map = json.loads(data)["weight_map"]
        return {name for name in set(weight_map.values()) if isinstance(name, str) and is_file_name(name) and "/" not in name}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()
