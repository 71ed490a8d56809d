"""The page: Gradio's components, and which of them follow from which. What they say comes from `session.py`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import replace
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from weightsmith import _methods as methods
from weightsmith._app.studio import compare, draft, show
from weightsmith._app.studio.places import Places, is_this_machine
from weightsmith._app.studio.session import Session
from weightsmith._base.errors import Unsupported
from weightsmith._base.installation import install
from weightsmith._base.text import end_status

# ---- What may be sent to the server, and what a browser may load for the page.
#
# Other sites may send nothing, the page itself its events and no files; a browser loads what this server sends.

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


_PROMPT = "The three most important things about this program are"
_QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
_SEEN: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
_LAST: dict[str, Any] = {**_QUIET, "trigger_mode": "always_last"}


def _gradio() -> Any:
    """The package, which sends nothing to its makers or to the Hub's. Raises Unsupported where it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import gradio
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise Unsupported("the studio needs Gradio", fix=f"run {install('studio')}") from None
    return gradio


def build(places: Places) -> Any:
    """The page, not yet served: Gradio's Blocks. Raises Unsupported without Gradio."""
    gr = _gradio()
    session = Session(places)
    listed = session.models()

    def chooser(label: str, name: str, *, many: bool = True, info: str | None = None) -> Any:
        value: Any = [] if many else None
        return gr.Dropdown(listed, value=value, multiselect=many, label=label, info=info, allow_custom_value=True, elem_id=name)

    goals = [(goal.words, name) for name, goal in draft.GOALS_SHOWN.items()]
    known = [(f"{method.name}: {method.title}", method.name) for method in methods.all_methods()]
    with gr.Blocks(title="weightsmith studio", analytics_enabled=False, fill_width=True) as page:
        gr.HTML("<div class='ws-head'><h1>weightsmith studio</h1><span>Choose, look, merge, compare.</span></div>")
        with gr.Row():
            with gr.Column(scale=5, min_width=330):
                goal = gr.Dropdown(goals, value=None, label="Goal", elem_id="ws-goal")
                hub = ", or org/name of a model on the Hub" if places.hub else ""
                base = chooser("Base", "ws-base", many=False, info=f"From the list{hub}")
                models = chooser("Models", "ws-models")
                facts = gr.HTML()
                method = gr.Dropdown(known, value=None, label="Method", elem_id="ws-method")
                about = gr.HTML()
                template, script = "<div class='ws-controls'></div>", _asset("controls.js")
                controls = gr.HTML({}, html_template=template, js_on_load=script)
            with gr.Column(scale=6, min_width=330):
                recipe = gr.Code(
                    "", language="yaml", label="Recipe", interactive=True, lines=12, buttons=["copy"], elem_id="ws-recipe"
                )
                notes = gr.HTML(session.check(""), elem_id="ws-notes")
                with gr.Row():
                    save = gr.Button("Save the recipe", size="sm", scale=0, min_width=160, elem_id="ws-save")
                with gr.Tabs():
                    with gr.Tab("Preview"):
                        with gr.Row():
                            live = gr.Checkbox(True, label="Update when the recipe changes", container=False, min_width=220)
                            again = gr.Button("Preview now", size="sm", scale=0, min_width=160)
                        ahead = gr.HTML(session.preview(""), elem_id="ws-preview")
                    with gr.Tab("Merge"):
                        where = f"A folder in {places.out}"
                        name = gr.Textbox("merged", label="Name of the result", info=where, elem_id="ws-name")
                        with gr.Row(visible=places.alone):
                            overwrite = gr.Checkbox(False, label="Replace a result of this name", elem_id="ws-overwrite")
                            discard = gr.Checkbox(False, label="Discard unfinished work", elem_id="ws-discard")
                        with gr.Row():
                            merge = gr.Button("Merge", variant="primary", elem_id="ws-merge")
                            cancel = gr.Button("Cancel", elem_id="ws-cancel")
                        refused = gr.HTML(elem_id="ws-refused")
                        status = gr.HTML(elem_id="ws-status")
                        html = gr.Textbox("", visible="hidden")
                        with gr.Row():
                            keep = gr.Button(
                                "Save the report", size="sm", scale=0, min_width=160, visible=False, elem_id="ws-keep"
                            )
                        framed = gr.HTML(elem_id="ws-report")
                    with gr.Tab("Compare"):
                        able = compare.available()
                        judged = chooser("Models", "ws-judged")
                        prompt = gr.Textbox(_PROMPT, label="Prompt, to be continued", lines=2, elem_id="ws-prompt")
                        text = gr.Textbox("", label="Text for the perplexity", lines=4, max_lines=8, elem_id="ws-text")
                        tokens = gr.Slider(8, compare.MAX_NEW_TOKENS, value=32, step=8, label="New tokens", elem_id="ws-tokens")
                        run = gr.Button("Compare", variant="primary", elem_id="ws-compare", interactive=able)
                        table = gr.HTML("" if able else show.hint("This needs torch and transformers."), elem_id="ws-samples")
                    with gr.Tab("Look"):
                        gr.HTML(show.hint("One model: its numbers. Two: what changed. A base and more: how their changes fit."))
                        look = gr.Button("Look at the chosen models", variant="primary", elem_id="ws-look")
                        looked = gr.HTML(elem_id="ws-looked")

        # What is chosen goes into the recipe; the recipe is what everything else follows from.
        shown = [base, models, method, about, controls]
        choice = [recipe, goal, method, base, models]
        follow = _follow(session)
        goal.input(session.begin, [goal, base, models], recipe, **_QUIET).then(follow, recipe, shown, **_QUIET)
        for chosen in (base, models, method):
            chosen.input(session.rebuild, choice, recipe, **_QUIET).then(follow, recipe, shown, **_QUIET)
        for chosen in (base, models):
            chosen.input(lambda base, models: session.facts([base, *models]), [base, models], facts, **_QUIET)
        controls.input(_edit(session), recipe, recipe, **_LAST)
        recipe.input(follow, recipe, shown, **_LAST)
        checked = recipe.change(session.check, recipe, notes, **_LAST)
        checked.then(_if_live(session), [recipe, live], ahead, **{**_SEEN, "trigger_mode": "always_last"})
        again.click(session.preview, recipe, ahead, **_SEEN)
        save.click(None, recipe, None, js=_saving("recipe.yml"))

        begun = merge.click(session.start, [recipe, name, overwrite, discard], refused, **_QUIET)
        for event in (begun, page.load(lambda: None, **_QUIET)):  # whoever opens the page again sees the merge that runs
            watched = event.then(session.watch, None, [status, html], concurrency_limit=None, **_QUIET)
            watched.then(_ended(session), [html, name, base, models], [framed, keep, merge, base, models, judged], **_QUIET)
        name.change(lambda name: gr.Button(_verb(session, name)), name, merge, **_QUIET)
        cancel.click(session.work.cancel, None, None, **_QUIET)
        keep.click(None, html, None, js=_saving("report.html"))
        run.click(session.compare, [judged, prompt, text, tokens], table, **_QUIET)
        look.click(session.look, [base, models], looked, **_SEEN)
    return page


