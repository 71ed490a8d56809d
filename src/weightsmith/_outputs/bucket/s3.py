"""S3 and stores with its API, through botocore.

botocore finds credentials, region and endpoint in the standard places (environment, ~/.aws, AWS_ENDPOINT_URL) and verifies TLS.
`client.retry` repeats requests, as for every store.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from weightsmith._base.errors import StoreError, WeightsmithError, first_line, legible
from weightsmith._files.remote.access import aws_endpoint, aws_region
from weightsmith._files.remote.environment import check_network
from weightsmith._files.remote.failures import no_panic, passes
from weightsmith._outputs.bucket.client import (
    TOKEN,
    UPLOADS,
    Damaged,
    Empty,
    Head,
    Missing,
    NoConditions,
    Object,
    Refused,
    Run,
    TransientError,
    check_tls,
    md5_of,
    not_installed,
    pages,
    retry,
    too_long,
    unanswered,
    written_before,
)

_EQUAL_PARTS = ".r2.cloudflarestorage.com"
"""Hosts of a store that takes parts of one size only."""
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
"""Codes for a body that was damaged or cut on its way."""
_SLOW = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"})
_ENDPOINT = "AWS_ENDPOINT_URL"
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_REFUSED = frozenset({"409", "412", "PreconditionFailed", "ConditionalRequestConflict"})
_EMPTY = frozenset({"416", "InvalidRange"})
_UNSUPPORTED = frozenset({"501", "NotImplemented"})
_FIXES = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "AccessDenied": "use credentials that may list, read, write and delete there",
    "403": "use credentials that may list, read, write and delete there",
    "InvalidAccessKeyId": "check the credentials: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "SignatureDoesNotMatch": "check the credentials: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "renew the credentials, and run again",
    "RequestTimeTooSkewed": "set the clock of this machine",
}


class S3Bucket:
    """See `client.Bucket`."""

    def __init__(self, name: str) -> None:
        """Sends nothing. Raises StoreError without botocore, and for settings that cannot be used."""
        try:
            import botocore.session
            from botocore.config import Config
        except ImportError as error:
            raise not_installed("writing to a bucket", "botocore", "remote", f"s3://{name}") from error
        from botocore import exceptions

        self.name = name
        self._client_error = exceptions.ClientError
        check_network("s3")
        aws_endpoint()  # and the keys, before botocore sees them
        session = botocore.session.get_session()
        config = Config(
            retries={"total_max_attempts": 1},  # `retry` repeats
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=2 * UPLOADS,
            request_checksum_calculation="when_required",  # Content-MD5 instead, which every store compares
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"}
            if aws_endpoint(session)
            else None,  # stores other than Amazon's may have no names of buckets
        )
        try:
            with no_panic():
                self._client = session.create_client("s3", region_name=aws_region(session) or None, config=config)
        except WeightsmithError:
            raise
        except (exceptions.BotoCoreError, exceptions.HTTPClientError) as error:
            raise self._failed(error, "") from error
        except Exception as error:  # an endpoint or a region that botocore takes apart
            what = f"the store cannot be opened: {type(error).__name__}: {first_line(error)}"
            raise StoreError(what, where=f"s3://{name}", fix=f"correct {_ENDPOINT}, or AWS_REGION") from error
        endpoint = self._client.meta.endpoint_url
        check_tls(endpoint, f"s3://{name}")
        self.equal_parts = _EQUAL_PARTS in endpoint or bool(os.environ.get("WEIGHTSMITH_EQUAL_PARTS"))

    # small objects

    def read(self, key: str, max_bytes: int) -> Object | None:
        """See `client.Bucket`."""
        try:
            answer, data = self._get(key, Range=f"bytes=0-{max_bytes}")
        except Missing:
            return None
        except Empty:
            answer, data = self._get(key)
        if len(data) > max_bytes:
            raise too_long(max_bytes, self._shown(key))
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        age = (parsedate_to_datetime(now) - answer["LastModified"]).total_seconds() if now else 0.0
        return Object(data, answer["ETag"], age)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `client.Bucket`."""
        return self._get(key, Range=f"bytes={start}-{start + nbytes - 1}")[1]

    def _get(self, key: str, **more: str) -> tuple[Mapping[str, Any], bytes]:
        def once() -> tuple[Mapping[str, Any], bytes]:
            answer = self._once("get_object", key, more)
            try:
                with no_panic():
                    return answer, bytes(answer["Body"].read())
            except Exception as error:  # a body that was cut off
                raise self._failed(error, key) from error

        return retry(once)

    def put(self, key: str, data: bytes, token: str = "") -> str:
        """See `client.Bucket`."""
        more = {"Metadata": {TOKEN: token}} if token else {}
        return str(self._send("put_object", key, data, md5_of(data), **more)["ETag"])

    def create(self, key: str, data: bytes) -> str | None:
        """See `client.Bucket`."""
        return self._conditional(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        """See `client.Bucket`."""
        return self._conditional(key, data, IfMatch=etag)

    def _conditional(self, key: str, data: bytes, **condition: str) -> str | None:
        try:
            return str(self._send("put_object", key, data, md5_of(data), **condition)["ETag"])
        except (Refused, Missing):
            return written_before(self, key, data)

    def head(self, key: str) -> Head | None:
        """See `client.Bucket`."""
        try:
            found = self._call("head_object", key)
        except Missing:
            return None
        return Head(found["ContentLength"], found["Metadata"].get(TOKEN, ""))

    def delete(self, key: str) -> None:
        """See `client.Bucket`."""
        try:
            self._call("delete_object", key)
        except Missing:
            pass

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `client.Bucket`."""
        for page in self._pages("list_objects_v2", None, "ContinuationToken", Prefix=prefix):
            yield from ((each["Key"], each["Size"]) for each in page.get("Contents", ()))

    def folders(self, prefix: str) -> Iterator[str]:
        """See `client.Bucket`."""
        for page in self._pages("list_objects_v2", None, "ContinuationToken", Prefix=prefix, Delimiter="/"):
            yield from (each["Prefix"] for each in page.get("CommonPrefixes", ()))

    # uploads in parts

    def begin(self, key: str, token: str) -> str:
        """See `client.Bucket`."""
        return str(self._call("create_multipart_upload", key, Metadata={TOKEN: token})["UploadId"])

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `client.Bucket`."""
        return str(self._send("upload_part", key, data, md5, UploadId=upload, PartNumber=number)["ETag"])

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `client.Bucket`."""
        last = run.start + nbytes - 1
        try:
            copied = self._call(
                "upload_part_copy",
                key,
                UploadId=upload,
                PartNumber=number,
                CopySource={"Bucket": run.bucket, "Key": run.key},
                CopySourceIfMatch=run.etag,
                CopySourceRange=f"bytes={run.start}-{last}",
            )
        except StoreError:  # another store, no permission, changed: the bytes are here, and uploading says what is wrong
            return ""
        return str(copied["CopyPartResult"]["ETag"])

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        """See `client.Bucket`."""
        try:
            listed = [*self._pages("list_parts", key, "PartNumberMarker", UploadId=upload)]
        except Missing:
            return None
        return {each["PartNumber"]: (each["ETag"], each["Size"]) for page in listed for each in page.get("Parts", ())}

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        """See `client.Bucket`."""
        listed = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(etags, 1)]
        try:
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": listed})
            return True
        except Missing:
            return False

    def abort(self, key: str, upload: str) -> None:
        """See `client.Bucket`."""
        try:
            self._call("abort_multipart_upload", key, UploadId=upload)
        except Missing:
            pass

    # requests

    def _pages(self, operation: str, key: str | None, *markers: str, **more: str) -> Iterator[Mapping[str, Any]]:
        """The pages of a list. markers: where the next one begins, as the request for it says."""

        def ask(marker: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
            page = self._call(operation, key, **more, **marker)
            following = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}
            return page, following if page.get("IsTruncated") else None

        return pages(ask, self._shown(key or more["Prefix"]))

    def _send(self, operation: str, key: str, data: bytes | bytearray, md5: bytes, **more: Any) -> Mapping[str, Any]:
        more |= {"Body": data, "ContentMD5": base64.b64encode(md5).decode()}
        return self._call(operation, key, **more)

    def _call(self, operation: str, key: str | None, **more: Any) -> Mapping[str, Any]:
        return retry(lambda: self._once(operation, key, more))

    def _once(self, operation: str, key: str | None, more: Mapping[str, Any]) -> Mapping[str, Any]:
        own = dict(more) if key is None else {**more, "Key": key}
        try:
            with no_panic():
                answer: Mapping[str, Any] = getattr(self._client, operation)(Bucket=self.name, **own)
            return answer
        except Exception as error:
            raise self._failed(error, key or "") from error

    def _failed(self, error: Any, key: str) -> StoreError:
        """The error for a request that failed for good."""
        where = self._shown(key)
        again = "run again: what is uploaded is kept"
        if not isinstance(error, self._client_error):
            kind = type(error).__name__
            if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"):
                fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in: aws sso login"
                return StoreError("there are no usable credentials for the store", where=where, fix=fix)
            return unanswered(error, where, _ENDPOINT, again)
        code = _code(error)
        kinds = {_MISSING: Missing, _REFUSED: Refused, _DAMAGED: Damaged, _UNSUPPORTED: NoConditions, _EMPTY: Empty}
        kind_of = next((kind for codes, kind in kinds.items() if code in codes), StoreError)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        what = f"the store refused {error.operation_name}: {legible(code, 80)}"
        if kind_of is StoreError and (passes(status) or code in _SLOW):
            kind_of = TransientError
            what = f"the store kept answering {legible(code, 80)} ({status}) to {error.operation_name}"
        return kind_of(what, where=where, fix=_FIXES.get(code, again))

    def _shown(self, key: str) -> str:
        return f"s3://{self.name}/{key}"


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
