"""`weightsmith demo`: a merge to look at, from nothing, which leaves nothing behind but its folder."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.cli_help import Cli, cli, run_process
from weightsmith._app.cli import housekeeping

__all__ = ["cli"]

_WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, transformers=None)  # importing them fails
from weightsmith._app.cli import main
main()
"""


@pytest.mark.process
@pytest.mark.slow
def test_the_demo_needs_no_torch_and_says_what_to_do_next(tmp_path: Path) -> None:
    ran = run_process("demo", code=_WITHOUT_TORCH, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "56 tensors, all checksums match" in ran.out
    assert "weightsmith init" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["weightsmith-demo"]
    demo = tmp_path / "weightsmith-demo"
    assert sorted(path.name for path in demo.iterdir()) == ["base", "french", "german", "merged", "recipe.yml", "report.html"]
    again = run_process("merge", "weightsmith-demo/recipe.yml", "weightsmith-demo/merged", "--overwrite", cwd=tmp_path)
    assert again.code == 0, again.err


@pytest.mark.slow
def test_the_models_of_the_demo_are_those_that_transformers_builds(tmp_path: Path) -> None:
    import torch
    import transformers

    from weightsmith._app.demo import demo_models

    demo_models(tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    text = "Größe: 1 + 1 = 2\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with torch.no_grad():
        assert model(**tokenizer(text, return_tensors="pt")).logits.isfinite().all()


@pytest.mark.process
@pytest.mark.slow
def test_the_models_of_the_demo_can_become_gguf(cli: Cli, tmp_path: Path) -> None:
    from weightsmith._app.demo import demo_models

    demo_models(tmp_path)
    ran = cli("quantize", tmp_path / "base", tmp_path / "gguf", "--format", "gguf-f16", "--quiet")
    assert ran.code == 0, ran.err
    assert (tmp_path / "gguf/model.gguf").is_file()


@pytest.mark.long
def test_a_folder_with_blanks_and_json(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("demo", "a b", "--json")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert facts["tensors"] == 56
    assert 0.05 < facts["distance_from_base"]["all"] < 0.15
    assert cli("plan", "a b/recipe.yml").code == 0


@pytest.mark.long
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_demo_that_fails_leaves_nothing_behind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weightsmith._outputs.places.verify", fail)
    assert cli("demo").code != 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_touched(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x")
    ran = cli("demo", tmp_path / "mine")
    assert ran.code == 3
    assert "there is a file or a folder of this name" in ran.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_the_real_demo_says_what_it_needs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "_REAL", ("no_such_package",))
    ran = cli("demo", tmp_path / "real", "--real")
    assert ran.code == 1
    assert "the real demo needs no_such_package" in ran.err
    assert "run make demo in" in ran.err.lower()
    assert not (tmp_path / "real").exists()


def test_a_folder_that_cannot_be_written_is_a_problem_of_the_output(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    reasons = {
        ("demo",): "Read-only file system",
        ("init", "no/such.yml", "--preset", "ties-paper"): "No such file",
    }
    for arguments, reason in reasons.items():
        ran = cli(*arguments)
        assert ran.code == 3
        assert "error[store]" in ran.err
        assert "cannot be written: " in ran.err
        assert reason in ran.err
        assert list(tmp_path.iterdir()) == []
