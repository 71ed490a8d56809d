"""The page, served by the command, in a browser: what a user does on it, and what must not go wrong."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import weightsmith
import weightsmith._app.studio.session
from tests.app.studio.models import make
from tests.app.studio.serving import Studio, asked, serving, start, stop
from tests.app.studio.slow_link import slow_link
from tests.app.studio.visit import SLOW_MS, Visit, values_shown, values_written
from tests.browser_help import browser
from tests.fake_hub import COMMIT, serve
from weightsmith._app.studio.server import ASSETS
from weightsmith._planning.recipe import load

__all__ = ["browser"]

pytestmark = [pytest.mark.reader, pytest.mark.slow]
HOSTILE = "<img src=x onerror=window.evil=1>"
TORCH = find_spec("torch") is not None and find_spec("transformers") is not None
FR, DE, BASE, PY = "./models/fr", "./models/de", "./models/base", "./models/adapters/py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page").resolve()
    make(root)
    return root


@pytest.fixture
def studio(root: Path, request: pytest.FixtureRequest) -> Iterator[Studio]:
    """A studio of its own for each test, as each has one recipe."""
    out = re.sub(r"\W+", "-", request.node.name)[-60:].strip("-")
    with serving(root, out=f"out/{out}") as served:
        yield served


def out_of(root: Path, request: pytest.FixtureRequest) -> Path:
    return root / "out" / re.sub(r"\W+", "-", request.node.name)[-60:].strip("-")


def ready(visit: Visit, text: str = "") -> None:
    """A merge of two fine-tunes of a base."""
    visit.write(text or RECIPE)
    visit.saved()
    visit.page.locator(".ws-control").first.wait_for(state="attached")


RECIPE = f"""# by hand
merge_method: ties
base_model: {BASE}
models:
  - model: {FR}   # French
    parameters: {{weight: 1.0, density: 0.5}}
  - model: {DE}
    parameters: {{weight: 1.0, density: 0.5}}
