"""`weightsmith eval`: the numbers are transformers' own, for models, recipes and stored codes; and what users see."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

import weightsmith
from tests import vision_zoo, zoo
from tests.calibration_help import TEXT, changed, save_model
from tests.cli_help import Cli, cli, run_process
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from weightsmith._base.errors import CannotResume, NonFinite, ParameterError, PlanError, StoreError
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Product
from weightsmith._reports.evaluate import opening
from weightsmith._reports.evaluate.values import evaluation_report
from weightsmith.abc.product import Arrays

__all__ = ["cli"]

TIES = """merge_method: ties
base_model: a
dtype: float32
models:
  - model: b
    parameters: {weight: 1, density: 0.5}
parameters: {scope: model}
"""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a recipe of them, and two texts."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        save_model(folder / name, seed=seed)
        changed(folder / name, o_proj=8, down_proj=8, lm_head=8, embed_tokens=8)
    (folder / "ties.yml").write_text(TIES)
    (folder / "t.txt").write_text(TEXT)
    (folder / "u.txt").write_text(TEXT[::-1])
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Evaluations have a folder of their own, also in a test that undoes its patches."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "cache_home", lambda: folder)
        yield


@pytest.fixture
def work(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the models."""
    for path in pristine.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def perplexity(folder: Path, text: str, tokens: int, dtype: torch.dtype = torch.float64, model: Any = None) -> float:
    """By transformers. A token is a byte. model: None: its causal one."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    model = model or transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    rows = torch.tensor(ids[: len(ids) // tokens * tokens]).view(-1, tokens)
    with torch.inference_mode():
        return math.exp(float(model(input_ids=rows, labels=rows).loss))


def leftovers(folder: Path) -> list[str]:
    """Unfinished work, none of which may be in this folder."""
    assert not list(folder.glob(".evaluation*"))
    return [path.name for path in opening.evaluations_folder().glob(".evaluation*")]


@pytest.mark.long
def test_models_recipes_and_stored_codes_have_the_numbers_of_transformers(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weightsmith.merge("ties.yml", "merged", progress=False)
    weightsmith.quantize("a", "codes", "fp8-dynamic", progress=False)
    weightsmith.dequantize("codes", "decoded", out_dtype="float32", progress=False)
    models = ("a", "b", "ties.yml", "codes")
    evaluation = weightsmith.evaluate(*models, text=["t.txt", "u.txt"], tokens=32, reference="a", progress=False)
    for name, scores in zip(("a", "b", "merged", "decoded"), evaluation.scores, strict=True):
        for file, score in zip(("t.txt", "u.txt"), scores, strict=True):
            assert score.perplexity == pytest.approx(perplexity(work / name, Path(file).read_text(), 32), rel=2e-5)
            assert score.nbytes == score.tokens == score.rows * 31
    divergences = [total.divergence.value for total in evaluation.totals[1:] if total.divergence is not None]
    assert len(divergences) == 3
    assert 0 < divergences[2] < 0.1 < divergences[0]
    assert evaluation.totals[3].agreement > 0.7
    assert leftovers(work) == []
    again = weightsmith.evaluate(*models[::2], text=["t.txt", "u.txt"], tokens=32, progress=False, threads=1)
    assert again.totals[1].loss == evaluation.totals[2].loss
    page = evaluation_report(evaluation)
    assert page.summary == evaluation.reading
    assert len(page.blocks) == 1 + 3 + 3 + 1  # settings; all texts and each; the layers of all but the reference; the command
    capsys.readouterr()
    page.show()
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("layer")] == []  # a row for each layer of each model
    assert shown.rstrip().endswith(page.summary[-1])


@pytest.mark.matrix("nemotron-h")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "nemotron-h",
        "nemotron-h-moe",
        "deepseek-v3",
        "glm4-moe",
        "dots1",
        "minimax-m2",
        "lfm2-moe",
        "mamba2",
        "exaone-moe",
        "ernie4-5-moe",
        "afmoe",
        "solar-open",
        "deepseek-v32",
        "minimax-m3",
        "mimo2",
        "laguna",
        "hy-v3",
        "phimoe",
        "glm-dsa",
        "gpt-neox",
    ],
)
def test_hybrids_and_biases_of_routers_have_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    """transformers keeps these biases as buffers. They are large here, so that others choose other experts."""
    sizes = {"vocab_size": 262} | ({"index_topk": 32} if name == "glm-dsa" else {})
    folder = zoo.save(name, tmp_path / "m", 1, dtype="float32", **sizes)
    tensors = load_file(folder / "model.safetensors")
    biases = {k: 3 * torch.randn(v.shape) for k, v in tensors.items() if k.endswith(("e_score_correction_bias", "expert_bias"))}
    large = {k: 8 * v for k, v in tensors.items() if k.endswith(("down_proj.weight", "w2.weight", "lm_head.weight"))}
    save_file({**tensors, **large, **biases}, folder / "model.safetensors", {"format": "pt"})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (folder / file).write_bytes(content)
    (tmp_path / "t.txt").write_text(TEXT)
    evaluation = weightsmith.evaluate(folder, text=tmp_path / "t.txt", tokens=32, progress=False)
    assert evaluation.totals[0].perplexity == pytest.approx(perplexity(folder, TEXT, 32, torch.float32), rel=2e-5)


@pytest.mark.matrix("gemma3")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "internvl", "idefics3", "qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_texts_run_through_models_with_images(name: str, tmp_path: Path) -> None:
    """The text half gets no images. Files have the names of the Hub, which transformers changes."""
    tied = not any("lm_head" in tensor for tensor in vision_zoo.MODELS[name]()[0])
    folder = vision_zoo.save(name, tmp_path / "m", tie_word_embeddings=tied)
    (tmp_path / "t.txt").write_text(TEXT)
    evaluation = weightsmith.evaluate(folder, text=tmp_path / "t.txt", tokens=32, progress=False)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    assert evaluation.totals[0].perplexity == pytest.approx(perplexity(folder, TEXT, 32, model=model), rel=2e-5)


@pytest.mark.matrix
@pytest.mark.slow
def test_an_interrupted_evaluation_resumes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = Staging.keep, list[str]()

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        kept.append(product.name)
        if kept.count("states 1") == 2:  # of the second model
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    def note(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        kept.append(product.name)
        return keep(staging, product, arrays)

    asked: dict[str, Any] = {"text": "t.txt", "tokens": 32, "reference": "a", "progress": False}
    monkeypatch.setattr(Staging, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        weightsmith.evaluate("b", **asked)
    assert len(leftovers(work)) == 2
    kept.clear()
    monkeypatch.setattr(Staging, "keep", note)
    resumed = weightsmith.evaluate("b", **asked, threads=1)
    assert kept == ["states 1", "sample 0", "states 2", "sample 1", "losses"]
    assert leftovers(work) == []
    assert resumed.to_json() == weightsmith.evaluate("b", **asked).to_json()


@pytest.mark.long
def test_what_was_compared_with_a_reference_is_not_kept_if_its_files_change(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same names, headers and sizes; other weights. The work on the reference itself was removed, as its error says."""
    for seed, name in enumerate(("changing", "b2", "b3")):
        save_model(work / name, seed=seed)
    keep, kept = Staging.keep, list[str]()

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        kept.append(product.name)
        if kept.count("states 1") == 3:  # of the third model
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    asked: dict[str, Any] = {"text": "t.txt", "tokens": 32, "reference": "changing", "progress": False}
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            weightsmith.evaluate("b2", "b3", **asked)
    save_model(work / "changing", seed=9)
    with pytest.raises(CannotResume, match="files of changing: changed") as refused:
        weightsmith.evaluate("b2", "b3", **asked)
    shutil.rmtree(refused.value.finding.where)
    evaluation = weightsmith.evaluate("b2", "b3", **asked)
    for path in opening.evaluations_folder().glob(".evaluation-*"):
        shutil.rmtree(path)
    assert evaluation.to_json() == weightsmith.evaluate("b2", "b3", **asked).to_json()


