"""A newcomer's first quarter of an hour, timed: install, demo, a merge, GGUF, a merge method in one file.

python scripts/newcomer.py                 # builds the wheel, installs it into a fresh environment, writes docs/newcomer.md
python scripts/newcomer.py --wheel FILE    # installs this wheel
python scripts/newcomer.py --installed BIN # installs nothing: runs BIN/weightsmith, and prints the transcript only

Everything happens in a temporary folder, with caches of its own. The install step needs a package index.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "newcomer.md"

METHOD = '''from weightsmith import PerModel, block_method


@block_method
def agree(models, base, out, weight: PerModel[float] = 1.0):
    """Add the mean change where the models move the same way; keep the base elsewhere."""
    changes = models - base
    together = (changes > 0).all(0) | (changes < 0).all(0)
    out[:] = base + together * (weight @ changes) / len(models)
'''
RECIPE = """merge_method: ./my_method.py:agree
base_model: weightsmith-demo/base
models:
  - model: weightsmith-demo/french
  - model: weightsmith-demo/german
dtype: bfloat16
"""


@dataclass(frozen=True)
class Step:
    """A heading of the transcript, what to say about it, files to write first, and commands."""

    title: str
    about: str
    commands: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)


STEPS = (
    Step("Try it", "The demo creates a base and two fine-tunes with random weights, then merges them.", ("weightsmith demo",)),
    Step(
        "Merge two models",
        "This uses the demo's models. Your own folders and Hub ids work the same way.",
        (
            "weightsmith init --goal blend --model weightsmith-demo/french --model weightsmith-demo/german",
            "weightsmith plan recipe.yml",
            "weightsmith merge recipe.yml blend",
            "weightsmith verify blend",
        ),
    ),
    Step(
        "Convert to GGUF",
        "llama.cpp and Ollama run GGUF files. [GGUF files](gguf.md) lists the formats.",
        ("weightsmith quantize blend blend-gguf --format gguf-q4_k_m", "ls blend-gguf"),
    ),
    Step(
        "Write a merge method",
        "A method is a function in a file next to the recipe. [Write your own](own-method.md) explains its arguments.",
        ("weightsmith merge agree.yml agreed --allow-code",),
        {"my_method.py": METHOD, "agree.yml": RECIPE},
    ),
)


@dataclass(frozen=True)
class Ran:
    """A command, what it printed to stdout, and its wall and processor seconds."""

    command: str
    out: str
    wall: float
    cpu: float


def run(command: str, folder: Path, env: Mapping[str, str]) -> Ran:
    """Run a command; raises SystemExit with what it printed if it fails."""
    before, began = os.times(), time.monotonic()
    done = subprocess.run(shlex.split(command), cwd=folder, env=dict(env), capture_output=True, text=True, check=False)
    wall, after = time.monotonic() - began, os.times()
    if done.returncode:
        raise SystemExit(f"{command}\nfailed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Ran(command, done.stdout.replace(f"{folder}{os.sep}", ""), wall, cpu)


def environment(programs: Path, folder: Path) -> dict[str, str]:
    """An environment that finds the programs first, with the caches of a new user."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WEIGHTSMITH_", "NUMBA_", "PYTHON"))}
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "NUMBA_CACHE_DIR": str(folder / "cache/numba")}
    return {**kept, **home, "PATH": f"{programs}{os.pathsep}{kept['PATH']}", "LC_ALL": "C.UTF-8", "COLUMNS": "100"}


def steps(folder: Path, env: Mapping[str, str]) -> Iterator[tuple[Step, list[Ran]]]:
    """Run the steps after the installation, in a folder."""
    for step in STEPS:
        for name, text in step.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        yield step, [run(command, folder, env) for command in step.commands]


def install(wheel: Path | None, folder: Path) -> tuple[Path, list[Ran]]:
    """A fresh environment with the wheel and GGUF support: the folder of its programs, and what ran."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if wheel is None:
        run(f"{sys.executable} -m pip wheel --quiet --no-deps --wheel-dir {folder} {ROOT}", folder, env)
        (wheel,) = folder.glob("*.whl")
    ran = [run(f"{sys.executable} -m venv {folder / 'venv'}", folder, env)]
    ran.append(run(f"{folder / 'venv/bin/python'} -m pip install --quiet {wheel}[gguf]", folder, env))
    shown = ("python3 -m venv venv && source venv/bin/activate", f"pip install './{wheel.name}[gguf]'")
    return folder / "venv/bin", [Ran(command, "", result.wall, result.cpu) for command, result in zip(shown, ran, strict=True)]


def section(step: Step, ran: list[Ran]) -> str:
    """A step as Markdown: its files, its commands with what they printed, and the time they took."""
    parts = [f"## {step.title}", step.about]
    parts += [f"`{name}`:\n\n```text\n{text}```" for name, text in step.files.items()]
    shown = "".join(f"$ {done.command}\n{done.out}" for done in ran)
    parts.append(f"```text\n{shown}```")
    parts.append(f"{sum(done.wall for done in ran):.1f} s, {sum(done.cpu for done in ran):.1f} s of CPU time.")
    return "\n\n".join(parts)


def page(sections: list[str], ran: list[Ran]) -> str:
    """The whole transcript."""
    total = f"{sum(done.wall for done in ran):.0f} s ({sum(done.cpu for done in ran):.0f} s of CPU time)"
    head = (
        "<!-- Generated by scripts/newcomer.py, which runs all commands. -->\n"
        "<!-- commands not run: tests/test_newcomer.py runs them -->\n\n"
        "# From nothing to your own merge method\n\n"
        "Install weightsmith, merge two tiny models, convert the result to GGUF, and write your own merge method. "
        "Copy and run each command.\n\n"
        f"All commands together took {total} on a virtual machine with 2 cores, no GPU and a local mirror of PyPI. Your "
        "download may take longer. The time includes compiling kernels, which happens once for each installation."
    )
    end = (
        "## Next\n\n* [Quickstart](quickstart.md): the same with models from the Hub.\n"
        "* [Which method?](which-method.md) and the [gallery](gallery.md) of recipes."
    )
    return "\n\n".join([head, *sections, end]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to install")
    parser.add_argument("--installed", type=Path, help="folder of an installed program: installs nothing, writes no page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as temporary:
        folder = Path(temporary)
        sections, everything = list[str](), list[Ran]()
        programs = options.installed
        if programs is None:
            programs, everything = install(options.wheel and options.wheel.resolve(), folder)
            about = "You need Python 3.11 or later. The `gguf` extra adds llama.cpp's quantised types."
            sections.append(section(Step("Install", about, ()), everything))
            print(sections[-1], flush=True)
        (folder / "work").mkdir()
        for step, ran in steps(folder / "work", environment(programs.resolve(), folder)):
            everything += ran
            sections.append(section(step, ran))
            print(sections[-1], flush=True)
    if options.installed is None:
        PAGE.write_text(page(sections, everything), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