dtype: bfloat16
"""


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_choose_mix_preview_merge_try_save(
    browser: Any, studio: Studio, root: Path, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    with Visit(browser, studio.address, width, scheme=scheme) as visit:
        page = visit.page
        visit.step("mix")
        page.select_option("#goal", "combine")
        visit.has("#notes", "no model is chosen here yet")
        visit.choose(BASE, "use as base")
        visit.choose(FR)
        visit.saved()
        visit.choose(PY)
        visit.has("#notes", "The recipe is correct")
        assert "merge_method: task_arithmetic" in visit.recipe
        assert "its share; the shares are divided" in visit.recipe
        visit.step("mix")
        page.click("#method")
        page.locator("#methods").get_by_role("button", name="ties", exact=True).click()
        page.locator("#methods").wait_for(state="hidden")
        visit.saved()
        assert "merge_method: ties" in visit.recipe
        slider = page.get_by_label(f"weight of {FR}", exact=True)
        slider.focus()
        for _ in range(20):
            page.keyboard.press("ArrowLeft")
        page.get_by_label(f"density of {FR}: one value, by layer or by part").select_option("layer")
        page.locator(".ws-hit").last.focus()
        for _ in range(3):
            page.keyboard.press("PageDown")
        visit.saved()
        assert "{weight: 0.8, density: [1, 1, 1, 1, 0.7]}" in visit.recipe
        visit.step("result")
        visit.previewed()
        visit.has("#shown", "away from its base")
        previewed = weightsmith.preview(_absolute(visit.recipe, root), progress=False)
        assert f"{previewed.total.models[0].survives:.1%} survives" in page.inner_text("#shown")  # type: ignore[union-attr]
        cell = page.locator("#shown figure.heat td[class]").first
        cell.click()
        assert "layer" in page.locator("#shown figure.heat .said").first.inner_text()
        visit.step("mix")
        visit.unfold()
        with page.expect_download() as saved:
            page.click("#save")
        exported = Path(saved.value.path()).read_text()
        assert (saved.value.suggested_filename, load(exported).problems, exported) == ("recipe.yml", (), visit.recipe)

        page.fill("#name", "mine")
        page.click("#merge")
        visit.has("#progress", "Done")
        out_folder = out_of(root, request) / "mine"
        assert (out_folder / "recipe.yml").read_text() == exported
        visit.step("result")
        page.frame_locator("#frame iframe").locator("h1", has_text="mine").wait_for()
        page.click("#tab-try")
        if TORCH:
            page.fill("#prompt", "The")
            page.fill("#judged", "The three most important things about this program are")
            page.click("#try-now")
            page.locator("#tried tbody tr").nth(3).wait_for(timeout=SLOW_MS)
            rows = page.locator("#tried tbody tr th").all_text_contents()
            assert rows == ["the merge", BASE, FR, f"{BASE}+{PY}"]
            assert all(re.fullmatch(r"\d+\.\d\d", text) for text in page.locator("#tried .ws-n").all_inner_texts())
        page.click("#tab-runs")
        kinds = page.locator("#rows li").evaluate_all("rows => rows.map(row => row.dataset.kind)")
        assert kinds == (["try", "merge", "preview"] if TORCH else ["merge", "preview"])
        page.click("#tab-sweep")
        page.fill("#values", "0.1, 0.9")
        page.click("#sweep-now")
        page.locator(".ws-sweep li").nth(1).wait_for()
        visit.fine()


def _absolute(text: str, root: Path) -> str:
    return text.replace("./models", f"{root}/models")


def test_a_hand_written_recipe_keeps_its_words_and_draws_the_controls(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        ready(visit)
        visit.page.get_by_label(f"density of {DE}, exactly").fill("0.25")
        visit.page.keyboard.press("Tab")
        visit.saved()
        assert visit.recipe == RECIPE.replace("density: 0.5", "density: 0.25").replace("density: 0.25", "density: 0.5", 1)
        visit.page.get_by_label(f"{DE}: move up").click()
        visit.saved()
        assert [entry["model"] for entry in yaml.safe_load(visit.recipe)["models"]] == [DE, FR]
        assert "# French" in visit.recipe
        visit.page.click("#undo")
        visit.has("#gutter", "9")
        visit.write(RECIPE.replace("weight: 1.0", "wieght: 1.0", 1))
        visit.has("#notes", "line 6, column 18")
        visit.page.locator("#gutter span.error", has_text="6").wait_for()
        visit.page.click("#notes button[data-line]")
        assert visit.page.evaluate(
            "getSelection().toString() || document.querySelector('#text').value.slice(text.selectionStart, text.selectionEnd)"
        ).startswith("    parameters")
        visit.fine()


def test_hostile_recipes_and_names(browser: Any, studio: Studio, root: Path) -> None:
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(
            f"merge_method: linear\nmodels:\n- model: ../secret\n- model: '{HOSTILE}'\n- model: '${{alert(1)}}{{{{x}}}}'\n"
        )
        visit.has("#notes li", "line 3, column 10 ../secret is outside the folders")
        visit.has("#notes li", HOSTILE)
        visit.has("#strips", HOSTILE)
        visit.write("/etc/passwd")
        visit.has("#notes", "1 problem.")
        assert "root:" not in page.content()
        visit.write(RECIPE)
        visit.saved()
        visit.until("!document.querySelector('#merge').disabled")
        for name in ("../evil", "/tmp/evil", HOSTILE):
            page.fill("#name", name)
            visit.has("#why", "A name can have up to 100 letters, digits")
            assert page.locator("#merge").is_disabled()
        visit.write("merge_method: linear\n# " + "x" * 100_001)
        visit.has("#notes", "more than 100,000 characters")
        assert not list(root.glob("**/evil*"))
        visit.fine()


@pytest.mark.skipif(not TORCH or find_spec("cmaes") is None, reason="needs torch, transformers and cmaes")
def test_a_search_from_the_page_and_its_recipe_loaded(browser: Any, studio: Studio) -> None:
    choice = random.Random(2)
    text = "".join(
        " ".join(choice.choices("what it reads and writes and how fast that is".split(), k=12)) + ".\n" for _ in range(100)
    )
    with Visit(browser, studio.address) as visit:
        page = visit.page
        ready(visit)
        page.click("#tab-try")
        page.fill("#judged", text)
        page.click("#tab-tune")
        ticks = page.locator("#ranges input[type=checkbox]")
        assert [tick.is_checked() for tick in ticks.all()][:3] == [True, False, True]  # the weights
        page.fill("#budget", "3")
        page.click("#tune-now")
        page.locator("#tuned tbody tr").first.wait_for(timeout=SLOW_MS)
        page.click("#tab-runs")
        page.locator("#rows li[data-kind=tune] button", has_text="Load").click()
        visit.until("!document.querySelector('#text').value.includes('weight: 1.0')")
        visit.saved()
        written = values_written(visit.recipe)
        assert (written[FR, "weight"], written[DE, "weight"]) != (1.0, 1.0)
        assert "# by hand" in visit.recipe
        visit.fine()


def test_a_model_of_the_hub_is_checked_previewed_and_merged(browser: Any, root: Path, tmp_path: Path) -> None:
    """No byte of it is asked for before its name is typed; a preview reads ranges, a merge downloads."""
    files = {name: {file.name: file.read_bytes() for file in (root / "models" / name).iterdir()} for name in ("fr", "de")}
    with serve({(f"org/{name}", COMMIT): contents for name, contents in files.items()}) as hub:
        with serving(root, out="out/hub", hub=hub.environment(tmp_path)) as studio, Visit(browser, studio.address) as visit:
            page = visit.page
            visit.choose(BASE, "use as base")
            visit.saved()
            assert hub.seen == []
            page.fill("#hub-name", "org/none")
            page.click("#hub button[type=submit]")
            visit.has("#hub-found", "org/none")
            assert "error[" not in page.inner_text("#hub-found")
            page.fill("#hub-name", "org/fr")
            page.keyboard.press("Enter")
            visit.has("#hub-found", "LlamaForCausalLM 1.1 M params 4 layers BF16")
            page.locator("#hub-found button", has_text="Add").click()
            visit.choose(DE)
            visit.has("#notes", "The recipe is correct")
            visit.previewed()
            visit.has("#shown", "away from its base")
            assert "model.safetensors" not in hub.whole()
            previewed = weightsmith.preview(_absolute(visit.recipe.replace("org/fr", FR), root), progress=False)
            assert f"{previewed.total.models[0].survives:.1%} survives" in page.inner_text("#shown")  # type: ignore[union-attr]
            page.click("#merge")
            visit.has("#progress", "Done")
            assert "model.safetensors" in hub.whole()
            visit.fine()


# ---- one state, at any latency


def _edits(page: Any, seed: int, count: int = 50) -> None:
    """Sliders, curve points and numbers, moved faster than the link can say."""
    choice = random.Random(seed)
    page.get_by_label(f"density of {FR}: one value, by layer or by part").select_option("layer")
    page.get_by_label(f"weight of {DE}: one value, by layer or by part").select_option("part")
    page.locator(".ws-hit").first.wait_for(state="attached")
    page.get_by_label(f"weight of {DE}, mlp", exact=True).wait_for(state="attached")
    for _ in range(count):
        kind = choice.random()
        if kind < 0.35:
            page.get_by_label(f"weight of {FR}", exact=True).press(
                choice.choice(["ArrowLeft", "ArrowRight", "PageUp", "PageDown"])
            )
        elif kind < 0.6:
            page.locator(".ws-hit").nth(choice.randrange(5)).press(
                choice.choice(["ArrowUp", "ArrowDown", "PageUp", "PageDown"])
            )
        elif kind < 0.75:
            page.get_by_label(f"weight of {DE}, mlp", exact=True).press(choice.choice(["ArrowLeft", "ArrowRight"]))
        elif kind < 0.85:
            page.get_by_label(f"density of {DE}, exactly").fill(f"{choice.random():.2f}")
            page.keyboard.press("Enter")
        elif kind < 0.92:
            page.evaluate(
                TYPE,
                f"# note {choice.random():.4f}\n",
            )
        else:
            page.wait_for_timeout(choice.randrange(120))


FIRST_EVENT = """fetch('/events').then(async answer => {
  const reader = answer.body.getReader();
  let text = "";
  const first = () => text.split("\\n\\n").slice(0, -1).find(event => event.startsWith("data:"));
  while (!first()) text += new TextDecoder().decode((await reader.read()).value);
  reader.cancel();
  return JSON.parse(first().slice(5)).document.text;
})"""
TYPE = """text => {
  const area = document.querySelector("#text");
  area.value += text;
  area.dispatchEvent(new Event("input"));
}"""


def _agree(visit: Visit) -> None:
    """The controls, the text on the page and the server's recipe say the same."""
    visit.saved()
    shown = values_shown(visit.page)
    written = values_written(visit.recipe)
    assert {key: shown[key] for key in written} == written
    server = visit.page.evaluate(FIRST_EVENT)
    assert server == visit.recipe


