"""Which requests the studio's server answers, and which it refuses."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.studio.models import make, recipe
from tests.app.studio.serving import Studio, asked, serving, start, stop
from tests.cli_help import run_process
from weightsmith._app.studio.server import MAX_BYTES, Guard, Message, own_names

LAN = "192.168.1.5:7860"


def status(host: str, origin: str = "", served: str = "0.0.0.0", kind: str = "http", token: str = "", **options: str) -> int:
    """The status of the answer to a request. A socket is refused with 403, as its client sees it."""
    values = {"host": host, "origin": origin, "content-type": "application/json", **options}
    headers = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in values.items()
        if value and name not in ("query", "method")
    ]
    scope = {
        "type": kind,
        "headers": headers,
        "method": options.get("method", "POST"),
        "query_string": options.get("query", "").encode(),
    }

    async def app(scope: Message, receive: object, send: object) -> None:
        sent.append({"type": "http.response.start", "status": 200})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    sent: list[Message] = []
    asyncio.run(Guard(app, own_names(served), token)(scope, receive, send))
    return int(sent[0].get("status", 403))


@pytest.mark.parametrize("served", ["127.0.0.1", "0.0.0.0", "192.168.1.5"])
def test_what_other_sites_send_is_refused_wherever_it_is_served(served: str) -> None:
    for host in ("localhost:7860", "127.0.0.1:7860", LAN, "[::1]:7860", "[fe80::1]"):
        assert status(host, served=served) == 200
        assert status(host, f"http://{host}", served) == 200
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://", "evil"):
            assert status(host, origin, served) == 403, (host, origin)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example", "", "["]
)
def test_a_name_that_a_site_may_have_given_to_this_machine_is_refused(host: str) -> None:
    assert status(host) == 400
    assert status(host, f"http://{host}") == 400


def test_sockets_and_what_is_not_json_are_refused() -> None:
    assert status(LAN, kind="websocket") == 403
    assert status(LAN, sec_fetch_site="cross-site") == 403
    assert status(LAN, sec_fetch_site="cross-site", method="GET") == 200  # a link
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert status(LAN, **{"content-type": kind}) == 415  # what a form of another site can send


def test_the_name_that_it_is_served_under_is_its_own() -> None:
    assert status("Merge.Lan:7860", "http://Merge.Lan:7860", "merge.lan") == 200
    assert status("other.lan:7860", served="merge.lan") == 400


def test_a_space_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_HOST", "me-studio.hf.space,studio.example.org")
    for host in ("me-studio.hf.space", "studio.example.org"):
        assert status(host, f"https://{host}") == 200
        assert status(host, "https://you-studio.hf.space") == 403
    assert status("you-studio.hf.space") == 400


def test_who_has_no_token_is_refused() -> None:
    assert status(LAN, token="secret") == 401
    assert status(LAN, token="secret", query="token=wrong") == 401
    assert status(LAN, token="secret", cookie="weightsmith-7860=wrong") == 401
    assert status(LAN, token="secret", cookie="weightsmith-7860=é;;") == 401
    assert status(LAN, token="secret", query="token=secret", method="GET") == 303
    assert status(LAN, token="secret", cookie="other=1; weightsmith-7860=secret") == 200
    assert status(LAN, token="secret", cookie='a={"b": 1}; [x]=1; c d=e; é; weightsmith-7860=secret') == 200
    assert status(LAN, token="secret", cookie="weightsmith-7861=secret") == 401, "that of another studio"
    assert status(LAN, "http://evil.example", token="secret", cookie="weightsmith-7860=secret") == 403


# ---- the command


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("server").resolve()
    make(root)
    return root


@pytest.fixture(scope="module")
def studio(root: Path) -> Iterator[Studio]:
    with serving(root) as served:
        yield served


@pytest.mark.long
def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    ran = run_process("studio", tmp_path / "none")
    assert ran.code == 1
    assert "no such folder" in ran.err


@pytest.mark.long
def test_the_server_gives_away_no_file(studio: Studio, root: Path) -> None:
    address = studio.address
    for path in (
        "etc/passwd",
        "../../../../etc/passwd",
        "assets/..%2F..%2Fserver.py",
        "assets/server.py",
        "assets/session.py",
        "runs/1",
        "runs/x",
        "runs/-1",
        "docs",
        "openapi.json",
        "do/none",
    ):
        assert asked(f"{address}{path}")[0] in (404, 405), path
    for name in ("", "assets/studio.js", "assets/charts.css", "about"):
        code, text = asked(address + name)
        assert code == 200
        assert "https://fonts" not in text
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "body", "code"),
    [
        ("edit", b"{", 400),
        ("edit", [], 409),
        ("edit", {}, 400),
        ("edit", {"tab": "a", "number": "x", "changes": []}, 400),
        ("edit", {"tab": "a", "number": 1, "changes": [3]}, 409),
        ("edit", b'{"tab": "a", "number": Infinity, "changes": []}', 400),
        ("edit", b'{"tab": "a", "number": 1, "changes": [{"kind": "text", "base": "", "text": "\\ud800"}]}', 400),
        ("edit", {"tab": "a", "number": 1, "changes": [{}] * 2000}, 409),
        ("edit", b'{"tab": ' + b"[" * 100_000, 400),
        ("merge", {"version": 0}, 400),
        ("merge", {"version": 10**9, "name": "x"}, 409),
        ("merge", {"version": 0, "name": "../x"}, 409),
        ("sweep", {"version": 0, "path": 1, "model": 2, "values": None, "prompt": "", "text": ""}, 400),
        ("try", {"version": 0, "models": "x", "prompt": "", "text": "", "new_tokens": 1}, 409),
        ("look", {"models": ["../secret"]}, 409),
        ("look", {"models": [3]}, 409),
        ("two", {"first": 1, "second": None}, 400),
        ("hub", {"name": "org/name"}, 409),  # started without the Hub
        ("hub", {"name": "/etc"}, 409),
    ],
)
def test_what_the_page_never_sends_is_refused(studio: Studio, action: str, body: object, code: int) -> None:
    got, text = asked(f"{studio.address}do/{action}", body)
    assert got == code, text
    assert "problem" in json.loads(text)


@pytest.mark.slow
def test_nothing_is_uploaded(studio: Studio) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nmine\r\n--x--\r\n'
    for path in ("do/edit", "upload", ""):
        assert asked(studio.address + path, body, **{"Content-Type": "multipart/form-data; boundary=x"})[0] == 415
    assert asked(f"{studio.address}do/edit", b'"' + b"x" * MAX_BYTES + b'"')[0] == 413


@pytest.mark.slow
def test_others_need_the_token_that_it_prints(root: Path) -> None:
    with serving(root, "--host", "0.0.0.0", out="shared") as studio:
        address, _, token = studio.address.partition("?token=")
        assert len(token) > 20
        assert asked(address)[0] == 401
        assert asked(f"{address}do/name", {"name": "x"})[0] == 401
        cookie = f"weightsmith-{studio.port}={token}"
        assert asked(address, Cookie=cookie)[0] == 200
        assert asked(address, Cookie=cookie, Host="evil.example")[0] == 400
        code, text = asked(
            f"{address}do/edit",
            {"tab": "a", "number": 1, "changes": [{"kind": "text", "base": "", "text": recipe(root)}]},
            Cookie=cookie,
        )
        assert code == 200
        version = json.loads(text)["document"]["version"]
        code, text = asked(f"{address}do/merge", {"version": version, "name": "x", "overwrite": True}, Cookie=cookie)
        assert (code, "replaces no result" in text) == (409, True)


@pytest.mark.long
def test_changes_reach_all_who_listen(studio: Studio, root: Path) -> None:
    heard = [urllib.request.urlopen(f"{studio.address}events", timeout=20) for _ in range(2)]

    def until(stream: object, name: str, what: str) -> None:
        for line in stream:  # type: ignore[attr-defined]
            if line.startswith(b"data: ") and what in json.dumps(json.loads(line[6:]).get(name, "")):
                return

    asked(
        f"{studio.address}do/edit",
        {"tab": "events", "number": 1, "changes": [{"kind": "text", "base": "", "text": "# heard\n"}]},
    )
    for stream in heard:
        until(stream, "document", "# heard")
        stream.close()


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_and_a_port_that_is_taken(root: Path) -> None:
    studio = start(root, out="other", fresh=True)
    taken = run_process("studio", "models", "--out", "third", "--port", studio.port, cwd=root)
    assert taken.code == 3
    assert "cannot serve here: Address already in use" in taken.err
    asked(f"{studio.address}do/edit", {"tab": "a", "number": 1, "changes": [{"kind": "text", "base": "", "text": "# mine\n"}]})
    busy = run_process("studio", "models", "--out", "other", cwd=root)
    assert "another studio writes its results here" in busy.err
    with urllib.request.urlopen(f"{studio.address}events", timeout=20):
        assert stop(studio) == 130, "an open page does not keep it"
    assert "Traceback" not in studio.log.read_text()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", studio.port))
