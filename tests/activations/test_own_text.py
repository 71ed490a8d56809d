"""Text that a model writes by itself, in place of a file: which tokens, for which features, and what is refused."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import weightsmith
from tests.calibration_help import captured, few_options, interrupted, prepared_for, quantise, save_model
from tests.cli_help import Cli, cli
from tests.plan_help import prepare
from weightsmith._activations import own_text, sampling
from weightsmith._activations.decoder.forward import Turns
from weightsmith._activations.model import input_of, text_for
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._engine.products import find_kind
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import plan_from_json

__all__ = ["cli", "few_options"]

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
SHORT = {"file": "own", "rows": 5, "tokens": 12}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def own_settings(rows: int = 6, tokens: int = 16, **options: Any) -> QuantizeSettings:
    return QuantizeSettings(calibration="own", calibration_rows=rows, calibration_tokens=tokens, **options)


def written(prepared: Prepared, threads: int = 2, memory: int | None = None) -> npt.NDArray[np.int32]:
    """The tokens of the first own text of a plan."""
    product = next(product for product in prepared.plan.products if product.op == "own_text")
    ids: npt.NDArray[np.int32] = captured(prepared, [product], memory, threads).arrays[product.name][0]
    return ids


def merge_of(text: Any, method: str = "regmean", **parameters: Any) -> dict[str, Any]:
    models = [{"model": "./a"}, {"model": "./b"}]
    return {"merge_method": method, "base_model": "./base", "models": models, "text": text, "parameters": parameters}


def save_all(family: str = "llama") -> None:
    for seed, name in enumerate(("base", "a", "b")):
        save_model(Path(name), family, seed)


def weights(folder: Any) -> dict[str, bytes]:
    tensors = load_file(Path(folder, "model.safetensors"))
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


# ---- tokens


@pytest.mark.matrix("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "mixtral", "qwen3 moe"])
def test_each_token_is_drawn_from_what_transformers_predicts(family: str) -> None:
    """Also where the plan stores experts, or q, k and v, one by one; and with one layer in memory at a time."""
    folder = save_model(Path("m"), family)
    with prepared_for(folder, own_settings(rows=5), "gptq-4bit") as prepared:
        whole, one_by_one = written(prepared), written(prepared, memory=1)
        [product] = [product for product in prepared.plan.products if product.op == "own_text"]
    starts = product.settings["starts"]
    assert np.array_equal(whole, one_by_one)
    assert len({len(ids) for ids in starts}) > 1  # groups of their own
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, ids in enumerate(whole.tolist()):
        start = list(starts[row % len(starts)])
        assert ids[: len(start)] == start
        with torch.no_grad():
            logits = module(torch.tensor([ids])).logits[0, len(start) - 1 : -1].double()
        uniform = np.random.Generator(np.random.Philox(key=np.array([0, row], np.uint64))).random(16)
        shares = logits.softmax(1).cumsum(1).numpy()
        assert ids[len(start) :] == [int(np.searchsorted(p, x, side="right")) for p, x in zip(shares, uniform, strict=False)]


@pytest.mark.long
def test_threads_change_no_token_and_the_seed_does() -> None:
    folder = save_model(Path("m"))
    by_seed = []
    for seed in (0, 1):
        with prepared_for(folder, own_settings(rows=20), "gptq-4bit", seed=seed) as prepared:
            by_seed.append([written(prepared, threads).tobytes() for threads in (1, 3)])
    assert by_seed[0][0] == by_seed[0][1]
    assert by_seed[0][0] != by_seed[1][0]


@pytest.mark.long
def test_rows_of_a_chat_model_also_begin_with_its_turns() -> None:
    folder = save_model(Path("m"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "!"}))
    with prepared_for(folder, own_settings(tokens=40), "gptq-4bit") as prepared:
        [product] = [product for product in prepared.plan.products if product.op == "own_text"]
        assert [*b"![user]"] in [[*bytes_of(ids)] for ids in product.settings["starts"]]
    with prepared_for(folder, own_settings(tokens=10), "gptq-4bit") as prepared:
        assert all(len(ids) <= 5 for p in prepared.plan.products if p.op == "own_text" for ids in p.settings["starts"])
    merged = weightsmith.quantize(folder, "q", format="gptq-4bit", calibration="own", calibration_tokens=10, progress=False)
    assert any("takes 7 tokens, and at most half of the 10" in str(warning) for warning in merged.warnings)


def bytes_of(ids: Any) -> bytes:
    from tokenizers import Tokenizer

    return bytes(Tokenizer.from_file("m/tokenizer.json").decode(list(ids)), "utf-8")


@pytest.mark.slow
def test_a_layer_that_cannot_be_loaded_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = watched_loads(monkeypatch, fails_at=5)
    with prepared_for(save_model(Path("m")), own_settings(rows=5), "gptq-4bit") as prepared:
        with pytest.raises(WeightsmithError, match="gone"):
            written(prepared, memory=1)
    assert len(loads) == 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


@pytest.mark.long
def test_a_layer_is_loaded_once_for_the_rows_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = watched_loads(monkeypatch)
    with prepared_for(save_model(Path("m")), own_settings(rows=5), "gptq-4bit") as prepared:
        written(prepared, memory=1)
    assert loads == [0, 1] * 15  # a row of 16 tokens after a start of one; other starts are longer


@pytest.mark.long
def test_a_thread_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls, loads = sampling._Choose.__call__, list[int](), watched_loads(monkeypatch)

    def choose(*args: Any) -> Any:
        calls.append(0)
        if len(calls) == 1:
            raise WeightsmithError("gone")
        return real(*args)

    monkeypatch.setattr(sampling._Choose, "__call__", choose)
    with prepared_for(save_model(Path("m")), own_settings(rows=5), "gptq-4bit") as prepared:
        with pytest.raises(WeightsmithError, match="gone"):
            written(prepared, memory=1)
    assert len(loads) <= 4  # of the 30 that all rows take


def watched_loads(monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> list[int]:
    """The layers that are loaded, in order. fails_at: the number of the one that cannot be."""
    of, loads = Turns.of, list[int]()

    def watched(turns: Turns, layers: Any) -> Any:
        def load(number: int, layer: Any) -> Any:
            loads.append(number)
            if len(loads) == fails_at:
                raise WeightsmithError("gone")
            return layer()

        return of(turns, [partial(load, number, layer) for number, layer in enumerate(layers)])

    monkeypatch.setattr(Turns, "of", watched)
    return loads


# ---- features that read it


@pytest.mark.long
def test_each_model_is_measured_on_the_text_that_it_wrote() -> None:
    save_all()
    merged = weightsmith.merge(merge_of(SHORT), "merged", progress=False)
    texts = json.loads(Path("merged/weightsmith.json").read_text())["own_texts"]
    for name, text in zip(("a", "b"), texts, strict=True):
        weightsmith.statistics(name, "own", f"{name}-stats", rows=5, tokens=12, progress=False)
        ids = load_file(f"{name}-stats/model.safetensors")["ids"].numpy()
        assert text == {"model": f"./{name}", "rows": 5, "tokens": 12, "seed": 0, "sha256": hashlib.sha256(ids).hexdigest()}
        assert text["sha256"] in (Path("merged") / "README.md").read_text()
    assert texts[0]["sha256"] != texts[1]["sha256"]
    recipe = merge_of(None)
    recipe["models"] = [{"model": f"./{name}", "text": f"{name}-stats"} for name in ("a", "b")]
    weightsmith.merge({key: value for key, value in recipe.items() if value is not None}, "stored", progress=False)
    assert weights("stored") == weights("merged")
    assert len(merged.reports) == 2


@pytest.mark.long
def test_a_plan_says_what_models_write_and_the_memory_for_it(cli: Cli) -> None:
    save_all()
    Path("own.yml").write_text(json.dumps(merge_of(SHORT)))
    printed = " ".join(cli("plan", "own.yml").out.split())
    parameters = sum(tensor.numel() for tensor in load_file("a/model.safetensors").values())
    nbytes = json.loads(cli("plan", "own.yml", "--json").out)["summary"]["writing_bytes"]
    assert nbytes == 4 * (parameters + 5 * 12)
    assert "5 rows of 12 tokens of own, through ./a: second_moments" in printed
    assert "while a model writes its text: " in printed


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "parameters"),
    [("regmean", {"through": "merge"}), ("fisher", {"weight": 1}), ("task_arithmetic", {"weight": 1, "aim": 0.5})],
)
def test_methods_that_look_at_a_text_take_it(method: str, parameters: dict[str, Any]) -> None:
    save_all()
    recipe = merge_of(SHORT, method, **parameters)
    weightsmith.merge(recipe, "one", threads=1, progress=False)
    weightsmith.merge(recipe, "two", threads=2, progress=False)
    assert weights("one") == weights("two")
    assert json.loads(Path("one/weightsmith.json").read_text())["own_texts"]


@pytest.mark.long
def test_a_quantised_merge_is_calibrated_on_what_the_merge_writes() -> None:
    save_all()
    recipe = merge_of(None, "linear", weight=1)
    recipe = {key: value for key, value in recipe.items() if key not in ("text", "base_model")}
    weightsmith.merge(recipe, "merged", progress=False)
    one = quantise(recipe, Path("one"), own_settings(), name="gptq-4bit")
    two = quantise("merged", Path("two"), own_settings(), name="gptq-4bit")
    assert weights(one.out) == weights(two.out)
    written_by = [json.loads(Path(name, "weightsmith.json").read_text())["own_texts"] for name in ("one", "two")]
    assert [[text.pop("model") for text in texts] for texts in written_by] == [["the merge"], ["merged"]]
    assert written_by[0] == written_by[1]


@pytest.mark.matrix("exl2-options1", "gguf-*-options3")
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exl2", {"bits": 4.1}),
        ("exl2", {"bits": 4.1, "measure": "full"}),
        ("gguf-q4_k_m", {}),
        ("gguf-q4_k_m", {"size_bytes": 200_000}),
    ],
)
@pytest.mark.usefixtures("few_options")
def test_a_measurement_and_what_follows_from_it_share_a_text(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = []

    def draw(*args: Any) -> Any:
        draws.append(args)
        return real(*args)

    real = sampling.draw
    monkeypatch.setattr(sampling, "draw", draw)
    merged = quantise(save_model(Path("m")), Path("q"), own_settings(**options), name=name)
    [text] = json.loads(Path(str(merged.out), "weightsmith.json").read_text())["own_texts"]
    assert (text["rows"], text["tokens"], len(draws)) == (6, 16, 1)


@pytest.mark.long
def test_a_run_that_died_goes_on_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(Path("m"))
    with interrupted(monkeypatch, "states 1"):
        quantise(folder, Path("q"), own_settings(), name="gptq-4bit")
    whole = quantise(folder, Path("other"), own_settings(), name="gptq-4bit")
    monkeypatch.setattr(own_text, "_fits", _never)
    merged = quantise(folder, Path("q"), own_settings(), name="gptq-4bit")
    assert weights(merged.out) == weights(whole.out)


def _never(*_: Any) -> bool:
    raise AssertionError("the text is written again")


# ---- what is refused


def refused(folder: str | Path, rows: int | None = None, tokens: int | None = None, seed: int = 0) -> str:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(folder)}]}
    with prepare(recipe, RecipeOptions()) as prepared, pytest.raises(PlanError) as caught:
        text_for(input_of(prepared.inputs, 0), "own", rows, tokens, seed)
    return str(caught.value)


def test_what_no_text_can_be_written_for_is_a_problem_of_the_plan() -> None:
    folder = save_model(Path("m"))
    config = json.loads((folder / "config.json").read_text())
    positions = config["max_position_embeddings"]
    assert f"a row has at most {positions} tokens, not {positions + 1}" in refused(folder, tokens=positions + 1)
    assert "a row of 1 token has no space for one behind its start" in refused(folder, tokens=1)
    assert "must be at least 0 for a text that a model writes, not -1" in refused(folder, seed=-1)
    Path("own").mkdir()
    assert "there is a file or folder of this name\n  -> Write ./own for that" in refused(folder)
    Path("own").rmdir()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    assert "transformers cannot build a model of type 'unheard-of'" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    assert "a text needs the model's tokenizer.json" in refused(folder)


def test_a_file_that_is_called_own_is_named_with_its_folder() -> None:
    """It is a folder of statistics, since texts end in .txt, .jsonl or .parquet."""
    Path("own").mkdir()
    for name in ("base", "a", "b"):
        save_model(Path(name))
    with pytest.raises(PlanError, match=r"Write \./own for that"):
        prepare(merge_of("own"))
    with pytest.raises(PlanError, match=r"\./own: a folder without statistics\.json"):
        prepare(merge_of("./own"))


def test_slopes_of_its_own_text_say_nothing() -> None:
    """The gradient of the log probability is zero on average over what a model says."""
    save_all()
    with pytest.raises(PlanError, match="its slopes are zero, except for chance"):
        prepare(merge_of("own", "core_step"))
    with pytest.raises(PlanError, match="its slopes are zero, except for chance"):
        weightsmith.statistics("a", "own", "stats", kind=("fisher", "slopes"), progress=False)


def test_scores_need_a_file() -> None:
    with pytest.raises(WeightsmithError, match=r"Write it first: weightsmith write MODEL own\.jsonl; then name own\.jsonl"):
        weightsmith.evaluate(save_model(Path("m")), text="own", progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record["text"].update(source="built-in"), "its text is not one that a model writes"),
        (lambda record: record["text"].update(seed=-1), "its text is not one that a model writes"),
        (lambda record: record.update(temperature=0.0), "its text is not one that a model writes"),
        (lambda record: record.update(version=2), "version 2, and this weightsmith has 1"),
        (lambda record: record["text"].update(rows=7), "its rows are not those of its text"),
        (lambda record: record.update(starts=[]), "its rows have no start"),
        (lambda record: record.update(starts=[[0] * 16]), "or no room behind it"),
        (lambda record: record.update(starts=[[256]]), "a start has a token without a row of the embedding"),
        (lambda record: record.update(starts=[[-1]]), "a start has a token without a row of the embedding"),
        (lambda record: record.update(starts="a"), "its settings are not those of a own_text product"),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str) -> None:
    with prepared_for(save_model(Path("m")), own_settings(), "gptq-4bit") as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    assert {find_kind(product.op).check(product) for product in plan_from_json(plan).products} == {""}
    change(next(product for product in plan["products"] if product["op"] == "own_text")["settings"])
    [why] = {find_kind(product.op).check(product) for product in plan_from_json(plan).products} - {""}
    assert words in why


# ---- gates of mixtures


def mixture_of(**options: Any) -> dict[str, Any]:
    experts = [{"source_model": f"./{name}", "prompts_file": "own"} for name in ("a", "b")]
    return {"base_model": "./base", "gate_mode": "hidden", "prompt_tokens": 24, "experts": experts, **options}


@pytest.mark.long
def test_gates_come_from_what_the_model_of_each_expert_writes() -> None:
    save_all()
    weightsmith.moe(mixture_of(), "one", threads=1, progress=False)
    weightsmith.moe(mixture_of(), "two", threads=2, progress=False)
    assert weights("one") == weights("two")
    texts = json.loads(Path("one/weightsmith.json").read_text())["own_texts"]
    rows = []
    for name, text in zip(("a", "b"), texts, strict=True):
        weightsmith.statistics(name, "own", f"{name}-stats", tokens=24, progress=False)
        ids = load_file(f"{name}-stats/model.safetensors")["ids"]
        assert hashlib.sha256(ids.numpy()).hexdigest() == text["sha256"]
        base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32).eval()
        with torch.no_grad():
            entering = base(ids.long(), output_hidden_states=True).hidden_states[1][:, -1]
        rows.append(torch.nn.functional.normalize(entering.double().mean(0), dim=0))
    router = load_file("one/model.safetensors")["model.layers.1.block_sparse_moe.gate.weight"].double()
    torch.testing.assert_close(router, torch.stack(rows), rtol=1e-2, atol=1e-3)


def test_an_expert_that_cannot_write_is_a_problem_of_the_plan() -> None:
    save_all()
    tokenizer = json.loads(Path("b/tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: 255 - number for token, number in tokenizer["model"]["vocab"].items()}
    Path("b/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=r"\./b writes tokens of its own tokenizer, and the mixture has that of \./base"):
        weightsmith.plan(mixture_of())
    Path("own").write_text("a text")
    with pytest.raises(PlanError, match="there is a file or folder of this name"):
        weightsmith.plan(mixture_of())
    assert weightsmith.plan(mixture_of(experts=[{"source_model": f"./{n}", "positive_prompts": n} for n in "ab"]))


def test_a_router_from_elsewhere_needs_the_rows_that_it_names() -> None:
    save_all()
    plan = json.loads(json.dumps(weightsmith.plan(mixture_of()).to_json()))
    router = next(product for product in plan["products"] if product["op"] == "router")
    assert [find_kind(product.op).check(product) for product in plan_from_json(plan).products] == ["", "", ""]
    router["needs"] = router["needs"][:1]
    assert "it does not need what its settings name" in [find_kind(p.op).check(p) for p in plan_from_json(plan).products]
