"""Statistics in folders: the same merge as from the text, and an error for what is not that model on that text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.calibration_help import TEXT, save_model
from tests.cli_help import Cli, cli
from tests.plan_help import prepare
from weightsmith._base.errors import PlanError
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Workload
from weightsmith._files.arrays import is_mapped
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays

__all__ = ["cli"]

pytestmark = pytest.mark.slow
ROWS = {"rows": 6, "tokens": 16}
KINDS = {"regmean": "second_moments", "fisher": "fisher"}


@pytest.fixture(scope="module")
def measured_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, two texts, and statistics of two of the models."""
    folder = tmp_path_factory.mktemp("stored")
    for seed, name in enumerate(("base", "a", "b")):
        save_model(folder / name, seed=seed)
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_text(TEXT.upper()[::-1])
    for name in "ab":
        weightsmith.statistics(
            folder / name,
            folder / f"{name}.txt",
            folder / f"{name}-stats",
            kind=[*KINDS.values()],
            **ROWS,
            threads=1,
            progress=False,
        )
    return folder


@pytest.fixture
def work(measured_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same at another place."""
    shutil.copytree(measured_models, tmp_path / "work")
    record = tmp_path / "work" / "a-stats" / "statistics.json"
    monkeypatch.chdir(tmp_path / "work")
    assert str(measured_models / "a.txt") in record.read_text()
    return tmp_path / "work"


def recipe(method: str, **texts: Any) -> dict[str, Any]:
    models = [{"model": f"./{name}", "text": texts.get(name, f"{name}-stats")} for name in "ab"]
    return {"merge_method": method, "base_model": "./base", "models": models, "dtype": "float32"}


@pytest.mark.long
@pytest.mark.parametrize("method", KINDS)
def test_a_merge_from_folders_has_the_bytes_of_that_from_texts(
    method: str, measured_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(measured_models)
    texts = {name: {"file": f"{name}.txt", **ROWS} for name in "ab"}
    weightsmith.merge(recipe(method, **texts), tmp_path / "texts", card=False, progress=False)
    with prepare(recipe(method)) as prepared:
        assert {product.op for product in prepared.plan.products} == {"stored_statistic"}
        (tmp_path / "plan.json").write_text(json.dumps(prepared.plan.to_json()))
    weightsmith.run(tmp_path / "plan.json", tmp_path / "folders", threads=2, progress=False)
    weightsmith.merge(recipe(method, b=texts["b"]), tmp_path / "both", card=False, progress=False)
    first, *others = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("texts", "folders", "both"))
    assert first == others[0] == others[1]


def test_a_copy_of_the_model_will_do_and_the_text_may_be_gone(work: Path, measured_models: Path) -> None:
    (measured_models / "a.txt").rename(measured_models / "gone.txt")
    try:
        with prepare(recipe("regmean")) as prepared:
            assert len(prepared.plan.products) == 4
    finally:
        (measured_models / "gone.txt").rename(measured_models / "a.txt")


def change_weights(folder: Path) -> None:
    tensors = load_file(folder / "a" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name].view(np.uint16)[0, 0] ^= 1
    save_file(tensors, folder / "a" / "model.safetensors", {"format": "pt"})


def change_json(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "a" / name
        data = json.loads(path.read_text())
        data["rope_theta" if name == "config.json" else "truncation"] = None
        path.write_text(json.dumps(data, indent=2))

    return change


def change_record(folder: Path) -> None:
    path = folder / "a-stats" / "statistics.json"
    path.write_text(path.read_text().replace('"rows": 6', '"rows": 7'))


def remove_record(folder: Path) -> None:
    (folder / "a-stats" / "statistics.json").unlink()


def swap(folder: Path) -> None:
    shutil.rmtree(folder / "a-stats")
    shutil.copytree(folder / "b-stats", folder / "a-stats")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_weights, "the weights of ./a are not those of "),
        (change_json("config.json"), "config.json of ./a is not that of "),
        (change_json("tokenizer.json"), "the tokenizer of ./a is not the one that cut the text"),
        (swap, "the weights of ./a are not those of "),
        (change_record, "statistics.json: it is not as weightsmith.json says"),
        (remove_record, "a folder without statistics.json: no statistics of a text"),
    ],
)
def test_what_is_not_that_model_is_one_error(change: Callable[[Path], None], said: str, work: Path) -> None:
    change(work)
    with pytest.raises(PlanError) as caught:
        prepare(recipe("regmean"))
    (problem,) = caught.value.problems
    assert said in str(problem)
    assert "models[0].text" in str(problem) or "a-stats" in str(problem)


def test_a_changed_text_a_kind_that_is_missing_and_rows_are_errors(measured_models: Path, work: Path) -> None:
    text = (measured_models / "a.txt").read_text()
    (measured_models / "a.txt").write_text(text + "more")
    try:
        with pytest.raises(PlanError) as caught:
            prepare(recipe("regmean", a={"file": "a-stats", "rows": 6}) | {"text": "a-stats", "parameters": {"aim": 0.4}})
    finally:
        (measured_models / "a.txt").write_text(text)
    messages = [str(problem) for problem in caught.value.problems]
    assert any("the statistics 'a-stats' have second_moments, fisher, but no magnitudes" in message for message in messages)
    assert any(
        "weightsmith statistics with --kind second_moments --kind fisher --kind magnitudes" in message for message in messages
    )
    assert any("statistics have the rows they were made of" in message for message in messages)
    assert any(f"the text '{measured_models}/a.txt' has changed since it was measured" in message for message in messages)


def test_arrays_are_mapped_from_the_folder_and_need_no_memory(work: Path) -> None:
    with prepare(recipe("regmean")) as prepared:
        plan = prepared.plan
        results = run(plan, prepared.inputs, DiscardedOutput(), workload=Workload(steps=())).results
    arrays = {out.name: array for p in plan.products for out, array in zip(p.outs, results.arrays(p.name), strict=True)}
    stored = load_file(work / "a-stats" / "model.safetensors")
    assert len(arrays) > len(stored) / 2
    for name, array in arrays.items():
        assert is_mapped(array)
        assert not array.flags.writeable
        if name.startswith("model 1,"):
            assert np.array_equal(array, stored[name.partition(": ")[2]])


def test_an_array_that_is_damaged_is_not_merged(work: Path) -> None:
    path = work / "a-stats" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(weightsmith.Corrupt, match="does not match its checksum"):
        weightsmith.merge(recipe("fisher"), work / "out", card=False, progress=False)


@pytest.mark.long
def test_statistics_go_on_after_a_kill_and_replace_nothing_of_others(
    measured_models: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, kept = Staging.keep, list[str]()

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if len(kept) == 4:
            raise KeyboardInterrupt
        kept.append(product.name)
        return keep(staging, product, arrays)

    def again(name: str, **options: Any) -> None:
        weightsmith.statistics("a", measured_models / "a.txt", name, kind=[*KINDS.values()], **ROWS, progress=False, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            again("two", threads=2)
    again("two", threads=2)
    assert (work / "two" / "model.safetensors").read_bytes() == (measured_models / "a-stats" / "model.safetensors").read_bytes()
    (work / "mine").mkdir()
    (work / "mine" / "diary.txt").write_text("dear")
    with pytest.raises(weightsmith.OutputExists):
        again("mine", overwrite=True)
    assert (work / "mine" / "diary.txt").read_text() == "dear"


def test_the_command_line_writes_and_reads_them(cli: Cli, work: Path) -> None:
    (work / "r.yml").write_text(json.dumps(recipe("regmean")))
    ask = ["statistics", "a", "a.txt", "new", "--rows", "6", "--tokens", "16", "--kind"]
    wrong = cli(*ask, "grams")
    assert wrong.code == 1
    assert "--kind (kind): must be one of gram, second_moments, moments, magnitudes, maxima, fisher, slopes" in wrong.err
    assert "(did you mean 'gram'?), not 'grams'" in wrong.err
    ran = cli(*ask, "second_moments,magnitudes", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["tensors"] == 2 * 2 * 4
    shown = " ".join(cli("plan", "r.yml").out.split())
    assert f"measured ./a, earlier: {work}/a-stats: second_moments, 172 kB" in shown
