"""Models on the Hub: list, judge, read headers by byte range, then download what is needed into huggingface_hub's own cache.

The environment rules as everywhere in the ecosystem: HF_HOME and HF_HUB_CACHE say where, HF_HUB_OFFLINE forbids the
network, HF_TOKEN or `hf auth login` give the token, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT say how long to wait.
"""

from __future__ import annotations

import errno
import glob
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from weightsmith._base.errors import CheckpointError, Finding, NotFound, without_queries
from weightsmith._base.files import show
from weightsmith._base.redaction import know
from weightsmith._files.remote.addresses import check_hub
from weightsmith._files.remote.folder import FetchedFiles, RemoteFile, read_starts
from weightsmith._files.remote.http import HttpFile
from weightsmith._files.remote.retries import lasting, no_panic, passes
from weightsmith._files.subfolders import list_names

UPLOAD_SECONDS = 300.0  # for an answer to what changes a repository: the hub hashes and moves files before it answers
SILENT_SECONDS = 60.0  # a hub that did not answer is not asked again for so long: each question takes a timeout
UNKNOWN = -1  # size of a file
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
_COMMIT = re.compile("[0-9a-f]{40,64}")

_silent: dict[str, tuple[float, str]] = {}
"""Endpoint → until when it is not asked, and why."""


class _Silent(Exception):
    """The hub did not answer a moment ago."""


@dataclass(eq=False)
class Repository(FetchedFiles):
    """One revision of a Hub model: its files, in the cache or still on the Hub. Made by `open_repository`.

    name      org/name
    commit    the commit hash that the revision stands for
    folder    of the files in the cache; those that are not cached yet will be there
    sizes     of all files by name; of the cached ones when the hub could not be asked
    notes     what the user should know
    revision  branch, tag or commit, if the hub has said what it stands for
    """

    name: str
    commit: str
    folder: Path
    sizes: dict[str, int]
    notes: tuple[Finding, ...]
    _: KW_ONLY
    cache_dir: str | Path | None
    token: str | bool | None = field(repr=False)
    revision: str = ""
    _requested: dict[str, None] = field(default_factory=dict, init=False)
    _files: dict[str, RemoteFile] = field(default_factory=dict, init=False)

    def want(self, names: Iterable[str]) -> None:
        """Name files that are needed: `download` brings them. Raises CheckpointError."""
        super().want(names)
        for name in self._requested:
            if self.sizes[name] == UNKNOWN:
                self.sizes[name] = self._ask_size(name)

    def _ask_size(self, name: str) -> int:
        """The size of a file, from a Hub that does not list sizes (some mirrors). Raises CheckpointError."""
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(self.name, name, revision=self.commit)
        try:
            with no_panic():
                size = huggingface_hub.get_hf_file_metadata(url, token=self.token, timeout=_timeouts()[0]).size
        except Exception as error:
            raise _explain(error, f"{self.name}, {name}") from error
        if size is None:
            what = "the Hub does not say how large the file is"
            raise CheckpointError(what, where=f"{self.name}, {name}", fix="download the model, and name its folder")
        return size

    def download(self, patterns: Sequence[str] | None = None, *, quiet: bool = False) -> None:
        """Bring into the cache what is missing, or the files of these patterns.

        quiet  no progress bar

        Raises CheckpointError.
        """
        if missing := self.to_bring(patterns):
            self._bring(missing, quiet=quiet)
        if patterns is None and self.revision:  # not for a dry run: the cache may have an older commit, whole
            _write_ref(self.folder.parents[1], self.revision, self.commit)

    def _bring(self, names: Sequence[str], *, quiet: bool) -> None:
        import huggingface_hub

        try:
            with no_panic():
                bound_requests()
                huggingface_hub.snapshot_download(
                    self.name,
                    revision=self.commit,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    allow_patterns=[glob.escape(name) for name in names],
                    etag_timeout=_timeouts()[0],
                    **({"tqdm_class": _no_bar()} if quiet else {}),
                )
        except Exception as error:
            raise _explain(error, self.name) from error
        if absent := [name for name in names if not (self.folder / name).is_file()]:  # it is satisfied with a part, off line
            what = f"{len(absent)} of {len(names)} files were not downloaded, the first is {show(absent[0])}"
            raise CheckpointError(what, where=self.name, fix="Check the network connection, and run the same command again.")

    def read_starts(self, names: Iterable[str]) -> None:
        """Read the start of each file that is not in the cache, several at a time: their headers, if `open` is to find them."""
        absent = [name for name in names if name in self.sizes and not (self.folder / name).is_file()]
        self._files = {name: RemoteFile(self.ranges(name)) for name in absent}
        read_starts(self._files.values())

    def stream(self) -> None:
        """Read weights that are not in the cache where they are, and leave them there. Call it after `read_starts`."""
        for name, file in self._files.items():
            if not (self.folder / name).is_file():
                file.stream()

    def ranges(self, name: str) -> HttpFile:
        """A file on the Hub, by byte range."""
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it marks no exports

        url = huggingface_hub.hf_hub_url(self.name, name, revision=self.commit)
        headers = build_hf_headers(token=self.token)
        pinned = "x-repo-commit", self.commit
        return HttpFile(url, f"{self.name}, {name}", self.sizes[name], self.commit, headers, pinned=pinned)


