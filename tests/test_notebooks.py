"""The notebooks run: their code cells, in order, in a process of their own, as Jupyter would."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.cli_help import Ran, environment
from tests.fork_help import forked
from tests.gguf_help import BYTE_LEVEL, SIZES, write_gguf

pytestmark = pytest.mark.repository

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FROM_HUB = FOLDER / "hub_to_gguf.ipynb"
HUB_IDS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct")

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
    listed: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return listed


def run(code: list[str], tmp_path: Path, folder: Path = FOLDER) -> Ran:
    """Run code cells in a folder, by default the notebooks'; temporary folders are in tmp_path, and there is no Hub."""

    def cells_run() -> None:
        warnings.simplefilter("error")
        tempfile.tempdir = str(tmp_path)
        sys.path.insert(0, "")
        exec(RUNNER, {"cells": code, "__name__": "__main__"})

    return forked(cells_run, env=environment(TMPDIR=str(tmp_path), HF_HUB_OFFLINE="1"), cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", [notebook for notebook in NOTEBOOKS if notebook != FROM_HUB], ids=lambda notebook: notebook.stem
)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    if "lora" in notebook.stem:
        pytest.importorskip("torch")
    done = run(["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"], tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("\n") > 5


def chat_model(folder: Path, seed: int) -> Path:
    """A tiny Llama with random weights, a tokenizer of bytes and a chat template, as a folder."""
    rng = np.random.default_rng(seed)
    tokens, width, inner = len(BYTE_LEVEL["tokenizer.ggml.tokens"]), SIZES["embedding_length"], SIZES["feed_forward_length"]
    shapes = {"token_embd.weight": (tokens, width), "output_norm.weight": (width,), "blk.0.ffn_down.weight": (width, inner)}
    shapes |= {f"blk.0.{part}_norm.weight": (width,) for part in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{part}.weight": (width, width) for part in ("q", "output")}
    shapes |= {f"blk.0.attn_{part}.weight": (width // 2, width) for part in "kv"}
    shapes |= {f"blk.0.ffn_{part}.weight": (inner, width) for part in ("gate", "up")}
    tensors = {name: (rng.standard_normal(shape) * 0.1, "F32") for name, shape in shapes.items()}
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    keys = {**SIZES, **BYTE_LEVEL, "tokenizer.chat_template": template}
    file = write_gguf(folder.with_suffix(".gguf"), "llama", tensors, keys)
    weightsmith.dequantize(file, folder, progress=False)
    return folder


@pytest.mark.slow
def test_the_notebook_for_hub_models_runs_on_models_of_this_disk(tmp_path: Path) -> None:
    """It merges, stores as GGUF, and generates. Warnings are no errors: transformers has some of its own."""
    code = ["".join(cell["source"]) for cell in cells(FROM_HUB) if cell["cell_type"] == "code"]
    for number, name in enumerate(HUB_IDS):
        assert sum(source.count(f'"{name}"') for source in code) == 1
        model = chat_model(tmp_path / f"model{number}", number)
        code = [source.replace(name, str(model)) for source in code]
    ran = run(["import warnings\nwarnings.simplefilter('default')", *code], tmp_path, folder=tmp_path)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "11 tensors"
    assert re.fullmatch(r"model\.gguf \d+\.\d MB", lines[1])
    assert "my-merge" in lines[2]
    assert len("".join(lines[3:])) > 20
    assert (tmp_path / "my-merge" / "model.gguf").is_file()


@pytest.mark.slow
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