def _follow(session: Session) -> Any:
    """What the controls show of a recipe: base, models, method, its documentation, sliders."""

    gr = _gradio()

    def follow(text: str) -> tuple[Any, ...]:
        found = draft.read(text)
        shown = {"held": found.held, "controls": [control.to_json() for control in found.controls]}
        if found.held:
            return gr.skip(), gr.skip(), gr.skip(), gr.skip(), shown
        return found.base or None, list(found.models), found.method, session.about(found.method), shown

    return follow


def _edit(session: Session) -> Any:
    def edit(text: str, event: Any) -> str:
        return session.edit(text, event._data if isinstance(event._data, dict) else {})

    edit.__annotations__["event"] = _gradio().EventData  # by which Gradio knows what to pass
    return edit


def _if_live(session: Session) -> Any:
    gr = _gradio()
    return lambda text, live: session.preview(text) if live is True else gr.skip()


def _ended(session: Session) -> Any:
    """What follows from the end of a merge: its report; its result is a model that can be chosen."""

    gr = _gradio()

    def ended(html: str, name: str, base: str | None, models: list[str]) -> tuple[Any, ...]:
        listed, made = session.models(), session.made()
        every = gr.Dropdown(choices=listed)
        judged = gr.Dropdown(choices=listed, value=[*filter(None, [base, *models]), *made]) if made else every
        return show.frame(html) if html else "", gr.Button(visible=bool(html)), _verb(session, name), every, every, judged

    return ended


def _verb(session: Session, name: str) -> str:
    return "Resume" if session.resumes(name) else "Merge"


def _saving(name: str) -> str:
    """JavaScript that saves a text as a file, without the server."""
    return f"""text => {{
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], {{type: "text/plain"}}));
      link.download = "{name}"; link.click(); URL.revokeObjectURL(link.href);
    }}"""


def _asset(name: str) -> str:
    return (files("weightsmith._app.studio") / name).read_text(encoding="utf-8")


def launch(places: Places, *, host: str = "127.0.0.1", port: int | None = None, browser: bool = False) -> None:
    """Serve the page until Ctrl-C.

    host, port  127.0.0.1 is reached from this machine alone; port None: the first free one from 7860 on
    browser     open it

    If others can reach the page, nothing that exists is replaced or discarded.

    Nothing is asked of the network but models of the Hub: no analytics, no fonts, no scripts of others. The browser is told
    to load nothing but what this server sends (`ContentPolicy`).
    """
    page, gr = build(replace(places, alone=is_this_machine(host))), _gradio()
    end_status()
    from starlette.middleware import Middleware

    middleware = [Middleware(ContentPolicy), Middleware(SameOrigin, names=own_names(host)), Middleware(EventsAlone)]
    page.queue(max_size=32).launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=browser,
        show_error=True,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        strict_cors=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        css=_asset("studio.css"),
        theme=gr.themes.Base(
            primary_hue="blue",
            neutral_hue="slate",
            radius_size="sm",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ),
        app_kwargs={"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )
