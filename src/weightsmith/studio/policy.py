"""What a browser may load for the page: what this server sends, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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


class ContentPolicy:
    """ASGI middleware: adds the policy to every answer."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
                message = {
                    **message,
                    "headers": [*headers, (b"referrer-policy", b"no-referrer"), (b"x-content-type-options", b"nosniff")],
                }
            await send(message)

        await self.app(scope, receive, answer if scope["type"] == "http" else send)
