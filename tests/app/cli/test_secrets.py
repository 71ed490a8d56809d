"""No command shows or writes a password, a token or a key, wherever it was given."""

from __future__ import annotations

import base64
import json
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests import fake_hub
from tests.cli_help import LINEAR, Cli, cli, make_adapter, work
from weightsmith._app.cli.app import make_app
from weightsmith._base import redaction

__all__ = ["cli", "work"]

MARK = "S3CRETmark"
GROUP: Any = typer.main.get_command(make_app())
COMMANDS: dict[str, Any] = GROUP.commands
_ENCODED = [base64.b64encode(f"{pad}{MARK}".encode()).decode().rstrip("=")[4:-2] for pad in ("", "a", "ab")]
_FOUND = re.compile("|".join([MARK, *map(re.escape, _ENCODED)]))

ADDRESSES = (
    f"https://me:{MARK}@127.0.0.1:9/a/b?token={MARK}&X-Amz-Signature={MARK}#key={MARK}",
    f"s3://KEY:{MARK}/{MARK}+{MARK}@bucket/model",
    f"hf://user:{MARK}@org/name",
    f"az://container/model?sv=1&sig={MARK}",
    "s3://bucket/model",  # the environment's endpoint, keys and proxies have marks
    "az://container/model",
    "org/name",
)
SUCCEEDING: dict[str, list[list[str]]] = {
    "merge": [["linear.yml", "out", "--report", "out/report.html"]],
    "moe": [["linear.yml", "out"]],
    "plan": [["linear.yml"], ["linear.yml", "--explain", "*q_proj*"], ["linear.yml", "--distance"]],
    "preview": [["linear.yml", "--report", "page.html"]],
    "inspect": [["a", "--stats", "--report", "page.html"]],
    "diff": [["a", "b", "--report", "page.html"]],
    "eval": [["a", "--text", "built-in", "--report", "page.html"]],
    "tune": [["linear.yml", "tuned.yml", "--text", "built-in", "--set", "parameters.weight={tune: [0, 1]}"]],
    "quantize": [["a", "out", "--format", "fp8-dynamic"]],
    "dequantize": [["a", "out"]],
    "extract-lora": [["a", "b", "out"]],
    "convert-lora": [["adapter", "out"]],
    "transplant-tokenizer": [["a", "b", "out"]],
    "statistics": [["a", "built-in", "out"]],
    "auto": [["a", "b", "c", "out"]],
    "write": [["a", "own.jsonl", "--rows", "1", "--tokens", "4"]],
    "run": [["plan.json", "out"]],
    "verify": [["made"]],
    "status": [["made"]],
    "init": [["new.yml", "--goal", "average", "--model", "a", "--model", "b"], ["-", "--preset", "ties-paper"]],
    "methods": [[], ["ties"]],
    "schema": [[]],
    "clean": [[]],
    "doctor": [[]],
    "help": [["merge"]],
    "demo": [["out"]],
    "studio": [[]],
}


def test_every_command_is_tried() -> None:
    assert SUCCEEDING.keys() == COMMANDS.keys()


