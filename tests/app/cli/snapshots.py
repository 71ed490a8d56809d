"""Texts of the command line that are kept as files: what a user sees, for a person to read in a review.

python -m tests.app.cli.snapshots            # say which are out of date
python -m tests.app.cli.snapshots --write    # write them anew
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from typer.main import get_command

from tests.cli_help import LINEAR, make_models
from tests.mini import write_checkpoint
from weightsmith._app.cli import main as run_program
from weightsmith._app.cli.app import make_app
from weightsmith._app.cli.help import overview, page_of, terminal_width

FOLDER = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)


def help_pages() -> dict[str, str]:
    """The help of the program and of each command, at both widths, by file name."""
    program = get_command(make_app())
    before = os.environ.get("COLUMNS")
    pages = {}
    try:
        for columns in WIDTHS:
            os.environ["COLUMNS"] = str(columns)
            width = terminal_width()
            pages[f"help-{columns}/weightsmith.txt"] = f"{overview(program, 'weightsmith').lines(width)}\n"
            for name, command in program.commands.items():  # type: ignore[attr-defined]
                pages[f"help-{columns}/{name}.txt"] = f"{page_of(command, f'weightsmith {name}').lines(width)}\n"
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return pages


TIES = """merge_method: ties
base_model: a
models:
  - model: b
    parameters: {weight: 1, density: 0.5}
