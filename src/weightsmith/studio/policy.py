"""What may be sent to the server, and what a browser may load for the page.

Other sites may send nothing, the page itself its events and no files; a browser loads what this server sends.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

POLICY = "; ".join(
    (
        "default-src 'self' data: blob:",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",  # Gradio compiles its templates in the browser
        "style-src 'self' 'unsafe-inline'",
        "base-uri 'self'",
        "form-action 'none'",
        "object-src 'none'",
    )
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class ContentPolicy:
    """ASGI middleware: adds the policy to every answer."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self.app(scope, receive, answer if scope["type"] == "http" else send)


_POSTED = ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset")
"""The routes of the page's events. All other routes that take something, uploads among them, are closed."""


class EventsAlone:
    """ASGI middleware: lets the page send its events, and nothing else. Gradio takes files whether a page uses them or not."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD") and path.rstrip("/") not in _POSTED:
            await _refuse(scope, send, 403, b"Nothing is uploaded to the studio.")
        elif scope["type"] == "http" and "upload" in path:
            await _refuse(scope, send, 404, b"Nothing is uploaded to the studio.")
        else:
            await self.app(scope, receive, send)


def own_names(host: str) -> frozenset[str]:
    """The names under which a server is reached: of the address that it serves, and of its Space if it runs in one."""
    space = os.environ.get("SPACE_HOST", "")  # several names, with commas between them, if it has a domain of its own
    return frozenset({"localhost", host.lower(), *space.lower().split(",")} - {""})


class SameOrigin:
    """ASGI middleware: refuses what a page of another site sends, even where that site could not read the answer.

    A site can give its own name to this machine's address, and is then of the same origin. So the host of a request must be
    an IP address or one of `names`.
    """

    def __init__(self, app: App, names: Collection[str]) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = dict(scope.get("headers", ()))
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not self._is_own(host):
            await _refuse(scope, send, 400, b"The studio is not known under this host name.")
        elif origin and origin.partition("://")[2] != host:
            await _refuse(scope, send, 403, b"This page is not for other sites.")
        else:
            await self.app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False


async def _refuse(scope: Message, send: Send, status: int, why: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": why})