@pytest.fixture
def marked(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Models, a plan and an output; then marks in the environment and in the files that hold credentials."""
    from huggingface_hub import constants

    from weightsmith._files import hub
    from weightsmith._files.remote import retries
    from weightsmith._kernels.compiler import cache_folder

    for name in ("AWS_PROFILE", "XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN_PATH", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    cache_folder()  # it stays where it is
    home = work / "home"
    kept = {
        ".netrc": f"machine 127.0.0.1 login me password {MARK}\n",
        ".git-credentials": f"https://me:{MARK}@huggingface.co\n",
        ".aws/credentials": f"[default]\naws_access_key_id = KEY\naws_secret_access_key = {MARK}\n",
        ".aws/config": f"[default]\nregion = nowhere-1\nendpoint_url = http://me:{MARK}@127.0.0.1:9\n",
        ".cache/huggingface/token": f"hf_{MARK}stored",
    }
    for name, text in kept.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    user = f"me:{MARK}"
    marks = {
        "HOME": str(home),
        "HF_TOKEN": f"hf_{MARK}",
        "HUGGING_FACE_HUB_TOKEN": f"hf_{MARK}2",
        "HF_ENDPOINT": f"http://{user}@127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "KEY",
        "AWS_SECRET_ACCESS_KEY": MARK,
        "AWS_SESSION_TOKEN": f"session{MARK}",
        "AWS_ENDPOINT_URL": f"http://{user}@127.0.0.1:9",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(MARK.encode()).decode(),
        "AZURE_STORAGE_SAS_TOKEN": f"?sv=1&sig={MARK}",
        "AZURE_CLIENT_SECRET": MARK,
        "AZURE_STORAGE_ENDPOINT": f"http://{user}@127.0.0.1:9",
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"private_key": f"-----BEGIN\n{MARK}\n"}),
        "HTTPS_PROXY": f"http://{user}@127.0.0.1:9",
        "all_proxy": f"http://{user}@127.0.0.1:9",
        "no_proxy": "127.0.0.1",
    }
    make_adapter(work / "adapter")
    (work / "made").mkdir()
    (work / "made" / "weightsmith.json").write_text("{}")
    for name, value in marks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", marks["HF_ENDPOINT"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(hub, "_silent", {})
    monkeypatch.setattr(retries, "PATIENCE", retries.Patience(first_seconds=0.0, most_seconds=0.0, failures=0))
    monkeypatch.setattr("weightsmith._app.studio.server.launch", _launch)
    monkeypatch.setattr("typer.main.get_command", lambda app: GROUP)  # making it anew takes longer than most runs here
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before other libraries try again
    yield work
    redaction._registered.clear()


def _launch(places: object, **options: object) -> None:
    raise RuntimeError(f"a failure of another library, about {options} and {places}")


class Looking:
    """Runs commands, and looks for marks in what they print and write."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli = cli
        self.folder = folder
        self.known = set(folder.rglob("*"))
        self.leaks: list[str] = []
        self.runs = 0

    def __call__(self, command: str, *args: str, json: bool = True) -> int:
        as_json = ["--json"] if json and "--json" in _options(command) else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ran = self.cli(command, *args, *as_json)
        self.runs += 1
        texts = {"stdout": ran.out, "stderr": ran.err}
        for path in sorted(set(self.folder.rglob("*")) - self.known, reverse=True):
            texts[f"the name {path}"] = path.name
            if path.is_file():
                texts[str(path)] = path.read_bytes().decode(errors="replace")
                path.unlink()
            else:
                path.rmdir()
        for place, text in texts.items():
            if match := _FOUND.search(text):
                shown = text[max(0, match.start() - 150) : match.end() + 80]
                self.leaks.append(f"{command} {' '.join(args)} [{ran.code}]: {place}: {shown}")
        return ran.code


def _options(command: str) -> list[str]:
    return [name for parameter in COMMANDS[command].params for name in parameter.opts]


def _words(command: str) -> tuple[int, list[str]]:
    """The number of the command's arguments, and its options that take a value."""
    arguments = [p for p in COMMANDS[command].params if p.param_type_name == "argument"]
    taking = [p.opts[0] for p in COMMANDS[command].params if p.param_type_name == "option" and not p.is_flag]
    return len(arguments), taking


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_or_writes_a_secret(command: str, marked: Path, cli: Cli) -> None:
    """Each of its arguments and options is an address with a secret; and where it succeeds, the environment has secrets."""
    looking = Looking(cli, marked)
    if command == "run":
        (marked / "plan.json").write_text(cli("plan", "linear.yml", "--json").out)
        looking.known.add(marked / "plan.json")
    for args in SUCCEEDING[command]:
        looking(command, *args, json=False)
        looking(command, *args)
    cli.monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    number, taking = _words(command)
    for address in ADDRESSES:
        for args in {(*[address] * number,), (*[*SUCCEEDING[command][0], "."][: number - 1], address)}:
            looking(command, *args)
    for option in taking:  # one of several commands is handled in one place
        if command == next(name for name in COMMANDS if option in _words(name)[1]):
            looking(command, *SUCCEEDING[command][0], option, ADDRESSES[0])
    assert not looking.leaks, "\n\n".join(looking.leaks)


RECIPES = {
    "model": LINEAR.replace("model: a", "model: @@"),
    "comment": LINEAR + "# from @@\n",
    "key": LINEAR + "@@: 1\n",
    "adapter": LINEAR.replace("model: a", "model: a+@@"),
    "not YAML": LINEAR + "  : [@@\n",
    "long line": f"x: {'-' * 100}@@{'-' * 100}\n",
    "inner": "merge_method: linear\nmodels:\n  - model: {merge_method: linear, models: [{model: '@@'}]}\n",
}


@pytest.mark.long
@pytest.mark.parametrize("command", ["merge", "plan", "preview", "moe"])
def test_a_recipe_with_a_secret_is_refused(command: str, marked: Path, cli: Cli) -> None:
    looking = Looking(cli, marked)
    looking.known.add(marked / "recipe.yml")
    for place, text in RECIPES.items():
        for address in ADDRESSES[:4]:
            (marked / "recipe.yml").write_text(text.replace("@@", address))
            assert looking(command, "recipe.yml", *([] if command in ("plan", "preview") else ["out"])) == 1, place
    assert not looking.leaks, "\n\n".join(looking.leaks)


def test_a_plan_with_a_secret_is_refused(marked: Path, cli: Cli) -> None:
    looking = Looking(cli, marked)
    plan = json.loads(cli("plan", "linear.yml", "--json").out)
    looking.known.add(marked / "plan.json")
    for address in ADDRESSES[:4]:
        changed = [model | {"paths": [address], "path": address, "ref": address} for model in plan["models"]]
        (marked / "plan.json").write_text(json.dumps(plan | {"models": changed}))
        assert looking("run", "plan.json", "out") == 1
        (marked / "plan.json").write_text(json.dumps(plan | {"recipe": f"# {address}\n"}))
        assert looking("run", "plan.json", "out") == 1
    assert not looking.leaks, "\n\n".join(looking.leaks)


def test_other_libraries_show_no_secret(marked: Path, cli: Cli) -> None:
    """Logs and tracebacks go to stderr without us."""

    def launch(*args: object, **options: object) -> None:
        logger, handler = logging.getLogger("other"), logging.StreamHandler()
        logger.addHandler(handler)
        logger.error("cannot GET %s", ADDRESSES[0])
        logger.removeHandler(handler)
        traceback.print_exception(ValueError(ADDRESSES[1]))

    cli.monkeypatch.setattr("weightsmith._app.studio.server.launch", launch)
    ran = cli("studio")
    assert "cannot GET https://***@127.0.0.1" in ran.err
    assert "ValueError: s3://***@bucket/model" in ran.err
    assert MARK not in ran.err


@pytest.mark.slow
def test_errors_of_calls_hold_no_secret(marked: Path) -> None:
    import weightsmith

    with fake_hub.serve({}) as server:
        token = f"hf_{MARK}given"
        with pytest.raises(weightsmith.WeightsmithError) as caught:
            weightsmith.open_checkpoint("org/name", token=token)
    assert server.url
    assert MARK not in str(caught.value) + repr(caught.value) + repr(caught.value.finding)
    for address in ADDRESSES:
        with pytest.raises(weightsmith.WeightsmithError) as caught:
            weightsmith.merge({"merge_method": "linear", "models": [{"model": address}]}, "out", progress=None)
        assert MARK not in str(caught.value) + repr(caught.value)


def test_it_is_the_redaction_that_hides(marked: Path, cli: Cli) -> None:
    cli.monkeypatch.setattr(redaction, "_users", lambda word: iter(()))
    cli.monkeypatch.setattr(redaction, "_SECRET", re.compile("(?!)"))
    cli.monkeypatch.setattr(redaction, "_secrets_now", lambda: None)
    looking = Looking(cli, marked)
    (marked / "recipe.yml").write_text(RECIPES["comment"].replace("@@", ADDRESSES[0]))
    looking.known.add(marked / "recipe.yml")
    tried = ["doctor"], ["inspect", "org/name"], ["studio", "--host", MARK], ["merge", "recipe.yml", "out"]
    for number, args in enumerate(tried, 1):
        looking(*args)
        assert len(looking.leaks) >= number, args