def open_repository(
    name: str, revision: str | None, *, cache_dir: str | Path | None = None, token: str | bool | None = None
) -> Repository:
    """Resolve a revision of a Hub model, once. Nothing is downloaded.

    When the hub does not answer, or refuses, the cached files of that revision are used, with a note.

    Raises NotFound and CheckpointError: neither hub nor cache has it, or may show it; ParameterError for a broken environment.
    """
    check_hub()
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it marks no exports

    know(token)
    where = f"{name}@{revision}" if revision else name
    try:
        validate_repo_id(name)
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        until, why = _silent.get(constants.ENDPOINT, (0.0, ""))
        if time.monotonic() < until:
            raise _Silent(why)
        api = huggingface_hub.HfApi(token=token)
        with no_panic():
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=_timeouts()[0])
    except Exception as error:
        if not _answered(error) and not isinstance(error, (errors.HFValidationError, errors.OfflineModeIsEnabled, _Silent)):
            _silent[constants.ENDPOINT] = time.monotonic() + SILENT_SECONDS, _reason(error)
        if not isinstance(error, (errors.RevisionNotFoundError, errors.HFValidationError)):
            repository = _cached(name, revision, error, cache_dir, token)
            if repository is not None:
                return repository
        raise _explain(error, where, cached=_cache(cache_dir)) from error
    commit, folder = info.sha or "", _folder(name, cache_dir)
    if not _COMMIT.fullmatch(commit):
        raise CheckpointError(f"the Hub names no commit, but {show(commit)}", where=where, fix="Check HF_ENDPOINT.")
    sizes = {file.rfilename: UNKNOWN if file.size is None else file.size for file in info.siblings or ()}
    known = revision or constants.DEFAULT_REVISION
    return Repository(name, commit, folder / "snapshots" / commit, sizes, (), cache_dir=cache_dir, token=token, revision=known)


def _cached(
    name: str, revision: str | None, error: Exception, cache_dir: str | Path | None, token: str | bool | None
) -> Repository | None:
    """What the cache has of a revision, with a note of why the Hub was not used; None for nothing."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except (errors.LocalEntryNotFoundError, ValueError):
        return None
    sizes = {name: (folder / name).stat().st_size for name in list_names(folder) if (folder / name).is_file()}
    notes: tuple[Finding, ...] = ()
    if not isinstance(error, errors.OfflineModeIsEnabled):
        what = f"{_reason(error)}, so the cached revision {folder.name} is used; it may be out of date"
        notes = (Finding(what, f"{name}@{revision}" if revision else name),)
    return Repository(name, folder.name, folder, sizes, notes, cache_dir=cache_dir, token=token)


def _write_ref(folder: Path, revision: str, commit: str) -> None:
    """Record in the cache what a branch or tag stands for, as huggingface_hub does: by this it is found without the Hub."""
    path = folder / "refs" / revision
    if revision == commit or ".." in path.parts or not path.is_relative_to(folder):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != commit:
            path.write_text(commit)
    except OSError:  # a cache that may only be read
        pass


def _cache(cache_dir: str | Path | None) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser()


def _folder(name: str, cache_dir: str | Path | None) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return _cache(cache_dir) / repo_folder_name(repo_id=name, repo_type="model")


def _timeouts() -> tuple[float, float]:
    """Seconds to wait for an answer about files, and for the next bytes of one."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT), float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def bound_requests() -> None:
    """Let no request of huggingface_hub wait for ever: its functions set no timeout on some, and its client has none."""
    import huggingface_hub

    session = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _bound not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _bound]}


