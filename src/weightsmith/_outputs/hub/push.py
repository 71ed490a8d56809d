"""`--push`: a finished folder becomes a model on the Hub, in one commit."""

from __future__ import annotations

from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, PushFailed, first_line
from weightsmith._outputs.hub.address import MAIN, parse_hub_address
from weightsmith._outputs.hub.repository import HubRepository


def check_push(spec: str) -> HubRepository:
    """Check, before hours of work, that a model may be pushed: a valid name, a network, a token that the Hub accepts.

    spec  org/name, or org/name@branch

    Raises PushFailed.
    """
    try:
        repository = HubRepository(parse_hub_address(spec))
        repository.check_token()
    except PushFailed as error:
        error.state = NOTHING_WRITTEN
        raise
    return repository


def push(repository: HubRepository, folder: Path, *, public: bool, message: str) -> str:
    """Upload a finished folder: the address of the model. Files of other names in the repository stay.

    public   who may see a repository that is created now; one that exists stays as visible as it is
    message  of the commit

    Raises PushFailed, which says how to upload the folder again.
    """
    import shlex

    address = repository.address
    try:
        repository.create(public=public)
        repository.api.upload_folder(repo_id=address.repo, folder_path=folder, revision=address.branch, commit_message=message)
    except (Exception, KeyboardInterrupt) as error:
        command = ["hf", "upload", address.repo, str(folder), ".", *([] if public else ["--private"])]
        command += [] if address.branch == MAIN else ["--revision", address.branch]
        details = error.finding.details if isinstance(error, PushFailed) else (f"{type(error).__name__}: {first_line(error)}",)
        raise PushFailed(
            "the upload was interrupted" if isinstance(error, KeyboardInterrupt) else "the upload failed",
            where=str(address),
            details=() if isinstance(error, KeyboardInterrupt) else details,
            fix=f"upload it again: `{shlex.join(command)}`",
            state=f"The output is finished and complete in {folder}",
        ) from error
    return address.url