SEEDS = int(os.environ.get("WEIGHTSMITH_STUDIO_SEEDS", "2"))
SLOW = 0.8
"""Seconds of a round trip. Tens of edits are made meanwhile."""


@pytest.mark.parametrize(("seed", "seconds"), [(seed, SLOW if seed % 2 else 0.2) for seed in range(SEEDS)])
def test_fifty_edits_over_a_slow_link(
    browser: Any, studio: Studio, root: Path, seed: int, seconds: float, request: pytest.FixtureRequest
) -> None:
    with slow_link(studio.port) as link, Visit(browser, f"http://127.0.0.1:{link.port}/") as visit:
        ready(visit)
        link.seconds = seconds
        _edits(visit.page, seed)
        before = values_shown(visit.page)
        _agree(visit)
        assert values_shown(visit.page) == before, "what was shown while edits were under way is what came of them"
        if seed == 0:
            visit.page.click("#merge")
            visit.has("#progress", "Done")
            out_folder = out_of(root, request) / "merged"
            assert (out_folder / "recipe.yml").read_text() == visit.recipe
            again = weightsmith.merge(_absolute(visit.recipe, root), out_of(root, request) / "again", progress=False)
            assert (out_folder / "model.safetensors").read_bytes() == (Path(str(again.out)) / "model.safetensors").read_bytes()
        visit.fine()


