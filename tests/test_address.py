"""The address of the repository stands in one file, and all others have it from there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.script_help import load

ROOT = Path(__file__).parents[1]
ADDRESS = "https://github.com/some-org/weightsmith"


@pytest.fixture
def script() -> ModuleType:
    return load(ROOT / "scripts" / "address.py")


def test_every_place_has_the_address_of_pyproject(script: ModuleType) -> None:
    for file in script.PLACES:
        assert script.filled(file, script.address_now()) == (ROOT / file).read_text(), "run scripts/address.py"


def test_no_page_has_a_placeholder() -> None:
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "action.yml", *(ROOT / ".github").rglob("*.yml")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "examples").rglob("*.ipynb")]
    for page in pages:
        assert not re.search(r"OWNER/|https://example\.org", page.read_text()), page


def test_until_the_package_is_on_an_index_it_is_installed_from_a_clone() -> None:
    """Anybody could register the name there."""
    pages = [ROOT / "README.md", ROOT / "action.yml", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages += [*(ROOT / "examples").rglob("*.ipynb"), *(ROOT / "examples").rglob("Dockerfile")]
    for page in pages:
        assert not re.search(r"weightsmith\[[a-z,]+\](?! @)|pip install ['\"]?weightsmith\b", page.read_text()), page


def test_an_address_is_written_into_links_buttons_and_metadata(script: ModuleType) -> None:
    urls = tomllib.loads(script.filled("pyproject.toml", ADDRESS))["project"]["urls"]
    assert urls["Issues"] == f"{ADDRESS}/issues"
    assert {"Homepage", "Changelog", "Documentation"} <= {*urls}
    readme = script.filled("README.md", ADDRESS)
    notebook = "some-org/weightsmith/blob/main/examples/notebooks/hub_to_gguf.ipynb"
    assert f"(https://colab.research.google.com/github/{notebook})" in readme
    assert "uses: some-org/weightsmith@main" in readme
    cells = json.loads(script.filled(script.NOTEBOOK, ADDRESS))["cells"]
    assert f'SOURCE = "git+{ADDRESS}"\n' in [line for cell in cells for line in cell["source"]]


def test_a_page_without_its_mark_is_an_error(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(SystemExit, match=r"README\.md: no mark 'address: NAME' for colab, workflow"):
        script.filled("README.md", ADDRESS)


def test_workflows_and_templates_are_yaml_and_call_what_exists() -> None:
    steps = []
    for file in (ROOT / ".github").rglob("*.yml"):
        content = yaml.safe_load(file.read_text())
        steps += [step for job in content.get("jobs", {}).values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert "bash .ci/run" in commands
    assert "make dist" in commands
    assert all((ROOT / name).exists() for name in (".ci/run", "Makefile"))