@pytest.mark.long
def test_models_with_other_tokenizers_are_compared_by_their_bits(work: Path) -> None:
    shutil.copytree(work / "b", work / "c")
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    old = Tokenizer.from_file(str(work / "b/tokenizer.json"))
    vocab = {token: 255 - number for token, number in old.get_vocab().items()}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(work / "c/tokenizer.json"))
    evaluation = weightsmith.evaluate("a", "c", text="t.txt", tokens=64, reference="a", progress=False)
    assert (evaluation.totals[1].change, evaluation.totals[1].divergence) == (None, None)
    assert "only bits per byte are compared" in evaluation.reading[0]
    assert evaluation.reading[1] == "No divergence for c: its vocabulary or its tokens are not those of a."


@pytest.mark.slow
def test_the_command_shows_a_table_json_and_a_page(work: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cli("eval", "a", "b", "--text", "t.txt", "--tokens", "64", "--reference", "a", "--report", "page.html")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[1].split() == ["reference", "a"]
    assert "model  perplexity  bits per byte" in ran.out
    assert "b is " in ran.out or "cannot be told apart" in ran.out
    assert "b is " in Path("page.html").read_text() or "told apart" in Path("page.html").read_text()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli("eval", "a", "b", "--text", "t.txt", "--tokens", "64", "--reference", "a")
    lines = narrow.out.splitlines()
    assert max(map(len, lines[4 : lines.index("", 4)])) <= 40  # the sentence after it is one line in a pipe
    shown = json.loads(cli("eval", "a", "--text", "t.txt", "--tokens", "64", "--rows", "2", "--json").out)
    assert shown["models"] == ["a"]
    assert shown["scores"][0][0]["rows"] == 2
    assert shown["scores"][0][0]["change"] is None


def refused(*models: Any, **options: Any) -> str:
    with pytest.raises((PlanError, ParameterError)) as caught:
        weightsmith.evaluate(*models, progress=False, **options)
    return str(caught.value)


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_one_error_before_tensors_are_read(work: Path) -> None:
    (work / "short.txt").write_text("a")
    shutil.copytree(work / "a", work / "unknown")
    config = json.loads((work / "a/config.json").read_text())
    (work / "unknown/config.json").write_text(json.dumps(config | {"model_type": "nosuch"}))
    shutil.copytree(work / "a", work / "mute", ignore=shutil.ignore_patterns("tokenizer.json"))
    shutil.copytree(work / "a", work / "bare", ignore=shutil.ignore_patterns("config.json"))
    assert "there is no text to score" in refused("a", text=[])
    assert "no model is given" in refused(text="t.txt")
    assert "its rows have at most 64 tokens, not 4,096" in refused("a", text="t.txt", tokens=4096)
    assert "it has fewer than two tokens" in refused("a", text="short.txt")
    assert "a text needs the model's tokenizer.json" in refused("mute", text="t.txt")
    assert "it is not a decoder with a config.json" in refused("bare", text="t.txt")
    assert "transformers cannot build a model of type 'nosuch'" in refused("unknown", text="t.txt")
    assert "--text (text): the text 'no.md' is not a .txt, .jsonl or .parquet file" in refused("a", text="no.md")
    recipe = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}
    other = recipe | {"merge_method": "karcher"}
    assert "two recipes have the name 'recipe'" in refused(recipe, other, text="t.txt")
    assert "Pass them one by one: evaluate(*models" in refused(["a", "b"], text="t.txt")
    both = refused("mute", "bare", text="t.txt")
    assert "tokenizer.json" in both
    assert "not a decoder" in both
    assert leftovers(work) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder in which nothing can be created")