def test_a_button_that_is_pressed_twice_over_a_slow_link_moves_once(browser: Any, studio: Studio) -> None:
    with slow_link(studio.port) as link, Visit(browser, f"http://127.0.0.1:{link.port}/") as visit:
        ready(visit)
        link.seconds = SLOW
        for _ in range(2):
            visit.page.get_by_label(f"{FR}: move down").click()
        visit.saved()
        assert [entry["model"] for entry in yaml.safe_load(visit.recipe)["models"]] == [DE, FR]
        visit.page.locator(f"[data-model='{FR}'] .ws-head").drag_to(visit.page.locator(f".ws-strip-box[data-model='{DE}']"))
        visit.saved()
        assert visit.recipe == RECIPE
        parts = "".join(f"  - sources: [{{model: {FR}, layer_range: [{i}, {i + 1}]}}]\n" for i in range(4))
        visit.write(f"merge_method: passthrough\nslices:\n{parts}")
        visit.saved()
        visit.page.get_by_label("slice 1: remove").dblclick()
        visit.saved()
        assert [entry["sources"][0]["layer_range"][0] for entry in yaml.safe_load(visit.recipe)["slices"]] == [1, 2, 3]


def test_a_reload_keeps_edits_that_were_under_way(browser: Any, studio: Studio) -> None:
    with slow_link(studio.port) as link, Visit(browser, f"http://127.0.0.1:{link.port}/") as visit:
        ready(visit)
        link.seconds = SLOW
        slider = visit.page.get_by_label(f"weight of {FR}", exact=True)
        for _ in range(10):
            slider.press("ArrowLeft")
        shown = values_shown(visit.page)[FR, "weight"]
        visit.page.reload()
        visit.page.locator(".ws-control").first.wait_for(state="attached")
        _agree(visit)
        assert values_shown(visit.page)[FR, "weight"] == shown == pytest.approx(0.9)


