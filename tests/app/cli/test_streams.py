"""Streams that cannot be written: closed, on a full disk, or pipes whose reader has gone. Every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_help import LINEAR, environment, make_adapter, make_models, run_process
from tests.features.transplant.test_transplant import pair

MOE = """base_model: model
gate_mode: random
architecture: mixtral
experts:
  - source_model: model
  - source_model: model
"""

COMMANDS: dict[str, tuple[list[str], str]] = {
    "merge": (["linear.yml", "OUT"], "The output is complete: "),
    "moe": (["moe.yml", "OUT", "--no-check-loading"], "The output is complete: "),
    "plan": (["linear.yml"], ""),
    "preview": (["linear.yml", "--report", "OUT.html"], "Page written: "),
    "inspect": (["model", "--report", "OUT.html"], "Page written: "),
    "diff": (["model", "model", "--report", "OUT.html"], "Page written: "),
    "quantize": (["a", "OUT", "--format", "fp8-dynamic"], "The output is complete: "),
    "dequantize": (["quantised", "OUT"], "The output is complete: "),
    "extract-lora": (["a", "b", "OUT", "--max-rank", "2"], "The output is complete: "),
    "convert-lora": (["adapter", "OUT"], "The output is complete: "),
    "transplant-tokenizer": (["model", "donor", "OUT", "--approximation", "mean"], "The output is complete: "),
    "run": (["plan.json", "OUT"], "The output is complete: "),
    "verify": (["done"], ""),
    "status": (["done"], ""),
    "init": (["OUT.yml", "--preset", "ties-paper"], "Recipe written: "),
    "methods": ([], ""),
    "schema": ([], ""),
    "clean": ([], ""),
    "doctor": ([], ""),
    "help": (["merge"], ""),
    "demo": (["OUT"], "The demo is in "),
}
"""Arguments of each command, and what it says of its output when the result cannot be printed."""
NO_JSON = {"init", "schema", "help"}
FAULTS = {"closed": "text", "full": "json", "pipe": "text"}
ALL_FAULTS = {"merge", "inspect", "methods"}
"""Commands that meet every fault of stdout; the others meet one."""
WITHOUT_STDERR = {"merge", "preview", "inspect", "verify", "methods", "doctor"}
"""Commands that meet a fault of stderr: with a progress bar and without, with a page, without a model."""

DRIVER = """
import json, os, sys
from weightsmith._app.cli import main
from weightsmith._app.cli.app import make_app
make_app()  # imports the modules of all commands
import weightsmith._features.adapters.extract, weightsmith._execution.execute, weightsmith._execution
import weightsmith._kernels.compiler
import weightsmith._reports.look.reports, weightsmith._planning.planner.reopen, weightsmith._features.transplant.plan
import gc, weightsmith

for quantize in (None, "fp8-dynamic"):  # numba takes a second before its first kernel
    weightsmith.merge("linear.yml", f"warm-{quantize}", quantize=quantize, progress=False, overwrite=True)
gc.freeze()  # as a copy ends, it looks through its own objects alone

def break_stream(number, fault):
    name = {1: "stdout", 2: "stderr"}[number]
    if fault == "closed":
        os.close(number)
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
        return
    if fault == "full":
        broken = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, broken = os.pipe()
        os.close(reader)
    os.dup2(broken, number)

codes = []
for label, number, fault, arguments in json.load(open("cases.json")):
    child = os.fork()
    if not child:
        for own, name in ((1, "out"), (2, "err")):
            if own != number:
                os.dup2(os.open(f"{label}.{name}", os.O_WRONLY | os.O_CREAT), own)
        break_stream(number, fault)
        sys.argv = ["weightsmith", *arguments]
        main()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