def test_a_folder_in_which_nothing_can_be_written_names_the_option_for_another(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soup = {"merge_method": "linear", "models": [{"model": work / name} for name in "ab"], "parameters": {"weight": 1}}
    monkeypatch.setattr(opening, "cache_home", lambda: Path("/proc"))
    with pytest.raises(StoreError) as caught:
        weightsmith.evaluate(work / "a", text=work / "t.txt", progress=False)
    assert caught.value.finding.fix.lower().endswith("choose another folder for unfinished work with --work (work).")
    with pytest.raises(StoreError, match=r"[Cc]hoose another folder for unfinished work with --work \(work\)\."):
        weightsmith.evaluate(soup, command="echo {model}", progress=False)
    with pytest.raises(StoreError, match=r"[Cc]hoose another folder for unfinished work\."):
        weightsmith.evaluate(work / "a", text=work / "t.txt", work="/proc/here", progress=False)


@pytest.mark.slow
def test_a_nan_stops_the_evaluation_and_leaves_nothing(work: Path) -> None:
    shutil.copytree(work / "a", work / "bad")
    changed(work / "bad", down_proj=float("nan"))
    with pytest.raises(NonFinite):
        weightsmith.evaluate("bad", text="t.txt", tokens=64, progress=False)


def test_row_sums_are_those_of_each_text() -> None:
    from weightsmith._activations.scored_rows import ScoredRows
    from weightsmith._reports.evaluate.measure import _by_text

    nbytes = np.array([[-1, 2, 0], [-1, 1, -1], [-1, -1, -1]], np.int32)
    rows = ScoredRows(np.zeros_like(nbytes), nbytes)
    arrays = [np.float32([[0, 3, 4], [0, 5, 0], [0, 0, 0]])]
    one, two = _by_text(arrays, rows, [1, 2])
    assert (one.nats.tolist(), one.tokens.tolist(), one.nbytes.tolist()) == ([7], [2], [2])
    assert (two.nats.tolist(), two.tokens.tolist(), two.nbytes.tolist()) == ([5], [1], [1])
    assert replace(two, tokenized="").divergences is None


@pytest.mark.long
def test_a_merge_and_a_quantised_model_are_evaluated_before_they_are_published(work: Path, cli: Cli) -> None:
    """As stored, beside the source. The numbers are those of `weightsmith eval`."""
    ran = cli("quantize", "a", "codes", "--format", "fp8-dynamic", "--evaluate", "t.txt", "--json")
    assert ran.code == 0, ran.err
    evaluation = json.loads(ran.out)["evaluation"]
    manifest = json.loads((work / "codes/weightsmith.json").read_text())
    assert manifest["evaluation"] == evaluation
    assert (evaluation["models"], evaluation["reference"]) == (["a", "the result"], "a")
    again = weightsmith.evaluate("a", "codes", text="t.txt", reference="a", progress=False).to_json()
    assert again["totals"] == evaluation["totals"]
    card = (work / "codes/README.md").read_text()
    assert "## Evaluation" in card
    assert "tokens of t.txt, in rows of 64." in card
    assert cli("verify", "codes").code == 0
    assert leftovers(work) == []
    merged = weightsmith.merge("ties.yml", "merged", evaluate="t.txt", max_shard_bytes=100_000, progress=False)
    assert len(merged.plan.layout.shards) > 1
    recorded = json.loads((work / "merged/weightsmith.json").read_text())["evaluation"]
    assert recorded["models"] == ["a", "the result"]
    assert cli("verify", "merged").code == 0
    shown = weightsmith.merge("ties.yml", "plain", max_shard_bytes=100_000, progress=False).out
    for file in sorted(Path(str(shown)).glob("*.safetensors")):
        assert file.read_bytes() == (work / "merged" / file.name).read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_an_evaluation_of_a_result_that_is_interrupted_resumes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Staging.keep

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if product.name == "losses":
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    monkeypatch.setattr(Staging, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge("ties.yml", "merged", evaluate="t.txt", progress=False)
    assert not (work / "merged").exists()
    monkeypatch.undo()
    monkeypatch.chdir(work)
    merged = weightsmith.merge("ties.yml", "merged", evaluate="t.txt", progress=False)
    assert merged.resumed == len(merged.plan.steps)
    assert "evaluation" in json.loads((work / "merged/weightsmith.json").read_text())
    assert leftovers(work) == []


@pytest.mark.slow
def test_a_result_that_cannot_be_evaluated_is_refused_before_work(work: Path, cli: Cli) -> None:
    ran = cli("merge", "ties.yml", "merged", "--evaluate", "none.txt")
    assert ran.code == 1
    assert "'none.txt': no such file" in ran.err
    assert "-> Name one of " in ran.err
    assert "Nothing was written" in ran.err
    ran = cli("quantize", "a", "s3://bucket/out", "--format", "fp8-dynamic", "--evaluate", "t.txt")
    assert "--evaluate reads the result before it is published" in ran.err
    assert not (work / "merged").exists()
    assert not list(work.glob(".merged*"))


def layer_outputs(folder: Path, text: str, tokens: int) -> list[torch.Tensor]:
    """What leaves each layer, by transformers in float64."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    rows = torch.tensor(ids[: len(ids) // tokens * tokens]).view(-1, tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        model(input_ids=rows)
    return outputs


@pytest.mark.long
def test_the_errors_of_layers_are_those_of_transformers(work: Path) -> None:
    """Of the scored tokens: all but the first of a row. Models with other layers have none."""
    evaluation = weightsmith.evaluate("a", "b", text="t.txt", tokens=32, reference="a", progress=False)
    theirs, ours = layer_outputs(work / "a", TEXT, 32), layer_outputs(work / "b", TEXT, 32)
    expected = [float((y - x)[:, 1:].norm() / x[:, 1:].norm()) for x, y in zip(theirs, ours, strict=True)]
    assert evaluation.layers[0] is None
    assert evaluation.layers[1] is not None
    np.testing.assert_allclose(evaluation.layers[1], expected, rtol=1e-5)
    [table] = [block for block in evaluation_report(evaluation).blocks if getattr(block, "title", "") == "Layers of b"]
    assert len(table.rows) == 2
    assert evaluation.to_json()["layers"][1] == list(evaluation.layers[1])
    assert weightsmith.evaluate("a", text="t.txt", progress=False).layers == (None,)


@pytest.mark.long
def test_only_the_first_rows_are_kept_for_the_errors_of_layers(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._reports.evaluate.measure.SAMPLE_BYTES", 2 * 2 * 32 * 64 * 4)
    evaluation = weightsmith.evaluate("a", "b", text="t.txt", tokens=32, reference="a", progress=False)
    theirs, ours = layer_outputs(work / "a", TEXT, 32), layer_outputs(work / "b", TEXT, 32)
    expected = [float((y - x)[:2, 1:].norm() / x[:2, 1:].norm()) for x, y in zip(theirs, ours, strict=True)]
    np.testing.assert_allclose(np.array(evaluation.layers[1]), expected, rtol=1e-5)


@pytest.mark.long
def test_a_mixture_is_evaluated_before_it_is_published(work: Path, cli: Cli) -> None:
    """Beside its base; the worst layers are in summary, manifest, card and page."""
    (work / "moe.yml").write_text(
        "base_model: a\ngate_mode: random\narchitecture: mixtral\nexperts: [{source_model: a}, {source_model: b}]\n"
    )
    ran = cli("moe", "moe.yml", "out", "--evaluate", "t.txt", "--report", "out/report.html", "--quantize", "fp8-dynamic")
    assert ran.code == 0, ran.err
    assert "on t.txt: perplexity" in ran.out
    assert "it grows most in layers" in ran.out
    recorded = json.loads((work / "out/weightsmith.json").read_text())["evaluation"]
    assert recorded["models"] == ["a", "the result"]
    assert len(recorded["layers"][1]) == 2
    card = (work / "out/README.md").read_text()
    assert "## Evaluation" in card
    assert "it grows most in layers" in card
    assert "Layers of the result" in (work / "out/report.html").read_text()


SIZE = """import json, os, sys
names = os.listdir(sys.argv[1])
print(json.dumps({"n": sum(name.endswith(".safetensors") for name in names), "here": names.count("weightsmith.json")}))
"""


@pytest.mark.long
def test_a_command_measures_folders_as_they_are_and_recipes_as_they_would_be_written(work: Path, cli: Cli) -> None:
    """Beside a text, and alone; what was written for it is gone afterwards."""
    Path("size.py").write_text(SIZE)
    command = f"{shlex.quote(sys.executable)} -I -S size.py {{model}}"
    before = sorted(path.name for path in work.iterdir())
    evaluation = weightsmith.evaluate("a", "ties.yml", command=command, metric="here", progress=False)
    assert evaluation.measured == (0, 1)
    assert evaluation.totals == ()
    assert evaluation.reading == ("The command finds 1 for ties.yml and 0 for a.",)
    assert "by a command" in repr(evaluation)
    assert sorted(path.name for path in work.iterdir()) == before
    ran = cli("eval", "a", "ties.yml", "--command", command, "--metric", "n", "--text", "t.txt", "--json")
    assert ran.code == 0, ran.err
    both = json.loads(ran.out)
    assert both["measured"] == [1, 1]
    assert len(both["totals"]) == 2
    page = evaluation_report(evaluation)
    assert f"--command {shlex.quote(command)} --metric here" in str(page.blocks[-1])
    with pytest.raises(ParameterError, match="a reference is for texts"):
        weightsmith.evaluate("a", command=command, reference="b", progress=False)


TASK = """task: notes
dataset_path: text
dataset_kwargs: {data_files: {test: notes.txt}, sample_by: document}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.slow
@pytest.mark.skipif("WEIGHTSMITH_LM_EVAL" not in os.environ, reason="needs lm-evaluation-harness: WEIGHTSMITH_LM_EVAL")
def test_lm_eval_measures_models_and_recipes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":  # lm_eval begins each text with the token that ends texts
        shutil.copytree(work / name, name.upper())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}
        Path(name.upper(), "tokenizer_config.json").write_text(json.dumps(config))
    Path("Ties.yml").write_text(TIES.replace(": a\n", ": A\n").replace(": b\n", ": B\n"))
    Path("notes.yaml").write_text(TASK)
    Path("notes.txt").write_text(TEXT[:120])
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    program = shlex.quote(os.environ["WEIGHTSMITH_LM_EVAL"])
    options = "--tasks notes --include_path . --device cpu --batch_size 1 --output_path {output}"
    command = f"{program} --model hf --model_args pretrained={{model}},dtype=float32,tokenizer={{model}} {options}"
    metric = "results/notes/bits_per_byte,none"
    evaluation = weightsmith.evaluate(
        "A", "Ties.yml", text="notes.txt", tokens=64, command=command, metric=metric, progress=False
    )
    assert evaluation.measured == pytest.approx([total.bits_per_byte for total in evaluation.totals], rel=0.05)


@pytest.mark.cpu
@pytest.mark.long
def test_a_run_killed_by_its_command_is_run_again_and_leaves_nothing(
    work: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    Path("once.py").write_text(
        "import os, pathlib\nif not pathlib.Path('was').exists():\n    open('was', 'w'); os.kill(os.getppid(), 9)\nprint(7)"
    )
    before = {path.name for path in work.iterdir()}
    folder = opening.evaluations_folder()
    asked = ("eval", "ties.yml", "--command", f"{shlex.quote(sys.executable)} -I -S once.py {{model}}", "--json")
    assert run_process(*asked, cwd=work).code == -signal.SIGKILL
    [model] = folder.iterdir()
    assert model.name.startswith("evaluation-")
    assert f"not removable: {model}" in cli("clean").err
    ran = run_process(*asked, cwd=work)
    assert json.loads(ran.out)["measured"] == [7], ran.err
    assert list(folder.iterdir()) == []
    assert {path.name for path in work.iterdir()} == before | {"was"}


def test_without_a_home_a_folder_must_be_named(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(opening, "cache_home", homeless)
    with pytest.raises(StoreError, match="no folder for unfinished work") as refused:
        opening.evaluations_folder()
    assert "--work" in str(refused.value)
    assert list(opening.find_evaluations()) == []


@pytest.mark.long
def test_a_text_may_be_a_string_or_several(work: Path) -> None:
    whole = weightsmith.evaluate("a", text="t.txt", tokens=32, progress=False)
    evaluation = weightsmith.evaluate("a", text=TEXT, tokens=32, progress=False)
    assert evaluation.scores == whole.scores
    assert evaluation.texts == (f"'{' '.join(TEXT.split())[:37]}...'",)
    Path("both.jsonl").write_text(f"{json.dumps(TEXT)}\n{json.dumps(TEXT[::-1])}\n")
    documents = weightsmith.evaluate("a", text="both.jsonl", tokens=32, progress=False)
    evaluation = weightsmith.evaluate("a", text=[TEXT, TEXT[::-1]], tokens=32, progress=False)
    assert evaluation.scores == documents.scores
    mixed = weightsmith.evaluate("a", text=["t.txt", TEXT[::-1]], tokens=32, progress=False)
    assert mixed.texts[0] == "t.txt"
    assert mixed.scores[0][0] == whole.scores[0][0]


def test_a_string_that_may_be_a_wrong_path_is_not_a_text(work: Path) -> None:
    with pytest.raises(
        PlanError, match=r"'notes' is not a .txt, .jsonl or .parquet file\n.*a text itself has a space or line break"
    ):
        weightsmith.evaluate("a", text="notes", progress=False)
    with pytest.raises(PlanError, match=r"my notes\.txt"):
        weightsmith.evaluate("a", text="my notes.txt", progress=False)


@pytest.mark.long
def test_an_open_model_is_a_model(work: Path) -> None:
    with weightsmith.open_checkpoint("a") as model:
        evaluation = weightsmith.evaluate(model, "b", text="t.txt", tokens=32, progress=False)
        merged = weightsmith.plan({"merge_method": "linear", "models": [{"model": model}], "parameters": {"weight": 1}})
    assert evaluation.models == ("a", "b")
    assert merged.models[0].ref == "a"


@pytest.mark.long
def test_a_table_has_a_row_for_each_model_and_text(work: Path) -> None:
    evaluation = weightsmith.evaluate("a", "b", text=["t.txt", "u.txt"], tokens=32, reference="a", progress=False)
    rows = evaluation.table()
    assert [(row["model"], row["text"]) for row in rows] == [(m, t) for m in "ab" for t in ("t.txt", "u.txt")]
    score = evaluation.scores[1][0]
    assert score.divergence is not None
    assert score.change is not None
    assert rows[2] == {
        **{"model": "b", "text": "t.txt", "rows": score.rows, "tokens": score.tokens, "loss": score.loss.value},
        **{"loss_error": score.loss.error, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte},
        **{"divergence": score.divergence.value, "divergence_error": score.divergence.error, "agreement": score.agreement},
        **{"change": score.change.value, "change_error": score.change.error},
    }
    assert (rows[0]["change"], rows[0]["divergence"]) == (None, None)
