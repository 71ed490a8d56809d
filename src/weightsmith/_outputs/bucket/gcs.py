"""Google Cloud Storage, over the authenticated session of google-auth.

Objects are written, read and listed with the JSON API, as the official client does. Uploads in parts are in the XML API alone.
The version of an object is its generation. There are no copies of ranges: `copy` leaves every part to be uploaded.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree

from weightsmith._base.errors import StoreError, legible
from weightsmith._files.remote import retries
from weightsmith._files.remote.stores import GOOGLE_ENDPOINT, google_credentials, google_endpoint
from weightsmith._outputs.bucket.client import (
    AGAIN,
    TOKEN,
    UPLOADS,
    Bucket,
    Damaged,
    Empty,
    Head,
    Missing,
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

_SECONDS = (10, 60)
"""To connect, and without a byte."""
_FIXES = {
    401: "check the credentials: gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    403: "use credentials that may list, read, write and delete there",
    404: "create the bucket, or correct its name",
}
_SLOW = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "SlowDown"})
_META = "x-goog-meta-"
_Found = TypeVar("_Found")


class GoogleBucket(Bucket):
    """See `Bucket`."""

    scheme = "gs"

    def __init__(self, name: str) -> None:
        """See `Bucket`. Raises StoreError also without credentials."""
        super().__init__(name)
        with self._importing("writing to Google Cloud Storage", "google-auth", "gcs"):
            import requests
            from google.auth import exceptions
            from google.auth.transport.requests import AuthorizedSession
        self._endpoint = google_endpoint() or GOOGLE_ENDPOINT
        self._check_tls(self._endpoint)
        self._refused_credentials = exceptions.GoogleAuthError
        self._unreached = exceptions.TransportError
        try:
            self._session = AuthorizedSession(google_credentials())
        except (exceptions.GoogleAuthError, ValueError, OSError) as error:
            raise _no_credentials(f"gs://{name}") from error
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=2 * UPLOADS)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)

    # objects: the JSON API

    def _get(self, key: str, nbytes: int | None) -> Object:
        for _ in range(retries.PATIENCE.failures + 1):
            about = self._call("GET", self._object(key), key)
            size, generation, written = self._json(
                about, key, lambda f: (int(f["size"]), str(f["generation"]), datetime.fromisoformat(f["updated"]))
            )
            version = {"alt": "media", "generation": generation}
            span = {"Range": f"bytes=0-{nbytes - 1}"} if nbytes is not None and nbytes < size else None
            try:
                data = self._call("GET", self._object(key), key, version, span).content
            except Missing:
                continue  # replaced between the two requests, or deleted
            return Object(data, generation, age(about.headers.get("Date"), written))
        raise TransientError("the object is replaced again and again", where=self._shown(key), fix=AGAIN)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `Bucket`."""
        span = {"Range": f"bytes={start}-{start + nbytes - 1}"}
        return bytes(self._call("GET", self._object(key), key, {"alt": "media"}, span).content)

    def _put(self, key: str, data: bytes, token: str, etag: str | None) -> str:
        condition = {} if etag is None else {"ifGenerationMatch": etag or "0"}
        md5 = base64.b64encode(md5_of(data)).decode()
        border = secrets.token_hex(16)
        about = json.dumps({"name": key, "md5Hash": md5} | ({"metadata": {TOKEN: token}} if token else {}))
        body = (
            f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{about}\r\n"
            f"--{border}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode() + data
        body += f"\r\n--{border}--\r\n".encode()
        query = {"uploadType": "multipart", **condition}
        kind = {"Content-Type": f"multipart/related; boundary={border}"}
        path = f"/upload/storage/v1/b/{quote(self.name, safe='')}/o"
        return self._json(self._call("POST", path, key, query, kind, body), key, lambda f: str(f["generation"]))

    def _head(self, key: str) -> Head:
        found = self._call("GET", self._object(key), key)
        return self._json(found, key, lambda f: Head(int(f["size"]), str(f.get("metadata", {}).get(TOKEN, ""))))

    def _delete(self, key: str) -> None:
        self._call("DELETE", self._object(key), key)

    def _list(self, prefix: str, marker: Any, *, folders: bool) -> Page:
        query = {"prefix": prefix, "fields": "items(name,size),prefixes,nextPageToken"}
        query |= {"delimiter": "/"} if folders else {}
        query |= {} if marker is None else {"pageToken": marker}

        def page(found: Any) -> Page:
            objects = [(str(each["name"]), int(each["size"])) for each in found.get("items", ())]
            return Page([*map(str, found.get("prefixes", ()))] if folders else objects, found.get("nextPageToken") or None)

        return self._json(self._call("GET", self._object(), prefix, query), prefix, page)

    def _json(self, answer: Any, key: str, pick: Callable[[Any], _Found]) -> _Found:
        """What `pick` finds in an answer in JSON."""
        try:
            return pick(answer.json())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._unexpected("JSON", key) from error

    def _unexpected(self, kind: str, key: str) -> StoreError:
        what = f"the answer of the store is not as expected ({kind})"
        return StoreError(what, where=self._shown(key), fix=f"check GOOGLE_BASE_URL, and {AGAIN}")

    def _object(self, key: str = "") -> str:
        """The path of an object, or of the list of them."""
        return f"/storage/v1/b/{quote(self.name, safe='')}/o" + (f"/{quote(key, safe='')}" if key else "")

    # uploads in parts: the XML API

    def begin(self, key: str, token: str) -> str:
        """See `Bucket`."""
        found = self._xml("POST", key, {"uploads": ""}, {_META + TOKEN: token})
        if not (upload := _text(found, "UploadId")):
            raise self._unexpected("XML", key)
        return upload

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `Bucket`."""
        query = {"partNumber": str(number), "uploadId": upload}
        sums = {"Content-MD5": base64.b64encode(md5).decode()}
        return _quoted(self._call("PUT", self._path(key), key, query, sums, data).headers.get("ETag", ""))

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `Bucket`."""
        return ""

    def _parts(self, key: str, upload: str, marker: Any) -> Page:
        page = self._xml("GET", key, {"uploadId": upload} | ({} if marker is None else {"part-number-marker": marker}))
        following = _text(page, "NextPartNumberMarker") if _text(page, "IsTruncated") == "true" else None
        try:
            found = [
                (int(_text(each, "PartNumber")), (_quoted(_text(each, "ETag")), int(_text(each, "Size"))))
                for each in page.iter("Part")
            ]
        except ValueError as error:
            raise self._unexpected("XML", key) from error
        return Page(found, following)

    def _complete(self, key: str, upload: str, etags: Sequence[str]) -> None:
        listed = ElementTree.Element("CompleteMultipartUpload")
        for number, etag in enumerate(etags, 1):
            part = ElementTree.SubElement(listed, "Part")
            ElementTree.SubElement(part, "PartNumber").text = str(number)
            ElementTree.SubElement(part, "ETag").text = etag
        self._xml("POST", key, {"uploadId": upload}, {"Content-Type": "application/xml"}, ElementTree.tostring(listed))

    def _abort(self, key: str, upload: str) -> None:
        self._call("DELETE", self._path(key), key, {"uploadId": upload})

    def _path(self, key: str) -> str:
        return f"/{quote(self.name, safe='')}/{quote(key, safe='/~')}"

    def _xml(self, method: str, key: str, query: Any, headers: Any = None, body: bytes | None = None) -> ElementTree.Element:
        """The answer to a request to the XML API, its tags without a namespace."""
        answer = self._call(method, self._path(key), key, query, headers, body)
        try:
            root = ElementTree.fromstring(answer.content)
        except ElementTree.ParseError as error:
            raise self._unexpected("XML", key) from error
        for each in root.iter():
            each.tag = each.tag.rpartition("}")[2]
        if root.tag == "Error":  # after the store has begun to answer with 200
            what = f"the store refused {method}: {legible(_text(root, 'Code'), 80)}"
            raise StoreError(what, where=self._shown(key), fix=AGAIN)
        return root

    # requests

    def _call(
        self,
        method: str,
        path: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray | None = None,
    ) -> Any:
        def request() -> Any:
            answer = self._session.request(
                method,
                self._endpoint + path,
                params=query,
                headers=headers,
                data=body,
                timeout=_SECONDS,
                allow_redirects=False,
            )
            if not 200 <= answer.status_code < 300:
                raise answered(method, answer, self._shown(key))
            return answer

        return self._ask(method, key, request)

    def _failed(self, error: Any, operation: str, where: str) -> StoreError:
        """Exceptions of requests and google-auth, and of the libraries below them."""
        if isinstance(error, self._refused_credentials) and not isinstance(error, self._unreached):
            return _no_credentials(where)
        return unanswered(error, where, "GOOGLE_BASE_URL")


def _no_credentials(where: str) -> StoreError:
    fix = "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
    return StoreError("there are no usable credentials for the store", where=where, fix=fix)


def answered(method: str, answer: Any, where: str) -> StoreError:
    """The error for an answer that is none."""
    status, code, message = answer.status_code, *_reason(answer)
    fix = _FIXES.get(status, AGAIN)
    if code == "NoSuchBucket" or (status == 404 and "bucket does not exist" in message):
        return StoreError(f"the store refused {method}: NoSuchBucket", where=where, fix=_FIXES[404])
    kind = {404: Missing, 412: Refused, 416: Empty}.get(status)
    if code in _SLOW:
        kind, fix = TransientError, AGAIN
    elif code == "BadDigest" or (status == 400 and "MD5" in message):
        kind = Damaged
    return refusal(kind, method, code, status, where, fix)


def _reason(answer: Any) -> tuple[str, str]:
    """Code and message of a refusal, in JSON or XML."""
    try:
        error = answer.json()["error"]
        return str(error["errors"][0]["reason"]), str(error["message"])
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    try:
        root = ElementTree.fromstring(answer.content)
        return _text(root, "Code") or "unknown", _text(root, "Message")
    except ElementTree.ParseError:
        return str(answer.reason or "unknown"), ""


def _text(element: ElementTree.Element, name: str) -> str:
    """The text of a child; "" if there is none."""
    return element.findtext(name) or ""


def _quoted(etag: str) -> str:
    return f'"{etag.strip(chr(34))}"'
