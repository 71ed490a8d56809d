"""`weightsmith inspect` and `diff`: tables of 80 columns, JSON, and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli_help import Cli, cli
from tests.reports.look.models import LAYERS, changed, low_rank, save, weights

__all__ = ["cli"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and a fine-tune of it."""
    save(tmp_path / "base", weights())
    changed(tmp_path / "b", low_rank(8, 0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_difference_in_tables_of_eighty_columns_and_as_json(folder: Path, cli: Cli) -> None:
    ran = cli("diff", "base", "b", "--quiet", "--json")
    assert json.loads(ran.out)["total"]["tensors"] == len(weights())
    ran = cli("diff", "base", "b", "--tensors", "*.q_proj.*")
    assert ran.code == 0
    assert "in all linear layers of all layers" in ran.out
    assert max(map(len, ran.out.rpartition("\n\n")[0].splitlines())) <= 80
    assert ran.out.rpartition("\n\n")[2].startswith("A change of low rank")  # the verdict is last
    part, *drawn = (line for line in ran.out.splitlines() if line.startswith("self_attn.q_proj "))
    assert [len(line.split()[1]) for line in drawn] == [LAYERS] * 2  # of two maps
    assert part.split()[-3] in ("8", "9")


def test_one_model_is_not_a_difference(folder: Path, cli: Cli) -> None:
    ran = cli("diff", "base")
    assert ran.code != 0
    assert "diff needs two models, but got 1" in ran.err


@pytest.mark.long
def test_an_inspection_in_tables_of_eighty_columns_and_as_json(folder: Path, cli: Cli) -> None:
    ran = cli("inspect", "base")
    assert ran.code == 0
    assert "LlamaForCausalLM (llama)" in ran.out
    assert "4 layers: model.layers.0 to 3" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    ran = cli("inspect", "base", "*.mlp.*", "model.norm.weight", "--stats")
    assert ran.out.count(".mlp.up_proj.weight") == 4
    inspection = json.loads(cli("inspect", "base", "--stats", "--json", "--quiet").out)
    assert len(inspection["statistics"]) == len(weights())


def test_a_glob_without_a_match_is_an_error(folder: Path, cli: Cli) -> None:
    ran = cli("inspect", "base", "*.mpl.*")
    assert ran.code != 0
    assert "no tensor matches '*.mpl.*'" in ran.err


@pytest.mark.long
def test_a_report_is_written_beside_the_answer(folder: Path, cli: Cli) -> None:
    ran = cli("diff", "base", "b", "--quiet", "--json", "--report", "r.html")
    assert json.loads(ran.out)["b"] == "b"
    assert "in all linear layers of all layers" in (folder / "r.html").read_text()
    assert cli("inspect", "base", "--report", "r.html").code == 0
    assert "LlamaForCausalLM of" in (folder / "r.html").read_text()


def test_a_file_that_is_no_report_is_found_before_the_models_are_read(folder: Path, cli: Cli) -> None:
    (folder / "thesis.html").write_text("mine")
    ran = cli("diff", "base", "nowhere", "--report", "thesis.html")
    assert ran.code == 3
    assert "\nerror[output-exists]: thesis.html: the file exists, and is no report of weightsmith" in ran.err
    assert (folder / "thesis.html").read_text() == "mine"


@pytest.mark.long
def test_a_preview_in_tables_of_eighty_columns_and_as_json(folder: Path, cli: Cli) -> None:
    models = "\n".join(f"  - model: {name}\n    parameters: {{weight: 0.5}}" for name in ("b", "base"))
    (folder / "sum.yml").write_text(f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{models}\n")
    ran = cli("preview", "sum.yml")
    assert ran.code == 0
    assert max(map(len, ran.out.rpartition("\n\n")[0].splitlines())) <= 80
    assert re.search(r"^A +25\.", ran.out, re.MULTILINE)
    previewed = json.loads(cli("preview", "sum.yml", "--json", "--quiet", "--full").out)
    assert previewed["looked_at"] == previewed["elements"]
    assert previewed["merge"]["write_bytes"] > 0