def test_two_tabs_show_one_recipe_and_one_merge(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        ready(visit)
        other = visit.tab()
        other.get_by_label(f"weight of {DE}, exactly").fill("0.4")
        other.keyboard.press("Enter")
        visit.until("document.querySelector('#text').value.includes('weight: 0.4')")
        # Both at once, each on its own control: neither is lost.
        for _ in range(5):
            visit.page.get_by_label(f"weight of {FR}", exact=True).press("ArrowLeft")
            other.get_by_label(f"density of {DE}", exact=True).press("ArrowRight")
        visit.saved()
        visit.saved(other)
        visit.until("document.querySelector('#text').value.includes('density: 0.525')")
        assert values_written(visit.recipe)[FR, "weight"] == 0.95
        visit.until(
            "['weight: 0.95', 'density: 0.525'].every(each => document.querySelector('#text').value.includes(each))", other
        )
        assert other.input_value("#text") == visit.recipe
        _agree(visit)
        visit.page.click("#merge")
        other.locator("#progress", has_text="Done").wait_for()
        other.locator("#frame iframe").or_(other.locator("#rows li[data-kind=merge]")).first.wait_for(state="attached")
        visit.fine()


def test_a_tab_that_is_duplicated_edits_for_itself(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        ready(visit)
        for _ in range(3):
            visit.page.get_by_label(f"weight of {FR}", exact=True).press("ArrowLeft")
            visit.saved()
        other = visit.tab()
        storage = visit.page.evaluate("JSON.stringify(sessionStorage)")
        other.evaluate(
            "kept => { for (const [name, value] of Object.entries(JSON.parse(kept))) sessionStorage.setItem(name, value); }",
            storage,
        )
        other.reload()
        for tab, weight in ((other, 0.99), (visit.page, 0.98), (other, 0.97)):
            tab.get_by_label(f"weight of {DE}", exact=True).press("ArrowLeft")
            for page in (visit.page, other):
                visit.until(f"document.querySelector('[aria-label=\"weight of {DE}, exactly\"]').value === '{weight}'", page)
                visit.saved(page)
        assert values_written(visit.recipe)[DE, "weight"] == 0.97
        _agree(visit)


def test_seven_tabs_edit_and_those_behind_follow_when_they_are_seen(browser: Any, studio: Studio) -> None:
    """A browser opens six connections to a server."""
    with Visit(browser, studio.address) as visit:
        ready(visit)
        for _ in range(7):
            hidden = visit.tab()
            hidden.evaluate(HIDE, True)
        visit.page.get_by_label(f"weight of {FR}", exact=True).press("ArrowLeft")
        visit.saved()
        assert "0.99" not in hidden.input_value("#text")
        hidden.evaluate(HIDE, False)
        visit.until("document.querySelector('#text').value.includes('weight: 0.99')", hidden)
        assert hidden.locator("#dead").is_hidden()


HEAR = """() => {
  window.heard = [];
  new MutationObserver(() => heard.push(document.querySelector("#said").textContent))
    .observe(document.querySelector("#said"), { childList: true });
}"""
HIDE = """hidden => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_dead_server_is_said_and_what_is_edited_meanwhile_arrives(browser: Any, root: Path) -> None:
    studio = start(root, out="out/dead")
    port = studio.port
    with Visit(browser, studio.address) as visit:
        ready(visit)
        visit.previewed()
        for place in range(3):  # with nothing running, with an edit under way, during a merge
            if place == 2:
                visit.page.fill("#name", "long")
                visit.page.click("#merge")
            if place == 1:
                visit.page.get_by_label(f"weight of {FR}", exact=True).press("ArrowLeft")
            studio.kill()
            visit.page.locator("#dead").wait_for()
            visit.page.get_by_label(f"density of {DE}", exact=True).press("ArrowLeft")
            shown = values_shown(visit.page)
            visit.page.click("#merge") if visit.page.locator("#merge").is_enabled() and place < 1 else None
            studio = start(root, out="out/dead", port=port)
            visit.page.locator("#dead").wait_for(state="hidden")
            visit.saved()
            assert values_shown(visit.page) == shown
            _agree(visit)
        # Under another name: what was finished when the server was killed is of the recipe before the last edit.
        visit.page.fill("#name", "after")
        visit.page.click("#merge")
        visit.has("#progress", "Done")
    stop(studio)


def test_the_recipe_of_this_browser_is_offered_to_an_empty_studio(browser: Any, root: Path) -> None:
    studio = start(root, out="out/first")
    port = studio.port
    with Visit(browser, studio.address) as visit:
        ready(visit)
        stop(studio)
        studio = start(root, out="out/second", port=port)
        visit.page.reload()
        visit.page.click("#restore")
        visit.until("document.querySelector('#text').value.includes('# by hand')")
        assert visit.recipe == RECIPE
    stop(studio)


# ---- what it takes to use it


def test_a_folder_of_links_says_that_they_are_not_followed(browser: Any, root: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "models" / "fr").symlink_to(root / "models" / "fr")
    with serving(tmp_path.resolve()) as studio, Visit(browser, studio.address) as visit:
        visit.has("#found", "Links to other folders are not followed")


def test_two_hundred_models_are_searched(browser: Any, tmp_path: Path) -> None:
    root = tmp_path.resolve()
    make(root)
    for i in range(200):
        folder = root / "models" / f"tune-{i:03}"
        folder.mkdir()
        for file in (root / "models" / "fr").iterdir():
            (folder / file.name).hardlink_to(file)
    with serving(root) as studio, Visit(browser, studio.address) as visit:
        visit.has("#found", "204 of 204 models, the first 60 are shown")
        visit.page.fill("#search", "tune-17")
        visit.has("#found", "10 of 204 models")
        visit.choose("./models/tune-177")
        visit.until("document.querySelector('#text').value.includes('./models/tune-177')")
        visit.fine()


def test_from_start_to_a_merged_model_by_keyboard_alone(
    browser: Any, studio: Studio, root: Path, request: pytest.FixtureRequest
) -> None:
    with Visit(browser, studio.address) as visit:
        page = visit.page

        def tab_to(label: str, most: int = 120) -> None:
            named = "(x => (x.getAttribute('aria-label') ?? x.id) === label)"
            page.wait_for_function(f"label => [...document.querySelectorAll('[aria-label], [id]')].some{named}", arg=label)
            for _ in range(most):
                page.keyboard.press("Tab")
                if page.evaluate(
                    "label => (document.activeElement.getAttribute('aria-label') ?? document.activeElement.id) === label", label
                ):
                    return
            raise AssertionError(f"{label} is not reached")

        tab_to(f"{BASE}: use as base")
        page.keyboard.press("Enter")
        visit.saved()
        tab_to(f"{DE}: add to the merge")
        page.keyboard.press("Space")
        visit.saved()
        tab_to(f"{FR}: add to the merge")
        page.keyboard.press("Space")
        visit.saved()
        tab_to("method")
        page.keyboard.press("Enter")
        page.locator("#methods[open]").wait_for()
        page.keyboard.press("Escape")
        page.locator("#methods").wait_for(state="hidden")
        tab_to(f"weight of {DE}")
        page.keyboard.press("ArrowLeft")
        for _ in range(120):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('#recipe > summary')"):
                break
        page.keyboard.press("Enter")
        tab_to("Recipe, as YAML")
        page.keyboard.press("Tab")  # the editor lets go of it
        assert page.evaluate("document.activeElement.id") != "text"
        tab_to("merge")
        visit.previewed()
        page.evaluate(HEAR)
        page.keyboard.press("Enter")
        visit.has("#progress", "Done")
        visit.has("#said", "merged is merged.")
        heard = page.evaluate("window.heard")
        assert heard[0] == "Merging merged: 0 percent."
        assert len(heard) <= 6, "not every step is read aloud"
        assert (out_of(root, request) / "merged" / "model.safetensors").is_file()


def test_a_merge_that_is_over_at_once_is_said_to_begin_each_time(
    browser: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightsmith._app.studio.session, "_TICK_SECONDS", 3)  # it is over before anyone looks at it
    with serving(root, out="out/fast") as studio, Visit(browser, studio.address) as visit:
        ready(visit)
        visit.previewed()
        visit.page.evaluate(HEAR)
        for _ in range(2):
            visit.page.click("#merge")
            visit.has("#progress", "planning")
            visit.has("#progress", "Done")
            visit.page.locator("#overwrite").check()
        assert visit.page.evaluate("window.heard") == ["Merging merged: 0 percent.", "merged is merged."] * 2


AXE = """axe.run(document, {
  iframes: false,
  resultTypes: ["violations"],
  runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"],
}).then(found => found.violations)"""


def _axe(page: Any) -> list[str]:
    from axe_playwright_python.base import AXE_FILE_PATH

    page.evaluate(Path(AXE_FILE_PATH).read_text())
    violations = page.evaluate(AXE)
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary'][:300]}"
        for violation in violations
        for node in violation["nodes"][:3]
    ]


SMALL = """[...document.querySelectorAll("button, select, input, summary, .ws-hit")].filter(each => each.checkVisibility())
  .map(each => [each.id || each.getAttribute("aria-label") || each.textContent, each.getBoundingClientRect()])
  .filter(([, box]) => box.width && (box.height < 23.5 || box.width < 23.5))
  .map(([name, box]) => `${name} ${box.width} by ${box.height}`)"""


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (1024, "light"), (390, "dark")])
def test_nothing_keeps_anyone_out(browser: Any, studio: Studio, width: int, scheme: str) -> None:
    """axe-core in every state; nothing wider than the page; three panes without page scroll on a desktop."""
    with Visit(browser, studio.address, width, scheme=scheme) as visit:
        page = visit.page
        assert _axe(page) == []
        ready(visit)
        page.get_by_label(f"density of {FR}: one value, by layer or by part").select_option("layer")
        page.get_by_label(f"weight of {DE}: one value, by layer or by part").select_option("part")
        visit.previewed()
        for name in ("models", "mix", "result"):
            visit.step(name)
            shown = page.locator("#models, #mix, #result").evaluate_all(
                "panes => panes.filter(pane => pane.checkVisibility()).map(pane => pane.id)"
            )
            assert shown == ([name] if width < 500 else ["models", "mix", "result"])
            if width < 500 or name == "result":  # on a desktop the steps are one state
                assert _axe(page) == [], name
            visit.fine()
        visit.step("mix")
        page.click("#method")
        assert _axe(page) == []
        page.click("#methods-close")
        page.click("#merge")
        visit.has("#progress", "Done")
        visit.step("result")
        for name in ("try", "sweep", "tune", "runs", "report"):
            page.click(f"#tab-{name}")
            assert _axe(page) == [], name
            visit.fine()
        visit.step("mix")
        visit.write("merge_method: tise\n")
        visit.has("#notes", "problem")
        assert _axe(page) == []
        page.evaluate("document.getElementById('notes').classList.add('old')")  # as while an edit is checked
        assert _axe(page) == []
        if width == 1440:
            assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        small = page.evaluate(SMALL)
        assert small == []


def test_the_page_is_small(studio: Studio) -> None:
    total = 0
    names = ["", "about", *(f"assets/{name}" for name in ASSETS)]
    for name in names:
        code, text = asked(studio.address + name)
        assert code == 200, name
        total += len(text.encode())
    assert total < 1 << 20


def test_screens_are_documented() -> None:
    """The pictures of docs/studio.md are there."""
    page = Path(__file__).parents[3] / "docs" / "studio.md"
    for name in re.findall(r"images/[\w/-]+\.png", page.read_text()):
        assert (page.parent / name).is_file(), name
