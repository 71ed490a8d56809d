"""Requests that change a model on the Hub, through huggingface_hub: bounded retries, and one clear error.

huggingface_hub finds endpoint and token in the standard places (HF_ENDPOINT, HF_TOKEN, `hf auth login`), uploads through Xet or
LFS, and repeats requests of uploads that were throttled, cut off or answered with 5xx. Here those that it sends once are
repeated too. A commit whose answer was lost is looked for before it is sent again. Messages contain no headers and no queries
of addresses: one may be a signature.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from weightsmith._base.errors import NOTHING_WRITTEN, PushFailed, first_line, legible
from weightsmith._files.hub import bound_requests
from weightsmith._files.remote.addresses import check_hub
from weightsmith._files.remote.retries import Patience, causes, lasting, no_panic, passes, retry
from weightsmith._outputs.local import absolute
from weightsmith._outputs.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode_manifest

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


PREFIX = "hf://"
MAIN = "main"
_BRANCH = re.compile(r"(?!-|/|refs/)(?!.*(\.\.|//|@\{|/\.|\.lock(/|$)))[^\s~^:?*\[\\\x00-\x1f\x7f]{1,200}(?<![/.])")
_COMMIT = re.compile("[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A branch of a model on the Hub.

    repo    org/name
    branch  without one in the address: main

    >>> address = parse_hub_address("hf://org/merged@v2")
    >>> str(address), address.name, address.branch, str(parse_hub_address("hf://org/merged@main"))
    ('hf://org/merged@v2', 'merged', 'v2', 'hf://org/merged')
    """

    repo: str
    branch: str = MAIN

    @property
    def name(self) -> str:
        """The name without the organisation."""
        return self.repo.rpartition("/")[2]

    @property
    def spec(self) -> str:
        """As `--push` takes it, and recipes name a model: org/name, or org/name@branch."""
        return self.repo if self.branch == MAIN else f"{self.repo}@{self.branch}"

    @property
    def url(self) -> str:
        """The address of the model's page."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}" + ("" if self.branch == MAIN else f"/tree/{quote(self.branch)}")

    @property
    def absolute(self) -> str:
        """The address."""
        return str(self)

    @property
    def local(self) -> Path:
        """A name in the current folder, which no other address, and no other Hub, has."""
        from huggingface_hub import constants

        return absolute(f"{self.name}-{hashlib.sha256(f'{constants.ENDPOINT} {self}'.encode()).hexdigest()[:8]}")

    def __str__(self) -> str:
        return PREFIX + self.spec

    def __fspath__(self) -> str:
        return str(self)


def is_hub_address(out: object) -> bool:
    """True for an address on the Hub."""
    return isinstance(out, str) and out.lower().startswith(PREFIX)


def parse_hub_address(text: str) -> HubAddress:
    """What `hf://org/name[@branch]`, or `org/name[@branch]` after --push, names. Raises PushFailed."""
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it marks no exports

    place = text[len(PREFIX) :] if is_hub_address(text) else text
    organisation, _, rest = place.strip("/").partition("/")
    name, at, branch = rest.partition("@")
    named, asked, _ = branch.partition("?")  # what follows may be a key
    repo = f"{organisation}/{name}"
    # A key or password before the place must not get into a message.
    shown = f"{organisation.rpartition('@')[2]}/{rest}".partition("?")[0]
    try:
        validate_repo_id(repo)
        if not organisation or not name:
            raise errors.HFValidationError("no organisation or user")
    except errors.HFValidationError as error:
        fix = "write the organisation or user, and the model: hf://org/name[@branch], or --push org/name[@branch]"
        what = "not a name that a model can have on the Hub"
        raise PushFailed(what, where=legible(shown, 120), fix=fix, state=NOTHING_WRITTEN) from error
    if at and _COMMIT.fullmatch(branch):
        what = "a commit cannot be written to"
        raise PushFailed(what, where=shown, fix="name a branch", state=NOTHING_WRITTEN)
    if at and not _BRANCH.fullmatch(branch):
        what = f"not a name that a branch can have: {legible(named, 60)}{asked}"
        raise PushFailed(what, where=repo, fix="write org/name@branch", state=NOTHING_WRITTEN)
    return HubAddress(repo, branch or MAIN)


PATIENCE = Patience(failures=3, first_seconds=1.0)
"""With fewer attempts than elsewhere: huggingface_hub repeats single requests of uploads itself."""

_MOST_COMMITS = 10
"""The most commits by others to search for one of ours whose answer was lost."""
_BATCH = 100
"""Uploaded files that one request asks about."""
FILE_REQUESTS = 4
"""Requests that upload a weight file in one part: how to send it, where to, its bytes, whether they have arrived."""
COMMIT_REQUESTS = 4
"""Requests that write, for a model as a whole: create it, check its card, how to send the other files, the commit."""
LARGE_NAMES = ".model", ".bin", ".parquet"
"""Ends of names of files besides the weights that a new repository keeps in LFS, whatever their size."""
REGULAR_BYTES = 10_000_000
"""The Hub keeps larger files in LFS."""
LARGE_REQUESTS = 2
"""Requests that upload such a file in one part: its bytes, whether they have arrived. One more asks where to send them all."""
_AGAIN = "run again"
_FIXES = {
    401: ("the Hub does not accept the token", "run `hf auth login`, or set HF_TOKEN, to a valid token that may write"),
    403: ("the token may not do this", "use a token that may write to this organisation or user, and create models there"),
    404: ("there is no such repository or branch, or the token may not see it", "check the name and the token"),
    429: ("the Hub kept refusing so many requests", f"wait some minutes, and {_AGAIN}"),
}
_Result = TypeVar("_Result")


class HubContent(NamedTuple):
    """What a file holds, as the Hub lists it.

    sha1    of git, for files that are in the repository itself; "" if that is not known
    sha256  for files in LFS or Xet; "" for others
    """

    nbytes: int
    sha1: str
    sha256: str

    def is_same(self, listed: HubContent) -> bool:
        """The file that the Hub lists so holds this."""
        same_hash = listed.sha256 == self.sha256 if listed.sha256 else listed.sha1 == self.sha1
        return same_hash and (listed.nbytes == self.nbytes)


def content_of(path: Path) -> HubContent:
    """The size and hashes of a local file."""
    nbytes = path.stat().st_size
    sha1, sha256 = hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha1.update(piece)
            sha256.update(piece)
    return HubContent(nbytes, sha1.hexdigest(), sha256.hexdigest())


class HubRepository:
    """A branch of a model on the Hub. Thread-safe. Its methods raise PushFailed if the Hub refuses or does not answer.

    created  what `create` has done, for messages; "" if the repository existed
    """

    def __init__(self, address: HubAddress) -> None:
        """Sends nothing. Raises PushFailed without a network or a token, ParameterError for a broken environment."""
        check_hub()
        import huggingface_hub
        from huggingface_hub import constants

        self.address = address
        self.created = ""
        if constants.HF_HUB_OFFLINE:
            fix = "unset it, or write to a local folder"
            raise PushFailed("HF_HUB_OFFLINE=1 forbids uploading", where=str(address), fix=fix, state=NOTHING_WRITTEN)
        if huggingface_hub.get_token() is None:
            fix = "run `hf auth login`, or set HF_TOKEN, to a token that may write"
            what = "uploading requires a token of the Hub, and none is set"
            raise PushFailed(what, where=str(address), fix=fix, state=NOTHING_WRITTEN)
        bound_requests()
        self.api = huggingface_hub.HfApi()

    def check_token(self) -> None:
        """Raise PushFailed if the Hub does not accept the token."""
        self._call("checking the token", self.api.whoami)

    # the branch

    def head(self) -> str | None:
        """The commit that the branch stands for; None if there is no such repository or branch."""
        from huggingface_hub import errors

        try:
            commit = self._call("the commit of the branch", self._info)
        except PushFailed as error:
            cause = error.__cause__
            if isinstance(cause, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)) and _status(cause) == 404:
                return None
            raise
        return commit

    def _info(self) -> str:
        info = self.api.model_info(self.address.repo, revision=self.address.branch, timeout=60)
        return str(info.sha)

    def create(self, *, public: bool) -> str:
        """Create repository and branch if they are missing: the commit of the branch.

        A new branch begins with the first commit of the repository, which holds nothing but .gitattributes as a rule.

        public  who may see a repository that is created now; one that exists stays as visible as it is
        """
        head = self.head()
        if head is not None:
            return head
        repo, branch = self.address.repo, self.address.branch
        existed = self._call("looking for the repository", lambda: self.api.repo_exists(repo))
        self._call("creating the repository", lambda: self.api.create_repo(repo, private=not public, exist_ok=True))
        if not existed:
            self.created = f"The empty {'public' if public else 'private'} repository {repo} was created."
        if branch != MAIN and self.head() is None:
            first = self._call("its first commit", lambda: self.api.list_repo_commits(repo)[-1].commit_id)
            self._call(
                "creating the branch", lambda: self.api.create_branch(repo, branch=branch, revision=first, exist_ok=True)
            )
        head = self.head()
        if head is None:
            raise PushFailed("the Hub does not show the branch that was created", where=str(self.address), fix="run again")
        return head

    # files

    def files(self, commit: str) -> dict[str, HubContent]:
        """The files of a commit by name."""
        from huggingface_hub.hf_api import RepoFile

        def listed() -> dict[str, HubContent]:
            tree = self.api.list_repo_tree(self.address.repo, recursive=True, revision=commit)
            return {
                entry.path: HubContent(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else "")
                for entry in tree
                if isinstance(entry, RepoFile)
            }

        return self._call("listing the files", listed)

    def manifest(self, commit: str) -> Manifest:
        """weightsmith's manifest in a commit. Raises also the errors of `decode_manifest`."""
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        where = f"{self.address}/{MANIFEST_NAME}"
        url = huggingface_hub.hf_hub_url(self.address.repo, MANIFEST_NAME, revision=commit)

        def read() -> bytes:
            data = bytearray()
            with huggingface_hub.get_session().stream("GET", url, headers=build_hf_headers()) as answer:
                hf_raise_for_status(answer)
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MAX_MANIFEST_BYTES:
                        break
            return bytes(data)

        data = self._call(f"reading {MANIFEST_NAME}", read)
        if len(data) > MAX_MANIFEST_BYTES:
            what = f"more than the {MAX_MANIFEST_BYTES:,} bytes that a manifest can have"
            raise PushFailed(what, where=where, fix="remove it")
        return decode_manifest(data, where)

    def upload(self, path: Path, name: str) -> CommitOperationAdd:
        """Upload a file, for a commit that adds it; nothing is visible before. Raises also for one that LFS does not take."""
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(name, path)

        def send() -> None:
            self.api.preupload_lfs_files(self.address.repo, [addition], revision=self.address.branch)

        self._call(f"uploading {name}", send)
        if not addition._is_uploaded:
            settings = ".gitignore" if addition._should_ignore else ".gitattributes"
            what = f"the repository does not take this weight file, because of its {settings}"
            fix = f"remove {settings} from the repository, or choose another one"
            raise PushFailed(what, where=f"{self.address}/{name}", fix=fix)
        return addition

    def missing(self, files: Mapping[str, HubContent]) -> list[str]:
        """The uploaded files that the Hub no longer has: it may remove files that no commit has."""
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        names = {content.sha256: name for name, content in files.items()}
        infos = [UploadInfo(size=c.nbytes, sample=b"", sha256=bytes.fromhex(c.sha256)) for c in files.values()]

        def ask(batch: list[UploadInfo]) -> list[str]:
            actions, problems, _ = post_lfs_batch_info(
                batch, None, "model", self.address.repo, self.address.branch, self.api.endpoint
            )
            return [names[reply["oid"]] for reply in (*actions, *problems) if reply.get("actions") or "error" in reply]

        missing: list[str] = []
        for start in range(0, len(infos), _BATCH):
            missing += self._call("asking for the uploaded files", partial(ask, infos[start : start + _BATCH]))
        return missing

    def commit(
        self,
        operations: Sequence[CommitOperationAdd | CommitOperationDelete],
        parent: str,
        message: str,
        is_ours: Callable[[str], bool],
    ) -> str:
        """Commit once, on top of `parent`: the new commit.

        is_ours  a commit holds what is committed here: that of a request whose answer was lost

        Raises BranchMoved if the branch no longer stands for `parent`.
        """

        def send() -> str:
            try:
                with no_panic():
                    done = self.api.create_commit(
                        self.address.repo,
                        operations,
                        commit_message=message,
                        revision=self.address.branch,
                        parent_commit=parent,
                    )
                return str(done.oid)
            except Exception as error:
                if (head := self.head()) == parent:
                    raise
                if head is not None and (ours := self.since(parent, is_ours)):
                    return ours
                raise moved(self.address, parent, head) from error

        return self._call("the commit", send)

    def since(self, parent: str, is_ours: Callable[[str], bool]) -> str:
        """The commit of ours among the last ones of the branch after `parent`; "" if there is none."""
        repo, branch = self.address.repo, self.address.branch
        commits = self._call("listing the commits", lambda: self.api.list_repo_commits(repo, revision=branch))
        later = takewhile(lambda oid: oid != parent, (commit.commit_id for commit in commits))
        return next(filter(is_ours, islice(later, _MOST_COMMITS)), "")

    # requests

    def _call(self, what: str, function: Callable[[], _Result]) -> _Result:
        """What a function returns that makes a request. Raises PushFailed."""

        def once() -> _Result:
            with no_panic():
                return function()

        try:
            return retry(once, _is_transient, PATIENCE)
        except PushFailed:
            raise
        except Exception as error:
            raise _failed(error, str(self.address), what) from error