json.dump(codes, open("codes.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read."""
    folder = tmp_path_factory.mktemp("streams")
    make_models(folder)
    make_adapter(folder / "adapter")
    pair(folder)
    (folder / "linear.yml").write_text(LINEAR)
    (folder / "moe.yml").write_text(MOE)
    for arguments in (["merge", "linear.yml", "done"], ["quantize", "a", "quantised", "--format", "fp8-dynamic"]):
        assert run_process(*arguments, cwd=folder).code == 0
    (folder / "plan.json").write_text(run_process("plan", "linear.yml", "--json", cwd=folder).out)
    return folder


def _cases(number: int) -> list[tuple[str, int, str, list[str]]]:
    cases = []
    for place, (command, (arguments, _)) in enumerate(COMMANDS.items()):
        if number == 2 and command not in WITHOUT_STDERR:
            continue
        each_fault = [*FAULTS.items()]
        for fault, how in each_fault if number == 1 and command in ALL_FAULTS else [each_fault[place % 3]]:
            label = f"{command}-{number}-{fault}"
            filled = [argument.replace("OUT", f"{label}-made") for argument in arguments]
            cases.append(
                (label, number, fault, [command, *filled, *(["--json"] if how == "json" and command not in NO_JSON else [])])
            )
    return cases


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each case; each in a copy of one process, whose imports are done."""
    cases = [*_cases(1), *_cases(2)]
    (folder / "cases.json").write_text(json.dumps(cases))
    env = environment(HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-c", DRIVER], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes.json").read_text())

    def text(path: Path) -> str:
        return path.read_text() if path.exists() else ""

    return {
        label: (code, text(folder / f"{label}.out"), text(folder / f"{label}.err"))
        for (label, *_), code in zip(cases, codes, strict=True)
    }


def test_the_table_has_every_command() -> None:
    from weightsmith._app.cli.app import make_app

    names = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in make_app().registered_commands
        if command.callback
    }
    # studio serves until Ctrl-C, the others need a model that transformers runs
    assert names == {*COMMANDS, "studio", "eval", "auto", "tune", "statistics", "write"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_result_that_cannot_be_printed_is_said_on_stderr_with_a_code_of_its_own(
    folder: Path, ran: dict[str, tuple[int, str, str]]
) -> None:
    wrong = {}
    why = {"closed": "it is closed", "full": "No space left on device", "pipe": "its reader has closed it"}
    for label, *_ in _cases(1):
        code, _, err = ran[label]
        name, fault = label.split("-1-")
        said, written = f"error[result-lost]: stdout: the result cannot be printed: {why[fault]}", COMMANDS[name][1]
        created = (*folder.glob(f"{label}-made*"),)
        lines = 0 if fault == "pipe" and not written else 1  # `| head` of what only answers is no fault
        good = code == (141 if fault == "pipe" else 3) and err.count(said) == lines and "Traceback" not in err
        if not good or written not in err or bool(written) != bool(created):
            wrong[label] = code, err, created
    assert not wrong


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stderr_that_cannot_be_written_stops_nothing(ran: dict[str, tuple[int, str, str]]) -> None:
    wrong = {}
    for label, *_ in _cases(2):
        code, out, _ = ran[label]
        if code or not out:
            wrong[label] = code, out
    assert not wrong


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["merge", "--help"], pytest.param(["quantize", "--list"], marks=pytest.mark.slow)]
)
def test_help_that_cannot_be_printed_is_no_traceback(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "weightsmith", *arguments], env=environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (
        3, "error[result-lost]: stdout: the result cannot be printed: No space left on device\n",
    )  # fmt: skip


@pytest.mark.long
def test_an_error_keeps_its_code_if_its_json_cannot_be_printed(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "weightsmith", "plan", "none.yml", "--json"],
            env=environment(), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert "no such recipe" in done.stderr
    assert "result-lost" not in done.stderr


def test_numbers_of_closed_streams_are_given_to_no_file() -> None:
    code = (
        "import os\nfor n in (0, 1, 2): os.close(n)\nimport sys\nsys.stdin = sys.stdout = sys.stderr = None\n"
        "sys.__stdout__ = sys.__stderr__ = None\nfrom weightsmith._base.process import replace_streams\nreplace_streams()\n"
        "fd = os.open('/dev/null', os.O_RDONLY)\nprint('dropped', file=sys.stderr, flush=True)\n"
        "os._exit(0 if fd > 2 else 1)"
    )
    assert run_process(code=code).code == 0


@pytest.mark.long
def test_a_pipe_that_another_program_made_non_blocking_gets_every_line() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = (
        "from weightsmith._base.text import prepare_streams, note\nprepare_streams()\nfor i in range(20000): note(f'line {i}')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stderr=writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        lines = file.read().splitlines()
    assert process.wait() == 0
    assert lines == [f"line {i}" for i in range(20000)]


def test_a_warning_of_a_library_bears_its_name(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "longname" / "inner.py"
    library.parent.mkdir(parents=True)
    library.write_text("import warnings\nwarnings.warn('torch_dtype is deprecated')\n")
    code = (
        "import sys\nfrom weightsmith._base.text import prepare_streams\nprepare_streams()\n"
        f"sys.path.insert(0, {str(library.parents[1])!r})\nimport longname.inner"
    )
    assert run_process(code=code).err == "warning of longname: torch_dtype is deprecated\n"
