"""Google Cloud Storage, over the authenticated session of google-auth.

Objects are written, read and listed with the JSON API, as the official client does. Uploads in parts are in the XML API alone.
The version of an object is its generation. There are no copies of ranges: `copy` leaves every part to be uploaded.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree

from weightsmith._base.errors import StoreError, legible
from weightsmith._files.remote import retries
from weightsmith._files.remote.access import GOOGLE_ENDPOINT, google_credentials, google_endpoint
from weightsmith._files.remote.environment import check_network
from weightsmith._files.remote.failures import no_panic, passes
from weightsmith._outputs.bucket.client import (
    TOKEN,
    UPLOADS,
    Damaged,
    Empty,
    Head,
    Missing,
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

_SECONDS = (10, 60)
"""To connect, and without a byte."""
_AGAIN = "run again: what is uploaded is kept"
_FIXES = {
    401: "check the credentials: gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    403: "use credentials that may list, read, write and delete there",
    404: "create the bucket, or correct its name",
}
_SLOW = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "SlowDown"})
_META = "x-goog-meta-"
_Found = TypeVar("_Found")


class GoogleBucket:
    """See `client.Bucket`."""

    equal_parts = False

    def __init__(self, name: str) -> None:
        """Sends nothing to the store. Raises StoreError without google-auth, or without credentials."""
        where = f"gs://{name}"
        try:
            import requests
            from google.auth import exceptions
            from google.auth.transport.requests import AuthorizedSession
        except ImportError as error:
            raise not_installed("writing to Google Cloud Storage", "google-auth", "gcs", where) from error
        self.name = name
        check_network("gs")
        self._endpoint = google_endpoint() or GOOGLE_ENDPOINT
        check_tls(self._endpoint, where)
        self._refused_credentials = exceptions.GoogleAuthError
        self._unreached = exceptions.TransportError
        try:
            self._session = AuthorizedSession(google_credentials())
        except (exceptions.GoogleAuthError, ValueError, OSError) as error:
            raise self._no_credentials(where) from error
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=2 * UPLOADS)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)

    # objects: the JSON API

    def read(self, key: str, max_bytes: int) -> Object | None:
        """See `client.Bucket`."""
        for _ in range(retries.PATIENCE.failures + 1):
            try:
                about = self._call("GET", self._object(key), key)
                nbytes, generation, written = self._json(
                    about, key, lambda f: (int(f["size"]), str(f["generation"]), datetime.fromisoformat(f["updated"]))
                )
                if nbytes > max_bytes:
                    raise too_long(max_bytes, self._shown(key))
                version = {"alt": "media", "generation": generation}
                data = self._call("GET", self._object(key), key, version).content
            except Missing:
                if self.head(key) is None:
                    return None
                continue  # replaced between the two requests
            now = about.headers.get("Date")
            age = max(0.0, (parsedate_to_datetime(now) - written).total_seconds()) if now else 0.0  # dates are in whole seconds
            return Object(data, generation, age)
        raise TransientError("the object is replaced again and again", where=self._shown(key), fix=_AGAIN)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """See `client.Bucket`."""
        span = {"Range": f"bytes={start}-{start + nbytes - 1}"}
        return bytes(self._call("GET", self._object(key), key, {"alt": "media"}, span).content)

    def put(self, key: str, data: bytes, token: str = "") -> str:
        """See `client.Bucket`."""
        return self._write(key, data, token)

    def create(self, key: str, data: bytes) -> str | None:
        """See `client.Bucket`."""
        try:
            return self._write(key, data, ifGenerationMatch="0")
        except Refused:
            return written_before(self, key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        """See `client.Bucket`."""
        try:
            return self._write(key, data, ifGenerationMatch=etag)
        except (Refused, Missing):
            return written_before(self, key, data)

    def _write(self, key: str, data: bytes, token: str = "", **condition: str) -> str:
        """Write an object with its MD5, which the store compares: its generation."""
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

    def head(self, key: str) -> Head | None:
        """See `client.Bucket`."""
        try:
            found = self._call("GET", self._object(key), key)
        except Missing:
            return None
        return self._json(found, key, lambda f: Head(int(f["size"]), str(f.get("metadata", {}).get(TOKEN, ""))))

    def delete(self, key: str) -> None:
        """See `client.Bucket`."""
        try:
            self._call("DELETE", self._object(key), key)
        except Missing:
            pass

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `client.Bucket`."""
        yield from self._list(prefix, lambda f: [(str(each["name"]), int(each["size"])) for each in f.get("items", ())])

    def folders(self, prefix: str) -> Iterator[str]:
        """See `client.Bucket`."""
        yield from self._list(prefix, lambda f: [str(each) for each in f.get("prefixes", ())], delimiter="/")

    def _list(self, prefix: str, pick: Callable[[Any], list[_Found]], **more: str) -> Iterator[_Found]:
        """What `pick` finds in each page of a list."""
        query = {"prefix": prefix, "fields": "items(name,size),prefixes,nextPageToken", **more}

        def ask(marker: dict[str, str]) -> tuple[list[_Found], dict[str, str] | None]:
            answer = self._call("GET", self._object(), "", query | marker)
            page, following = self._json(answer, "", lambda f: (pick(f), f.get("nextPageToken")))
            return page, {"pageToken": str(following)} if following else None

        for page in pages(ask, self._shown(prefix)):
            yield from page

    def _json(self, answer: Any, key: str, pick: Callable[[Any], _Found]) -> _Found:
        """What `pick` finds in an answer in JSON."""
        try:
            return pick(answer.json())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._unexpected("JSON", key) from error

    def _unexpected(self, kind: str, key: str) -> StoreError:
        what = f"the answer of the store is not as expected ({kind})"
        return StoreError(what, where=self._shown(key), fix=f"check GOOGLE_BASE_URL, and {_AGAIN}")

    def _object(self, key: str = "") -> str:
        """The path of an object, or of the list of them."""
        return f"/storage/v1/b/{quote(self.name, safe='')}/o" + (f"/{quote(key, safe='')}" if key else "")

    # uploads in parts: the XML API

    def begin(self, key: str, token: str) -> str:
        """See `client.Bucket`."""
        found = self._xml("POST", key, {"uploads": ""}, {_META + TOKEN: token})
        if not (upload := _text(found, "UploadId")):
            raise self._unexpected("XML", key)
        return upload

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """See `client.Bucket`."""
        query = {"partNumber": str(number), "uploadId": upload}
        sums = {"Content-MD5": base64.b64encode(md5).decode()}
        return _quoted(self._call("PUT", self._path(key), key, query, sums, data).headers.get("ETag", ""))

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """See `client.Bucket`."""
        return ""

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        """See `client.Bucket`."""
        found: dict[int, tuple[str, int]] = {}
        try:
            for page in self._pages(key, {"uploadId": upload}, "part-number-marker"):
                for each in page.iter("Part"):
                    found[int(_text(each, "PartNumber"))] = _quoted(_text(each, "ETag")), int(_text(each, "Size"))
        except ValueError as error:
            raise self._unexpected("XML", key) from error
        except Missing:
            return None
        return found

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        """See `client.Bucket`."""
        listed = ElementTree.Element("CompleteMultipartUpload")
        for number, etag in enumerate(etags, 1):
            part = ElementTree.SubElement(listed, "Part")
            ElementTree.SubElement(part, "PartNumber").text = str(number)
            ElementTree.SubElement(part, "ETag").text = etag
        try:
            self._xml("POST", key, {"uploadId": upload}, {"Content-Type": "application/xml"}, ElementTree.tostring(listed))
            return True
        except Missing:
            return False

    def abort(self, key: str, upload: str) -> None:
        """See `client.Bucket`."""
        try:
            self._call("DELETE", self._path(key), key, {"uploadId": upload})
        except Missing:
            pass

    def _path(self, key: str) -> str:
        return f"/{quote(self.name, safe='')}" + (f"/{quote(key, safe='/~')}" if key else "")

    def _pages(self, key: str, query: Mapping[str, str], *markers: str) -> Iterator[ElementTree.Element]:
        """The pages of a list. markers: where the next one begins, as the request for it says."""
        names = {name: f"Next{name.title().replace('-', '')}" for name in markers}

        def ask(marker: dict[str, str]) -> tuple[ElementTree.Element, dict[str, str] | None]:
            page = self._xml("GET", key, {**query, **marker})
            following = {name: found for name, tag in names.items() if (found := _text(page, tag))}
            return page, following if _text(page, "IsTruncated") == "true" else None

        return pages(ask, self._shown(key))

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
            raise StoreError(
                f"the store refused {method}: {legible(_text(root, 'Code'), 80)}", where=self._shown(key), fix=_AGAIN
            )
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
        return retry(lambda: self._once(method, path, key, query, headers, body))

    def _once(self, method: str, path: str, key: str, query: Any, headers: Any, body: Any) -> Any:
        where = self._shown(key)
        try:
            with no_panic():
                answer = self._session.request(
                    method,
                    self._endpoint + path,
                    params=query,
                    headers=headers,
                    data=body,
                    timeout=_SECONDS,
                    allow_redirects=False,
                )
        except Exception as error:  # those of requests and google-auth, and what they let through
            if isinstance(error, self._refused_credentials) and not isinstance(error, self._unreached):
                raise self._no_credentials(where) from error
            raise unanswered(error, where, "GOOGLE_BASE_URL", _AGAIN) from error
        if 200 <= answer.status_code < 300:
            return answer
        raise _failed(method, answer, where)

    def _no_credentials(self, where: str) -> StoreError:
        fix = "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
        return StoreError("there are no usable credentials for the store", where=where, fix=fix)

    def _shown(self, key: str) -> str:
        return f"gs://{self.name}/{key}"


def _failed(method: str, answer: Any, where: str) -> StoreError:
    """The error for an answer that is none."""
    status, code, message = answer.status_code, *_reason(answer)
    what = f"the store refused {method}: {legible(code, 80)} ({status})"
    if passes(status) or code in _SLOW:
        return TransientError(f"the store kept answering {legible(code, 80)} ({status}) to {method}", where=where, fix=_AGAIN)
    if code == "NoSuchBucket" or (status == 404 and "bucket does not exist" in message):
        return StoreError(f"the store refused {method}: NoSuchBucket", where=where, fix=_FIXES[404])
    if code == "BadDigest" or (status == 400 and "MD5" in message):
        return Damaged(what, where=where, fix=_AGAIN)
    kind = {404: Missing, 412: Refused, 416: Empty}.get(status, StoreError)
    return kind(what, where=where, fix=_FIXES.get(status, _AGAIN))


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
