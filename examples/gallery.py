"""The reports of docs/gallery.md: each section's commands, run on the models of the demo.

    make demo                                    # once: the environment and the models, in build/demo
    python examples/gallery.py                   # all sections; or: python examples/gallery.py combine extract

The commands are those of the page, from the ```bash blocks of a section; `<!-- report: NAME -->` ends it. They run in WORK.
Reports go to WORK/gallery/NAME.html, and `make site` links to those that are there. Models that the commands write are removed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from over_tuning import build_over
from smollm2 import build_models
from transplants import train

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "gallery.md"


def main() -> None:
    """Build the models, run the commands, keep the reports."""
    commands = sections(PAGE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"{', '.join(commands)}; all if not given")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder with the demo's models")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(commands)):
        raise SystemExit(f"no section is called {', '.join(unknown)}; sections: {', '.join(commands)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    work: Path = args.work.resolve()
    build_models(work / "models", HERE / "testbed")
    for name in args.names or commands:
        print(f"{name}: {make(name, commands[name], work)}", flush=True)


def sections(page: str) -> dict[str, str]:
    """The commands before each `<!-- report: NAME -->` of a page, by its name."""
    blocks = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if name := re.search(r"^<!-- report: ([\w-]+) -->$", section, flags=re.MULTILINE):
            blocks[name[1]] = "\n".join(
                re.findall(r"^```bash\n(.*?)^```$", section[: name.start()], flags=re.MULTILINE | re.DOTALL)
            )
    return blocks


def make(name: str, commands: str, work: Path) -> Path:
    """Run a section's commands, which write gallery/NAME.html, or the folder gallery/NAME with a report in it."""
    gallery = work / "gallery"
    gallery.mkdir(exist_ok=True)
    page, out = gallery / f"{name}.html", gallery / name
    shutil.rmtree(out, ignore_errors=True)
    if name == "overtuned":
        build_over(work / "models")
    elif name == "tokenizer":
        train(work)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-e", "-c", commands], cwd=work, env={**os.environ, "PATH": path}, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: a command of {PAGE} ended with status {done.returncode}")
    if (out / "report.html").exists():
        (out / "report.html").replace(page)
    shutil.rmtree(out, ignore_errors=True)
    return page


if __name__ == "__main__":
    main()
