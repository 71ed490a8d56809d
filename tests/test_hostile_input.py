"""Input that was made to do harm, or is merely broken: one short error, at once, in little memory, wherever it comes in."""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.features.mixture.test_bad_input import model as dense
from tests.mini import write_checkpoint
from tests.plan_help import prepare_moe
from tests.sampling import sampled
from tests.work import steps
from weightsmith._base.errors import FormatError, NotFound, OutputExists, PlanError, StoreError, WeightsmithError, legible
from weightsmith._base.files import open_regular
from weightsmith._files import state_pickle
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans import plan_from_json

LINEAR = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("a", "b")]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, a and b, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        plan_help.model(tmp_path / name, seed=seed)
    return tmp_path


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(WeightsmithError) as caught:
        call()
    return str(caught.value)


# ---- values of config.json

ROPE: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("architecture", ["mixtral", "granitemoe", "qwen2_moe", "deepseek", "qwen3_moe"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 1 << 40),
        ("num_hidden_layers", (1 << 16) + 1),
        ("num_hidden_layers", -1),
        ("num_attention_heads", "gpt2"),
        ("num_key_value_heads", 2.5),
        ("head_dim", [8]),
        ("hidden_size", True),
        ("sliding_window", float("nan")),
        ("no_rope_layer_interval", "4"),
        ("no_rope_layers", 3),
        ("layer_types", {"0": "full_attention"}),
        ("rope_theta", float("inf")),
        ("partial_rotary_factor", "half"),
        ("embedding_multiplier", [1.0]),
        ("attention_multiplier", float("nan")),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {**ROPE, "factor": "2"}),
        ("rope_parameters", {**ROPE, "partial_rotary_factor": {}}),
        ("hidden_act", 1),
    ],
)
def test_a_value_that_cannot_be_is_one_error_of_the_model(architecture: str, key: str, value: object, tmp_path: Path) -> None:
    base = dense(tmp_path / "base", **{"model_type": "unknown", key: value})
    recipe = {"base_model": base, "experts": [{"source_model": base}] * 2, "gate_mode": "random", "architecture": architecture}
    with pytest.raises(PlanError) as caught:
        prepare_moe(recipe, RecipeOptions()).close()
    (problem,) = caught.value.problems
    assert isinstance(problem, FormatError)
    inner = key if not isinstance(value, dict) or "0" in value else "factor"
    assert re.search(rf"base: .*{inner} of config.json is .*, not ", str(problem))


