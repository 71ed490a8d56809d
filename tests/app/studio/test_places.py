"""Which models may be read, and where results may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.studio.models import make
from tests.plan_help import model
from weightsmith._app.studio.places import ListedModel, Places, reference
from weightsmith._base.errors import NotFound, ParameterError, StoreError
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places").resolve()
    make(root)
    return root


def problem(places: Places, name: str) -> str:
    ref = parse_reference(name, "r.yml:1:1")
    assert isinstance(ref, ModelRef)
    error = places.check(ref)
    return "" if error is None else error.finding.what


@pytest.mark.slow
def test_what_the_folders_hold(root: Path) -> None:
    models = root / "models"
    assert Places.of([models], root / "out").models() == (
        ListedModel(f"{models}/adapters/py", True),
        ListedModel(f"{models}/base", False),
        ListedModel(f"{models}/de", False),
        ListedModel(f"{models}/fr", False),
    )


def test_results_have_a_folder_of_their_own_that_the_first_one_creates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    places = Places.of(["models"])
    assert places.out == tmp_path / "results"
    assert places.models() == ()
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert places.holds(places.target("merged"))
    model(tmp_path / "results" / "merged")
    assert [model.ref for model in places.models()] == ["./results/merged"]


def test_a_folder_of_results_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for out in ("file", "file/x", "loop", "loop/x", "x" * 300, "a\0b"):
        with pytest.raises(StoreError):
            Places.of([tmp_path], f"{tmp_path}/{out}")
    for folder in ("file", "loop", "none", "x" * 300, "a\0b"):
        with pytest.raises(NotFound, match="no such folder"):
            Places.of([f"{tmp_path}/{folder}"])


def test_names_start_at_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert reference(root / "models" / "base") == "./models/base"
    places = Places.of(["models"])
    assert [model.ref for model in places.models()][1] == "./models/base"
    assert problem(places, "./models/base") == problem(places, "models/fr") == ""
    assert places.on_base(["./models/adapters/py", "./models/fr"], "./b") == ["./b+./models/adapters/py", "./models/fr"]
    assert places.on_base(["./old+./models/adapters/py"], "./new") == ["./new+./models/adapters/py"]


def test_paths_outside_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    places = Places.of(["models"], "out", hub=True)
    (root / "models" / "link").unlink(missing_ok=True)
    (root / "models" / "link").symlink_to(root / "secret")
    outside = [
        str(root / "secret"),
        "./secret",
        "secret",
        "models/../secret",
        "./models/link",
        "models/base/../../secret",
        "~",
        "~/x",
        "/etc/passwd",
        "/",
        "..",
        "./models/../*",
        "./sec*",
        "./models/li*",
        "/e*",
        "*",
        "./models/base+./secret",
        "./models/base+/etc",
        "../" * 20 + "etc",
    ]
    for name in outside:
        assert "outside the folders" in problem(places, name), name
    for name in (
        "./models/base",
        "./models/[bf]*",
        "./models/base+./models/adapters/py",
        "./models/none",
        "org/name",
        "org/name@v1",
        "out/x",
    ):
        assert problem(places, name) == "", name
    for name in ("s3://bucket/model", "https://evil/x", "hf://a/b", "a/b/c", "file:///etc/passwd", "x" * 5000, "a\0b", "name"):
        assert problem(places, name), name


def test_without_the_hub_only_folders_are_read(root: Path) -> None:
    places = Places.of([root / "models"], hub=False)
    assert "without the Hub" in problem(places, "org/name")
    assert problem(places, str(root / "models" / "base")) == ""


def test_results_have_plain_names(root: Path) -> None:
    places = Places.of([root / "models"], root / "out")
    assert places.target("my-merge_1.0") == root / "out" / "my-merge_1.0"
    assert places.holds(root / "out" / "my-merge_1.0")  # a result can be a model
    for name in ("", ".", "..", "../x", "a/b", "/tmp/x", ".hidden", "a\0", "a b", "x" * 101, "\n", "é"):
        with pytest.raises(ParameterError, match="cannot be the name of a result"):
            places.target(name)
    with pytest.raises(NotFound):
        Places.of([root / "none"])
