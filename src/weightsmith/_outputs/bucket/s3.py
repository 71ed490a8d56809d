"""S3 and stores with its API, through botocore.

botocore finds credentials, region and endpoint in the standard places (environment, ~/.aws, AWS_ENDPOINT_URL) and verifies TLS.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weightsmith._base.errors import StoreError
from weightsmith._files.remote.stores import aws_endpoint, aws_region
from weightsmith._outputs.bucket.client import (
    AGAIN,
    TOKEN,
    UPLOADS,
    Bucket,
    Damaged,
    Empty,
    Head,
    Missing,
    NoConditions,
    Object,
    Page,
    Refused,
    Run,
    TransientError,
    age,
    md5_of,
    refusal,
    unanswered,
)

_EQUAL_PARTS = ".r2.cloudflarestorage.com"
"""Hosts of a store that takes parts of one size only."""
_ENDPOINT = "AWS_ENDPOINT_URL"
_KINDS: Mapping[type[StoreError], tuple[str, ...]] = {
    Missing: ("404", "NoSuchKey", "NoSuchUpload", "NotFound"),
    Refused: ("409", "412", "PreconditionFailed", "ConditionalRequestConflict"),
    Damaged: ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"),
    NoConditions: ("501", "NotImplemented"),
    Empty: ("416", "InvalidRange"),
    TransientError: ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")
_FIXES = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "AccessDenied": "use credentials that may list, read, write and delete there",
    "403": "use credentials that may list, read, write and delete there",
    "InvalidAccessKeyId": "check the credentials: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "SignatureDoesNotMatch": "check the credentials: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "renew the credentials, and run again",
    "RequestTimeTooSkewed": "set the clock of this machine",
}


class S3Bucket(Bucket):
    """See `Bucket`."""

    scheme = "s3"

    def __init__(self, name: str) -> None:
        """See `Bucket`."""
        super().__init__(name)
        with self._importing("writing to a bucket", "botocore", "remote"):
            import botocore.session
            from botocore import exceptions
            from botocore.config import Config
        self._client_error = exceptions.ClientError
        aws_endpoint()  # and the keys, before botocore sees them
        session = botocore.session.get_session()
        config = Config(
            retries={"total_max_attempts": 1},  # `retry` repeats
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=2 * UPLOADS,
            request_checksum_calculation="when_required",  # Content-MD5 instead, which every store compares
            response_checksum_validation="when_required",
            # stores other than Amazon's may have no names of buckets
            s3={"addressing_style": "path"} if aws_endpoint(session) else None,
        )
        with self._opening(f"correct {_ENDPOINT}, or AWS_REGION"):
            try:
                self._client = session.create_client("s3", region_name=aws_region(session) or None, config=config)
            except (exceptions.BotoCoreError, exceptions.HTTPClientError) as error:
                raise self._failed(error, "", self._shown("")) from error
        endpoint = self._client.meta.endpoint_url
        self._check_tls(endpoint)
        self.equal_parts = _EQUAL_PARTS in endpoint or bool(os.environ.get("WEIGHTSMITH_EQUAL_PARTS"))

    def _get(self, key: str, nbytes: int | None) -> Object:
        answer = self._read(key, {} if nbytes is None else {"Range": f"bytes=0-{nbytes - 1}"})
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return Object(answer["Body"], answer["ETag"], age(now, answer["LastModified"]))

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `Bucket`."""
        return bytes(self._read(key, {"Range": f"bytes={start}-{start + nbytes - 1}"})["Body"])

    def _read(self, key: str, more: Mapping[str, str]) -> Mapping[str, Any]:
        """The answer to a request for bytes, and the bytes in it; a body that was cut off is an error of the request."""

        def get() -> Mapping[str, Any]:
            answer = self._client.get_object(Bucket=self.name, Key=key, **more)
            return {**answer, "Body": answer["Body"].read()}

        return self._ask("get_object", key, get)

    def _put(self, key: str, data: bytes, token: str, etag: str | None) -> str:
        more: dict[str, Any] = {"Metadata": {TOKEN: token}} if token else {}
        if etag is not None:
            more |= {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        return self._send("put_object", key, data, md5_of(data), **more)

    def _head(self, key: str) -> Head:
        found = self._call("head_object", key)
        return Head(found["ContentLength"], found["Metadata"].get(TOKEN, ""))

    def _delete(self, key: str) -> None:
        self._call("delete_object", key)

    def _list(self, prefix: str, marker: Any, *, folders: bool) -> Page:
        more = {"Prefix": prefix, "Delimiter": "/"} if folders else {"Prefix": prefix}
        found, following = self._page("list_objects_v2", None, "ContinuationToken", marker, more)
        if folders:
            return Page([each["Prefix"] for each in found.get("CommonPrefixes", ())], following)
        return Page([(each["Key"], each["Size"]) for each in found.get("Contents", ())], following)

    def begin(self, key: str, token: str) -> str:
        """See `Bucket`."""
        return str(self._call("create_multipart_upload", key, Metadata={TOKEN: token})["UploadId"])

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `Bucket`."""
        return self._send("upload_part", key, data, md5, UploadId=upload, PartNumber=number)

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `Bucket`."""
        with suppress(StoreError):  # another store, no permission, changed: uploading says what is wrong
            copied = self._call(
                "upload_part_copy",
                key,
                UploadId=upload,
                PartNumber=number,
                CopySource={"Bucket": run.bucket, "Key": run.key},
                CopySourceIfMatch=run.etag,
                CopySourceRange=f"bytes={run.start}-{run.start + nbytes - 1}",
            )
            return str(copied["CopyPartResult"]["ETag"])
        return ""

    def _parts(self, key: str, upload: str, marker: Any) -> Page:
        found, following = self._page("list_parts", key, "PartNumberMarker", marker, {"UploadId": upload})
        return Page([(each["PartNumber"], (each["ETag"], each["Size"])) for each in found.get("Parts", ())], following)

    def _complete(self, key: str, upload: str, etags: Sequence[str]) -> None:
        listed = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(etags, 1)]
        self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": listed})

    def _abort(self, key: str, upload: str) -> None:
        self._call("abort_multipart_upload", key, UploadId=upload)

    # requests

    def _page(
        self, operation: str, key: str | None, name: str, marker: Any, more: Mapping[str, str]
    ) -> tuple[Mapping[str, Any], Any]:
        """A page of a list, and the marker of the next one. name: of the marker, in the request for a page."""
        found = self._call(operation, key, **more, **({} if marker is None else {name: marker}))
        return found, found.get(f"Next{name}", "") if found.get("IsTruncated") else None

    def _send(self, operation: str, key: str, data: bytes | bytearray, md5: bytes, **more: Any) -> str:
        more |= {"Body": data, "ContentMD5": base64.b64encode(md5).decode()}
        return str(self._call(operation, key, **more)["ETag"])

    def _call(self, operation: str, key: str | None, **more: Any) -> Mapping[str, Any]:
        own = more if key is None else {**more, "Key": key}
        return self._ask(operation, key or "", lambda: getattr(self._client, operation)(Bucket=self.name, **own))

    def _failed(self, error: Any, operation: str, where: str) -> StoreError:
        if not isinstance(error, self._client_error):
            if type(error).__name__ in _NO_CREDENTIALS:
                fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in: aws sso login"
                return StoreError("there are no usable credentials for the store", where=where, fix=fix)
            return unanswered(error, where, _ENDPOINT)
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = next((kind for kind, codes in _KINDS.items() if code in codes), None)
        return refusal(kind, error.operation_name, code, status, where, _FIXES.get(code, AGAIN))
