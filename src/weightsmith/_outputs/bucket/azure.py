"""Azure Blob Storage, through azure-storage-blob.

A part is a block. Azure lists blocks by name and size, and all writers of a blob share them. So the name of a block holds the
id of its upload, the number of the part and its MD5, which was compared when the block was sent or copied. An upload that was
begun is not known to the store before its first block: its id says which work has begun it, which completing it stores.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

from weightsmith._base.errors import StoreError, WeightsmithError, first_line, legible
from weightsmith._files.remote.access import azure, azure_identity, azure_token
from weightsmith._files.remote.environment import check_network
from weightsmith._files.remote.failures import no_panic, passes
from weightsmith._outputs.bucket.client import (
    TOKEN,
    Answer,
    Damaged,
    Empty,
    Head,
    Missing,
    Object,
    Refused,
    Run,
    TransientError,
    check_tls,
    etag_of,
    not_installed,
    pages,
    retry,
    too_long,
    unanswered,
    written_before,
)

_ENDPOINT = "the endpoint of the account"
_AGAIN = "run again: what is uploaded is kept"
_MISSING = frozenset({"BlobNotFound", "ResourceNotFound", "InvalidBlockList"})
_REFUSED = frozenset({"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet", "UncommittedBlob"})
_DAMAGED = frozenset({"Md5Mismatch"})
_CREDENTIALS = (
    "check the credentials: AZURE_STORAGE_CONNECTION_STRING, the key or SAS of the account, or az login; and the clock"
)
_FIXES = {
    "ContainerNotFound": "create the container, or correct its name",
    "AuthenticationFailed": _CREDENTIALS,
    "NoAuthenticationInformation": _CREDENTIALS,
    "InvalidAuthenticationInfo": _CREDENTIALS,
    "AuthorizationFailure": "use credentials, from a network, that may list, read, write and delete there",
    "AuthorizationPermissionMismatch": "use credentials that may list, read, write and delete there",
    "InvalidBlobOrBlock": "another program has begun to upload this blob: delete it, or wait a week until its blocks expire",
}
_ID_BYTES, _NUMBER_BYTES, _MD5_BYTES = 8, 4, 16
_UPLOAD = re.compile(rf"[0-9a-f]{{{2 * _ID_BYTES}}}\..*")
_COPY_HOURS = 2
"""For which the store may read what it copies, if the account is given by its key."""


class _Block(NamedTuple):
    """What the name of a block says. id: of the upload."""

    id: bytes
    number: int
    md5: bytes

    @property
    def name(self) -> str:
        return base64.b64encode(self.id + self.number.to_bytes(_NUMBER_BYTES, "big") + self.md5).decode()


class AzureBucket:
    """See `client.Bucket`. The bucket is a container of the account that the environment names."""

    equal_parts = False

    def __init__(self, name: str) -> None:
        """Sends nothing. Raises StoreError without azure-storage-blob, and if no account is named."""
        where = f"az://{name}"
        try:
            from azure.core import MatchConditions, exceptions
            from azure.storage.blob import BlobBlock, BlobServiceClient
        except ImportError as error:
            raise not_installed("writing to Azure", "azure-storage-blob", "azure", where) from error
        self.name = name
        self._error, self._response_error = exceptions.AzureError, exceptions.HttpResponseError
        self._credential_error = exceptions.ClientAuthenticationError
        self._same, self._absent = MatchConditions.IfNotModified, MatchConditions.IfMissing
        self._block = BlobBlock
        check_network("az")
        access = azure()
        if access is None:
            fix = "set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING"
            raise StoreError("the environment does not name the account of the container", where=where, fix=fix)
        check_tls(access.endpoint, where)
        self._access = access
        self._identity: Any = None
        if not access.key and not access.sas:
            try:
                self._identity = azure_identity()
            except ImportError as error:
                fix = "give the key of the account, or install azure-identity: pip install 'weightsmith[azure]'"
                raise StoreError("an identity of Azure requires azure-identity", where=where, fix=fix) from error
        key = {"account_name": access.account, "account_key": access.key} if access.key else None
        try:
            with no_panic():
                self._service = BlobServiceClient(
                    access.endpoint,
                    credential=key or access.sas or self._identity,
                    retry_total=0,  # `retry` repeats
                    connection_timeout=10,
                    read_timeout=60,
                    max_single_put_size=1 << 30,
                    max_single_get_size=64 << 20,
                )
                self._container = self._service.get_container_client(name)
        except Exception as error:
            what = f"the store cannot be opened: {type(error).__name__}: {first_line(error)}"
            raise StoreError(what, where=where, fix=f"correct {_ENDPOINT}; {_CREDENTIALS}") from None

    # small objects

    def read(self, key: str, max_bytes: int) -> Object | None:
        """See `client.Bucket`."""
        try:
            return self._read(key, max_bytes, offset=0, length=max_bytes + 1)
        except Missing:
            return None
        except Empty:
            return self._read(key, max_bytes)

    def _read(self, key: str, max_bytes: int, **span: int) -> Object:
        now: list[str] = []

        def get() -> Any:
            seen = {"raw_response_hook": lambda answer: now.append(answer.http_response.headers.get("Date", ""))}
            found = self._blob(key).download_blob(**span, **seen)
            return found.readall(), found.properties

        data, about = self._call("Get Blob", key, get)
        if len(data) > max_bytes:
            raise too_long(max_bytes, self._shown(key))
        age = (parsedate_to_datetime(now[-1]) - about.last_modified).total_seconds() if now and now[-1] else 0.0
        return Object(data, about.etag, age)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `client.Bucket`."""
        return bytes(self._call("Get Blob", key, lambda: self._blob(key).download_blob(offset=start, length=nbytes).readall()))

    def put(self, key: str, data: bytes, token: str = "") -> str:
        """See `client.Bucket`."""
        return self._put(key, data, overwrite=True, metadata={TOKEN: token} if token else None)

    def create(self, key: str, data: bytes) -> str | None:
        """See `client.Bucket`."""
        try:
            return self._put(key, data, overwrite=False)
        except Refused:
            return written_before(self, key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        """See `client.Bucket`."""
        try:
            return self._put(key, data, overwrite=True, etag=etag, match_condition=self._same)
        except (Refused, Missing):
            return written_before(self, key, data)

    def _put(self, key: str, data: bytes, **more: Any) -> str:
        put = self._blob(key).upload_blob
        return str(self._call("Put Blob", key, lambda: put(data, validate_content=True, **more))["etag"])

    def head(self, key: str) -> Head | None:
        """See `client.Bucket`."""
        try:
            found = self._call("Get Blob Properties", key, self._blob(key).get_blob_properties)
        except Missing:
            return None
        return Head(found.size, (found.metadata or {}).get(TOKEN, ""))

    def delete(self, key: str) -> None:
        """See `client.Bucket`."""
        try:
            self._call("Delete Blob", key, self._blob(key).delete_blob)
        except Missing:
            pass

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `client.Bucket`."""
        yield from ((each.name, each.size) for each in self._list(lambda: self._container.list_blobs(name_starts_with=prefix)))

    def folders(self, prefix: str) -> Iterator[str]:
        """See `client.Bucket`."""
        walk = self._container.walk_blobs
        yield from (each.name for each in self._list(lambda: walk(name_starts_with=prefix)) if each.name.endswith("/"))

    def _list(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """The entries of a list, page by page."""
        listed = begin().by_page()

        def ask(_marker: dict[str, str]) -> tuple[list[Any], dict[str, str] | None]:
            page = self._call("List Blobs", "", lambda: [*next(listed)])
            following = listed.continuation_token
            return page, {"marker": following} if following else None

        for page in pages(ask, self._shown("")):
            yield from page

    # uploads in parts

    def begin(self, key: str, token: str) -> str:
        """See `client.Bucket`. Sends nothing."""
        return f"{secrets.token_hex(_ID_BYTES)}.{token}"

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `client.Bucket`."""
        block, stage = _Block(_id_of(upload), number, md5), self._blob(key).stage_block
        self._call("Put Block", key, lambda: stage(block.name, bytes(data), validate_content=True))
        return etag_of(md5)

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `client.Bucket`."""
        block, stage = _Block(_id_of(upload), number, md5), self._blob(key).stage_block_from_url
        try:
            url, more = self._source(run)
            self._call(
                "Put Block From URL",
                key,
                lambda: stage(
                    block.name,
                    url,
                    source_offset=run.start,
                    source_length=nbytes,
                    source_content_md5=bytearray(md5),  # so it need not be the version that was read
                    **more,
                ),
            )
        except StoreError:  # no permission, changed, not possible here: the bytes are here, and uploading says what is wrong
            return ""
        return etag_of(md5)

    def _source(self, run: Run) -> tuple[str, Mapping[str, str]]:
        """The address at which the store reads what it copies, and by whose right."""
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        blob = self._service.get_blob_client(run.bucket, run.key)
        if self._identity is not None:
            return blob.url, {"source_authorization": f"Bearer {azure_token(self._identity).token}"}
        if not self._access.key:
            return blob.url, {}  # the SAS is part of it
        signed = generate_blob_sas(
            self._access.account,
            run.bucket,
            run.key,
            account_key=self._access.key,
            permission=BlobSasPermissions(read=True),
            expiry=datetime.now(UTC) + timedelta(hours=_COPY_HOURS),
        )
        return f"{blob.url}?{signed}", {}

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        """See `client.Bucket`. There is no such upload once it is complete."""
        if not _UPLOAD.fullmatch(upload):  # of a journal that is not ours
            return None
        committed, waiting = self._blocks(key)
        own = _id_of(upload)
        if any(block.id == own for block, _ in committed):
            return None
        return {block.number: (etag_of(block.md5), nbytes) for block, nbytes in waiting if block.id == own}

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        """See `client.Bucket`."""
        names = [_Block(_id_of(upload), i, bytes.fromhex(etag.strip('"'))).name for i, etag in enumerate(etags, 1)]
        blocks, metadata = [self._block(name) for name in names], {TOKEN: upload.partition(".")[2]}
        commit = self._blob(key).commit_block_list
        try:
            self._call("Put Block List", key, lambda: commit(blocks, metadata=metadata, validate_content=True))
            return True
        except Missing:
            return False

    def abort(self, key: str, upload: str) -> None:
        """See `client.Bucket`. Blocks stay for a week where there is a blob of this name, or another upload of it."""
        if self.parts(key, upload) in (None, {}) or self.head(key) is not None:
            return
        _, waiting = self._listed(key)
        if len(waiting) != sum(block.id == _id_of(upload) for block, _ in _ours(waiting)):
            return  # what follows would discard the blocks of others too
        blob = self._blob(key)
        with suppress(Refused):  # of no blocks: an empty blob, for a moment
            self._call("Put Block List", key, lambda: blob.commit_block_list([], match_condition=self._absent))
        with suppress(Refused, Missing):  # another program may have written it meanwhile
            found = self._call("Get Blob Properties", key, blob.get_blob_properties)
            if not found.size:
                delete = partial(blob.delete_blob, etag=found.etag, match_condition=self._same)
                self._call("Delete Blob", key, delete)

    def _blocks(self, key: str) -> tuple[list[tuple[_Block, int]], list[tuple[_Block, int]]]:
        """The blocks of a blob that are ours, and their sizes: those that it consists of, and others."""
        committed, waiting = self._listed(key)
        return [*_ours(committed)], [*_ours(waiting)]

    def _listed(self, key: str) -> tuple[list[Any], list[Any]]:
        """All blocks of a blob: those that it consists of, and others."""
        try:
            committed, waiting = self._call("Get Block List", key, lambda: self._blob(key).get_block_list("all"))
        except Missing:
            return [], []
        return committed, waiting

    # requests

    def _blob(self, key: str) -> Any:
        return self._container.get_blob_client(key)

    def _call(self, operation: str, key: str, call: Callable[[], Answer]) -> Answer:
        def once() -> Answer:
            try:
                with no_panic():
                    return call()
            except (WeightsmithError, StopIteration):
                raise
            except Exception as error:  # those of azure-core, and what it lets through
                cause = None if self._access.sas else error  # whose text may have the address, and with it the SAS
                raise self._failed(error, operation, self._shown(key)) from cause

        return retry(once)

    def _failed(self, error: Any, operation: str, where: str) -> StoreError:
        """The error for a request that failed."""
        answered = isinstance(error, self._response_error) and error.status_code is not None
        if isinstance(error, self._credential_error) and not answered:
            fix = f"run `az login`, or {_CREDENTIALS}"
            return StoreError("there are no usable credentials for the store", where=where, fix=fix)
        if not answered:
            return unanswered(error, where, _ENDPOINT, _AGAIN)
        status, found = error.status_code, getattr(error, "error_code", None)  # an enum or a text
        code = str(getattr(found, "value", found) or "unknown")
        fix = _FIXES.get(code, _CREDENTIALS if status in (401, 403) else _AGAIN)
        if passes(status):
            return TransientError(
                f"the store kept answering {legible(code, 80)} ({status}) to {operation}", where=where, fix=fix
            )
        kinds = {_MISSING: Missing, _REFUSED: Refused, _DAMAGED: Damaged}
        kind = next((kind for codes, kind in kinds.items() if code in codes), None)
        if kind is None and code != "ContainerNotFound":
            kind = {404: Missing, 412: Refused, 416: Empty}.get(status)
        return (kind or StoreError)(f"the store refused {operation}: {legible(code, 80)} ({status})", where=where, fix=fix)

    def _shown(self, key: str) -> str:
        return f"az://{self.name}/{key}"


def _id_of(upload: str) -> bytes:
    return bytes.fromhex(upload.partition(".")[0])


def _ours(blocks: Sequence[Any]) -> Iterator[tuple[_Block, int]]:
    for each in blocks:
        name = base64.b64decode(each.id)
        if len(name) == _ID_BYTES + _NUMBER_BYTES + _MD5_BYTES:
            number = int.from_bytes(name[_ID_BYTES:-_MD5_BYTES], "big")
            yield _Block(name[:_ID_BYTES], number, name[-_MD5_BYTES:]), each.size
