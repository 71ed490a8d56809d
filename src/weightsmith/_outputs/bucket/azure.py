"""Azure Blob Storage, through azure-storage-blob.

A part is a block. Azure lists blocks by name and size, and all writers of a blob share them. So the name of a block holds the
id of its upload, the number of the part and its MD5, which was compared when the block was sent or copied. An upload that was
begun is not known to the store before its first block: its id says which work has begun it, which completing it stores.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from weightsmith._base.errors import StoreError
from weightsmith._base.installation import install
from weightsmith._files.remote.stores import azure, azure_identity, azure_token
from weightsmith._outputs.bucket.client import (
    AGAIN,
    TOKEN,
    Bucket,
    Damaged,
    Empty,
    Head,
    Missing,
    Object,
    Page,
    Refused,
    Run,
    age,
    etag_of,
    refusal,
    unanswered,
)

_ENDPOINT = "the endpoint of the account"
_KINDS: Mapping[type[StoreError], tuple[str, ...]] = {
    Missing: ("BlobNotFound", "ResourceNotFound", "InvalidBlockList"),
    Refused: ("BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet", "UncommittedBlob"),
    Damaged: ("Md5Mismatch",),
    StoreError: ("ContainerNotFound",),
}
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


class AzureBucket(Bucket):
    """See `Bucket`. The bucket is a container of the account that the environment names."""

    scheme = "az"

    def __init__(self, name: str) -> None:
        """See `Bucket`. Raises StoreError also if no account is named."""
        super().__init__(name)
        where = self._shown("")
        with self._importing("writing to Azure", "azure-storage-blob", "azure"):
            from azure.core import MatchConditions, exceptions
            from azure.storage.blob import BlobBlock, BlobServiceClient
        self._response_error, self._credential_error = exceptions.HttpResponseError, exceptions.ClientAuthenticationError
        self._same, self._absent = MatchConditions.IfNotModified, MatchConditions.IfMissing
        self._block = BlobBlock
        access = azure()
        if access is None:
            fix = "set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING"
            raise StoreError("the environment does not name the account of the container", where=where, fix=fix)
        self._check_tls(access.endpoint)
        self._access = access
        self.shows_requests = bool(access.sas)  # the addresses have it
        self._identity: Any = None
        if not access.key and not access.sas:
            try:
                self._identity = azure_identity()
            except ImportError as error:
                fix = f"give the key of the account, or install azure-identity: {install('azure')}"
                raise StoreError("an identity of Azure requires azure-identity", where=where, fix=fix) from error
        key = {"account_name": access.account, "account_key": access.key} if access.key else None
        with self._opening(f"correct {_ENDPOINT}; {_CREDENTIALS}"):
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

    # small objects

    def _get(self, key: str, nbytes: int | None) -> Object:
        now: list[str] = []
        span = {} if nbytes is None else {"offset": 0, "length": nbytes}

        def get() -> Any:
            seen = {"raw_response_hook": lambda answer: now.append(answer.http_response.headers.get("Date", ""))}
            found = self._blob(key).download_blob(**span, **seen)
            return found.readall(), found.properties

        data, about = self._ask("Get Blob", key, get)
        return Object(data, about.etag, age(now[-1] if now else None, about.last_modified))

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `Bucket`."""
        return bytes(self._ask("Get Blob", key, lambda: self._blob(key).download_blob(offset=start, length=nbytes).readall()))

    def _put(self, key: str, data: bytes, token: str, etag: str | None) -> str:
        more: dict[str, Any] = {"etag": etag, "match_condition": self._same} if etag else {}
        put, metadata = self._blob(key).upload_blob, {TOKEN: token} if token else None
        sent = {"overwrite": etag != "", "metadata": metadata, "validate_content": True, **more}
        return str(self._ask("Put Blob", key, lambda: put(data, **sent))["etag"])

    def _head(self, key: str) -> Head:
        found = self._ask("Get Blob Properties", key, self._blob(key).get_blob_properties)
        return Head(found.size, (found.metadata or {}).get(TOKEN, ""))

    def _delete(self, key: str) -> None:
        self._ask("Delete Blob", key, self._blob(key).delete_blob)

    def _list(self, prefix: str, marker: Any, *, folders: bool) -> Page:
        begin = self._container.walk_blobs if folders else self._container.list_blobs
        listed = begin(name_starts_with=prefix).by_page(marker)
        found = self._ask("List Blobs", prefix, lambda: [*next(listed)])
        if folders:
            return Page([each.name for each in found if each.name.endswith("/")], listed.continuation_token or None)
        return Page([(each.name, each.size) for each in found], listed.continuation_token or None)

    # uploads in parts

    def begin(self, key: str, token: str) -> str:
        """See `Bucket`. Sends nothing."""
        return f"{secrets.token_hex(_ID_BYTES)}.{token}"

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `Bucket`."""
        block, stage = _Block(_id_of(upload), number, md5), self._blob(key).stage_block
        self._ask("Put Block", key, lambda: stage(block.name, bytes(data), validate_content=True))
        return etag_of(md5)

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `Bucket`."""
        block, stage = _Block(_id_of(upload), number, md5), self._blob(key).stage_block_from_url
        span = {"source_offset": run.start, "source_length": nbytes}
        sums = {"source_content_md5": bytearray(md5)}  # so it need not be the version that was read
        with suppress(StoreError):  # no permission, changed, not possible here: uploading says what is wrong
            url, more = self._source(run)
            self._ask("Put Block From URL", key, lambda: stage(block.name, url, **span, **sums, **more))
            return etag_of(md5)
        return ""

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

    def _parts(self, key: str, upload: str, marker: Any) -> Page:
        gone = Missing("there is no such upload", where=self._shown(key))
        if not _UPLOAD.fullmatch(upload):  # of a journal that is not ours
            raise gone
        committed, waiting = self._blocks(key)
        own = _id_of(upload)
        if any(block.id == own for block, _ in committed):  # it is complete
            raise gone
        return Page([(block.number, (etag_of(block.md5), size)) for block, size in waiting if block.id == own], None)

    def _complete(self, key: str, upload: str, etags: Sequence[str]) -> None:
        names = [_Block(_id_of(upload), i, bytes.fromhex(etag.strip('"'))).name for i, etag in enumerate(etags, 1)]
        blocks, metadata = [self._block(name) for name in names], {TOKEN: upload.partition(".")[2]}
        commit = self._blob(key).commit_block_list
        self._ask("Put Block List", key, lambda: commit(blocks, metadata=metadata, validate_content=True))

    def _abort(self, key: str, upload: str) -> None:
        """Blocks stay for a week where there is a blob of this name, or another upload of it."""
        if self.parts(key, upload) in (None, {}) or self.head(key) is not None:
            return
        _, waiting = self._listed(key)
        if len(waiting) != sum(block.id == _id_of(upload) for block, _ in _ours(waiting)):
            return  # what follows would discard the blocks of others too
        blob = self._blob(key)
        with suppress(Refused):  # of no blocks: an empty blob, for a moment
            self._ask("Put Block List", key, lambda: blob.commit_block_list([], match_condition=self._absent))
        with suppress(Refused):  # another program may have written it meanwhile
            found = self._ask("Get Blob Properties", key, blob.get_blob_properties)
            if not found.size:
                self._ask("Delete Blob", key, lambda: blob.delete_blob(etag=found.etag, match_condition=self._same))

    def _blocks(self, key: str) -> tuple[list[tuple[_Block, int]], list[tuple[_Block, int]]]:
        """The blocks of a blob that are ours, and their sizes: those that it consists of, and others."""
        committed, waiting = self._listed(key)
        return [*_ours(committed)], [*_ours(waiting)]

    def _listed(self, key: str) -> tuple[list[Any], list[Any]]:
        """All blocks of a blob: those that it consists of, and others."""
        try:
            committed, waiting = self._ask("Get Block List", key, lambda: self._blob(key).get_block_list("all"))
        except Missing:
            return [], []
        return committed, waiting

    # requests

    def _blob(self, key: str) -> Any:
        return self._container.get_blob_client(key)

    def _failed(self, error: Any, operation: str, where: str) -> StoreError:
        """Exceptions of azure-core, and of the libraries below it that it lets through."""
        answered = isinstance(error, self._response_error) and error.status_code is not None
        if isinstance(error, self._credential_error) and not answered:
            fix = f"run `az login`, or {_CREDENTIALS}"
            return StoreError("there are no usable credentials for the store", where=where, fix=fix)
        if not answered:
            return unanswered(error, where, _ENDPOINT)
        status, found = error.status_code, getattr(error, "error_code", None)  # an enum or a text
        code = str(getattr(found, "value", found) or "unknown")
        kind = next((kind for kind, codes in _KINDS.items() if code in codes), None)
        kind = kind or {404: Missing, 412: Refused, 416: Empty}.get(status)
        return refusal(kind, operation, code, status, where, _FIXES.get(code, _CREDENTIALS if status in (401, 403) else AGAIN))


def _id_of(upload: str) -> bytes:
    return bytes.fromhex(upload.partition(".")[0])


def _ours(blocks: Sequence[Any]) -> Iterator[tuple[_Block, int]]:
    for each in blocks:
        name = base64.b64decode(each.id)
        if len(name) == _ID_BYTES + _NUMBER_BYTES + _MD5_BYTES:
            number = int.from_bytes(name[_ID_BYTES:-_MD5_BYTES], "big")
            yield _Block(name[:_ID_BYTES], number, name[-_MD5_BYTES:]), each.size
