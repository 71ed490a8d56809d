"""Checkpoint: tensor name -> what it is and where its bytes are, for a folder, a file or a hub model.

Opening reads headers and small files only. Tensor bytes come through positioned reads into the caller's buffers: no
memory map (no crash when a file shrinks, no resident gigabytes), no file position, so many threads may read at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from weightsmith.errors import CheckpointError, Finding, FormatError, NotFound, ParameterError, Unsupported, nearest
from weightsmith.formats.files import read_bounded, show
from weightsmith.formats.hf_folder import carried_files, choose_weights, natural_key, read_index
from weightsmith.formats.quantised import describe_quantisation
from weightsmith.formats.safetensors import Header, StoredTensor, read_header
from weightsmith.formats.strict_json import parse_object
from weightsmith.tensors import DType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CONFIG_BYTES = 16 << 20
MAX_OPEN_FILES = 65_536  # as far as the process's soft limit is raised when a checkpoint has very many shards

_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(.+))?", re.ASCII)
_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json", ".yml", ".yaml")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Checkpoint:
    """A model's tensors, readable, and the files beside them. Made by `open_checkpoint`; a context manager.

    ref          as the user named it
    folder       where its files are
    revision     commit hash of a hub model, "" otherwise
    config       config.json, or None when there is none
    tensors      name -> StoredTensor in model order: names sorted with their numbers as numbers (files are no guide:
                 the reference writer sorts by dtype)
    files        names of the files to carry into a new model (config.json and the tokenizer among them), sorted
    ignored      safetensors files in the folder that are not part of the model (`consolidated.safetensors`, variants)
    weights      names of the weight files, in natural order
    metadata     the weight files' `__metadata__`; keys on which two files disagree are left out
    quantised    what the weights are quantised with, None when they are plain numbers
    nbytes       bytes of all tensors
    header_hash  xxh3_128 of the weight files' names, sizes and headers: another checkpoint has another hash
    state_hash   the same and their modification times: unequal when the files may have changed since
    notes        what the user should know of the model
    ready        its tensors can be read: False while they are still being computed
    """

    notes: tuple[Finding, ...] = ()
    ready: bool = True

    def __init__(
        self,
        ref: str,
        folder: Path,
        headers: Mapping[Path, Header],  # in natural order of the file names
        *,
        revision: str = "",
        config: dict[str, Any] | None = None,
        files: tuple[str, ...] = (),
        ignored: tuple[str, ...] = (),
        index: tuple[Path, Mapping[str, str]] | None = None,
    ) -> None:
        self.ref = ref
        self.folder = folder
        self.revision = revision
        self.config = config
        self.files = files
        self.ignored = ignored
        self.weights = tuple(path.name for path in headers)
        self.tensors = _unite(headers.values(), folder, index)
        self.metadata = _common_metadata(headers.values())
        self.quantised = describe_quantisation(config, {name: t.spec for name, t in self.tensors.items()})
        self.nbytes = sum(h.nbytes - h.data_start for h in headers.values())
        facts = [(path.name, h.nbytes, h.digest, h.mtime_ns) for path, h in headers.items()]
        self.header_hash = _hash([fact[:3] for fact in facts])
        self.state_hash = _hash(facts)
        self._state = {path: (h.nbytes, h.mtime_ns) for path, h in headers.items()}
        self._lock = threading.Lock()
        self._closed = False
        # Opened at first use and kept: `location` hands descriptors out, so none may be closed under its user.
        self._fds: dict[Path, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._fds)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Every folder that tensors come from."""
        return (self.folder,)

    def kept_as(self, name: str) -> DType:
        """The dtype that the model keeps a tensor in: what it is written as where nobody asks for another."""
        return self._tensor(name).spec.dtype

    def location(self, name: str) -> tuple[int, int]:
        """(file descriptor, offset of the tensor's first byte in that file), for `os.copy_file_range` and the like.

        The descriptor stays open, and belongs to this checkpoint, until `close`. Raises NotFound for an unknown tensor,
        FormatError when the file has changed since the checkpoint was opened.
        """
        tensor = self._tensor(name)
        return self._fd(tensor.file), tensor.offset

    def read_into(self, name: str, start_byte: int, buffer: memoryview | npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` with the tensor's bytes from `start_byte` on. Thread-safe.

        buffer  writable, C-contiguous bytes (numpy uint8, memoryview); all of it is filled

        Raises NotFound for an unknown tensor, ParameterError when the range is not inside the tensor, FormatError when
        the file ends early or has changed, CheckpointError on an I/O error.
        """
        tensor = self._tensor(name)
        view = (buffer if isinstance(buffer, memoryview) else buffer.data).cast("B")
        if start_byte < 0 or start_byte + len(view) > tensor.spec.nbytes:
            raise ParameterError(
                f"bytes {start_byte:,} to {start_byte + len(view):,} are not inside tensor {show(name)} of "
                f"{tensor.spec.nbytes:,} bytes",
                where=str(tensor.file),
            )
        fd = self._fd(tensor.file)
        offset, done = tensor.offset + start_byte, 0
        while done < len(view):  # one call moves at most 2 GiB, and may always move less
            try:
                n = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"tensor {show(name)} cannot be read at byte {offset + done:,}: {error.strerror}",
                    where=str(tensor.file),
                ) from error
            if n == 0:
                raise FormatError(
                    f"the file shrank while reading tensor {show(name)}: it ends at byte {offset + done:,}, "
                    f"{len(view) - done:,} bytes early",
                    where=str(tensor.file),
                    fix="Another program is writing the file: wait for it, then start again.",
                )
            done += n

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor as a new numpy array, in the machine's byte order (ml_dtypes for bf16 and fp8).

        rows  a slice with step 1 along the first dimension: only these bytes are read

        Raises ParameterError for another step or rows of a 0-d tensor, else as `read_into`.
        """
        import numpy as np

        spec = self._tensor(name).spec
        shape, start_byte = spec.shape, 0
        if rows is not None:
            if not shape:
                raise ParameterError(f"tensor {show(name)} has no rows: its shape is []")
            start, stop, step = rows.indices(shape[0])
            if step != 1:
                raise ParameterError(f"tensor {show(name)}: rows are read with step 1, not {step}")
            row_bytes = spec.nbytes // max(1, shape[0])
            shape, start_byte = (max(0, stop - start), *shape[1:]), start * row_bytes
        array = np.empty(shape, dtype=spec.dtype.numpy)
        raw = array.reshape(-1).view(np.uint8)
        if raw.size:
            self.read_into(name, start_byte, raw)
            if sys.byteorder == "big" and spec.dtype.itemsize > 1:
                raw.view(f"u{spec.dtype.itemsize}").byteswap(inplace=True)
        return array

    def close(self) -> None:
        """Close all files. Call it when no thread reads any more; closing twice is fine."""
        with self._lock:
            self._closed = True
            _close_all(self._fds)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.ref}: {len(self.tensors):,} tensors, {self.nbytes:,} bytes>"

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise NotFound(f"no tensor {show(name)}{nearest(name, self.tensors)}", where=self.ref) from None

    def _fd(self, path: Path) -> int:
        fd = self._fds.get(path)
        return self._open(path) if fd is None else fd

    def _open(self, path: Path) -> int:
        with self._lock:
            if self._closed:
                raise CheckpointError("this checkpoint is closed", where=self.ref, fix="Open it again.")
            if path in self._fds:  # another thread was first
                return self._fds[path]
            fd = _open_readonly(path)
            try:
                stat, (nbytes, mtime_ns) = os.fstat(fd), self._state[path]
                if (stat.st_size, stat.st_mtime_ns) != (nbytes, mtime_ns):
                    raise FormatError(
                        f"the file changed after its header was read: {nbytes:,} bytes then, {stat.st_size:,} now",
                        where=str(path),
                        fix="Another program is writing the file: wait for it, then start again.",
                    )
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except BaseException:
                os.close(fd)
                raise
            self._fds[path] = fd
            return fd


def open_checkpoint(
    ref: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
) -> Checkpoint:
    """Open a model: a local folder, one .safetensors file, or a hub id `org/name[@revision]`.

    A local path wins over a hub id of the same spelling; a Path is never a hub id. A single file stands alone, without
    the config.json beside it: name the folder to have both. Hub models are downloaded into huggingface_hub's cache
    (`cache_dir`, else HF_HOME) unless they are there.

    Raises NotFound, FormatError (a byte that breaks the format), Unsupported (pickles, GGUF, adapters, dtypes),
    CheckpointError (permissions, network), ParameterError (a revision for a local path, or two revisions).

    >>> open_checkpoint("./no/such/folder")
    Traceback (most recent call last):
    weightsmith.errors.NotFound: ./no/such/folder: no such folder or file
    """
    name = os.fspath(ref)
    place = locate(ref, revision)
    if isinstance(place, Path):
        return _open_folder(name, place, _local_names(place)) if place.is_dir() else _open_file(name, place)

    from weightsmith import hub

    try:
        snapshot = hub.fetch(*place, cache_dir, token)
    except NotFound as error:
        if hint := _nearest_sibling(_expand(name)):  # `models/lama` is spelled like a hub id
            found = error.finding
            raise NotFound(found.what + hint, where=found.where, details=found.details, fix=found.fix) from error
        raise
    return _open_folder(name, snapshot.folder, snapshot.names, snapshot.commit)


def locate(ref: str | Path, revision: str | None = None) -> Path | tuple[str, str | None]:
    """The local path that a name stands for, or else the hub id and revision.

    Raises NotFound for a name that can be neither, ParameterError for a revision of a local path and for two revisions.
    """
    name = os.fspath(ref)
    path = _expand(name)
    if name and _exists(path):
        if revision is not None:
            raise ParameterError(f"revision {show(revision)} is given for a local path, which has no revisions", where=name)
        return path
    match = _HUB_ID.fullmatch(name) if isinstance(ref, str) and not name.lower().endswith(_FILE_SUFFIXES) else None
    if match is None:
        raise _not_found(name, path)
    repo, in_name = match[1], match[2]
    if revision is not None and in_name is not None and revision != in_name:
        raise ParameterError(f"two revisions: {show(in_name)} in the name, {show(revision)} beside it", where=name)
    return repo, in_name or revision


def _open_folder(ref: str, folder: Path, names: Sequence[str], commit: str = "") -> Checkpoint:
    """A folder whose files are `names`; `commit` when it is in the hub's cache (whose links need no check)."""
    chosen = choose_weights(names, str(folder) if not commit else ref)
    files = carried_files(names)
    if not commit:
        _check_links(folder, files)
    index = None
    paths = [folder / name for name in chosen.files]
    if chosen.index is not None:
        index = folder / chosen.index, read_index(folder / chosen.index, set(names))
        paths = [folder / name for name in sorted(set(index[1].values()), key=natural_key)]
    used = {path.name for path in paths}
    return Checkpoint(
        ref,
        folder,
        {path: read_header(path) for path in paths},
        revision=commit,
        config=_read_config(folder / "config.json") if "config.json" in names else None,
        files=files,
        ignored=tuple(name for name in chosen.ignored if name not in used),
        index=index,
    )


def _open_file(ref: str, path: Path) -> Checkpoint:
    if path.suffix.lower() != ".safetensors":
        raise Unsupported(
            "not a .safetensors file",
            where=ref,
            fix="Name a folder or a .safetensors file; convert pickles with transformers' save_pretrained().",
        )
    return Checkpoint(ref, path.parent, {path: read_header(path)})


def _unite(headers: Iterable[Header], folder: Path, index: tuple[Path, Mapping[str, str]] | None) -> dict[str, StoredTensor]:
    """All tensors in model order. The files and the index must say the same."""
    united: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            other = united.setdefault(tensor.spec.name, tensor)
            if other is not tensor:
                raise FormatError(
                    f"tensor {show(tensor.spec.name)} is in two files: which one is meant?",
                    where=str(folder),
                    details=tuple(f"{t.file.name}  {list(t.spec.shape)} {t.spec.dtype}" for t in (other, tensor)),
                    fix="Remove the file that does not belong to this model.",
                )
    if not united:
        raise FormatError("there is no tensor in the weight files", where=str(folder))
    if index is not None:
        path, weight_map = index
        for name, file in weight_map.items():
            stored = united.get(name)
            if stored is None or stored.file.name != file:
                found = f"it is in {stored.file.name}" if stored is not None else "no file has it"
                raise FormatError(
                    f"the index says that tensor {show(name)} is in {file}, but {found}",
                    where=str(path),
                    fix="The index and the weight files are of different versions: download both again.",
                )
        if len(united) > len(weight_map):
            extra = [t for name, t in united.items() if name not in weight_map]
            raise FormatError(
                f"{len(extra):,} tensor(s) that the index does not list, the first is {show(extra[0].spec.name)} in "
                f"{extra[0].file.name}",
                where=str(path),
                fix="The index and the weight files are of different versions: download both again, or remove the "
                "index to read all tensors in the files.",
            )
    return {name: united[name] for name in sorted(united, key=natural_key)}


def _common_metadata(headers: Iterable[Header]) -> dict[str, str]:
    common: dict[str, str] = {}
    disputed = set()
    for header in headers:
        for key, value in header.metadata.items():
            if common.setdefault(key, value) != value:
                disputed.add(key)
    return {key: value for key, value in common.items() if key not in disputed}


def _read_config(path: Path) -> dict[str, Any]:
    # A name twice is accepted here, the last one counts: that is how every other reader takes a config.json.
    fix = "Repair config.json, or download it again."
    return parse_object(read_bounded(path, MAX_CONFIG_BYTES), "config.json", str(path), fix, unique=False)


def _local_names(folder: Path) -> list[str]:
    """Names of the files at the top level; with no weights there, also one level down, for the message."""
    try:
        entries = sorted(folder.iterdir())
        names = [p.name for p in entries if not p.is_dir()]
        if not any(name.endswith(".safetensors") for name in names):
            names += [f"{p.parent.name}/{p.name}" for p in folder.glob("*/*.safetensors")]
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(folder)) from error
    return names


def _check_links(folder: Path, names: Sequence[str]) -> None:
    """Refuse links out of the folder among the files that will be copied into a model, and perhaps published with it.

    A cloned repository can hold `tokenizer.json -> ~/.ssh/id_rsa`. Links into the hub's cache, whose files bear their
    hash as name, are fine. Weight files may be links to anywhere: they are parsed, and only tensors leave them.
    """
    root = folder.resolve()
    for name in names:
        path = folder / name
        if not path.is_symlink():
            continue
        target = path.resolve()
        if not target.is_file():
            raise NotFound(f"{name} is a symbolic link to {target}, which is not a file", where=str(folder))
        in_hub_cache = "blobs" in target.parts and _BLOB.fullmatch(target.name)
        if not target.is_relative_to(root) and not in_hub_cache:
            raise CheckpointError(
                f"{name} is a symbolic link that leaves the folder, to {target}; its content would be copied into the "
                "merged model",
                where=str(folder),
                fix=f"If that is meant, replace the link by the file: cp --remove-destination {target} {path}",
            )


def _expand(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~nobody/models
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _not_found(name: str, path: Path) -> NotFound:
    base, at, _ = name.rpartition("@")
    if at and _exists(_expand(base)):
        return NotFound(f"no such folder; {base} is one, but a local path has no revisions", where=name, fix="Drop the @.")
    with contextlib.suppress(OSError, ValueError):  # no link, or no possible path at all
        return NotFound(f"a symbolic link to {path.readlink()}, which does not exist", where=name)
    if name.startswith(("http://", "https://", "hf://")):
        return NotFound("neither a local path nor a hub id", where=name, fix="Write a hub model as org/name[@revision].")
    kind = "no such folder or file"
    if "/" not in name and os.sep not in name:
        kind += ", and not a hub id, which has the form org/name"
    return NotFound(kind + _nearest_sibling(path), where=name)


def _nearest_sibling(path: Path) -> str:
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".safetensors"]
        return nearest(path.name, sorted(siblings))
    except (OSError, ValueError):
        return ""


def _hash(facts: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, separators=(",", ":")).encode())


def _open_readonly(path: Path) -> int:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EMFILE and _raise_open_files_limit():
            return os.open(path, flags)
        fix = "Raise the limit: ulimit -n 65536" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error


def _raise_open_files_limit() -> bool:
    """Raise the soft limit of open files towards the hard one; False when it is there."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def _close_all(fds: dict[Path, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])
