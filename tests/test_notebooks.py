"""The notebooks run: their code cells, in order, in a process of their own, as Jupyter would."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.cli_help import Ran, environment
from tests.fork_help import forked

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

RUNNER = """
import ast, sys
for number, source in enumerate(cells, 1):
    tree = ast.parse(source, f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), globals())
    value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), globals()) if last else None
    if value is not None:
        print(value._repr_html_()[:40] if hasattr(value, "_repr_html_") else repr(value))
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def run(code: list[str], tmp_path: Path) -> Ran:
    """Run code cells in the notebooks' folder; temporary folders are in tmp_path, and there is no hub."""

    def cells_run() -> None:
        warnings.simplefilter("error")
        tempfile.tempdir = str(tmp_path)
        sys.path.insert(0, "")
        exec(RUNNER, {"cells": code, "__name__": "__main__"})

    return forked(cells_run, env=environment(TMPDIR=str(tmp_path), HF_HUB_OFFLINE="1"), cwd=FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    if "lora" in notebook.stem:
        pytest.importorskip("torch")
    done = run(["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"], tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("\n") > 5


def test_a_cell_that_fails_is_found(tmp_path: Path) -> None:
    done = run(["x = 1\nx", "x += 1", "assert x == 1"], tmp_path)
    assert done.out == "1\n"
    assert 'File "cell 3", line 1' in done.err
    assert done.code == 70


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_stored_without_outputs(notebook: Path) -> None:
    whole = json.loads(notebook.read_text(encoding="utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    for cell in whole["cells"]:
        assert cell["id"]
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert [link for link in links if "://" not in link and not (FOLDER / link).exists()] == []
    assert len(links) > 2
