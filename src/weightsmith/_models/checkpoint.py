"""Checkpoint: a model's tensors and other files, from a folder, a file or a Hub model.

Opening reads only headers and small files. Tensors are read from a source (`weightsmith._models.sources`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, final

from weightsmith._base.errors import CheckpointError, Finding, NotFound, ParameterError, Unsupported, nearest_names
from weightsmith._base.files import exists, expand_user, fix_for_windows_path, open_local, real_path, show
from weightsmith._base.idioms import Closing
from weightsmith._base.tensors import DType, NamedTensors, TensorSpec
from weightsmith._base.text import status
from weightsmith._files import subfolders
from weightsmith._files.containers import Naming
from weightsmith._files.copied import check_copied, choose_copied, copied_files, is_weights, kept_metadata, read_to_choose
from weightsmith._files.hf_folder import CARD_NAME, read_card
from weightsmith._files.remote.addresses import HUB, Address, is_address, parse_address
from weightsmith._models.formats import opening
from weightsmith._models.formats.config import SETTINGS_FILES, SETTINGS_METADATA
from weightsmith._models.sources.composed import Foldered
from weightsmith._models.sources.files import sample_files
from weightsmith._models.structure.configs import of_diffusers
from weightsmith.abc.stored import Wrapped
from weightsmith.abc.tensors import OpenedFiles, Tensors, Verbatim, read

if TYPE_CHECKING:
    import numpy as np

    from weightsmith._base.files import Extent
    from weightsmith._files.hub import Repository
    from weightsmith._files.remote.folder import RemoteFolder
    from weightsmith._plans import Plan
    from weightsmith.abc.tensors import Buffer

_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(.+))?", re.ASCII)
_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json", ".yml", ".yaml")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOWN = 8  # names that a message lists
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub: org/name, and branch, tag or commit. streams: its weights are read where they are."""

    name: str
    revision: str | None
    streams: bool = False


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's files besides its tensors.

    path         of the folder
    revision     commit hash of a Hub model, digest of the files' versions at another address, "" otherwise
    config, files, left_out, ignored, alone, repositories, subfolders, parts   see `Checkpoint`
    said         of the model by its weight files, as the front matter of a card says it
    temporary    the folder, if it is removed when the checkpoint is closed
    """

    path: Path
    revision: str = ""
    config: Mapping[str, Any] | None = None
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    alone: bool = False
    repositories: tuple[Repository | RemoteFolder, ...] = ()
    subfolders: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    temporary: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, path: Path, repository: Repository | RemoteFolder | None, **files: Any) -> ModelFolder:
        """A folder on this machine, or the folder of a repository."""
        if repository is None:
            return cls(path, **files)
        return cls(path, repository.commit, repositories=(repository,), **files)

    @classmethod
    def like(cls, model: Checkpoint, **changes: Any) -> ModelFolder:
        """The files of a model, for one that is made of it. changes: fields that differ."""
        of_the_model = cls(
            model.folder,
            model.revision,
            model.config,
            model.files,
            model.left_out,
            model.ignored,
            model.alone,
            model.repositories,
            model.subfolders,
            model.parts,
            model._said,
        )
        return replace(of_the_model, **changes)


@final
class Checkpoint(NamedTensors, Closing):
    """A model: its tensors by name, and its other files. Created by `open_checkpoint`; a context manager.

    Use it like a read-only dict: `model["lm_head.weight"]`, `name in model`, `for name in model`, `len(model)`. Opening reads
    headers; a tensor is read when you ask for it.

    ref          as the user named it
    folder       contains config.json and the other files; a temporary one if they are made from the weight files (GGUF)
    source       source of the tensors; its members are available here too, so a checkpoint is itself a source
    revision     commit hash of a Hub model, digest of the files' versions at another address, "" otherwise
    config       config.json, or None if missing
    files        names of the files to copy into a new model (including config.json and the tokenizer), sorted
    left_out     names of other files, which no loader reads and which are not copied; of subfolders, with a `/`
    ignored      weight files in the folder that are not part of the model (`consolidated.safetensors`, variants)
    metadata     the weight files' metadata (`__metadata__` of safetensors), without keys on which files disagree
    quantised    the quantisation of the weights, None if not quantised
    stale        the quantisation that config.json names although the weights are plain; "" if there is none
    decoded      the quantisation of stored weights that the source decodes; "" if there is none
    subfolders   with weights of their own, as modules of sentence-transformers have: `2_Dense/linear.weight` is a tensor of
                 the subfolder `2_Dense`
    parts        of a pipeline of diffusers, whose weights are all in subfolders: the config.json of each
    repositories  Hub repositories, and folders elsewhere, whose files may have to be downloaded before tensors are read
    notes        warnings about the model
    untied       the one of `notes` on an embedding and a head that were one tensor, and are two with its adapter
    alone        a single file, opened without its folder
    plan         of a merge whose result it is, if the tensors are computed when they are read
    verbatim     its tensors as the files have them, if they can be copied so; else None
    """

    def __init__(
        self,
        ref: str,
        source: Tensors,
        folder: ModelFolder = ModelFolder(Path()),
        *,
        metadata: Mapping[str, str] | None = None,
        notes: tuple[Finding, ...] = (),
        untied: Finding | None = None,
        decoded: str = "",
        plan: Plan | None = None,
    ) -> None:
        self.ref = ref
        self.folder = folder.path
        self.source = source
        self.revision = folder.revision
        self.config = None if folder.config is None else dict(folder.config)
        self.files = folder.files
        self.left_out = folder.left_out
        self.alone = folder.alone
        self.ignored = folder.ignored
        self.metadata = dict(metadata or {})
        described = (opening.describe_quantisation(part, {}) for part in folder.parts.values())
        self.quantised = opening.describe_quantisation(folder.config, source.specs) or next(filter(None, described), None)
        self.stale = opening.stale_entry(folder.config, source.specs) or _stale_part(folder.parts, source.specs)
        self.notes = notes
        self.untied = untied
        self.repositories = folder.repositories
        self.subfolders = folder.subfolders
        self.parts = folder.parts
        self.decoded = decoded
        self.plan = plan
        self.verbatim: Verbatim | None = None
        self._said = folder.said
        self._temporary = folder.temporary
        self._decoded: Checkpoint | None = None

    def __fspath__(self) -> str:
        """What names this model in recipes and calls, so that it can be passed there: models on the Hub with their commits.

        A commit takes the place of a branch. In `base+adapter`, each of the two has its own.
        """
        names, commits = self.ref.split("+"), self.revision.split("+")
        if len(names) > 2:  # a folder with a + in its name
            return self.ref
        return "+".join(_pinned(name, commit) for name, commit in zip_longest(names, commits[: len(names)], fillvalue=""))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, in model order: names sorted with their numbers as numbers."""
        return self.source.specs

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def stored_share(self) -> float:
        """Bytes of the weight files for each byte of the decoded tensors; 1 for weights that are stored plain."""
        if not self.decoded:
            return 1.0
        missing = self.missing
        stored = sum(missing.get(path) or (path.stat().st_size if path.is_file() else 0) for path in self.paths)
        if not stored:  # it is streamed
            extents = (part for name, spec in self.specs.items() for part in self.extents(name, 0, spec.nbytes))
            stored = sum(extent.nbytes for extent in extents)
        return stored / max(1, self.nbytes)

    @property
    def home(self) -> Path:
        """The folder of the weight files: `folder`, except for a GGUF file, whose other files are made from it."""
        weights = next((path.absolute() for path in self.paths), None)
        folder = self.folder.absolute()
        return folder if weights is None or weights.is_relative_to(folder) else weights.parent

    @property
    def card(self) -> dict[str, Any]:
        """What is said of the model: the front matter of its README.md, and for keys that it lacks what its weight files say.

        A file that was opened without its folder has no README.md, nor have tensors in memory. That of a model elsewhere must
        be fetched before.
        """
        said = dict(self._said)
        if self.alone or not self.paths:
            return said
        card = read_card(self.home)
        if "license" in card:  # its name and link go with it
            said = {key: value for key, value in said.items() if not key.startswith("license")}
        return said | card

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weight files, in natural order, and after them those in subfolders."""
        folders = {self.folder / name: f"{name}/" for name in self.subfolders}
        return tuple(f"{folders.get(path.parent, '')}{path.name}" for path in self.paths)

    @property
    def naming(self) -> Naming:
        """How the safetensors files of a new model with this one's files are named, and what they say besides tensors."""
        parts = {name: _stem(config) for name, config in self.parts.items()}
        return Naming(_stem(self.config or {}), kept_metadata(self.metadata), self.subfolders, parts)

    @property
    def sources(self) -> tuple[Tensors, ...]:
        """What its tensors are read from."""
        return (self.source,)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the weight files."""
        return self.source.paths

    @property
    def identity(self) -> str:
        """Hash of the weight files' names, sizes and headers."""
        return self.source.identity

    @property
    def state(self) -> str:
        """Hash of the identity and of each file's inode and change time."""
        return self.source.state

    def sample(self) -> str:
        """Hash of 32 pages of the weight files that no revision or plan names, else "". Equal for a copy of the files.

        Training changes it, as does all else that changes all weights. A change of a few tensors may not.
        """
        named = [repository.folder for repository in self.repositories]
        unnamed = [path for path in self.paths if not any(path.is_relative_to(folder) for folder in named)]
        return sample_files(unnamed) if unnamed and self.plan is None else ""

    @property
    def missing(self) -> dict[Path, int]:
        """Files of Hub models that a merge needs and that are not cached yet, with their sizes."""
        return {repo.folder / name: nbytes for repo in self.repositories for name, nbytes in repo.missing.items()}

    def stream(self) -> None:
        """Stream the weights of Hub models that are not cached; `download` then downloads the other files only."""
        for repository in self.repositories:
            repository.stream()

    def download(self) -> None:
        """Download missing files. Raises CheckpointError; completed files stay in the cache."""
        for repository in self.repositories:
            repository.download()

    def fetch(self, names: Sequence[str]) -> None:
        """Download these files of a Hub model, unless cached. Not for weights."""
        for repository in self.repositories[:1]:
            repository.download([glob.escape(name) for name in names], quiet=True)

    def natural_dtype(self, name: str) -> DType:
        """The default output dtype of a tensor."""
        return self.source.natural_dtype(name)

    @property
    def kept_specs(self) -> dict[str, TensorSpec]:
        """Name, dtype and shape of every tensor, with the dtypes that an output has by default."""
        specs, kept = self.specs, dict(self.specs)
        for name, spec in specs.items():
            if (dtype := self.natural_dtype(name)) is not spec.dtype:
                kept[name] = TensorSpec(spec.name, dtype, spec.shape)
        return kept

    def preferred_rows(self, name: str) -> int:
        """The number of rows to read at once so that no byte is read twice."""
        return self.source.preferred_rows(name)

    def location(self, name: str) -> tuple[int, int] | None:
        """(file descriptor, offset of the tensor's first byte in that file), or None if not stored as plain bytes.

        The descriptor belongs to this checkpoint and stays open until `close`. Raises NotFound for an unknown tensor,
        CheckpointError if the file has changed since the checkpoint was opened.
        """
        return self.source.location(name)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """The parts of remote files that are read for these bytes of a tensor; () if all of it is on this disk."""
        return self.source.extents(name, start_byte, nbytes)

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        """Fill `out` with the tensor's bytes from `start_byte` on. Thread-safe.

        out  writable, C-contiguous bytes (numpy uint8, memoryview); filled completely

        Raises NotFound for an unknown tensor, ParameterError for a range outside the tensor, FormatError if the file ends
        early, CheckpointError if it has changed and for an I/O error.
        """
        self.source.read_into(name, start_byte, out)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor as a new numpy array, in the machine's byte order (ml_dtypes for bf16 and fp8).

        rows  a slice with step 1 along the first dimension; only these rows are read

        Raises ParameterError for another step and for rows of a 0-d tensor, else as `read_into`.
        """
        return read(self, name, rows, where=self.ref)

    def undecoded(self) -> Checkpoint:
        """The same files, with their tensors as `verbatim` has them. To close it closes this one too."""
        assert self.verbatim is not None
        undecoded = Checkpoint(self.ref, self.verbatim.source, ModelFolder.like(self, config=None, files=()))
        undecoded._decoded = self
        return undecoded

    def check_unchanged(self) -> None:
        """Raise CheckpointError, naming the file, if a weight file differs from when it was opened."""
        self.source.check_unchanged()

    def close(self) -> None:
        """Close all files, once no thread reads any more. May be called twice."""
        self.source.close()
        if self._decoded is not None:
            self._decoded.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.ref}: {len(self.specs):,} tensors, {self.nbytes:,} bytes>"


def _stale_part(parts: Mapping[str, Mapping[str, Any]], specs: Mapping[str, TensorSpec]) -> str:
    """The first quantisation that config.json of a part names although the weights of that part are plain, else ""."""
    for part, config in parts.items():
        inner = {name: spec for name, spec in specs.items() if name.startswith(f"{part}/")}
        if stale := opening.stale_entry(config, inner):
            return stale
    return ""


def _stem(config: Mapping[str, Any]) -> str:
    """What the names of weight files begin with: diffusers looks for no other."""
    return "diffusion_pytorch_model" if of_diffusers(config) else "model"


def open_checkpoint(
    ref: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    raw: bool = False,
    download: bool = True,
    stream: bool = False,
    ignore_quantization_config: bool = False,
) -> Checkpoint:
    """Open a model: a local folder, one weight file, a Hub id `org/name[@revision]`, or an address.

    Addresses are `hf://org/name[@revision]`, `https://host/folder`, `s3://bucket/folder`, `gs://` and `az://`; see
    docs/remote.md. Their tensors are read by byte range.

    Weights are safetensors, PyTorch's zip checkpoints (.bin, .pt, .pth, .ckpt), which are read without executing code, or GGUF,
    whose config.json and tokenizer are made from the file. Checkpoints of training runs (DCP, DeepSpeed's ZeRO) hold parts of
    each tensor, one for each process. GGUF's blocks, and FP8, compressed-tensors, GPTQ, AWQ, AutoRound, Quark, bitsandbytes,
    ComfyUI, EXL3, HQQ and MLX weights are dequantised to float32; others are returned as stored.

    The result of `merge` and other functions is opened where it was written. A local path takes precedence over a Hub id of the
    same name; a Path is never a Hub id. A single file is opened without
    the config.json next to it: open the folder to get both. Models on the Hub are downloaded to huggingface_hub's cache
    (`cache_dir`, else HF_HOME) unless cached.

    raw       return tensors as stored, without decoding
    download  False reads the headers of a Hub model by byte range; tensors can be read after `Checkpoint.download`
    stream    read the tensors of a Hub model by byte range, without a download
    ignore_quantization_config  drop what config.json says of quantisation if the weights are plain

    Raises NotFound, FormatError (a byte that breaks the format), Unsupported (adapters, dtypes, codes in another layout),
    CheckpointError (permissions, network), ParameterError (a revision for a local path, or two revisions).

    >>> open_checkpoint("./no/such/folder")
    Traceback (most recent call last):
    weightsmith._base.errors.NotFound: ./no/such/folder: no such folder or file
      -> Write the path of a folder that exists, or a Hub id: org/name.
    """
    name = os.fspath(ref)
    status(f"reading headers of {name}")
    place = locate(ref, revision)
    if isinstance(place, Path):
        if place.is_dir():
            return _open_folder(name, place, _local_names(place), raw=raw, plain=ignore_quantization_config)
        return _checkpoint(name, opening.open_file(place, name), ModelFolder(place.parent, alone=True), raw=raw)

    try:
        repository, only = open_place(place, cache_dir=cache_dir, token=token)
    except NotFound as error:
        if hint := "" if isinstance(place, Address) else _nearest_sibling(name):  # `models/lama` looks like a hub id
            finding = error.finding
            raise NotFound(finding.what + hint, where=finding.where, details=finding.details, fix=finding.fix) from error
        raise
    if only:
        repository.read_starts([only])
        opened = opening.open_file(repository.folder / only, name, repository.open)
        return _checkpoint(name, opened, ModelFolder.of(repository.folder, repository, alone=True), raw=raw)
    _fetch_headers(repository, name, download=download, stream=stream or isinstance(place, Address) or place.streams)
    names = list(repository.sizes)
    return _open_folder(name, repository.folder, names, repository, raw=raw, plain=ignore_quantization_config)


def _fetch_headers(repository: Repository | RemoteFolder, name: str, *, download: bool, stream: bool) -> None:
    """Fetch what says where every tensor is: settings, indexes, and the beginnings of weight files; the rest as asked."""
    indexes = [pattern for kind in opening.kinds() for pattern in kind.indexes]
    repository.download(["config.json", *SETTINGS_FILES, *indexes, *subfolders.SETTINGS], quiet=True)
    folders = subfolders.module_folders(repository.folder, repository.sizes)
    repository.download([f"{inner}/{file}" for inner in folders for file in ("config.json", *indexes)], quiet=True)
    if subfolders.is_pipeline(repository.folder, repository.sizes):
        files = [*_find_parts(repository.folder, repository.sizes, folders, name).values()]
    else:
        files = [opening.find_weights(repository.folder, repository.sizes, name)]
        files += opening.find_subfolders(repository.folder, repository.sizes, folders, name).values()
    weights = [path.relative_to(repository.folder).as_posix() for file in files for path in file.paths]
    repository.want([*weights, *copied_files(repository.sizes, folders), CARD_NAME])
    if download and not stream:
        repository.download()
    repository.download(read_to_choose(repository.sizes), quiet=True)
    repository.read_starts(weights)
    if stream:
        repository.stream()
        if download:
            repository.download(quiet=True)


def open_place(
    place: HubModel | Address, *, cache_dir: str | Path | None = None, token: str | bool | None = None
) -> tuple[Repository | RemoteFolder, str]:
    """The files of a model on the Hub or at an address; and the name of the one that an address names, else ""."""
    if isinstance(place, HubModel):
        from weightsmith._files import hub

        return hub.open_repository(place.name, place.revision, cache_dir=cache_dir, token=token), ""
    from weightsmith._files.remote.folder import open_folder

    parent, _, last = place.path.rpartition("/")
    if not last.lower().endswith(opening.suffixes()):
        return open_folder(place), ""
    return open_folder(replace(place, path=parent), last), last


def locate(ref: str | os.PathLike[str], revision: str | None = None) -> Path | HubModel | Address:
    """The local path of a name, else the Hub model, or the address, that it names.

    Raises NotFound for a name that is neither, ParameterError for a revision of a local path and for two revisions.
    """
    name, is_path = os.fspath(ref), isinstance(ref, PurePath)
    if not is_path and is_address(name):
        plain, _, in_name = name.partition("@")
        address = parse_address(plain if name.lower().startswith("hf://") else name)
        if address.scheme == HUB:
            return _hub_model(name, address.path, in_name, revision, streams=True)
        if revision is not None:
            raise ParameterError(f"revision {show(revision)} for an address, which has no revisions", where=str(address))
        return address
    path = expand_user(name)
    if name and exists(path):
        if revision is not None:
            what = f"revision {show(revision)} for a local path, which has no revisions"
            raise ParameterError(what, where=name, fix="leave the revision out")
        return path
    match = _HUB_ID.fullmatch(name) if not is_path and not name.lower().endswith(_FILE_SUFFIXES) else None
    if match is None:
        raise _not_found(name, path)
    return _hub_model(name, match[1], match[2] or "", revision, streams=False)


def _pinned(name: str, commit: str) -> str:
    """The name of a model with its commit; as it is, if the model is not on the Hub."""
    path = name.partition("@")[0]
    on_hub = ":" not in path or path.lower().startswith("hf://")
    return f"{path}@{commit}" if on_hub and _COMMIT.fullmatch(commit) else name


def _hub_model(name: str, repo: str, in_name: str, revision: str | None, *, streams: bool) -> HubModel:
    if revision is not None and in_name and revision != in_name:
        what = f"two revisions: {show(in_name)} in the name, and revision={show(revision)}"
        raise ParameterError(what, where=name, fix="give one of them")
    return HubModel(repo, in_name or revision, streams)


def _open_folder(
    ref: str,
    folder: Path,
    names: Sequence[str],
    repository: Repository | RemoteFolder | None = None,
    *,
    raw: bool,
    plain: bool,
) -> Checkpoint:
    """A folder with the files `names`; `repository` if it is in the Hub's cache (whose links need no check)."""
    where, open_file = (str(folder), open_local) if repository is None else (ref, repository.open)
    if subfolders.is_pipeline(folder, names):
        return _open_pipeline(ref, folder, names, repository, raw=raw, plain=plain)
    weights = opening.find_weights(folder, names, where)
    config: Mapping[str, Any] | None = opening.read_config(folder / "config.json") if "config.json" in names else None
    folders = subfolders.module_folders(folder, names)
    inner = opening.find_subfolders(folder, names, folders, where)
    files, left_out = _choose_copied(folder, names, config, folders, repository)
    opened = weights.open(ref, open_file)
    config = opening.complete_config(config, folder, names, opened.source.specs)
    sources = {}
    for name, module_weights in inner.items() if not opened.files else ():
        module_config = opening.read_config(folder / name / "config.json") if f"{name}/config.json" in names else None
        stored = module_weights.open(f"{ref}/{name}", open_file)
        opened = replace(opened, notes=(*opened.notes, *stored.notes))
        sources[name] = stored.source if raw else opening.wrap(stored, module_config, f"{ref}/{name}").source
    rest = {"config": config, "files": files, "left_out": left_out, "ignored": weights.ignored, "subfolders": tuple(sources)}
    return _checkpoint(ref, opened, ModelFolder.of(folder, repository, **rest), sources, raw=raw, plain=plain)


def _open_pipeline(
    ref: str, folder: Path, names: Sequence[str], repository: Repository | RemoteFolder | None, *, raw: bool, plain: bool
) -> Checkpoint:
    """The folder of a pipeline of diffusers. Weight files beside model_index.json are another copy of it: none is read."""
    where, open_file = (str(folder), open_local) if repository is None else (ref, repository.open)
    folders = subfolders.module_folders(folder, names)
    inner = _find_parts(folder, names, folders, where)
    files, left_out = _choose_copied(folder, names, None, folders, repository)
    sources, parts, decoded, notes = {}, {}, [], []
    for name, weights in inner.items():
        config = opening.read_config(folder / name / "config.json") if f"{name}/config.json" in names else {}
        part = f"{ref}/{name}"
        opened = weights.open(part, open_file)
        if not opened.files and weights.kind.name == "GGUF":
            what = "a part of a pipeline in a GGUF file, whose tensors do not have the names of diffusers"
            raise Unsupported(what, where=part, fix="Use the part's safetensors files, or name the GGUF file in the recipe.")
        if opened.files:
            what = "a part of a pipeline in a format that brings its own config.json and tokenizer"
            raise Unsupported(what, where=part, fix="Convert the part to safetensors first: weightsmith dequantize.")
        wrapped = Wrapped(opened.source, config) if raw else opening.wrap(opened, config, part)
        if plain and not raw:
            wrapped = opening.without_stale_entry(wrapped, part)
        sources[name], parts[name] = wrapped.source, wrapped.config or {}
        decoded += [kind for kind in (wrapped.kind or opened.decoded,) if kind]
        notes += [*opened.notes, *wrapped.notes]
    ignored = tuple(name for name in names if "/" not in name and name.lower().endswith(opening.suffixes()))
    if ignored:
        listed = ", ".join(ignored[:_SHOWN]) + (f" and {len(ignored) - _SHOWN} more" if len(ignored) > _SHOWN else "")
        fix = "name one of these files to merge it"
        notes.append(Finding(f"not read, as another copy of the pipeline's weights: {listed}", ref, fix=fix))
    rest = {"files": files, "left_out": left_out, "ignored": ignored, "subfolders": tuple(sources), "parts": parts}
    return Checkpoint(
        ref,
        Foldered(None, sources, ref),
        ModelFolder.of(folder, repository, **rest),
        notes=(*([] if repository is None else repository.notes), *notes),
        decoded=", ".join(dict.fromkeys(decoded)),
    )


def _find_parts(folder: Path, names: Collection[str], folders: Sequence[str], where: str) -> Mapping[str, opening.WeightFiles]:
    """The weight files of a pipeline's parts. Raises NotFound if there are none, or none of a part with a model's config.json:
    the output would lack it.
    """
    inner = opening.find_subfolders(folder, names, folders, where)
    for part in subfolders.model_parts(folder):
        if part in inner or f"{part}/config.json" not in names:
            continue
        config = opening.read_config(folder / part / "config.json")
        if any(key in config for key in ("_class_name", "architectures", "model_type")):
            there = sorted(name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/"))
            what = "a part of the pipeline with a model's config.json, but no weight file with a usual name"
            fix = f"Download its safetensors files. To leave the part out, write [null, null] for it in {subfolders.PIPELINE}."
            raise NotFound(what, where=f"{where}/{part}", details=(", ".join(there[:_SHOWN]),), fix=fix)
    if not inner:
        what = f"no part that {subfolders.PIPELINE} names has weights"
        raise NotFound(what, where=where, details=(", ".join(folders[:20]) or "it names none",), fix="Download it again.")
    return inner


def _choose_copied(
    folder: Path,
    names: Sequence[str],
    config: Mapping[str, Any] | None,
    folders: Sequence[str],
    repository: Repository | RemoteFolder | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files to copy, checked, and those that are left out."""
    files, left_out = choose_copied(folder, names, config, folders)
    if repository is None:
        check_links(folder, files)
    check_copied(folder, [name for name in files if repository is None or name not in repository.missing])
    return files, left_out


def _checkpoint(
    ref: str,
    opened: OpenedFiles,
    folder: ModelFolder,
    inner: Mapping[str, Tensors] | None = None,
    *,
    raw: bool,
    plain: bool = False,
) -> Checkpoint:
    """A checkpoint of open weight files; decoded if a wrapper recognises their encoding, unless `raw`.

    inner  the tensors of each subfolder that has some
    plain  what config.json says of quantisation is dropped if it is wrong
    """
    if opened.files:
        temporary = tempfile.TemporaryDirectory(prefix="weightsmith-", ignore_cleanup_errors=True)
        path, files = Path(temporary.name), tuple(sorted(opened.files))
        for name, content in opened.files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(content)
        config = opening.read_config(path / "config.json")
        folder = replace(folder, path=path, config=config, files=files, left_out=(), temporary=temporary)
    wrapped = Wrapped(opened.source, folder.config) if raw else opening.wrap(opened, folder.config, ref)
    if plain and not raw:
        wrapped = opening.without_stale_entry(wrapped, ref)
    notes = (*(note for repository in folder.repositories for note in repository.notes), *opened.notes, *wrapped.notes)
    checkpoint = Checkpoint(
        ref,
        Foldered(wrapped.source, inner, ref) if inner else wrapped.source,
        replace(folder, config=wrapped.config, said=opened.card),
        metadata={key: value for key, value in opened.metadata.items() if raw or key not in SETTINGS_METADATA},
        notes=notes,
        decoded=wrapped.kind or opened.decoded,
    )
    if not inner:
        checkpoint.verbatim = opening.verbatim_of(wrapped, opened)
    return checkpoint


def _local_names(folder: Path) -> list[str]:
    """Relative names of the files of a folder and its subfolders."""
    try:
        return subfolders.list_names(folder)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(folder)) from error


def check_links(folder: Path, names: Sequence[str]) -> None:
    """Reject links that leave the folder, among the files to copy into a model, which may then be published.

    A cloned repository can contain `tokenizer.json -> ~/.ssh/id_rsa`. Links into the hub's cache are allowed if a
    snapshot there has the same file under the same name. Weight files may be links to
    anywhere, because only tensors are copied from them.
    """
    root = real_path(folder)
    for name in names:
        path = folder / name
        target = real_path(path)
        if target == root / name:
            continue
        if not target.is_file():
            what = f"{name} is a symbolic link to {target}, which is not a file"
            raise NotFound(what, where=str(folder), fix="restore the link's target, or remove the link")
        if not target.is_relative_to(root) and not _is_in_hub_cache(target, name):
            raise CheckpointError(
                f"{name} is a symbolic link that leaves the folder, to {target}; its content would be copied into the "
                "merged model",
                where=str(folder),
                fix=f"Replace the link by the file, if that is meant: `cp --remove-destination {target} {path}`",
            )


def _is_in_hub_cache(blob: Path, name: str) -> bool:
    """The hub has published this file under this name: `models--org--name/snapshots/COMMIT/NAME` is a link to it."""
    if not _BLOB.fullmatch(blob.name) or not re.fullmatch(r"models--[^/]+/blobs", "/".join(blob.parts[-3:-1])):
        return False
    snapshots = blob.parent.parent / "snapshots"
    return snapshots.is_dir() and any(real_path(commit / name) == blob for commit in snapshots.iterdir())


def _not_found(name: str, path: Path) -> NotFound:
    base, at, _ = name.rpartition("@")
    if at and exists(expand_user(base)):
        return NotFound(f"no such folder; {base} is one, but a local path has no revisions", where=name, fix="Drop the @.")
    with contextlib.suppress(OSError, ValueError):  # not a link, or not a valid path
        return NotFound(f"broken symbolic link to {path.readlink()}", where=name, fix="restore the link's target")
    kind = "no such folder or file"
    if "/" not in name and os.sep not in name:
        kind += ", and not a Hub id, which has the form org/name"
    fix = "Write the path of a folder that exists, or a Hub id: org/name."
    if os.sep == "/" and (here := fix_for_windows_path(name)):
        return NotFound("no such folder or file: this is a Windows path", where=name, fix=here)
    if up := _folder_above(name):
        kind += f" here, but there is one in {up}: paths start at the current folder"
        fix = f"Run the command from there, after `cd {up}`."
    return NotFound(kind + _nearest_sibling(name), where=name, fix=fix)


def _folder_above(name: str) -> str:
    """`..` or `../..` where a relative path exists from there: the user has changed to the folder of the recipe."""
    if PurePath(name).is_absolute() or name.startswith("~"):
        return ""
    return next((up for up in ("..", "../..") if exists(Path(up, name))), "")


def _nearest_sibling(name: str) -> str:
    """` (did you mean 'models/llama'?)`: the path of a model beside one that does not exist, or an empty string."""
    try:
        path = expand_user(name)
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir() or is_weights(p.name)]
        close = nearest_names(path.name, sorted(siblings))
        return f" (did you mean '{PurePath(name).with_name(close[0])}'?)" if close else ""
    except (OSError, ValueError):
        return ""
