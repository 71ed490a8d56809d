"""Every path that a user can name, in every command: one that cannot be used is one error, and nothing is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_help import LINEAR, Cli, cli, make_adapter
from tests.output_help import tree
from weightsmith._base import files

__all__ = ["cli"]

ONE = "merge_method: linear\nmodels:\n  - model: PATH\n    parameters: {weight: 1}\n"
TIES = "merge_method: ties\nbase_model: PATH\nmodels:\n  - model: a\n    parameters: {weight: 1}\n"
EXPERTS = "base_model: a\nexperts:\n  - source_model: b\n    positive_prompts: [y]\n  - source_model: "
EXL2 = ["--format", "exl2", "--bits", "4"]


def written(text: str, command: str = "merge") -> Callable[[str], list[str]]:
    """A merge of a recipe with a path in it."""

    def arguments(path: str) -> list[str]:
        Path("bad.yml").write_text(text.replace("PATH", json.dumps(path)))
        return [command, "bad.yml", "out"]

    return arguments


READ: dict[str, Callable[[str], list[str]]] = {
    "merge": lambda path: ["merge", path, "out"],
    "moe": lambda path: ["moe", path, "out"],
    "plan": lambda path: ["plan", path],
    "preview": lambda path: ["preview", path],
    "run": lambda path: ["run", path, "out"],
    "inspect": lambda path: ["inspect", path],
    "diff": lambda path: ["diff", "a", path],
    "eval": lambda path: ["eval", "a", path, "--text", "built-in"],
    "eval --text": lambda path: ["eval", "a", "--text", path],
    "eval --reference": lambda path: ["eval", "a", "--text", "built-in", "--reference", path],
    "quantize": lambda path: ["quantize", path, "out", "--format", "fp8-dynamic"],
    "dequantize": lambda path: ["dequantize", path, "out"],
    "extract-lora": lambda path: ["extract-lora", path, "a", "out"],
    "convert-lora": lambda path: ["convert-lora", path, "out"],
    "extract-lora base": lambda path: ["extract-lora", "a", path, "out"],
    "transplant-tokenizer": lambda path: ["transplant-tokenizer", path, "b", "out"],
    "transplant-tokenizer donor": lambda path: ["transplant-tokenizer", "a", path, "out"],
    "transplant-tokenizer --report-text": lambda path: ["transplant-tokenizer", "a", "b", "out", "--report-text", path],
    "statistics": lambda path: ["statistics", path, "built-in", "out"],
    "statistics text": lambda path: ["statistics", "a", path, "out"],
    "quantize --measurement": lambda path: ["quantize", "a", "out", *EXL2, "--measurement", path],
    "quantize --imatrix": lambda path: ["quantize", "a", "out", "--format", "gguf-q4_0", "--imatrix", path],
    "quantize --evaluate": lambda path: ["quantize", "a", "out", "--format", "fp8-dynamic", "--evaluate", path],
    "quantize --calibration": lambda path: ["quantize", "a", "out", *EXL2, "--calibration", path],
    "adapter": lambda path: ["dequantize", f"a+{path}", "out"],
    "model of a recipe": written(ONE),
    "adapter of a recipe": lambda path: written(ONE)(f"a+{path}"),
    "base of a recipe": written(TIES),
    "tokenizer_source": written(LINEAR + "tokenizer_source: PATH\n"),
    "chat_template": written(LINEAR + "chat_template: PATH\n"),
    "merge_method": lambda path: written(LINEAR.replace("linear", "PATH", 1))(f"{path}.py:f"),
    "prompts_file": written(EXPERTS + "a\n    prompts_file: PATH\n", "moe"),
    "source_model": written(EXPERTS + "PATH\n    positive_prompts: [x]\n", "moe"),
    "verify": lambda path: ["verify", path],
    "status": lambda path: ["status", path],
    "clean": lambda path: ["clean", path],
}
WRITTEN: dict[str, Callable[[str], list[str]]] = {
    "merge": lambda path: ["merge", "linear.yml", path],
    "merge --overwrite": lambda path: ["merge", "linear.yml", path, "--overwrite"],
    "run": lambda path: ["run", "plan.json", path],
    "run --part": lambda path: ["run", "plan.json", path, "--part", "1/2"],
    "quantize": lambda path: ["quantize", "a", path, "--format", "fp8-dynamic"],
    "dequantize": lambda path: ["dequantize", "a", path],
    "extract-lora": lambda path: ["extract-lora", "a", "b", path],
    "convert-lora": lambda path: ["convert-lora", "adapter", path],
    "transplant-tokenizer": lambda path: ["transplant-tokenizer", "a", "b", path],
    "statistics": lambda path: ["statistics", "a", "built-in", path, "--tokens", "8", "--rows", "1"],
    "inspect --report": lambda path: ["inspect", "a", "--report", path],
    "diff --report": lambda path: ["diff", "a", "b", "--report", path],
    "preview --report": lambda path: ["preview", "linear.yml", "--report", path],
    "eval --report": lambda path: ["eval", "a", "--text", "built-in", "--report", path],
    "eval --work": lambda path: ["eval", "a", "--text", "built-in", "--tokens", "8", "--rows", "1", "--work", path],
    "init": lambda path: ["init", path, "--preset", "ties-paper"],
}
NAMES = {
    "loop": "loop",
    "below a loop": "loop/x",
    "link to nowhere": "broken/x",
    "a long name": "x" * 300,
    "a long path": "d/" * 2500 + "x",
    "NUL": "a\0b",
    "below a file": "file/x/y",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with tokenizers, of which every format and every layout can be made."""
    pytest.importorskip("transformers")
    from tests.calibration_help import save_model

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        save_model(folder / name, seed=seed)
    tokenizer = folder / "b" / "tokenizer.json"  # has a token that the other one lacks
    tokenizer.write_text(tokenizer.read_text().replace('"A"', '"AA"', 1))
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, a recipe, and names that cannot be used."""
    folder = tmp_path
    monkeypatch.chdir(folder)
    for name in "ab":
        shutil.copytree(models / name, folder / name)
    (folder / "linear.yml").write_text(LINEAR)
    make_adapter(folder / "adapter")
    (folder / "file").write_text("mine")
    (folder / "loop").symlink_to("loop")
    (folder / "broken").symlink_to("nowhere")
    return folder


def planned(cli: Cli) -> None:
    Path("plan.json").write_text(cli("plan", "linear.yml", "--json").out)


def refused(cli: Cli, arguments: list[str], here: Path, name: str = "") -> str:
    """The command ends with one error, and has changed nothing: its message. name: in it."""
    before = tree(here)
    ran = cli(*arguments)
    assert ran.code in (1, 2, 3), ran.err + ran.out
    assert "internal" not in ran.err, ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("error[") == 1 or ran.code == 2, ran.err
    assert tree(here) == before
    assert len(ran.err) < 12_000
    assert name[:40].replace("\0", "\\x00") in ran.err or "null byte" in ran.err
    return ran.err


@pytest.mark.matrix("merge-*", "plan-*", "*-loop", "*-NUL")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", READ)
def test_what_cannot_be_read_is_one_error(cli: Cli, here: Path, command: str, name: str) -> None:
    refused(cli, READ[command](NAMES[name]), here, NAMES[name])


@pytest.mark.matrix("merge-*", "plan-*", "*-loop", "*-NUL")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", WRITTEN)
def test_what_cannot_be_written_is_one_error(cli: Cli, here: Path, command: str, name: str) -> None:
    if command.startswith("run"):
        planned(cli)
    refused(cli, WRITTEN[command](NAMES[name]), here, NAMES[name])


@pytest.mark.matrix("True-*")
@pytest.mark.slow
@pytest.mark.parametrize("command", READ)
@pytest.mark.parametrize("inside", [False, True])
def test_what_may_not_be_read_is_one_error(cli: Cli, here: Path, no_root: None, command: str, inside: bool) -> None:
    closed = here / "closed"
    closed.mkdir()
    arguments = READ[command]("closed/x" if inside else "closed")
    closed.chmod(0)
    try:
        refused(cli, arguments, here, "closed")
    finally:
        closed.chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITTEN)
@pytest.mark.parametrize("inside", [False, True])
def test_what_may_not_be_written_is_one_error(cli: Cli, here: Path, no_root: None, command: str, inside: bool) -> None:
    if command.startswith("run"):
        planned(cli)
    closed = here / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        refused(cli, WRITTEN[command]("closed/x" if inside else "closed"), here, "closed")
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (r"C:\Users\me\r.yml", "Write /mnt/c/Users/me/r.yml."),
        ("d:/r.yml", "Mount the drive, and write its path here."),
        (r".\r.yml", "Write ./r.yml."),
        (r"\\wsl$\Ubuntu\home\me\r.yml", "Write /home/me/r.yml."),
        (r"\\server\share\r.yml", "Mount the shared folder, and write its path here."),
    ],
)
@pytest.mark.parametrize("command", ["plan", "inspect", "in a recipe"])
def test_a_windows_path_is_answered_with_its_name_here(
    cli: Cli, here: Path, path: str, answer: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "is_folder", lambda folder: folder == Path("/mnt/c"))
    ran = cli(*(written(ONE)(path) if command == "in a recipe" else (command, path)))
    assert ran.code == 1
    assert "this is a Windows path" in ran.err
    assert f"-> {answer}" in ran.err


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("merge linear.yml new/m.GGUF", "new/m: with --quantize gguf-q4_k_m, it will hold model.gguf."),
        ("merge linear.yml m.safetensors", "m: it will hold the weights and what belongs to them."),
        ("merge linear.yml m.safetensors.gguf", "m: with --quantize gguf-q4_k_m, it will hold model.gguf."),
        ("quantize a m.gguf --format int8", "m: with --format gguf-q4_k_m, it will hold model.gguf."),
        ("dequantize a m.gguf", "m."),
        ("convert-lora a m.gguf", "m."),
        ("extract-lora a b m.gguf", "m."),
        ("transplant-tokenizer a b m.gguf", "m."),
        ("auto a b c m.gguf", "m."),
        ("run plan.json m.gguf", "m."),
    ],
)
def test_the_name_of_a_file_is_no_output(cli: Cli, here: Path, line: str, answer: str) -> None:
    before = tree(here)
    ran = cli(*line.split())
    assert ran.code == 3
    assert f"-> Name a folder, such as {answer}\n" in ran.err
    assert "Nothing was written" in ran.err
    assert tree(here) == before


def test_stages_may_be_named_like_a_file(cli: Cli, here: Path) -> None:
    first = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
    last = "merge_method: linear\nmodels: [{model: half.safetensors}, {model: b}]\nparameters: {weight: 1}\n"
    Path("stages.yml").write_text(f"name: half.safetensors\n{first}---\n{last}")
    ran = cli("merge", "stages.yml", "new", "--keep-stages")
    assert ran.code == 0, ran.err
    assert Path("new.stage-half.safetensors/model.safetensors").is_file()


def test_a_tokenizer_that_is_a_link_to_itself_is_one_error(cli: Cli, here: Path) -> None:
    (here / "a" / "tokenizer.json").unlink()
    (here / "a" / "tokenizer.json").symlink_to("tokenizer.json")
    assert "symbolic link" in refused(cli, ["merge", "linear.yml", "out"], here)


def test_a_recipe_is_not_written_through_a_link_to_nowhere(cli: Cli, here: Path) -> None:
    assert "already exists" in refused(cli, ["init", "broken", "--preset", "ties-paper"], here)
    assert not (here / "nowhere").exists()


@pytest.mark.slow
def test_a_report_replaces_the_page_and_not_the_link_to_it(cli: Cli, here: Path) -> None:
    (here / "pages").mkdir()
    (here / "page.html").symlink_to("pages/page.html")
    for _ in range(2):
        assert cli("inspect", "a", "--report", "page.html").code == 0
    assert (here / "page.html").is_symlink()
    assert (here / "pages" / "page.html").is_file()