"""
MISTAKES: Mapping[str, Sequence[str]] = {
    # the command line
    "unknown-command": ["mrege", "linear.yml", "out"],
    "unknown-option": ["merge", "linear.yml", "out", "--thread", "4"],
    "no-value": ["diff", "a", "b", "--tensors"],
    "no-arguments": ["merge"],
    "no-out": ["merge", "linear.yml"],
    "one-argument-too-many": ["merge", "linear.yml", "out", "more"],
    "recipe-and-out-swapped": ["merge", "out", "linear.yml"],
    "threads-0": ["merge", "linear.yml", "out", "--threads", "0"],
    "size-without-unit-we-know": ["merge", "linear.yml", "out", "--max-memory", "2Gb!"],
    "too-little-memory": ["merge", "linear.yml", "out", "--max-memory", "1MB", "--threads", "1"],
    "dtype-of-integers": ["merge", "linear.yml", "out", "--out-dtype", "int8"],
    "unknown-format": ["quantize", "a", "out", "--format", "gguf-q4km"],
    "no-format": ["quantize", "a", "out"],
    "option-of-another-format": ["quantize", "a", "out", "--format", "int8", "--bits", "4"],
    "set-without-value": ["merge", "linear.yml", "out", "--set", "parameters.t"],
    "set-of-nothing": ["merge", "linear.yml", "out", "--set", "modles[0].model=a"],
    "diff-of-one": ["diff", "a"],
    "diff-of-one-with-a-base": ["diff", "--base", "a", "b"],
    "eval-without-text": ["eval", "a"],
    "part-of-parts": ["run", "plan.json", "out", "--part", "5/4"],
    "unknown-preset": ["init", "--preset", "tie-paper"],
    "init-over-a-file": ["init", "linear.yml", "--preset", "ties-paper"],
    "unknown-method-name": ["methods", "tise"],
    # files
    "no-such-recipe": ["merge", "liner.yml", "out"],
    "folder-as-recipe": ["merge", "a", "out"],
    "config-as-recipe": ["merge", "a/config.json", "out"],
    "weights-as-recipe": ["merge", "a/model.safetensors", "out"],
    "plan-as-recipe": ["merge", "plan.json", "out"],
    "recipe-as-plan": ["run", "linear.yml", "out"],
    "recipe-as-model": ["inspect", "linear.yml"],
    "no-such-model": ["inspect", "aa"],
    "empty-folder-as-model": ["inspect", "empty"],
    "verify-of-a-model": ["verify", "a"],
    "verify-of-nothing": ["verify", "nothing"],
    "status-of-nothing": ["status", "nothing"],
    "out-is-a-model": ["merge", "linear.yml", "a"],
    "out-is-a-file": ["merge", "linear.yml", "linear.yml"],
    "out-below-a-file": ["merge", "linear.yml", "linear.yml/out"],
    "out-where-nothing-can-be": ["merge", "linear.yml", "x" * 256],
    "report-is-a-folder": ["inspect", "a", "--report", "b"],
    "mixture-in-merge": ["merge", "moe.yml", "out"],
    "merge-in-moe": ["moe", "linear.yml", "out"],
    "nan-in-an-input": ["merge", "nan.yml", "out"],
    "shapes-differ": ["merge", "wide.yml", "out"],
    "no-tokenizer-in-the-base": ["plan", "no-tokenizer.yml", "--quiet"],
    # recipes
    "unknown-method": ["merge", "unknown-method.yml", "out"],
    "method-nobody-knows": ["merge", "method-nobody-knows.yml", "out"],
    "no-method": ["merge", "no-method.yml", "out"],
    "no-models": ["merge", "no-models.yml", "out"],
    "no-base": ["merge", "no-base.yml", "out"],
    "no-weight": ["merge", "no-weight.yml", "out"],
    "density-above-1": ["merge", "density.yml", "out"],
    "density-is-text": ["merge", "density-text.yml", "out"],
    "unknown-parameter": ["merge", "unknown-parameter.yml", "out"],
    "unknown-key": ["merge", "unknown-key.yml", "out"],
    "missing-model": ["merge", "missing-model.yml", "out"],
    "yaml-indentation": ["merge", "indentation.yml", "out"],
    "yaml-tab": ["merge", "tab.yml", "out"],
    "empty-recipe": ["merge", "empty.yml", "out"],
}
"""Command lines that are wrong, as users write them."""
RECIPES: Mapping[str, str] = {
    "linear": LINEAR,
    "moe": "base_model: a\ngate_mode: random\nexperts:\n  - source_model: a\n  - source_model: b\n",
    "nan": LINEAR.replace("model: b", "model: nan"),
    "wide": LINEAR.replace("model: b", "model: wide"),
    "no-tokenizer": f"base_model: bare\n{TIES.replace('base_model: a', '').strip()}\n",
    "unknown-method": TIES.replace("ties", "tise"),
    "method-nobody-knows": TIES.replace("ties", "frankenmerge9000"),
    "no-method": TIES.replace("merge_method: ties\n", ""),
    "no-models": "merge_method: ties\nbase_model: a\n",
    "no-base": TIES.replace("base_model: a\n", "  ".strip()),
    "no-weight": "merge_method: linear\nmodels:\n  - model: a\n  - model: b\n",
    "density": TIES.replace("0.5", "50"),
    "density-text": TIES.replace("0.5", "half"),
    "unknown-parameter": TIES.replace("density", "densty"),
    "unknown-key": f"{TIES}dtypes: bfloat16\n",
    "missing-model": TIES.replace("model: b", "model: ./models/b"),
    "indentation": TIES.replace("    parameters", "   parameters"),
    "tab": TIES.replace("    parameters", "\tparameters"),
    "empty": "",
}


def mistakes() -> dict[str, str]:
    """What each of `MISTAKES` prints, by file name; paths and times are normalised."""
    pages = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_models(Path())
        for name, text in RECIPES.items():
            Path(f"{name}.yml").write_text(text)
        Path("empty").mkdir()
        _damaged_models()
        with _quiet_environment():
            Path("plan.json").write_text(_run(["plan", "linear.yml", "--json"])[1])
            for name, args in MISTAKES.items():
                code, out, err = _run(args)
                shown = "".join(
                    f"{title}\n{text.rstrip()}\n" for title, text in (("--- stdout", out), ("--- stderr", err)) if text
                )
                text = f"$ weightsmith {' '.join(args)}\n{shown}--- exit code {code}\n"
                pages[f"mistakes/{name}.txt"] = text.replace(str(Path(folder).resolve()), "/work").replace(folder, "/work")
    return pages


def _damaged_models() -> None:
    rng = np.random.default_rng(2)
    config = json.loads(Path("a/config.json").read_text())
    tensors = {"model.norm.weight": np.array([1, np.nan, 2, 3], np.float32)}
    names = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    names |= {f"model.layers.{i}.{part}.weight": (4, 4) for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")}
    whole = {name: rng.standard_normal(shape, np.float32) for name, shape in names.items()}
    write_checkpoint(Path("nan"), whole | tensors, config)
    write_checkpoint(Path("bare"), whole, config)
    write_checkpoint(
        Path("wide"), whole | {"model.layers.1.mlp.up_proj.weight": rng.standard_normal((4, 5), np.float32)}, config
    )


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """No colour, no network, no settings of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTSMITH_", "NO_COLOR", "COLUMNS"))}
    with mock.patch.dict(os.environ, kept | {"HF_HUB_OFFLINE": "1", "WEIGHTSMITH_CONFIG": ""}, clear=True):
        yield


def _run(args: Sequence[str]) -> tuple[int, str, str]:
    """A command in this process: exit code and both streams."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["weightsmith", *args]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run_program()
        except SystemExit as ended:
            code = int(ended.code or 0)
    shown = re.sub(r"(compiling|merging|preparing)[^\n]*\n", "", err.getvalue())
    return code, out.getvalue(), shown


def stale(pages: Mapping[str, str], pattern: str) -> list[str]:
    """The files that are missing or differ, and those that nothing makes. pattern: the files of this kind."""
    there = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.glob(pattern)}
    return sorted(name for name in {*pages, *there} if pages.get(name) != there.get(name))


def write(pages: Mapping[str, str], pattern: str) -> list[str]:
    """Write the files that are out of date, and remove those that nothing makes: their names."""
    wrong = stale(pages, pattern)
    for name in wrong:
        path = FOLDER / name
        if name in pages:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages[name])
        else:
            path.unlink()
    return wrong


def main() -> None:
    """Write or check."""
    do, done = (write, "written") if "--write" in sys.argv else (stale, "out of date")
    for name in (*do(help_pages(), "help-*/*.txt"), *do(mistakes(), "mistakes/*.txt")):
        print(f"{name}: {done}")


if __name__ == "__main__":
    main()
