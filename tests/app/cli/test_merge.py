"""`weightsmith merge`: what is printed where, what the options do, and how it ends when it ends badly."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli_help import CONFIG, LINEAR, Cli, cli, environment, run_process, work
from tests.mini import write_checkpoint
from weightsmith import open_checkpoint
from weightsmith._base.errors import FormatError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout
from weightsmith._models.checkpoint import Checkpoint

__all__ = ["cli", "work"]


def test_a_merge_prints_its_summary_to_stdout_and_its_progress_lines_to_stderr(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 0
    assert ran.out.startswith(f"{work / 'out'}: 6 tensors, 400 bytes in ")
    assert ran.out.count("\n") == 1
    lines = [line for line in ran.err.splitlines() if not line.startswith("compiling kernels")]  # unless they are cached
    first, *lines = lines
    assert first == "reading the recipe and the models' headers"
    assert list(dict.fromkeys(line.split(":")[0] for line in lines)) == ["merging", "saving to disk"]
    assert {p.name for p in (work / "out").iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}


def test_json_prints_one_object_and_nothing_else_to_stdout(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out", "--json")
    printed = json.loads(ran.out)
    assert printed["out"] == str(work / "out")
    assert (printed["tensors"], printed["resumed"], printed["warnings"], printed["method"]) == (6, 0, [], "linear")
    nbytes = open_checkpoint(work / "out").nbytes
    assert printed["bytes"] == printed["written_bytes"] == nbytes
    assert printed["read_bytes"] == 2 * nbytes
    assert printed["files"] == [{"name": "model.safetensors", "bytes": (work / "out/model.safetensors").stat().st_size}]
    assert printed["seconds"] >= 0


def test_quiet_prints_nothing(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out", "--quiet", "--cuda")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_quiet_still_prints_warnings_in_full(cli: Cli, work: Path) -> None:
    (work / "r.yml").write_text(LINEAR.replace("linear", "task_arithmetic") + "base_model: a\nparameters: {int8_mask: true}\n")
    ran = cli("merge", "r.yml", "out", "--quiet")
    assert (ran.code, ran.out) == (0, "")
    assert "warning: r.yml:9:14: int8_mask has no effect" in ran.err
    assert "\n    9 | parameters: {int8_mask: true}\n      |              ^^^^^^^^^\n" in ran.err


@pytest.mark.long
def test_the_options_reach_the_merge(cli: Cli, work: Path) -> None:
    assert cli("merge", "linear.yml", "out", "--max-shard-size", "100", "--out-dtype", "bfloat16", "--no-card",
               "--threads", "1", "--max-memory", "500MB", "--no-fsync").code == 0  # fmt: skip
    checkpoint = open_checkpoint(work / "out")
    assert {spec.dtype.name for spec in checkpoint.specs.values()} == {"BF16"}
    assert len(checkpoint.weights) > 1
    assert not (work / "out/README.md").exists()


@pytest.mark.slow
def test_the_seed_reaches_the_merge(cli: Cli, work: Path) -> None:
    (work / "dare.yml").write_text(
        "merge_method: dare_linear\nbase_model: a\nmodels: [{model: b, parameters: {weight: 1, density: 0.5}}]\n"
    )
    outs = {}
    for name, args in {"1": ["--seed", "1"], "1again": ["--random-seed=1"], "2": ["--seed", "2"]}.items():
        assert cli("merge", "dare.yml", name, *args).code == 0
        outs[name] = (work / name / "model.safetensors").read_bytes()
    assert outs["1"] == outs["1again"] != outs["2"]


@pytest.mark.slow
def test_an_output_that_is_there_is_refused_with_3_and_replaced_with_overwrite(cli: Cli, work: Path) -> None:
    assert cli("merge", "linear.yml", "out").code == 0
    before = (work / "out/model.safetensors").read_bytes()
    (work / "linear.yml").write_text(LINEAR.replace("0.25", "0.9"))
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 3
    assert "error[output-exists]: " in ran.err
    assert "--overwrite" in ran.err
    assert (work / "out/model.safetensors").read_bytes() == before
    assert cli("merge", "linear.yml", "out", "--overwrite").code == 0
    assert (work / "out/model.safetensors").read_bytes() != before


def test_all_problems_of_a_recipe_are_printed_as_they_are_and_the_code_is_1(cli: Cli, work: Path) -> None:
    (work / "bad.yml").write_text('merge_method: "[red]tise[/red]"\nmodels:\n  - model: nowhere/at/all\ndtyp: bfloat16\n')
    ran = cli("merge", "bad.yml", "out")
    assert ran.code == 1
    assert "error[unknown-method]: bad.yml:1:1: no merge method is called '[red]tise[/red]'" in ran.err
    assert "bad.yml:4:1" in ran.err
    assert "Nothing was written." in ran.err
    assert ran.out == ""
    assert not (work / "out").exists()


def test_control_characters_from_outside_never_reach_the_terminal(cli: Cli, work: Path) -> None:
    (work / "bad.yml").write_text('merge_method: "\\e[2Jlinear"\nmodels: [{model: a, parameters: {weight: 1}}]\n')
    ran = cli("merge", "bad.yml", "out")
    assert ran.code == 1
    assert "\x1b" not in ran.err
    assert "x1b[2J" in ran.err


def test_an_input_that_fails_while_merging_ends_with_5(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Checkpoint, name: str, start_byte: int, buffer: object) -> None:
        raise FormatError("the file ends early", where=name)

    monkeypatch.setattr(Checkpoint, "location", lambda self, name: None)  # as of a file that is read elsewhere
    monkeypatch.setattr(Checkpoint, "read_into", fail)
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 5
    assert "error[format]: model." in ran.err


def test_what_nobody_foresaw_is_a_short_message_and_70_and_a_traceback_on_request(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise KeyError("[oops]")

    monkeypatch.setattr("weightsmith._app.api.prepare_any", fail)
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 70
    assert "error[internal]: KeyError: '[oops]'" in ran.err
    assert "--verbose" in ran.err
    assert "Traceback" not in ran.err
    monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 70
    assert "Traceback" in ran.err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["merge"], "RECIPE"),
        (["merge", "r.yml"], "OUT"),
        (["merge", "r.yml", "out", "--frob"], "--frob"),
        (
            ["merge", "r.yml", "out", "--max-memory", "lots"],
            "a size such as 800MB, 5GB or 2GiB, or a number of bytes, not 'lots'",
        ),
        (["merge", "r.yml", "out", "--max-shard-size", "5B"], "5GB or 2GiB, or a number of bytes, not '5B'"),
        (["merge", "r.yml", "out", "--max-shard-size", "0"], "--max-shard-size (max_shard_bytes): must be at least 1, not 0"),
        (["merge", "r.yml", "out", "--out-dtype", "bflat16"], "did you mean 'bfloat16'?"),
        (["merge", "r.yml", "out", "--threads", "0"], "--threads (threads): must be at least 1, not 0"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_is_wrong(cli: Cli, args: list[str], text: str) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert text in ran.err
    assert ran.out == ""


TENSORS = 48


def big_models(root: Path) -> None:
    """Three models of 100 MB each, of zeros that take no disk: long enough to merge for Ctrl-C to come in the middle."""
    specs = [TensorSpec(f"model.layers.{i}.w.weight", DTYPES["BF16"], (512, 2048)) for i in range(TENSORS)]
    (shard,) = make_layout(specs, 10**12).shards
    for name in "abc":
        (root / name).mkdir()
        with (root / name / shard.name).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)
    # Not all zeros, or a wrong tensor could not be told from a right one.
    with (root / "b" / shard.name).open("r+b") as file:
        for i in range(0, TENSORS, 7):
            file.seek(len(shard.header) + i * specs[0].nbytes + 1000)
            file.write(bytes(range(1, 60)) * 40)
    (root / "ties.yml").write_text(
        "merge_method: ties\nbase_model: a\nparameters: {weight: 1, density: 0.5}\nmodels: [{model: b}, {model: c}]\n"
    )


# The default handler, which a shell's background jobs do not have.
_START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from weightsmith._app.cli import main; main()"
)


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_keeps_the_work_and_the_same_command_finishes_it_with_equal_bytes(tmp_path: Path) -> None:
    big_models(tmp_path)
    args = ["merge", "ties.yml", "out", "--threads", "1", "--no-fsync"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *args, "--no-resume"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = tmp_path / ".out.weightsmith-staging" / "journal"
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert f"Finished tensors are kept in {journal.parent}" in err
    # --no-resume would discard what was just done, so the command that resumes does not have it.
    assert "the same command: weightsmith merge ties.yml out --threads 1 --no-fsync\n" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()

    again = run_process(*args, "--json", cwd=tmp_path)
    assert again.code == 0, again.err
    assert 0 < json.loads(again.out)["resumed"] < TENSORS
    assert "checking finished tensors" in again.err
    assert not journal.parent.exists()

    fresh = run_process("merge", "ties.yml", "fresh", "--no-fsync", "--quiet", cwd=tmp_path)
    assert fresh.code == 0, fresh.err
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "fresh/model.safetensors").read_bytes()


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_kernels(work: Path) -> None:
    """DELLA's kernels take seconds: the process ends before they are compiled, and the same command does the rest."""
    recipe = "merge_method: della\nbase_model: a\nmodels: [{model: b}]\nparameters: {weight: 1, density: 0.5, epsilon: 0.2}\n"
    (work / "della.yml").write_text(recipe)
    env = environment(NUMBA_CACHE_DIR=str(work / "kernels"))
    args = ["merge", "della.yml", "out", "--no-fsync"]
    with subprocess.Popen([sys.executable, "-c", _START, *args], env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line == "compiling kernels (first use only)\n":
                break
        process.send_signal(signal.SIGINT)
        seen += process.stderr
        assert process.wait() == 130, seen
    compiled = {*(work / "kernels").rglob("*.nbc")}
    assert "Interrupted. Finished tensors are kept" in "".join(seen)
    assert "Traceback" not in "".join(seen)
    again = run_process(*args, env=env, fresh=True)
    assert again.code == 0, again.err
    assert compiled < {*(work / "kernels").rglob("*.nbc")}
    assert "compiling kernels (first use only)" in again.err
    warm = run_process("merge", "della.yml", "warm", "--no-fsync", env=env, fresh=True)
    assert "compiling" not in warm.err
    assert (work / "out/model.safetensors").read_bytes() == (work / "warm/model.safetensors").read_bytes()


@pytest.mark.parametrize("out", ["out", "s3://", "hf://merged", "ftp://models/merged"])
def test_ctrl_c_before_anything_was_made_says_that_nothing_is_left(
    cli: Cli, work: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weightsmith._app.api.prepare_any", interrupt)
    ran = cli("merge", "linear.yml", out)
    assert ran.code == 130
    assert "Interrupted. No unfinished work was left." in ran.err


@pytest.mark.long
@pytest.mark.parametrize("start", ["sys.exit(cli.main())", "runpy.run_module('weightsmith', run_name='__main__')"])
def test_ctrl_c_ends_with_130_even_if_a_library_aborts_at_the_end(tmp_path: Path, start: str) -> None:
    """The installed script, and `python -m weightsmith`: what is printed is seen, and temporary folders are removed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, ctypes, runpy, sys, tempfile, types\n"
        "from weightsmith._app import cli\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(libc.abort, None, None)\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "cli._run = lambda app: print('told') or 130\n"
        "sys.argv = ['weightsmith', 'methods']\n"
        "atexit.register(print, 'cleaned up')\n"
        f"folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})\n"
        f"{start}\n"
    )
    ran = subprocess.run([sys.executable, str(program)], env=environment(), capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (130, "told\ncleaned up\n")
    assert [*tmp_path.iterdir()] == [program]


@pytest.mark.long
def test_ctrl_c_ends_no_program_that_calls_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text("from weightsmith._app import cli\ndef call():\n    cli.main()\n")
    (tmp_path / "program.py").write_text(
        "import sys, types\n"
        "import caller\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "caller.cli._run = lambda app: 130\n"
        "sys.argv = ['weightsmith', 'methods']\n"
        "try:\n"
        "    caller.call()\n"
        "except SystemExit as ended:\n"
        "    print('went on after', ended.code)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], env=environment(), capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "went on after 130\n")


@pytest.mark.long
@pytest.mark.parametrize("command", ["schema", "methods"])  # more, and less, than a buffer holds
def test_a_reader_that_goes_away_ends_a_process_that_wrote_nothing_without_a_word(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsmith", command],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, "")


@pytest.mark.slow
def test_a_nan_names_the_ways_out_and_each_of_them_works(cli: Cli, work: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {key: value.copy() for key, value in load_file(work / "b" / "model.safetensors").items()}
    tensors[name][1, 2] = np.nan
    write_checkpoint(work / "bad", tensors, CONFIG)
    recipe = (work / "linear.yml").read_text().replace("model: b", "model: bad")
    (work / "bad.yml").write_text(recipe)
    refused = cli("merge", "bad.yml", "out")
    assert refused.code == 5
    assert f"bad, tensor {name}: element [1, 2] is nan" in refused.err
    look, leave = (
        f"weightsmith inspect bad {name} --stats",
        f'weight: [{{filter: "{name}", value: 0}}, ...] in the parameters of bad',
    )
    assert look in refused.err
    assert leave in refused.err
    assert "with --allow-nonfinite the same command resumes from them" in refused.err
    looked = cli(*shlex.split(look)[1:])
    assert (looked.code, "NaN" in looked.out) == (0, True), looked
    assert cli("merge", "bad.yml", "out").code == 5, "the same command meets the same number"
    assert cli("merge", "bad.yml", "out", "--allow-nonfinite").code == 0
    (work / "left.yml").write_text(recipe.replace("weight: 0.75", f'weight: [{{filter: "{name}", value: 0}}, {{value: 0.75}}]'))
    assert cli("merge", "left.yml", "out2").code == 0
    assert np.array_equal(
        load_file(work / "out2" / "model.safetensors")[name], load_file(work / "a" / "model.safetensors")[name]
    )