def test_a_deep_config_is_refused_before_anything_walks_it(here: Path) -> None:
    config = (here / "a" / "config.json").read_text()
    for depth, fine in ((63, True), (64, False), (900, False)):
        (here / "a" / "config.json").write_text(config[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
        if fine:
            weightsmith.plan(LINEAR)
        else:
            assert "a/config.json: config.json is JSON nested too deeply" in refusal(lambda: weightsmith.plan(LINEAR))
    (here / "a" / "config.json").write_text(config)
    (here / "old").mkdir()
    (here / "old" / "config.json").write_text("[" * 5000)
    assert "weightsmith did not make it" in refusal(lambda: weightsmith.merge(LINEAR, "old", overwrite=True))


# ---- memory

MEASURE = """
import re, sys
from pathlib import Path
import weightsmith

def status(key):
    return int(re.search(rf"^{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) / 1024

Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
try:
    weightsmith.open_checkpoint(sys.argv[1])
except weightsmith._base.errors.WeightsmithError as error:
    print(status("VmHWM") - before, str(error))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
@pytest.mark.parametrize("kind", sampled(["header of lists", "header of names", "index"], {"index"}))
def test_a_hundred_megabytes_of_small_values_take_no_gigabytes(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    if kind == "index":
        place = tmp_path
        plan_help.model(place)
        (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
        with (place / "model.safetensors.index.json").open("wb") as file:
            file.write(b'{"weight_map": {')
            for start in range(0, 6_000_000, 1_000_000):
                file.write(b"".join(b'"%08x":"a",' % i for i in range(start, start + 1_000_000)))
            file.write(b'"z":"a"}}')
    else:
        text = b"[" + b"[]," * 32_999_999 + b"[]]" if kind == "header of lists" else b'{"a":1' + b',"a":1' * 16_000_000 + b"}"
        place.write_bytes(len(text).to_bytes(8, "little") + text)
    ran = subprocess.run([sys.executable, "-c", MEASURE, place], capture_output=True, text=True, check=True)
    megabytes, _, message = ran.stdout.partition(" ")
    assert "MiB of memory: at most 400 are allowed" in message
    assert float(megabytes) < 500


# ---- pipes and other things that are no files


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_never_waited_for(here: Path, kind: str) -> None:
    import socket

    def put(path: str) -> None:
        if kind == "pipe":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)

    for name in ("recipe.yml", "plan.json", "own.py", "a/tokenizer.json"):
        put(name)
    document = {"merge_method": "./own.py:f", "models": [{"model": "b"}]}
    assert "recipe.yml" in refusal(lambda: weightsmith.plan("recipe.yml"))
    assert f"not a regular file, but a {kind}" in refusal(lambda: weightsmith.run("plan.json", "out"))
    assert f"own.py, cannot be read: not a regular file, but a {kind}" in refusal(
        lambda: weightsmith.plan(document, allow_code=True)
    )
    assert f"a/tokenizer.json: not a regular file, but a {kind}" in refusal(lambda: weightsmith.merge(LINEAR, "out"))


def test_a_recipe_may_come_from_a_pipe_of_the_shell(here: Path) -> None:
    """`weightsmith merge <(make-recipe) OUT`: the pipe is the process's own, and somebody writes into it."""
    reading, writing = os.pipe()
    os.write(writing, json.dumps(LINEAR).encode())
    os.close(writing)
    assert len(weightsmith.plan(f"/dev/fd/{reading}").models) == 2
    os.close(reading)


def test_a_file_that_becomes_a_pipe_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    before = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: before)
    with pytest.raises(FormatError, match="not a regular file, but a pipe"):
        open_regular(path)


def test_a_path_that_cannot_be_is_not_found() -> None:
    with pytest.raises(NotFound, match="null byte"):
        open_regular(Path("a\0b"))


# ---- plans from anyone


def test_a_plan_cannot_have_other_files_copied(here: Path) -> None:
    (here / "a" / "id_rsa").write_text("secret")
    data = weightsmith.plan(LINEAR).to_json()
    for name in ("id_rsa", "x" * 5000):
        data["carried"] = [name]
        message = refusal(lambda: weightsmith.run(plan_from_json(data), "out"))
        assert "the plan carries a file that the model does not have, or that no loader reads" in message
    assert not (here / "out").exists()


def edited(settings: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    path = key.split(".")
    place: Any = settings
    for part in path[:-1]:
        place = place[int(part) if part.isdigit() else part]
    place[path[-1]] = value
    return settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sizes", "x"),
        ("sizes", []),
        ("sizes", [0]),
        ("wanted", [[0, 2.0, 0.0]]),
        ("wanted", [[0, "x", 0.0]]),
        ("wanted", [[1, 0.5, 0.0]]),
        ("wanted", [[0, float("nan"), 0.0]]),
    ],
)
def test_thresholds_of_a_plan_are_checked(here: Path, key: str, value: object) -> None:
    recipe = {
        "merge_method": "ties",
        "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 1, "density": 0.5}}],
        "parameters": {"scope": "model"},
    }
    data = json.loads(json.dumps(weightsmith.plan(recipe).to_json()))
    edited(data["products"][0]["settings"], key, value)
    message = refusal(lambda: weightsmith.run(plan_from_json(data), "out"))
    assert "product thresholds" in message
    assert "not a plan that can be run" in message


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("ramplus", lambda product, _: product.update(models=[0, 0])),
        ("ramplus", lambda product, _: product.update(models=[0, 1])),
        ("ramplus", lambda product, steps: [step.pop("needs") for step in steps]),
        ("ties", lambda product, steps: [step.pop("needs") for step in steps]),
        ("ties", lambda product, _: product["settings"]["wanted"][0].__setitem__(1, 0.25)),
        ("ties", lambda product, _: product["outs"][0].__setitem__(1, "F32")),
    ],
)
def test_a_merge_of_a_plan_has_the_product_that_it_reads(here: Path, method: str, change: Callable[..., object]) -> None:
    """Each ended in a KeyError, IndexError or ValueError of a thread."""
    plan_help.model(here / "c", seed=2)
    parameters = {"weight": 1, "density": 0.5} if method == "ties" else {}
    recipe = {
        "merge_method": method,
        "base_model": "a",
        "models": [{"model": name, "parameters": parameters} for name in "bc"],
        **({"parameters": {"scope": "model"}} if method == "ties" else {}),
    }
    data = json.loads(json.dumps(weightsmith.plan(recipe).to_json()))
    change(data["products"][0], data["steps"])
    message = refusal(lambda: weightsmith.run(plan_from_json(data), "out"))
    assert re.search(r"needs a product '(thresholds|activity)' of its models|has a model twice|of int64", message)
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "none"),
        ("scale", "1"),
        ("routed", 3),
        ("groups", 0),
        ("seed", -1),
        ("base", {}),
        ("base.layers", 1 << 40),
        ("experts.0.texts", []),
        ("experts", []),
        ("report", 1),
        ("packages", {"torch": 2}),
        ("more", 1),
    ],
)
def test_router_weights_of_a_plan_are_checked(tmp_path: Path, key: str, value: object) -> None:
    base = dense(tmp_path / "base")
    recipe = {"base_model": base, "experts": [{"source_model": base}] * 2, "gate_mode": "random"}
    with prepare_moe(recipe, RecipeOptions()) as prepared:
        data = json.loads(json.dumps(prepared.plan.to_json()))
    weightsmith.run(plan_from_json(data), tmp_path / "good", fsync=False)
    edited(data["products"][0]["settings"], key, value)
    message = refusal(lambda: weightsmith.run(plan_from_json(data), tmp_path / "out"))
    assert "product router" in message
    assert "not a plan that can be run" in message