def _bound(request: Any) -> None:
    seconds = _timeouts()[1] if request.method in ("GET", "HEAD") else UPLOAD_SECONDS
    timeouts = request.extensions.get("timeout") or {}
    request.extensions["timeout"] = {**timeouts, **{k: timeouts.get(k) or seconds for k in ("connect", "read", "write")}}


def _no_bar() -> Any:
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):  # for a few small files: no bar for each model
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return NoBar


def _answered(error: Exception) -> bool:
    """The hub sent an answer, and the answer is the error."""
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError) and getattr(error, "response", None) is not None


def _reason(error: Exception) -> str:
    """Why the Hub was not used."""
    from huggingface_hub import constants

    if _answered(error):
        return f"the Hub refused ({_first_lines(error)})"
    if isinstance(error, _Silent):
        return str(error)
    return f"{constants.ENDPOINT} did not answer ({type(error).__name__}, timeout {_timeouts()[0]:g} s)"


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in without_queries(str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _explain(error: Exception, where: str, *, cached: Path | None = None) -> CheckpointError:
    """What went wrong, in this package's words; huggingface_hub's own first line is kept as detail.

    cached  the cache, if it was searched and does not have the model
    """
    from huggingface_hub import errors

    kind: type[CheckpointError] = NotFound
    details = () if isinstance(error, _Silent) else (_first_lines(error),)  # a question that was not asked has no error
    again = "Run the same command again to resume: what has arrived is kept in the cache."
    if isinstance(error, errors.GatedRepoError):
        kind, what = CheckpointError, "this Hub model is gated: its owner decides who may download it"
        fix = "Ask for access on the model's page, then `hf auth login` (or set HF_TOKEN)."
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = "neither a local path nor a model on the Hub that you may see"
        fix = "Check the spelling; for a private model, `hf auth login` (or set HF_TOKEN)."
    elif isinstance(error, errors.RevisionNotFoundError):
        what = "the Hub model exists, but not this revision"
        fix = "Name a branch, tag or full commit hash that the model's page lists."
    elif isinstance(error, errors.HFValidationError):
        what = f"neither a local path nor a valid Hub id ({show(where)})"
        fix = "Write a Hub model as org/name[@revision]."
    elif isinstance(error, errors.OfflineModeIsEnabled):
        what = "neither a local path nor a model in the Hub cache, and HF_HUB_OFFLINE=1 forbids downloading it"
        fix = f"Check the path, or download the model once: `HF_HUB_OFFLINE=0 hf download {_command(where)}`"
        details = (f"cache  {cached}",) if cached is not None else ()
    elif isinstance(error, OSError) and error.errno in _DISK:
        kind, what = CheckpointError, f"the cache cannot be written: {error.strerror}"
        fix = "Free space there, or set HF_HOME to a folder on another disk."
        details = (f"file  {error.filename}",) if error.filename else ()
    elif _answered(error):
        kind, what = CheckpointError, "the Hub answered with an error"
        passing = passes(getattr(getattr(error, "response", None), "status_code", 500))
        fix = again if passing else "Check the model's name, your token and HF_ENDPOINT."
    elif cached is not None:
        what = "neither a local path nor a model in the Hub cache"
        fix = "Check the path, the network connection and HF_ENDPOINT."
        details = (_reason(error), *details, f"cache  {cached}")
    elif stays := lasting(error, "HF_ENDPOINT"):
        kind, what, fix = CheckpointError, f"the download stopped: {stays.what}", stays.fix
    else:
        what, fix, details = "the download stopped", again, (_reason(error), *details)
    return kind(what, where=where, details=details, fix=fix)


def _command(where: str) -> str:
    """The arguments of `hf download` for a model."""
    name, at, revision = where.partition("@")
    return f"{name} --revision {revision}" if at else name
