"""Models on the hub: list, judge, then download what is needed, into huggingface_hub's own cache.

The environment rules as everywhere in the ecosystem: HF_HOME and HF_HUB_CACHE say where, HF_HUB_OFFLINE forbids the
network, HF_TOKEN or `hf auth login` give the token.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith.errors import CheckpointError, NotFound
from weightsmith.formats.carried import carried_files
from weightsmith.formats.files import show

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision of a hub model on this disk.

    folder  in the cache
    commit  the commit hash that the revision stood for
    names   of the repository's files; of the cached ones when the hub could not be asked
    """

    folder: Path
    commit: str
    names: tuple[str, ...]


def fetch(
    repo: str,
    revision: str | None,
    cache_dir: str | Path | None,
    token: str | bool | None,
    *,
    indexes: Sequence[str],
    weights: Callable[[Path, Collection[str], str], Sequence[str]],
) -> Snapshot:
    """Bring a hub model's weights and small files into the cache.

    indexes  patterns of index files
    weights  names of the weight files that are needed: (folder of the index files, names of all files, repository for messages)

    The revision is resolved once, everything is taken from that commit. A repository without usable weights is refused
    before any are downloaded. Raises NotFound, CheckpointError, and what `weights` raises.
    """
    import huggingface_hub
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):  # the first call fetches two small files: no bar for each model
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    where = f"{repo}@{revision}" if revision else repo
    try:
        # With a branch name, because this is what writes refs/<branch>, by which the model is found when offline.
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                allow_patterns=["config.json", *indexes],
                tqdm_class=NoBar,
            )
        )
    except Exception as error:
        raise _explain(error, where) from error
    commit = folder.name
    try:
        # model_info and not list_repo_files: the latter retries for 10 s when the hub does not answer.
        info = huggingface_hub.HfApi(token=token).model_info(repo, revision=commit)
        names = tuple(file.rfilename for file in info.siblings or ())
    except Exception as error:  # offline, or any of three HTTP libraries' errors: huggingface_hub changed its own twice
        names = tuple(p.name for p in folder.iterdir() if not p.is_dir()) if folder.is_dir() else ()
        log.info("%s: the hub was not asked (%s), using the cached %s", where, type(error).__name__, folder)
        return Snapshot(folder, commit, names)

    wanted = [*weights(folder, names, where), *carried_files(names)]
    if any(not (folder / name).is_file() for name in wanted):
        try:
            huggingface_hub.snapshot_download(
                repo,
                revision=commit,
                cache_dir=cache_dir,
                token=token,
                allow_patterns=[glob.escape(name) for name in wanted],
            )
        except Exception as error:
            raise _explain(error, where) from error
    return Snapshot(folder, commit, names)


def fetch_files(repo: str, revision: str | None, names: Sequence[str]) -> tuple[Path, str]:
    """Bring some files of a hub repository into the cache, those of `names` that it has; their folder and the commit."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(n) for n in names])
    except Exception as error:
        raise _explain(error, f"{repo}@{revision}" if revision else repo) from error
    return Path(folder), Path(folder).name


def _explain(error: Exception, where: str) -> CheckpointError:
    """What went wrong, in this package's words; huggingface_hub's own first line is kept as detail."""
    from huggingface_hub import constants, errors

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = (f"{type(error).__name__}: {lines[0][:300] if lines else ''}",)
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            "this hub model is gated: its owner decides who may download it",
            where=where,
            details=details,
            fix="Ask for access on the model's page, then `hf auth login` (or set HF_TOKEN).",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFound(
            "neither a local path nor a model on the hub that you may see",
            where=where,
            details=details,
            fix="Check the spelling; for a private model, `hf auth login` (or set HF_TOKEN).",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(
            "the hub model exists, but not this revision",
            where=where,
            details=details,
            fix="Name a branch, tag or full commit hash that the model's page lists.",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return NotFound(
            "neither a local path nor a model in the hub cache, and HF_HUB_OFFLINE forbids to ask the hub",
            where=where,
            fix="Check the path; or unset HF_HUB_OFFLINE, so that the model is downloaded.",
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return NotFound(
            "neither a local path nor a model in the hub cache, and the hub cannot be reached",
            where=where,
            details=details,
            fix="Check the path, or the network connection.",
        )
    if isinstance(error, errors.HFValidationError):
        return NotFound(f"neither a local path nor a valid hub id ({show(where)})", where=where, details=details)
    return CheckpointError(
        "the download failed",
        where=where,
        details=details,
        fix="Run the same command again to resume: what has arrived is kept in the cache.",
    )