# ---- messages


@pytest.mark.long
def test_messages_are_short_and_printable(here: Path) -> None:
    big, strange = "x" * 100_000, "\x1b[2J\u202e\ny"
    write_checkpoint(here / "c", {f"{strange}{i}.w": np.zeros((2, 2), np.float32) for i in range(500)}, {"model_type": "llama"})
    unknown = "merge_method: linear\n" + "".join(f"k{i}: 1\n" for i in range(5000))
    mixed = {"merge_method": "linear", "models": [{"model": n, "parameters": {"weight": 1}} for n in ("a", "c")]}
    said = []
    for call in (
        lambda: weightsmith.plan(unknown),
        lambda: weightsmith.plan({"merge_method": big, "models": [{"model": "a"}]}),
        lambda: weightsmith.plan({"merge_method": "linear", "models": [{"model": big}]}),
        lambda: weightsmith.plan({"merge_method": "linear", "models": [{"model": strange}]}),
        lambda: weightsmith.plan({big: 1, strange: 2}),
        lambda: weightsmith.plan(mixed),
        lambda: weightsmith.open_checkpoint(f"a{strange}"),
        lambda: weightsmith.save_file({strange: np.zeros(2)}, f"{strange}/\0"),
    ):
        with pytest.raises((WeightsmithError, ValueError)) as caught:
            call()
        said.append(caught.value)
        message = str(caught.value)
        assert len(message) < 20_000
        assert all(c.isprintable() or c == "\n" for c in message)
    refused = said[0]
    assert isinstance(refused, PlanError)
    assert len(refused.problems) > 5000, "the message is cut, and not what it is made from"
    assert re.search(r"\n\.\.\. and [\d,]+ more\nNothing was written. \(5,?\d+ problems\)", str(refused))


def test_details_that_are_not_shown_are_counted() -> None:
    error = StoreError("x", details=[f"line {i}" for i in range(50)])
    assert len(error.finding.details) == 50
    assert str(error).endswith("  line 39\n  ... and 10 more")


def test_text_is_cut_in_the_middle_and_escaped() -> None:
    assert legible("a\tb\x00é😀\udcff") == r"a\tb\x00é😀\udcff"
    cut = legible("\x1b" * 500 + "a" * 100_000 + "end")
    assert len(cut) == 1000
    assert (cut[:4], cut[-3:]) == (r"\x1b", "end")


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_number_of_a_megabyte_is_refused_at_once() -> None:
    # int() takes a minute for some: pytest ends it.
    for number in ("1:" * 250_000 + "1", "9" * 500_000, "0b" + "1" * 500_000, "1:" * 600 + "1.5"):
        assert "has more than 1000 characters" in refusal(lambda number=number: weightsmith.plan(f"x-a: {number}\n"))