class BranchMoved(PushFailed):
    """Someone else has committed to the branch."""


def moved(address: HubAddress, parent: str, head: str | None, *, committed: bool = False) -> BranchMoved:
    """The error for a branch that stands for `head`, where a run began with `parent`. committed: or made that commit itself."""
    if committed:
        what = "an interrupted run has committed this model, and the branch was changed after that"
        details = (f"its commit  {parent}", f"now         {head or 'deleted'}")
        fix = "look at what was committed there; to commit this model again, run with --overwrite (overwrite=True)"
        return BranchMoved(what, where=str(address), details=details, fix=fix, state="This run has committed nothing.")
    what = "the branch was changed after this run began, so nothing was committed"
    fix = "look at what was committed there; the same command then continues from it, without computing or uploading again"
    return BranchMoved(what, where=str(address), details=(f"began with  {parent}", f"now         {head or 'deleted'}"), fix=fix)


def uploaded(name: str, content: HubContent) -> CommitOperationAdd:
    """The operation that adds a file which an earlier run has uploaded; its bytes are not here."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    addition = CommitOperationAdd(name, b"")
    addition.upload_info = UploadInfo(size=content.nbytes, sample=b"", sha256=bytes.fromhex(content.sha256))
    addition._upload_mode, addition._should_ignore, addition._is_uploaded = "lfs", False, True
    return addition


@contextmanager
def no_bars() -> Iterator[None]:
    """No progress bars of huggingface_hub: there is one of ours."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _status(error: BaseException) -> int:
    """The status with which the Hub, or the place of the bytes, refused; 0 without an answer."""
    return next((answer.status_code for cause in causes(error) if (answer := getattr(cause, "response", None)) is not None), 0)


