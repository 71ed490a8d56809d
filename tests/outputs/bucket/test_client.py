"""Requests to real servers, and the bucket in memory, which has to behave as they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.bucket_help import AZURITE, GOOGLE, MOTO, SEAWEED, MemoryBucket, Server, environment_at
from weightsmith._base.errors import ParameterError, StoreError
from weightsmith._files.remote import retries
from weightsmith._outputs.bucket import azure, client, gcs
from weightsmith._outputs.bucket.client import (
    Bucket,
    Damaged,
    Empty,
    Missing,
    NoConditions,
    Refused,
    TransientError,
    md5_of,
)
from weightsmith._outputs.bucket.contents import open_bucket
from weightsmith._outputs.bucket.lock import Lock
from weightsmith._outputs.bucket.prefix import parse_prefix
from weightsmith._outputs.bucket.s3 import S3Bucket

pytestmark = pytest.mark.store

MEMORY = "memory"


def opened(server: Server) -> Bucket:
    return open_bucket(parse_prefix(server.address("x")))


@pytest.fixture(params=[MEMORY, MOTO, SEAWEED, GOOGLE, AZURITE])
def bucket(request: pytest.FixtureRequest, new_server: Callable[[str], Server]) -> Any:
    return MemoryBucket(request.node.name) if request.param == MEMORY else opened(new_server(request.param))


@pytest.mark.slow
def test_an_object_is_created_once_and_replaced_only_in_the_version_that_was_seen(bucket: Any) -> None:
    first = bucket.create("a/lock", b"one")
    assert first
    assert bucket.create("a/lock", b"two") is None
    assert bucket.create("a/lock", b"one") == first if not isinstance(bucket, MemoryBucket) else True  # a repeated request
    second = bucket.replace("a/lock", b"three", first)
    assert second not in (None, first)
    assert bucket.replace("a/lock", b"four", first) is None
    assert bucket.replace("a/none", b"four", first) is None
    found = bucket.read("a/lock", 100)
    assert (found.data, found.etag) == (b"three", second)
    assert 0 <= found.age_seconds < 3600  # not since 1970


@pytest.mark.slow
def test_a_store_that_cannot_replace_a_version_is_asked_for_it_first(moto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, send = S3Bucket(moto.bucket), S3Bucket._send

    def without(self: S3Bucket, *given: Any, **more: Any) -> Any:
        if "IfMatch" in more:
            raise NoConditions("501")
        return send(self, *given, **more)

    monkeypatch.setattr(S3Bucket, "_send", without)
    own = Lock(bucket, "lock", "out")
    own.take()
    assert "replaces objects without a condition" in own.warnings[0].what
    first = bucket.read("lock", 1000)
    own.renew()
    second = bucket.read("lock", 1000)
    assert first
    assert second
    assert first.etag != second.etag
    bucket.put("lock", b"{}")
    with pytest.raises(StoreError, match="another process has taken over"):
        own.renew()
    own.release()
    assert bucket.read("lock", 10).data == b"{}"  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://store.example:9000", "has no TLS"),
        ("nonsense", "AWS_ENDPOINT_URL: the variable of the environment is no address"),
    ],
)
def test_endpoints_that_are_refused(endpoint: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    for name, value in environment_at("s3", 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises((StoreError, ParameterError), match=message):
        S3Bucket("bkt")
    if "TLS" in message:
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        S3Bucket("bkt")


@pytest.mark.slow
def test_small_objects(bucket: Any) -> None:
    assert bucket.read("none", 100) is None
    assert bucket.head("none") is None
    bucket.delete("none")
    for key in ("x/empty", "x/y/b c+ü.json", "xz"):
        bucket.put(key, b"" if "empty" in key else b"0123456789")
    assert [*bucket.names("x/")] == [("x/empty", 0), ("x/y/b c+ü.json", 10)]
    assert [*bucket.folders("x/")] == ["x/y/"]
    assert bucket.read("x/empty", 100).data == b""
    assert bucket.read("xz", 10).data == b"0123456789"
    assert bucket.read_range("xz", 2, 3) == b"234"
    assert bucket.read_range("xz", 8, 30) == b"89"
    bucket.delete("xz")
    assert bucket.read("xz", 10) is None


@pytest.mark.slow
def test_what_we_have_written_is_marked(bucket: Any) -> None:
    bucket.put("x/ours", b"1", "token")
    bucket.put("x/theirs", b"1")
    assert [bucket.head(key).token for key in ("x/ours", "x/theirs")] == ["token", ""]
    bucket.put("x/ours", b"2")
    assert bucket.head("x/ours").token == ""


@pytest.mark.slow
def test_an_object_that_is_too_large_is_not_read(server: Server) -> None:
    bucket = opened(server)
    bucket.put("x", b"0123456789")
    with pytest.raises(StoreError, match="more than the 9 bytes"):
        bucket.read("x", 9)


@pytest.mark.slow
def test_an_upload_in_parts(bucket: Any) -> None:
    one, two = b"1" * (5 << 20), b"22"
    upload = bucket.begin("x/model", "token")
    assert bucket.parts("x/model", upload) == {}
    second = bucket.upload("x/model", upload, 2, two, md5_of(two))
    first = bucket.upload("x/model", upload, 1, two, md5_of(two))
    first = bucket.upload("x/model", upload, 1, one, md5_of(one))  # in place of the other
    assert first == f'"{md5_of(one).hex()}"'
    listed = bucket.parts("x/model", upload)
    assert listed[2] == (second, 2)
    assert listed[1][0] in (first, second)  # SeaweedFS lists the part that came first, and completes with the one that is named
    assert [*bucket.names("x/")] == []
    assert bucket.complete("x/model", upload, [first, second])
    head = bucket.head("x/model")
    assert (head.nbytes, head.token) == (len(one) + 2, "token")
    assert bucket.read_range("x/model", 0, len(one) + 2) == one + two
    assert bucket.parts("x/model", upload) is None
    bucket.abort("x/model", upload)
    other = bucket.begin("x/other", "token")
    bucket.upload("x/other", other, 1, two, md5_of(two))
    bucket.abort("x/other", other)
    assert not bucket.parts("x/other", other)
    assert [*bucket.names("x/")] == [("x/model", len(one) + 2)]


@pytest.mark.slow
def test_uploads_of_one_object_do_not_mix_and_what_is_there_stays(bucket: Any) -> None:
    old, one, two = b"old", b"1" * 100, b"2" * 99
    bucket.put("x/model", old)
    first, second = bucket.begin("x/model", "one"), bucket.begin("x/model", "two")
    bucket.upload("x/model", first, 1, one, md5_of(one))
    etag = bucket.upload("x/model", second, 1, two, md5_of(two))
    assert bucket.parts("x/model", first) == {1: (f'"{md5_of(one).hex()}"', 100)}
    assert bucket.parts("x/model", second) == {1: (etag, 99)}
    bucket.abort("x/model", first)
    assert bucket.read("x/model", 100).data == old
    assert bucket.complete("x/model", second, [etag])
    assert bucket.read("x/model", 100).data == two
    assert bucket.head("x/model").token == "two"
    assert not bucket.parts("x/model", first)


def test_a_part_of_an_upload_that_is_gone(memory: MemoryBucket) -> None:
    with pytest.raises(Missing):
        memory.upload("x", "none", 1, b"", md5_of(b""))


class Answer:
    """What `requests` makes of an answer."""

    def __init__(self, status: int, text: str) -> None:
        self.status_code, self.content, self.reason = status, text.encode(), "reason"

    def json(self) -> Any:
        return json.loads(self.content)


def in_json(reason: str, message: str = "") -> str:
    return json.dumps({"error": {"errors": [{"reason": reason}], "message": message}})


@pytest.mark.parametrize(
    ("status", "text", "kind", "what"),
    [
        (429, in_json("rateLimitExceeded"), TransientError, "kept answering rateLimitExceeded"),
        (403, in_json("userRateLimitExceeded"), TransientError, "kept answering"),
        (503, "<html>", TransientError, "kept answering reason"),
        (400, in_json("invalid", "Provided MD5 hash x doesn't match calculated MD5 hash y"), Damaged, "invalid"),
        (400, "<Error><Code>BadDigest</Code></Error>", Damaged, "BadDigest"),
        (400, in_json("invalid", "Bad name"), StoreError, "invalid"),
        (404, in_json("notFound", "The specified bucket does not exist."), StoreError, "NoSuchBucket"),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", StoreError, "NoSuchBucket"),
        (404, "<Error><Code>NoSuchUpload</Code></Error>", Missing, "NoSuchUpload"),
        (404, in_json("notFound", "No such object: b/o"), Missing, "notFound"),
        (412, in_json("conditionNotMet"), Refused, "conditionNotMet"),
        (416, "", Empty, "reason"),
        (403, in_json("forbidden", "S3CRET"), StoreError, "forbidden"),
    ],
)
def test_what_answers_of_google_mean(status: int, text: str, kind: type[StoreError], what: str) -> None:
    found = gcs.answered("PUT", Answer(status, text), "gs://b/o")
    assert type(found) is kind
    assert what in str(found)
    assert "S3CRET" not in str(found)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "ServerBusy", TransientError),
        (500, "OperationTimedOut", TransientError),
        (429, "TooManyRequests", TransientError),
        (400, "Md5Mismatch", Damaged),
        (400, "InvalidBlockList", Missing),
        (404, "BlobNotFound", Missing),
        (404, "ContainerNotFound", StoreError),
        (409, "BlobAlreadyExists", Refused),
        (412, "ConditionNotMet", Refused),
        (416, "InvalidRange", Empty),
        (403, "AuthenticationFailed", StoreError),
        (400, "InvalidBlobOrBlock", StoreError),
    ],
)
def test_what_answers_of_azure_mean(status: int, code: str, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.storage.blob")
    from azure.core.exceptions import HttpResponseError

    for name, value in environment_at("az", 1).items():
        monkeypatch.setenv(name, value)
    error = HttpResponseError("S3CRET")
    error.status_code, error.error_code = status, code  # type: ignore[attr-defined]
    found = azure.AzureBucket("bkt")._failed(error, "Put Block", "az://bkt/o")
    assert type(found) is kind
    assert code in str(found)
    assert "S3CRET" not in str(found)


def test_damaged_and_passing_are_repeated_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)
    left: list[StoreError] = [TransientError("busy"), Damaged("cut"), TransientError("busy")]

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    assert client.retry(call) == "done"
    assert len(waits) == 3
    left.extend(TransientError("busy") for _ in range(retries.PATIENCE.failures + 1))
    with pytest.raises(TransientError):
        client.retry(call)
    assert left == []
    assert max(waits) <= retries.PATIENCE.most_seconds
    with pytest.raises(Missing):
        client.retry(lambda: (_ for _ in ()).throw(Missing("gone")))


def test_lists_of_google_go_on_where_a_page_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.auth.transport.requests")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    bucket, asked = gcs.GoogleBucket("bkt"), list[dict[str, str]]()
    part = "<Part><PartNumber>{0}</PartNumber><ETag>{0}</ETag><Size>5</Size></Part>"
    more, last = "<IsTruncated>true</IsTruncated>", "<IsTruncated>false</IsTruncated>"
    space = '<R xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    answers = [
        f"{space}{part.format(1)}{more}<NextPartNumberMarker>1</NextPartNumberMarker></R>",
        f"{space}{part.format(2)}{last}</R>",
        json.dumps({"items": [{"name": "x1", "size": "5"}], "nextPageToken": "t"}),
        json.dumps({"items": [{"name": "x2", "size": "6"}]}),
    ]

    def request(self: Any, method: str, url: str, *, params: dict[str, str], **more: Any) -> Answer:
        asked.append(dict(params))
        return Answer(200, answers.pop(0))

    monkeypatch.setattr(type(bucket._session), "request", request)
    assert bucket.parts("x", "id") == {1: ('"1"', 5), 2: ('"2"', 5)}
    assert [*bucket.names("x")] == [("x1", 5), ("x2", 6)]
    assert [query.get("part-number-marker") for query in asked[:2]] == [None, "1"]
    assert [query.get("pageToken") for query in asked[2:]] == [None, "t"]


@pytest.mark.slow
def test_lists_of_s3_go_on_where_a_page_ends(moto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, send = S3Bucket(moto.bucket), S3Bucket._call
    limits = {"list_objects_v2": "MaxKeys", "list_parts": "MaxParts"}

    def call(self: S3Bucket, operation: str, key: str | None, **more: Any) -> Any:
        return send(self, operation, key, **more, **({limits[operation]: 2} if operation in limits else {}))

    monkeypatch.setattr(S3Bucket, "_call", call)
    names = ["x/1", "x/2", "x/3/a", "x/4", "x/5/a"]
    for name in names:
        bucket.put(name, b"1")
    assert [*bucket.names("x/")] == [(name, 1) for name in names]
    assert [*bucket.folders("x/")] == ["x/3/", "x/5/"]
    upload = bucket.begin("x/1", "token")
    etags = {i: bucket.upload("x/1", upload, i, b"%d" % i, md5_of(b"%d" % i)) for i in range(1, 6)}
    assert bucket.parts("x/1", upload) == {i: (etag, 1) for i, etag in etags.items()}


def test_lists_of_azure_go_on_where_a_page_ends(new_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    bucket: Any = opened(new_server(AZURITE))
    for name in ("x/1", "x/2", "x/3/a", "x/4", "x/5/a"):
        bucket.put(name, b"1")
    whole = bucket._container.list_blobs
    monkeypatch.setattr(bucket._container, "list_blobs", lambda **more: whole(results_per_page=2, **more))
    assert [*bucket.names("x/")] == [(name, 1) for name in ("x/1", "x/2", "x/3/a", "x/4", "x/5/a")]
    assert [*bucket.folders("x/")] == ["x/3/", "x/5/"]


def test_an_upload_to_azure_is_not_aborted_where_that_would_discard_the_blocks_of_others(
    new_server: Callable[[str], Server],
) -> None:
    import base64

    bucket: Any = opened(new_server(AZURITE))
    upload = bucket.begin("x/model", "token")
    bucket.upload("x/model", upload, 1, b"1", md5_of(b"1"))
    theirs = base64.b64encode(b"y" * 28).decode()  # all ids of the blocks of a blob have one length
    bucket._blob("x/model").stage_block(theirs, b"mine")
    bucket.abort("x/model", upload)
    _, waiting = bucket._listed("x/model")
    assert theirs in [block.id for block in waiting]


def google(text: str, monkeypatch: pytest.MonkeyPatch) -> gcs.GoogleBucket:
    """A bucket that answers everything with this."""
    pytest.importorskip("google.auth.transport.requests")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    bucket = gcs.GoogleBucket("bkt")
    monkeypatch.setattr(type(bucket._session), "request", lambda *given, **more: Answer(200, text))
    return bucket


def unending(bucket: Any) -> None:
    """Every list of the bucket raises after two pages."""
    for call in (
        lambda: [*bucket.names("x")],
        lambda: [*bucket.folders("x")],
        lambda: bucket.parts("x", "id"),
    ):
        with pytest.raises(StoreError, match="the store's list does not end"):
            call()


@pytest.mark.parametrize("marked", [False, True])
def test_lists_of_s3_that_never_end_are_one_error(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    for name, value in environment_at("s3", 1).items():
        monkeypatch.setenv(name, value)
    bucket, asked = S3Bucket("bkt"), list[str]()
    markers = {"ContinuationToken": "t", "PartNumberMarker": 7}

    def call(operation: str, key: str | None, **more: Any) -> Any:
        asked.append(operation)
        return {"IsTruncated": True} | ({f"Next{name}": value for name, value in markers.items()} if marked else {})

    monkeypatch.setattr(bucket, "_call", call)
    unending(bucket)
    assert len(asked) == 3 * (2 if marked else 1)


@pytest.mark.parametrize("marked", [False, True])
def test_lists_of_google_that_never_end_are_one_error(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = "<NextPartNumberMarker>7</NextPartNumberMarker>" if marked else ""
    bucket, asked = google("", monkeypatch), list[str]()

    def request(self: Any, method: str, url: str, **more: Any) -> Answer:
        asked.append(url)
        found = json.dumps({"nextPageToken": "t"})
        return Answer(200, found if "/storage/v1/" in url else f"<R><IsTruncated>true</IsTruncated>{markers}</R>")

    monkeypatch.setattr(type(bucket._session), "request", request)
    unending(bucket)
    assert len(asked) == 4 + 1 * (2 if marked else 1)


def test_lists_of_azure_that_never_end_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.storage.blob")
    from azure.core.paging import ItemPaged

    for name, value in environment_at("az", 1).items():
        monkeypatch.setenv(name, value)
    bucket, asked = azure.AzureBucket("bkt"), list[str | None]()

    def endless(**more: Any) -> Any:
        return ItemPaged(lambda token: asked.append(token), lambda answer: ("t", []))

    monkeypatch.setattr(bucket._container, "list_blobs", endless)
    monkeypatch.setattr(bucket._container, "walk_blobs", endless)
    for call in (bucket.names, bucket.folders):
        with pytest.raises(StoreError, match="the store's list does not end"):
            [*call("x")]
    assert asked == 2 * [None, "t"]


@pytest.mark.parametrize("text", ["[]", "null", '"x"', '{"size": "five", "items": [{}]}', '{"items": 5}', "<html/>"])
def test_answers_of_google_that_make_no_sense_are_one_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = google(text, monkeypatch)
    for call in (
        lambda: bucket.read("k", 9),
        lambda: bucket.head("k"),
        lambda: bucket.put("k", b""),
        lambda: [*bucket.names("")],
    ):
        with pytest.raises(StoreError, match="the answer of the store is not as expected"):
            call()


def test_a_page_of_google_for_humans_is_no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = google("<html><Part/></html>", monkeypatch)
    for call in (lambda: bucket.begin("k", "token"), lambda: bucket.parts("k", "id")):
        with pytest.raises(StoreError, match="the answer of the store is not as expected"):
            call()


@pytest.mark.parametrize("upload", ["zzz", "", "00.aa", "0011223344556677", "../x"])
def test_an_upload_of_azure_that_no_run_has_begun_is_none(upload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that someone else has written names it."""
    pytest.importorskip("azure.storage.blob")
    for name, value in environment_at("az", 1).items():
        monkeypatch.setenv(name, value)
    bucket = azure.AzureBucket("bkt")
    monkeypatch.setattr(bucket, "_blocks", lambda key: ([], []))
    assert bucket.parts("k", upload) is None
    bucket.abort("k", upload)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_blob_that_appears_while_an_upload_to_azure_is_aborted_stays(theirs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.storage.blob")
    from azure.core.exceptions import HttpResponseError

    for name, value in environment_at("az", 1).items():
        monkeypatch.setenv(name, value)
    bucket, deleted = azure.AzureBucket("bkt"), list[str]()

    class Blob:
        size, etag = 9 if theirs else 0, "now"

        def commit_block_list(self, blocks: object, **condition: object) -> None:
            if theirs:
                error = HttpResponseError("it exists")
                error.status_code, error.error_code = 409, "BlobAlreadyExists"  # type: ignore[attr-defined]
                raise error

        def get_blob_properties(self) -> Blob:
            return self

        def delete_blob(self, *, etag: str = "*", match_condition: object = None) -> None:
            deleted.append(etag)

    monkeypatch.setattr(bucket, "_blob", lambda key: Blob())
    monkeypatch.setattr(bucket, "parts", lambda key, upload: {1: ("etag", 4)})
    monkeypatch.setattr(bucket, "_listed", lambda key: ([], []))
    monkeypatch.setattr(bucket, "head", lambda key: None)
    bucket.abort("k", f"{'00' * 8}.aa")
    assert deleted == ([] if theirs else ["now"])
