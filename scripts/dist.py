"""Builds the wheel and the sdist, checks them, installs the wheel in a fresh environment and merges with it.

python scripts/dist.py                # into dist/
python scripts/dist.py --python PATH  # the interpreter of the fresh environment

Needs `build` and `twine`, and a package index; `make dist` installs both. torch is not installed: the core runs without it.
"""

from __future__ import annotations

import argparse
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = ("weightsmith/py.typed", "weightsmith/_app/cli/app.py", "dist-info/licenses/LICENSE", "dist-info/entry_points.txt")
IN_SDIST = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "tests/mini.py",
)
UNWANTED = (".venv", "__pycache__", "build/", "dist/", ".pytest_cache")

MODELS = """
import numpy as np, weightsmith
for name, value in (("a", 1), ("b", 3)):
    weightsmith.save_model({"w": np.full((300, 64), value, np.float32), "n": np.full(8, value, np.float16)}, name)
"""
CHECK = """
import sys, numpy as np, weightsmith
with weightsmith.open_checkpoint("merged") as model:
    assert (model.read("w") == 2).all() and (model.read("n") == 2).all()
assert "torch" not in sys.modules
print("weightsmith", weightsmith.__version__, "from", weightsmith.__file__)
"""
RECIPE = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command; this script ends with it if it fails."""
    print("+", *command, flush=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=False)
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")


def require(names: list[str], endings: tuple[str, ...], archive: Path) -> None:
    """End unless an archive holds every wanted file, and nothing that the build left."""
    missing = [end for end in endings if not any(name.endswith(end) for name in names)]
    unwanted = [name for name in names if any(part in name for part in UNWANTED)]
    if missing or unwanted:
        sys.exit(f"{archive.name}: missing {missing}, unwanted {unwanted[:5]}")


def check_metadata(wheel: Path) -> None:
    """End unless the wheel's metadata say what the project is. It has no URLs while the repository has no address."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    version = wheel.name.split("-")[1]
    urls = {line.split(",")[0] for line in metadata.get_all("Project-URL", [])}
    problems = [
        *([] if metadata["Version"] == version else [f"version {metadata['Version']}"]),
        *([] if metadata["License-Expression"] == "Apache-2.0" else ["no license expression"]),
        *([] if metadata["Description-Content-Type"] == "text/markdown" else ["the description is not Markdown"]),
        *(f"no URL {name}" for name in {"Homepage", "Changelog", "Issues"} - urls if urls),
    ]
    if problems:
        sys.exit(f"{wheel.name}: {problems}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the fresh environment")
    options = parser.parse_args()

    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as archive:
        require(archive.namelist(), IN_WHEEL, wheel)
    with tarfile.open(sdist) as archive:
        require(archive.getnames(), IN_SDIST, sdist)
    check_metadata(wheel)

    with tempfile.TemporaryDirectory(prefix="weightsmith-dist-") as temporary:
        folder = Path(temporary)
        run(options.python, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", wheel)
        run(python, "-m", "pip", "--disable-pip-version-check", "check")
        run(python, "-c", MODELS, cwd=folder)
        (folder / "recipe.yml").write_text(RECIPE)
        command = folder / "venv" / "bin" / "weightsmith"
        run(command, "plan", "recipe.yml", cwd=folder)
        run(command, "merge", "recipe.yml", "merged", cwd=folder)
        run(command, "verify", "merged", cwd=folder)
        run(python, "-c", CHECK, cwd=folder)
    print(
        f"{wheel.relative_to(ROOT)}, {wheel.stat().st_size:,} bytes; {sdist.relative_to(ROOT)}, {sdist.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