def _is_transient(error: BaseException) -> bool:
    """The same request may succeed: see `failures`; or a signed address has expired."""
    if isinstance(error, PushFailed):
        return False
    from huggingface_hub import constants

    answer = next((response for cause in causes(error) if (response := getattr(cause, "response", None)) is not None), None)
    if answer is None:
        return lasting(error) is None and not isinstance(error, LookupError)  # of an answer that is not as expected
    elsewhere = urlsplit(str(answer.url)).netloc != urlsplit(constants.ENDPOINT).netloc
    return passes(answer.status_code) or (elsewhere and answer.status_code == 403)


def _failed(error: BaseException, where: str, doing: str) -> PushFailed:
    """The error for a request that failed for good."""
    status = _status(error)
    what, fix = _FIXES.get(status, ("", ""))
    if not what and status:
        what, fix = f"the Hub answered with {status}", _AGAIN
    elif not what:
        stays = lasting(error, "HF_ENDPOINT")
        what = f"the Hub cannot be reached: {stays.what}" if stays else "the Hub does not answer, or not as expected"
        fix = stays.fix if stays else f"check the network and HF_ENDPOINT, and {_AGAIN}"
    details = tuple(dict.fromkeys(f"{type(cause).__name__}: {first_line(cause)}" for cause in causes(error)))[:3]
    return PushFailed(f"{what} ({doing})", where=where, details=details, fix=fix)
