"""What a release is made of says the same everywhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import weightsmith
from tests.script_help import load
from weightsmith._outputs.area import STAGING_SUFFIX

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def dist() -> ModuleType:
    return load(ROOT / "scripts" / "dist.py")


def wheel(folder: Path, **changed: str) -> Path:
    fields = {"Version": "0.1.0", "License-Expression": "Apache-2.0", "Description-Content-Type": "text/markdown"}
    fields |= {name: value for name, value in changed.items() if name != "urls"}
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


# ---- the image, the action and the man page


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, in order."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def test_the_image_is_slim_pinned_and_not_run_as_root() -> None:
    lines = instructions()
    bases = [rest.split()[0] for word, rest in lines if word == "FROM"]
    assert len(bases) == 2  # what builds is not in the image
    assert all(re.fullmatch(r"python:3\.\d+-slim", base) for base in bases)
    assert {word for word, _ in lines} <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    last = max(place for place, (word, _) in enumerate(lines) if word == "FROM")
    final = dict(lines[last:])
    assert final["USER"] not in ("root", "0")
    assert [word for word, _ in lines].index("USER") > max(i for i, (word, _) in enumerate(lines) if word == "RUN")
    assert final["ENTRYPOINT"] == '["weightsmith"]'
    for word, rest in lines:
        assert word != "RUN" or "pip install" not in rest or "--no-cache-dir" in rest
        assert not re.search(r"(TOKEN|SECRET|PASSWORD)", rest)


def test_what_the_image_copies_is_there_and_in_its_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from="):
            for name in rest.split()[:-1]:
                assert (ROOT / name.removeprefix("./")).exists(), name
                assert f"!{name.removeprefix('./')}" in ignored


def test_the_extras_of_the_image_and_the_action_are_the_project_s() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (default,) = [rest.partition("=")[2] for word, rest in instructions() if word == "ARG"]
    assert {*default.split(","), *action["inputs"]["extras"]["default"].split(",")} <= set(extras)


def test_the_action_has_what_github_reads_and_no_input_in_a_script() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert {"name", "description", "inputs", "outputs", "runs"} <= set(action)
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "run" not in step or step["shell"] == "bash"
        assert "${{" not in step.get("run", "")
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])
    for definition in action["inputs"].values():
        assert definition["description"]
        assert definition.get("required") or isinstance(definition["default"], str)


def test_the_script_of_the_action_merges(tmp_path: Path) -> None:
    """With a program in place of weightsmith that prints its arguments."""
    (step,) = [step for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"] if step.get("id") == "merge"]
    program = tmp_path / "weightsmith"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "-x $(touch hacked).yml", "OUT": "my out", "PUSH": "org/name"}
    env |= {"QUANTIZE": "", "GITHUB_OUTPUT": str(tmp_path / "output")}
    ran = subprocess.run(["bash", "-euo", "pipefail", "-c", step["run"]], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["merge", "--push=org/name", "--", "-x $(touch hacked).yml", "my out"]
    assert (tmp_path / "output").read_text() == "out=my out\n"
    assert not (tmp_path / "hacked").exists()


def test_the_man_page_has_every_command_and_no_warning_of_groff() -> None:
    page = ROOT / "man/weightsmith.1"
    text = page.read_text()
    from typer.main import get_command

    from weightsmith._app.cli.app import make_app

    for name in get_command(make_app()).commands:  # type: ignore[attr-defined]
        assert f".SS weightsmith {name}".replace("-", "\\-") in text
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    ran = subprocess.run(["groff", "-man", "-ww", "-z", page], capture_output=True, text=True, check=True)
    assert ran.stderr == ""


# ---- installed by name


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index with this project's wheel alone."""
    folder = tmp_path_factory.mktemp("index")
    project = folder / "simple/weightsmith"
    project.mkdir(parents=True)
    isolated = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolated, "--wheel-dir", project, ROOT]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (built,) = project.glob("*.whl")
    (project / "index.html").write_text(f'<a href="{built.name}">{built.name}</a>')
    return folder


INSTALLERS = {
    "pip": lambda index, home: [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--index-url", f"{index.as_uri()}/simple"),
        *("--target", home / "pip", "weightsmith"),
    ],
    "uv": lambda index, home: [
        *("uv", "pip", "install", "--quiet", "--no-deps", "--default-index", f"{index.as_uri()}/simple"),
        *("--python", sys.executable, "--target", home / "uv", "weightsmith"),
    ],
    "pipx": lambda index, home: [
        # It reads the metadata of what the package depends on, so that is installed too, from the usual index.
        *("pipx", "install", "--quiet", "--python", sys.executable),
        *(f"--pip-args=--find-links {index}/simple/weightsmith", "weightsmith"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLERS)
def test_the_wheel_installs_by_name_and_runs(index: Path, tmp_path: Path, name: str) -> None:
    if name != "pip" and shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {key: value for key, value in os.environ.items() if name == "pipx" or not key.startswith(("PIP_", "UV_"))}
    env.pop("PYTHONPATH", None)
    env |= {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    done = subprocess.run(INSTALLERS[name](index, tmp_path), env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (program,) = tmp_path.glob("bin/weightsmith" if name == "pipx" else f"{name}/bin/weightsmith")
    manual = next((tmp_path / name).rglob("share/man/man1/weightsmith.1"))
    assert manual.read_text() == (ROOT / "man/weightsmith.1").read_text()
    # What it depends on is taken from here.
    paths = [str(path) for path in tmp_path.glob("uv" if name == "uv" else "pip")]
    env["PYTHONPATH"] = os.pathsep.join([*paths, sysconfig.get_paths()["purelib"]])
    ran = subprocess.run([program.resolve(), "--version"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"weightsmith {weightsmith.__version__}\n"), ran.stderr


def test_no_unfinished_work_is_in_the_repository() -> None:
    """Neither committed, nor offered to be: an evaluation or a merge may be interrupted here."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [name for name in listed if STAGING_SUFFIX in name or "/.weightsmith-" in f"/{name}"] == []
    for folder in (f".out{STAGING_SUFFIX}", f"docs/.evaluation-0123{STAGING_SUFFIX}"):
        ignored = subprocess.run(["git", "check-ignore", "--quiet", f"{folder}/journal"], cwd=ROOT, check=False)
        assert ignored.returncode == 0, folder
