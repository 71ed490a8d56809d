"""Work is resumed only where its bytes are the same: every input that decides bytes is part of the identity, and no other."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.cli_help import make_models, run_process
from tests.plan_help import prepare
from weightsmith._base.errors import StoreError
from weightsmith._execution import identity
from weightsmith._execution.identity import facts, program_digest, program_files, work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._planning.planner.build import Prepared

TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "a",
    "models": [
        {"model": "b", "parameters": {"weight": 1.0, "density": 0.5}},
        {"model": "c", "parameters": {"weight": 0.5, "density": 0.5}},
    ],
    "dtype": "bfloat16",
}
DARE = TIES | {"merge_method": "dare_ties"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the models a, b, c and d; d has a tokenizer of its own."""
    make_models(tmp_path, ("a", "b", "c", "d"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def identified(recipe: Any, device: str = "cpu", **options: Any) -> str:
    with opened(recipe, **options) as prepared:
        return work_identity(prepared.plan, prepared.inputs, device)


def opened(recipe: Any, **options: Any) -> Prepared:
    from weightsmith._planning.options import RecipeOptions

    return prepare(recipe, RecipeOptions(**options))


# ---- the plan


CHANGES: dict[str, dict[str, Any]] = {
    "method": TIES | {"merge_method": "task_arithmetic"},
    "base": TIES | {"base_model": "d"},
    "model": TIES | {"models": [TIES["models"][0], TIES["models"][1] | {"model": "d"}]},
    "order of models": TIES | {"models": TIES["models"][::-1]},
    "parameter": TIES | {"models": [TIES["models"][0], {"model": "c", "parameters": {"weight": 0.25, "density": 0.5}}]},
    "parameter of the recipe": TIES | {"parameters": {"lambda": 0.5}},
    "gradient": TIES | {"parameters": {"lambda": [0.5, 1.0]}},
    "dtype": TIES | {"dtype": "float16"},
    "out_dtype": TIES | {"out_dtype": "float32"},
    "chat template": TIES | {"chat_template": "chatml"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_that_makes_other_files_has_another_identity(name: str) -> None:
    assert identified(CHANGES[name]) != identified(TIES)


@pytest.mark.parametrize(
    "option",
    [{"seed": 1}, {"max_shard_bytes": 100}, {"quantize": "fp8-dynamic"}, {"settings": {"models[1].parameters.weight": 2.0}}],
)
def test_an_option_that_decides_bytes_changes_the_identity(option: dict[str, Any]) -> None:
    if "quantize" in option:
        assert weightsmith.plan(DARE, **option).hash != weightsmith.plan(DARE).hash
    else:
        assert identified(DARE, **option) != identified(DARE)


@pytest.mark.process
@pytest.mark.slow
def test_the_same_recipe_has_the_same_identity_in_another_process(here: Path) -> None:
    (here / "ties.yml").write_text(json.dumps(TIES) + "\n")
    code = """
from weightsmith._execution.identity import work_identity
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
with assemble("ties.yml", RecipeOptions()).finish() as prepared:
    print(work_identity(prepared.plan, prepared.inputs, "cpu"))
"""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    assert run_process(code=code, cwd=here, env={"PYTHONHASHSEED": other}).out == identified("ties.yml") + "\n"


# ---- the inputs


def test_a_changed_input_changes_the_identity_and_the_reason_names_it(here: Path) -> None:
    before = identified(TIES)
    with opened(TIES) as prepared:
        known = facts(prepared.plan, prepared.inputs, "cpu")
    shard = here / "c" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(0, 0))  # whatever the clock's grain
    assert identified(TIES) != before
    with opened(TIES) as prepared:
        now = facts(prepared.plan, prepared.inputs, "cpu")
    assert [name for name in known if known[name] != now[name]] == ["files of c"]


@pytest.mark.parametrize(
    ("name", "other"),
    [("seed", {"seed": 1}), ("max_shard_bytes", {"max_shard_bytes": 100}), ("dtypes of the output", {"out_dtype": "float32"})],
)
def test_the_reason_names_the_option_that_differs(name: str, other: dict[str, Any]) -> None:
    from weightsmith._planning.options import output_dtype

    other = other | ({"out_dtype": output_dtype(other["out_dtype"])} if "out_dtype" in other else {})
    with opened(DARE) as one, opened(DARE, **other) as two:
        first, second = (facts(prepared.plan, prepared.inputs, "cpu") for prepared in (one, two))
    assert [name for name in first if first[name] != second[name]] == [name]


# ---- what is no part of it


OTHERWISE: dict[str, Any] = {
    "threads": 3, "max_memory_bytes": 400_000_000, "overwrite": True, "fsync": False, "card": False, "report": "page.html",
    "allow_nonfinite": True, "device": "cpu:0", "keep_stages": True, "stream": True, "stream_cache_bytes": 1_000_000,
}  # fmt: skip
NOT_HERE = {"resume", "processes", "push", "public", "commit_message", "ray", "evaluate", "staging", "local_copy"}
"""These discard work, or need the Hub, a cluster, copies or a model that transformers runs."""


@pytest.mark.parametrize("name", OTHERWISE)
def test_work_is_resumed_with_other_options_of_the_run(name: str) -> None:
    class Stop(Exception):
        pass

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.merge(TIES, "out", progress=stop, threads=1)
    assert weightsmith.merge(TIES, "out", progress=False, **{name: OTHERWISE[name]}).resumed


def test_every_option_of_a_run_was_tried() -> None:
    assert {field.name for field in dataclasses.fields(RunOptions)} == {*OTHERWISE} | NOT_HERE


@pytest.mark.cpu
def test_the_device_matters_only_where_numbers_are_computed_on_it() -> None:
    assert identified(TIES, "cuda") == identified(TIES)
    by_matrix = TIES | {"merge_method": "tsv_m", "models": [{"model": "b"}, {"model": "c"}]}
    assert identified(by_matrix, "cuda") != identified(by_matrix)
    assert identified(by_matrix, "cuda:1") == identified(by_matrix, "cuda")


def test_work_of_another_identity_is_not_resumed(here: Path) -> None:
    class Stop(Exception):
        pass

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.merge(TIES, "out", progress=stop, threads=1)
    with pytest.raises(StoreError, match="seed"):
        weightsmith.merge(TIES, "out", progress=False, seed=1)
    assert not (here / "out").exists()


# ---- the program


@pytest.mark.long
def test_every_module_that_a_merge_imports_is_part_of_the_program(here: Path) -> None:
    """The modules that reading, merging and writing load, and planning does not, against those that the text names."""
    (here / "ties.yml").write_text(json.dumps(TIES) + "\n")
    code = """
import sys, weightsmith
weightsmith.plan("ties.yml")
planned = {*sys.modules}
import weightsmith._models.checkpoint, weightsmith._engine.local
weightsmith.merge("ties.yml", "out")
for name in {*sys.modules} - planned | {"weightsmith._models.checkpoint"}:
    if name.startswith("weightsmith."):
        print(name)
"""
    ran = run_process(code=code, cwd=here)
    assert ran.code == 0, ran.err
    known = program_files(Path(identity.__file__).parents[1])
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in known}
    loaded = {name.removeprefix("weightsmith.") for name in ran.out.split()}
    others = (
        "_execution",
        "_app.api",
        "_outputs.bucket",
        "_outputs.hub",
        "_outputs.places",
    )
    assert {"_models.checkpoint", "_engine.local", "_methods.ties"} <= modules
    assert {name for name in loaded - modules if not name.startswith(others)} == set()


@pytest.mark.long
def test_the_program_is_its_version_and_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weightsmith"
    shutil.copytree(Path(identity.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        program_digest.cache_clear()
        monkeypatch.setattr(identity, "__file__", str(package / "_execution" / "identity.py"))
        return program_digest()

    try:
        first = digest()
        assert digest() == first
        second = first
        for name in (
            "_kernels/combine.py",
            "_outputs/weight_files.py",
            "_models/checkpoint.py",
            "_base/tensors.py",
            "_plans/values.py",
            "_outputs/checksum.py",
            "_features/mixture/prompt_gates.py",
            "_methods/ties.py",
            "_models/formats/gguf/writing.py",
            "_models/formats/exl2/model.py",
        ):
            (package / name).write_text((package / name).read_text() + "\n# another\n")
            before, second = second, digest()
            assert second != before, name
        for name in ("_app/cli/merge.py", "_execution/cards.py", "_reports/look/diff.py", "testing/outputs.py"):
            (package / name).write_text("")
        assert digest() == second, "what only draws or tests makes no bytes"
        monkeypatch.setattr(identity, "__version__", "0.0.0")
        assert digest() != second
        third = digest()
        monkeypatch.setattr(
            identity, "_version", lambda package: "0.0.0" if package == "libgguf" else metadata.version(package)
        )
        assert digest() != third, "ggml's blocks are libgguf's"
    finally:
        program_digest.cache_clear()


def test_a_release_is_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(package: Path) -> dict[str, bytes]:
        raise AssertionError("the text of a release is not read")

    monkeypatch.setattr(identity, "is_release", lambda package: True)
    monkeypatch.setattr(identity, "program_files", no_files)
    digests = set[str]()
    for version in ("0.1.0", "0.1.1"):
        monkeypatch.setattr(identity, "__version__", version)
        digests.add(program_digest.__wrapped__())
    monkeypatch.setattr(identity, "_version", lambda package: "0.0.0")
    digests.add(program_digest.__wrapped__())
    assert len(digests) == 3
