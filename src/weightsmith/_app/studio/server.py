"""The web server: access control and routes. The only module that imports Starlette."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from weightsmith import ParameterError, StoreError, Unsupported, WeightsmithError
from weightsmith._app.studio import draft, show
from weightsmith._app.studio.places import Places, is_this_machine
from weightsmith._app.studio.session import Session, listed_methods
from weightsmith.plugin import FAMILIES, chart_files, install, parse_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# ---- Access control
#
# The page loads files from this server only, and sends it JSON. Requests from other sites are rejected. Reports contain
# scripts, so they are shown in a sandboxed frame without access to the page or the network.

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # widths of bars
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-src 'self'",
        "frame-ancestors {ancestors}",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_REPORT_POLICY = "; ".join(
    (
        "sandbox allow-scripts allow-downloads",
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "frame-ancestors 'self'",
    )
)
_HEADERS = {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff", "cache-control": "no-store"}
MAX_BYTES = 1 << 20
"""Maximum size of a request."""


def own_names(host: str) -> frozenset[str]:
    """The host names of the server: the address that it serves, and its Space if it runs in one."""
    space = os.environ.get("SPACE_HOST", "")  # several names, with commas between them, if it has a domain of its own
    return frozenset({"localhost", host.lower(), *space.lower().split(",")} - {""})


class Guard:
    """ASGI middleware: rejects requests from other sites, and requests without the token.

    A site can point its own domain at this machine, and then counts as the same origin (DNS rebinding). So the host of a
    request must be an IP address or one of `names`.

    token  "": no token is required
    """

    def __init__(self, app: App, names: Collection[str], token: str = "") -> None:
        self.app = app
        self.names = names
        self.token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        host, origin = headers.get("host", ""), headers.get("origin", "")
        cookie = f"weightsmith-{host.rpartition(':')[2]}"  # a browser sends cookies to all ports of a host
        asked_token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not self._is_own(host):
            await _refuse(send, 400, "The studio is not known under this host name.")
        elif origin and origin.partition("://")[2] != host:
            await _refuse(send, 403, "This page is not for other sites.")
        elif headers.get("sec-fetch-site", "") == "cross-site" and scope["method"] != "GET":
            await _refuse(send, 403, "This page is not for other sites.")
        elif scope["method"] == "POST" and not headers.get("content-type", "").startswith("application/json"):
            await _refuse(send, 415, "The studio takes JSON. Nothing is uploaded to it.")
        elif self.token and self._is_token(asked_token):
            await _refuse(
                send, 303, "", location="/", **{"set-cookie": f"{cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"}
            )
        elif self.token and not self._is_token(_cookie(headers.get("cookie", ""), cookie)):
            await _refuse(send, 401, "Open the address that the studio printed: it ends with a token.")
        else:
            await self.app(scope, receive, _with_headers(send))

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


def _cookie(header: str, name: str) -> str:
    """The value of a cookie. The header also has the cookies of other programs on this machine, in any syntax."""
    pairs = (part.partition("=") for part in header.split(";"))
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message.get("headers", ())}
            ancestors = "https://huggingface.co" if os.environ.get("SPACE_HOST") else "'none'"
            standard = {"content-security-policy": POLICY.replace("{ancestors}", ancestors), **_HEADERS}
            added = [(name.encode(), value.encode()) for name, value in standard.items() if name.encode() not in names]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return answer


async def _refuse(send: Send, status: int, why: str, **headers: str) -> None:
    fields = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **headers}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": why.encode()})


# ---- Routes

_TICK_SECONDS = 0.1
_BEAT_SECONDS = 0.5
"""Interval of messages without news. The page reports a dead server after 3 seconds of silence."""
ASSETS = {
    "studio.css": "text/css",
    "studio.js": "text/javascript",
    "link.js": "text/javascript",
    "controls.js": "text/javascript",
    "mix.js": "text/javascript",
    "result.js": "text/javascript",
    "charts.css": "text/css",
    "charts.js": "text/javascript",
}


@cache
def asset(name: str) -> str:
    """A file of the page."""
    return chart_files().get(name) or (files("weightsmith._app.studio") / name).read_text(encoding="utf-8")


def application(session: Session, ended: Callable[[], bool], *, names: Collection[str], token: str = "") -> App:
    """The ASGI application of a session. ended: whether the server is shutting down. Raises Unsupported without Starlette."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ModuleNotFoundError:
        raise Unsupported("the studio needs Starlette and uvicorn", fix=f"run {install('studio')}") from None

    async def page(request: Request) -> Response:
        return Response(asset("studio.html"), media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        return Response(asset(name), media_type=ASSETS[name]) if name in ASSETS else Response("no such file", 404)

    async def about(request: Request) -> Response:
        goals = [{"name": name, "words": goal.words} for name, goal in draft.GOALS_SHOWN.items()]
        return JSONResponse({"methods": listed_methods(), "families": FAMILIES, "goals": goals})

    async def report_of(request: Request) -> Response:
        html = await asyncio.to_thread(session.kept.report, request.path_params["number"])
        headers = {"content-security-policy": _REPORT_POLICY}
        return (
            Response("The report of this run is not in the studio's folder: it was removed, or could not be written.", 404)
            if html is None
            else Response(html, media_type="text/html", headers=headers)
        )

    async def events(request: Request) -> Response:
        async def changes() -> AsyncIterator[str]:
            revision, quiet = 0, _BEAT_SECONDS
            yield f"retry: {1000 * _BEAT_SECONDS:.0f}\n\n"  # a browser waits seconds otherwise, when the server is back
            while not ended():
                revision, changed = session.board.since(revision)
                if changed or quiet >= _BEAT_SECONDS:
                    yield f"data: {json.dumps(changed)}\n\n"
                    quiet = 0.0
                await asyncio.sleep(_TICK_SECONDS)
                quiet += _TICK_SECONDS

        return StreamingResponse(changes(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def do(request: Request) -> Response:
        action = _ACTIONS.get(request.path_params["action"])
        if action is None:
            return Response("no such action", 404)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                return Response("too much", 413)
        try:
            request_json = parse_json(body)
            if not isinstance(request_json, dict):
                raise ParameterError("the request is not a JSON object")
            answer = await asyncio.to_thread(action, session, request_json)
        except WeightsmithError as error:
            return JSONResponse({"problem": show.error(error), "kind": type(error).__name__}, 409)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            return JSONResponse({"problem": show.error(ParameterError(f"the page sent something wrong: {error!r}"))}, 400)
        return JSONResponse(answer or {})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(session.close)

    routes = [
        Route("/", page),
        Route("/assets/{name}", file),
        Route("/about", about),
        Route("/events", events),
        Route("/runs/{number:int}", report_of),
        Route("/do/{action}", do, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), names, token)


def _texts(names: object, most: int) -> list[str]:
    if not isinstance(names, list) or len(names) > most or not all(isinstance(name, str) for name in names):
        raise ParameterError(f"not a list of up to {most} names")
    return names


def _edit(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    changes, number = request["changes"], request["number"]
    if not isinstance(changes, list) or len(changes) > 1000 or not all(isinstance(change, dict) for change in changes):
        raise ParameterError("not a list of edits")
    return {"number": number, "document": session.edit(str(request["tab"])[:40], int(number), changes)}


def _merge(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    options = {"overwrite": request.get("overwrite") is True, "again": request.get("again") is True}
    return {"work": session.start(int(request["version"]), str(request["name"]), **options)}


def _try(session: Session, request: Mapping[str, Any]) -> None:
    models, recipe = _texts(request["models"], 12), session.recipe(int(request["version"]))
    session.tasks.ask(recipe, models, str(request["prompt"]), str(request["text"]), int(request["new_tokens"]))


def _sweep(session: Session, request: Mapping[str, Any]) -> None:
    values = [float(value) for value in request["values"]]
    asked = str(request["prompt"]), str(request["text"])
    session.tasks.sweep(session.recipe(int(request["version"])), request["path"], str(request["model"]), values, *asked)


def _tune(session: Session, request: Mapping[str, Any]) -> None:
    ranges = [(list(path), str(model), float(low), float(high)) for path, model, low, high in request["ranges"]]
    recipe = session.recipe(int(request["version"]))
    session.tasks.tune(recipe, ranges, str(request["text"]), int(request["budget"]), _row_tokens(request))


def _find(session: Session, request: Mapping[str, Any]) -> None:
    texts = request.get("texts", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ParameterError("not a text for each model")
    session.find(int(request["version"]), str(request["name"]), texts, overwrite=request.get("overwrite") is True)


def _row_tokens(request: Mapping[str, Any]) -> int | None:
    """Tokens in each row of a text; None: as the model suits."""
    tokens = request.get("tokens")
    return None if tokens is None else int(tokens)


_ACTIONS: Mapping[str, Callable[[Session, Mapping[str, Any]], dict[str, Any] | None]] = {
    "edit": _edit,
    "merge": _merge,
    "cancel": lambda session, request: session.work.cancel(),
    "name": lambda session, request: session.about_name(str(request["name"])),
    "try": _try,
    "sweep": _sweep,
    "tune": _tune,
    "find": _find,
    "fit": lambda session, request: session.fit(str(request["text"]), _row_tokens(request)),
    "example": lambda session, request: session.example(),
    "look": lambda session, request: session.tasks.look(session.text, _texts(request["models"], 26)),
    "stop": lambda session, request: session.tasks.stop(),
    "two": lambda session, request: {"html": session.compare_runs(int(request["first"]), int(request["second"]))},
    "hub": lambda session, request: session.card(str(request["name"])[:1000]),
}


def launch(
    places: Places,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = False,
    token: str | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve the page until Ctrl-C.

    host, port  127.0.0.1 is reached from this machine alone; port None: the first free one from 7860 on
    browser     open it
    started     called before the address is printed
    token       required to open the page. None: no token on 127.0.0.1, else a new one, which is printed; "": no token

    If others can reach the page, nothing that exists is replaced or discarded. Nothing is asked of the network but models of
    the Hub. Raises Unsupported without Starlette and uvicorn, StoreError for a port that is taken, Busy for results that
    another studio writes.
    """
    alone = is_this_machine(host)
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise Unsupported("the studio needs Starlette and uvicorn", fix=f"run {install('studio')}") from None
    if token is None:
        token = "" if alone else secrets.token_urlsafe(16)
    session = Session(replace(places, alone=alone))
    app = application(session, lambda: server.should_exit, names=own_names(host), token=token)
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?{urlencode({'token': token})}" if token else "")
    started()
    print(f"The studio is at {address}\nPress Ctrl-C to stop it.", flush=True)
    if browser:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False)
    server = uvicorn.Server(config)
    server.run(sockets=[listening])
    raise KeyboardInterrupt  # only Ctrl-C ends it; on a busy machine uvicorn may return instead of raising this


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket of the first free port. Raises StoreError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for number in range(7860, 7960) if port is None else [port]:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(128)  # the address is printed before the first request is taken
            return listening
        except (OSError, OverflowError) as error:
            listening.close()
            problem = error if isinstance(error, OSError) else OSError(0, str(error))
    where = host if port is None else f"{host}:{port}"
    why = (problem.strerror or str(problem)) if problem else ""
    raise StoreError(f"cannot serve here: {why}", where=where, fix="choose another --port")
