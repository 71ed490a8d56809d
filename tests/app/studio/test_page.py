"""The page, served by the command, in a browser: the whole path, and what a hostile visitor tries."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.app.studio.models import make
from tests.browser_help import browser
from tests.cli_help import environment, run_process
from weightsmith._base.installation import install
from weightsmith._planning.recipe import load

__all__ = ["browser"]

GRADIO = find_spec("gradio") is not None
needs_gradio = pytest.mark.skipif(not GRADIO, reason="Gradio is not installed")
needs_torch = pytest.mark.skipif(find_spec("torch") is None or find_spec("transformers") is None, reason="needs transformers")
WAIT_MS = 90_000  # the machine may be busy
HOSTILE = "<img src=x onerror=window.evil=1>"


@pytest.mark.slow
@pytest.mark.skipif(GRADIO, reason="Gradio is installed")
def test_without_gradio_the_command_says_what_to_install() -> None:
    ran = run_process("studio")
    assert ran.code == 1
    assert f"the studio needs Gradio\n  -> Run {install('studio')}." in ran.err


@pytest.mark.slow
def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    ran = run_process("studio", tmp_path / "none")
    assert ran.code == 1
    assert "no such folder" in ran.err


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page").resolve()
    make(root)
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    """Of a studio that serves the folders."""
    if not GRADIO:
        pytest.skip("Gradio is not installed")
    with serving(root) as url:
        yield url


@contextmanager
def serving(root: Path, *flags: str) -> Iterator[str]:
    """The address of a studio of some folders, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "weightsmith", "studio", "models", "--out", "out", "--no-hub", "--port", str(port), *flags]
    log = (root / "log").open("w")
    env = environment(HF_HUB_OFFLINE="1", GRADIO_TEMP_DIR=str(root / "gradio"))
    process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            if process.poll() is not None:
                break
            try:
                urllib.request.urlopen(url, timeout=5).read()
                break
            except OSError:
                time.sleep(0.3)
        assert process.poll() is None, (root / "log").read_text()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def status_of(url: str, data: bytes | None = None, **headers: str) -> int:
    try:
        request = urllib.request.Request(url, data=data, headers=headers)
        return int(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@needs_gradio
def test_the_server_gives_away_no_file_and_answers_no_other_name(address: str, root: Path) -> None:
    assert status_of(address) == 200
    assert status_of(address, Host="evil.example") == 400
    assert status_of(address, Origin="http://evil.example") == 403
    assert status_of(f"{address}/gradio_api/upload", b"", Origin="null") == 403
    assert status_of(address, Origin=address) == 200
    for path in ("/etc/passwd", f"{root}/models/base/config.json", f"{root}/secret/config.json", f"{root}/log"):
        assert status_of(f"{address}/gradio_api/file={path}") in (403, 404)
    for path in ("/docs", "/openapi.json", "/gradio_api/mcp/sse", "/monitoring"):
        assert status_of(address + path) in (404, 403), path
    answer = urllib.request.urlopen(address, timeout=20)
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self' data: blob:;")
    html = answer.read().decode()
    assert "fonts.googleapis.com" not in html
    assert json.loads(re.search(r"window.gradio_config = (\{.*?\});</script>", html)[1])["analytics_enabled"] is False  # type: ignore[index]


@pytest.mark.slow
@needs_gradio
def test_others_may_reach_it_and_their_sites_may_not(root: Path) -> None:
    with serving(root, "--host", "0.0.0.0") as address:
        join, event = f"{address}/gradio_api/queue/join", b'{"data": [], "fn_index": 0, "session_hash": "abcdefghij"}'
        assert status_of(address, Host="192.168.1.5") == 200
        assert status_of(address, Host="evil.example") == 400
        for kind in ("application/json", "text/plain"):
            assert status_of(join, event, Origin="https://evil.example", **{"Content-Type": kind}) == 403
        assert status_of(join, event, Origin=address, **{"Content-Type": "application/json"}) == 200


@pytest.mark.slow
@needs_gradio
def test_nothing_is_uploaded(address: str, root: Path) -> None:
    """Every route of Gradio that takes something is closed, but for the events of the page."""
    from weightsmith._app.studio.page import _POSTED

    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nmine\r\n--x--\r\n'
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    code = (
        "import json, gradio, gradio.routes as r; print(json.dumps([path for path, takes in "
        "r.App.create_app(gradio.Blocks()).openapi()['paths'].items() if takes.keys() - {'get', 'head'}]))"
    )
    known = set(json.loads(run_process(code=code).out.splitlines()[-1]))
    assert "/gradio_api/upload" in known, "this version of Gradio says otherwise where it takes files"
    closed = {path for path in known if path.rstrip("/") not in _POSTED}
    for path in {*closed, "/upload", "/gradio_api/upload/", "/gradio_api//upload"}:
        assert status_of(address + re.sub(r"\{.*?\}", "x", path), body, **multipart) in (403, 404), path
    assert status_of(f"{address}/gradio_api/upload_progress?upload_id=x") == 404
    assert [path for path in (root / "gradio").rglob("*") if path.is_file()] == []


# ---- in a browser


class Visit:
    """A page that is open, and what it said and asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.address = address
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.said: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(address)
        self.page.wait_for_selector("#ws-recipe .cm-content")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:", "about:")):
            self.elsewhere.append(request.url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *given: object) -> None:
        self.context.close()

    def choose(self, name: str, text: str) -> None:
        """One more value of a list."""
        self.page.click(f"#{name} input")
        self.page.keyboard.type(text)
        self.page.locator("ul[role=listbox] li", has_text=text).first.click()
        self.page.keyboard.press("Escape")

    def write(self, text: str) -> None:
        """The recipe, by hand."""
        self.page.click("#ws-recipe .cm-content")
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(text)

    @property
    def recipe(self) -> str:
        return "\n".join(self.page.locator("#ws-recipe .cm-line").all_text_contents())

    def has(self, selector: str, text: str) -> None:
        """Wait until an element holds a text."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def fine(self) -> None:
        """Nothing was said, asked of others, or run that a name brought; and nothing is wider than the page."""
        assert self.said == []
        assert self.elsewhere == []
        assert self.page.evaluate("window.evil") is None
        assert not self.page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_choose_preview_merge_compare_export(browser: Any, address: str, root: Path, width: int, scheme: str) -> None:
    name = f"merged-{width}"
    with Visit(browser, address, width, scheme) as visit:
        page = visit.page
        visit.choose("ws-goal", "skills of several")
        visit.has("#ws-notes", "no model is chosen here yet")
        visit.choose("ws-base", "models/base")
        visit.has("#ws-recipe", "base_model: ./models/base")
        visit.choose("ws-models", "models/fr")
        visit.has("#ws-recipe", "- model: ./models/fr")
        visit.choose("ws-models", "adapters/py")
        visit.has("#ws-recipe", "- model: ./models/base+./models/adapters/py")
        visit.has("#ws-notes", "The recipe is correct.")
        assert "its share; the shares are divided" in visit.recipe

        visit.has("#ws-preview", "away from its base")
        page.locator("#ws-preview figure").nth(3).wait_for()
        before = page.locator("#ws-preview").inner_text()
        slider = page.locator(".ws-control input[type=range]").first
        slider.focus()
        for _ in range(20):
            page.keyboard.press("ArrowLeft")
        visit.has("#ws-recipe", "{weight: 0.8}")
        page.locator(".ws-by-layer").nth(1).click()
        page.locator(".ws-curve circle").last.focus()
        for _ in range(3):
            page.keyboard.press("PageUp")
        visit.has("#ws-recipe", "{weight: 0.8, density: [0.5, 0.5, 0.5, 0.5, 0.8]}")
        page.wait_for_function("before => document.querySelector('#ws-preview').innerText !== before", arg=before)
        with page.expect_download() as saved:
            page.click("#ws-save")
        exported = Path(saved.value.path()).read_text()
        assert saved.value.suggested_filename == "recipe.yml"
        assert load(exported).problems == ()
        assert exported.rstrip("\n") == visit.recipe.rstrip("\n")

        page.get_by_role("tab", name="Merge").click()
        page.fill("#ws-name textarea, #ws-name input", name)
        page.click("#ws-merge")
        visit.has("#ws-status", f"/out/{name}")
        made = json.loads((root / "out" / name / "weightsmith.json").read_text())
        assert made
        assert (root / "out" / name / "recipe.yml").read_text().rstrip("\n") == exported.rstrip("\n")
        report = page.frame_locator("#ws-report iframe")
        report.locator("h1", has_text=name).wait_for()
        report.locator("figure.heat tbody td[class]").first.click()
        with page.expect_download() as saved:
            page.click("#ws-keep")
        assert Path(saved.value.path()).read_text() == (root / "out" / name / "report.html").read_text()

        page.get_by_role("tab", name="Compare").click()
        if find_spec("transformers") is not None:
            page.fill("#ws-prompt textarea", "The")
            page.fill("#ws-text textarea", "The three most important things about this program are")
            page.click("#ws-compare")
            page.locator("#ws-samples tbody tr").nth(3).wait_for()
            rows = page.locator("#ws-samples tbody tr").all_inner_texts()
            assert [row.split()[0] for row in rows] == [
                "./models/base",
                "./models/fr",
                "./models/base+./models/adapters/py",
                f"./out/{name}",
            ]
            assert all(re.search(r"\d+\.\d\d", row) for row in rows), rows

        page.get_by_role("tab", name="Look").click()
        page.click("#ws-look")
        page.frame_locator("#ws-looked iframe").locator("h1", has_text="Task vectors of 2 models").wait_for()
        visit.fine()


@pytest.mark.slow
def test_a_recipe_that_is_written_draws_the_controls_and_marks_its_lines(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        lines = ["merge_method: slerp", "base_model: ./models/base", "models:", "- model: ./models/fr", "parameters:"]
        visit.write("\n".join([*lines, "  tt: 0.5"]))
        visit.has("#ws-notes li", "line 6, column 3")
        marked = "getComputedStyle(document.querySelectorAll('#ws-recipe .cm-line')[5]).backgroundColor"
        visit.page.wait_for_function(f"{marked} !== 'rgba(0, 0, 0, 0)'")
        visit.write("\n".join([*lines, "  t: [0, 0.5, 1]"]))
        visit.has("#ws-notes", "The recipe is correct.")
        visit.page.locator(".ws-curve circle").nth(2).wait_for()
        assert visit.page.locator("#ws-base input").input_value() == "./models/base"
        assert visit.page.locator("#ws-method input").input_value().startswith("slerp")
        visit.page.fill("#ws-method input", "nearswap")
        visit.page.locator("ul[role=listbox] li", has_text="nearswap").click()
        visit.has("#ws-recipe", "merge_method: nearswap")
        visit.fine()


@pytest.mark.slow
def test_hostile_recipes_and_names(browser: Any, address: str, root: Path) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        visit.write(
            f"merge_method: linear\nmodels:\n- model: ../secret\n- model: '{HOSTILE}'\n- model: '${{alert(1)}}{{{{x}}}}'\n"
        )
        visit.has("#ws-notes li", "line 3, column 10 ../secret is outside the folders")
        visit.has("#ws-notes li", HOSTILE)
        visit.write("/etc/passwd")
        visit.has("#ws-notes", "1 problem.")
        assert "root:" not in page.content()
        page.get_by_role("tab", name="Merge").click()
        for name in ("../evil", "/tmp/evil", HOSTILE):
            page.fill("#ws-name textarea, #ws-name input", name)
            page.click("#ws-merge")
            visit.has("#ws-refused", "error")
        visit.write("merge_method: linear\n# " + "x" * 100_000)
        visit.has("#ws-notes", "more than 100,000 characters")
        assert sorted((root / "out").glob("evil*")) == []
        visit.fine()


@pytest.mark.slow
def test_the_page_asks_nobody_else(tmp_path: Path) -> None:
    """Analytics are off before Gradio is imported, whatever the environment says."""
    if not GRADIO:
        pytest.skip("Gradio is not installed")
    code = (
        "import weightsmith._app.studio.page as p; p._gradio()\n"
        "import gradio.analytics; print(gradio.analytics.analytics_enabled())"
    )
    ran = run_process(code=code, env={"GRADIO_ANALYTICS_ENABLED": "True"}, cwd=tmp_path)
    assert (ran.code, ran.out) == (0, "False\n"), ran.err
