"""Which requests the studio's server answers, and which it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from weightsmith._app.studio.page import App, EventsAlone, Message, SameOrigin, own_names

LAN = "192.168.1.5:7860"


def status(host: str, origin: str = "", served: str = "0.0.0.0", kind: str = "http") -> int:
    """The status of the answer to a request. A socket that is refused has 403, as its client sees it."""
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    return asked(lambda app: SameOrigin(app, own_names(served)), type=kind, headers=headers)


def asked(wrapped: Callable[[App], App], **scope: Any) -> int:
    async def app(scope: Message, receive: object, send: object) -> None:
        sent.append({"type": "http.response.start", "status": 200})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    sent: list[Message] = []
    asyncio.run(wrapped(app)(scope, receive, send))  # type: ignore[arg-type]
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
    assert status(host, kind="websocket") == 403


def test_the_name_that_it_is_served_under_is_its_own() -> None:
    assert status("Merge.Lan:7860", "http://Merge.Lan:7860", "merge.lan") == 200
    assert status("other.lan:7860", served="merge.lan") == 400


def test_a_space_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_HOST", "me-studio.hf.space,studio.example.org")
    for host in ("me-studio.hf.space", "studio.example.org"):
        assert status(host, f"https://{host}") == 200
        assert status(host, "https://you-studio.hf.space") == 403
    assert status("you-studio.hf.space") == 400


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/", 200),
        ("HEAD", "/", 200),
        ("GET", "/gradio_api/queue/data", 200),
        ("POST", "/gradio_api/queue/join", 200),
        ("POST", "/gradio_api/queue/join/", 200),
        ("POST", "/gradio_api/upload", 403),
        ("POST", "/gradio_api/upload/", 403),
        ("POST", "/gradio_api//upload", 403),
        ("POST", "/upload", 403),
        ("PUT", "/gradio_api/queue/join/../upload", 403),
        ("POST", "/gradio_api/process_recording", 403),
        ("POST", "/gradio_api/stream/abc", 403),
        ("POST", "/gradio_api/run/start", 403),
        ("POST", "/login", 403),
        ("DELETE", "/", 403),
        ("GET", "/gradio_api/upload_progress", 404),
    ],
)
def test_the_page_sends_its_events_and_no_files(method: str, path: str, wanted: int) -> None:
    assert asked(EventsAlone, type="http", method=method, path=path) == wanted