# ---- where there is no home, and names that are taken


def test_no_home_and_no_such_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise KeyError("no entry")

    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    weightsmith.merge(LINEAR, "out", fsync=False)
    assert "'~/out' is in a home folder that does not exist" in refusal(lambda: weightsmith.merge(LINEAR, "~/out"))
    document = {"merge_method": "~/own.py:f", "models": [{"model": "b"}]}
    assert "cannot be read: no such file" in refusal(lambda: weightsmith.plan(document, allow_code=True))
    assert {path.name for path in here.iterdir()} == {"a", "b", "out"}


def test_kernels_are_not_kept_where_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._kernels import compiler

    def none(*_: object) -> None:
        raise KeyError("no entry")

    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.setattr(compiler.config, "CACHE_DIR", "")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compiler.cache_folder.__wrapped__() == ""


def test_a_link_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name, target in (("link", "mine"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
        for overwrite in (False, True):
            with pytest.raises(OutputExists, match=f"a symbolic link to {target}, and links are not followed"):
                weightsmith.save_file({"a": np.ones(3)}, tmp_path / name, overwrite=overwrite)
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.long
def test_too_many_open_files_is_said_with_the_limit(tmp_path: Path) -> None:
    code = (
        "import resource, sys, numpy, weightsmith\n"
        "tensors = {f'w{i}': numpy.ones(100, 'f4') for i in range(100)}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "weightsmith.save_model(tensors, sys.argv[1], max_shard_bytes=400)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True)
    assert "StoreError" in ran.stderr, ran.stderr
    assert "cannot be prepared: Too many open files\n" in ran.stderr
    assert "  -> Raise the limit: ulimit -n 65536." in ran.stderr
    assert not list(tmp_path.iterdir())
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 60


def test_the_work_for_a_pickle_is_bounded() -> None:
    """4 million instructions take 2 to 3 seconds, 2 million values 250 MB: for 80,000 tensors in one file."""
    assert state_pickle.MAX_STEPS == 4_000_000
    assert state_pickle.MAX_VALUES == 2_000_000


# ---- work that grows with the square of what is given


@pytest.mark.long
def test_an_adapter_of_another_base_is_refused_at_once(tmp_path: Path) -> None:
    """Each of its targets was looked for among the names of all tensors: minutes for 1,000 among 2,000."""

    def plan(count: int) -> str:
        names = [f"model.layers.{i}.mlp.experts.{j}.{part}.weight" for i in range(10) for j in range(count) for part in "ab"]
        zeros = np.zeros((2, 2), np.float16)
        base = write_checkpoint(tmp_path / f"base{count}", dict.fromkeys(names, zeros), {"model_type": "llama"})
        targets = [f"base_model.model.other.layer{i}.q_proj.lora_{part}.weight" for i in range(10 * count) for part in "AB"]
        lora = write_checkpoint(tmp_path / f"lora{count}", dict.fromkeys(targets, zeros))
        (lora / "model.safetensors").rename(lora / "adapter_model.safetensors")
        (lora / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 8}')
        return refusal(lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{base}+{lora}"}]}))

    message = plan(100)
    assert "1000 of its targets have no place there" in message
    assert "and 992 more" in message
    assert steps(lambda: plan(90)) < 4 * steps(lambda: plan(30))


@pytest.mark.long
def test_a_config_of_many_layer_counts_is_read_at_once(tmp_path: Path) -> None:
    def work(count: int) -> int:
        names = [f"a{i}.layers.{j}.b.weight" for i in range(count) for j in range(2)]
        config = {"model_type": "llama", "num_hidden_layers": 2} | {f"k{i}_layers": 2 for i in range(100 * count)}
        base = write_checkpoint(tmp_path / f"base{count}", dict.fromkeys(names, np.zeros(2, np.float16)), config)
        return steps(lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(base)}]}))

    assert work(180) < 4 * work(60)
