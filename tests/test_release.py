"""What a release is made of says the same everywhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import weightsmith

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dist", ROOT / "scripts" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, **changed: str) -> Path:
    fields = {"Version": "0.1.0", "License-Expression": "Apache-2.0", "Description-Content-Type": "text/markdown"} | changed
    urls = "".join(f"Project-URL: {name}, https://example.org\n" for name in ("Homepage", "Changelog", "Issues"))
    path = folder / "weightsmith-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        text = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in fields.items())
        archive.writestr("weightsmith-0.1.0.dist-info/METADATA", text + changed.get("urls", urls))
    return path


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == weightsmith.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_every_file_of_the_sdist_exists() -> None:
    for pattern in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert list(ROOT.glob(pattern)), pattern


def test_every_target_of_make_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    assert "dist" in targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "README.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", (ROOT / name).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_promise_of_security_names_tests_that_exist() -> None:
    table = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| **")]
    assert len(table) > 10
    for line in table:
        files = re.findall(r"`((?:tests|scripts)/[\w/]+\.py)`", line.rsplit("|", 2)[1])
        assert files, line
        assert all((ROOT / file).exists() for file in files), line


def test_the_metadata_of_a_wheel_are_checked(dist: ModuleType, tmp_path: Path) -> None:
    dist.check_metadata(wheel(tmp_path))
    for changed, words in (
        ({"Version": "0.2.0"}, "version 0.2.0"),
        ({"License-Expression": "MIT"}, "no license expression"),
        ({"Description-Content-Type": "text/plain"}, "not Markdown"),
        ({"urls": "Project-URL: Homepage, https://example.org\n"}, "no URL Changelog"),
    ):
        with pytest.raises(SystemExit, match=words):
            dist.check_metadata(wheel(tmp_path, **changed))


def test_what_an_archive_lacks_or_holds_too_much_ends_the_build(dist: ModuleType) -> None:
    dist.require(["x/LICENSE", "x/README.md"], ("LICENSE",), Path("x.whl"))
    with pytest.raises(SystemExit, match="missing"):
        dist.require(["x/README.md"], ("LICENSE",), Path("x.whl"))
    with pytest.raises(SystemExit, match="__pycache__"):
        dist.require(["x/LICENSE", "x/__pycache__/a.pyc"], ("LICENSE",), Path("x.whl"))
