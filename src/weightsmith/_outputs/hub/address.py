"""Addresses of outputs on the Hub: `hf://org/name`, or `hf://org/name@branch`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from weightsmith._base.errors import NOTHING_WRITTEN, PushFailed, legible
from weightsmith._outputs.local.target import absolute

SCHEME = "hf://"
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
        return SCHEME + self.spec

    def __fspath__(self) -> str:
        return str(self)


def is_hub_address(out: object) -> bool:
    """True for an address on the Hub."""
    return isinstance(out, str) and out.lower().startswith(SCHEME)


def parse_hub_address(text: str) -> HubAddress:
    """What `hf://org/name[@branch]`, or `org/name[@branch]` after --push, names. Raises PushFailed."""
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it marks no exports

    place = text[len(SCHEME) :] if is_hub_address(text) else text
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
