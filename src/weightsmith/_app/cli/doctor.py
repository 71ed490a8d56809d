"""`weightsmith doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.configuration import FILE, in_force, user_file
from weightsmith._app.cli.failures import Exit, failures
from weightsmith._base.errors import printable
from weightsmith._base.installation import reinstall
from weightsmith._base.text import show_fact, show_json, size, status_line
from weightsmith._version import __version__

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
    memory, available = _memory()
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


def _memory() -> tuple[int | None, int | None]:
    """Bytes of the machine, and those that are free or can be freed; None where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None, None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return total, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return total, None


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
