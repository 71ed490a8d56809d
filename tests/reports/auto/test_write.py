"""Text that a model writes by itself: which tokens, from which starts; what users see."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import weightsmith
from tests.calibration_help import save_model
from tests.cli_help import Cli, cli
from weightsmith._base.errors import OutputExists, ParameterError, PlanError, StoreError
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Silent
from weightsmith._reports.auto.write import Sampling, draw, writer
from weightsmith._reports.evaluate.opening import opened, prepare_named
from weightsmith._reports.options import WriteSettings

__all__ = ["cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def text_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


def drawn(folder: Path, threads: int = 1, **options: Any) -> list[list[int]]:
    sampling = Sampling(**{"starts": ((10,), (5, 6)), "rows": 19, "tokens": 12, "temperature": 1.0, "seed": 0, **options})
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return draw(module, sampling, threads, "cpu", lambda done, total: None, "llama")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_each_token_is_the_one_that_the_whole_row_predicts(folder: Path, temperature: float) -> None:
    """By a forward pass over the row without a cache, and the row's own random numbers."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, ids in enumerate(drawn(folder, temperature=temperature, seed=3)):
        uniform = np.random.Generator(np.random.Philox(key=np.array([3, row], np.uint64))).random(12)
        start = [(10,), (5, 6)][row % 2]
        with torch.no_grad():
            logits = module(torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1].double()
        shares = (logits / temperature).softmax(1).cumsum(1)
        assert ids == [
            int(np.searchsorted(row_shares, x, side="right")) for row_shares, x in zip(shares.numpy(), uniform, strict=True)
        ]


@pytest.mark.long
def test_the_same_tokens_for_any_number_of_threads_and_others_for_another_seed(folder: Path) -> None:
    one = drawn(folder)
    assert one == drawn(folder, threads=3)
    assert one != drawn(folder, seed=1)
    assert len({tuple(ids) for ids in one}) == 19
    assert drawn(folder, rows=3) == one[:3]  # fewer rows are the first of more


@pytest.mark.long
def test_a_file_has_a_row_on_each_line_and_is_a_text(folder: Path, tmp_path: Path) -> None:
    written = weightsmith.write(folder, tmp_path / "own.jsonl", rows=6, tokens=40, progress=False)
    assert (written.rows, written.tokens) == (6, 240)
    assert written.to_json()["out"] == str(tmp_path / "own.jsonl")
    assert len(text_of(written.out)) == 6
    score = weightsmith.evaluate(folder, text=written.out, tokens=32, progress=False)
    assert score.scores[0][0].rows >= 4


@pytest.mark.long
def test_a_start_of_the_user_begins_rows_and_is_not_written(folder: Path, tmp_path: Path) -> None:
    for name, start in (("a", ("hello",)), ("b", ("hello", "x"))):
        weightsmith.write(folder, tmp_path / f"{name}.jsonl", rows=4, tokens=8, start=start, progress=False)
    a, b = text_of(tmp_path / "a.jsonl"), text_of(tmp_path / "b.jsonl")
    assert (a[0], a[2]) == (b[0], b[2])
    assert a[1] != b[1]
    assert not a[0].startswith("hello")


@pytest.mark.matrix("gemma3")
@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "qwen3 moe", "phi3"])
def test_models_of_other_families_write(family: str, tmp_path: Path) -> None:
    """Caches of sliding windows, experts in one tensor, fused matrices."""
    folder = save_model(tmp_path / "model", family)
    rows = drawn(folder, rows=2)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        predicted = module(torch.tensor([[10, *rows[0]]])).logits[0, :-1].double().softmax(1).cumsum(1)
    uniform = np.random.Generator(np.random.Philox(key=np.array([0, 0], np.uint64))).random(12)
    assert rows[0] == [
        int(np.searchsorted(row_shares, x, side="right")) for row_shares, x in zip(predicted.numpy(), uniform, strict=True)
    ]
    weightsmith.write(folder, tmp_path / "own.jsonl", rows=2, tokens=8, progress=False)


@pytest.mark.long
def test_a_recipe_writes_what_its_result_would(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    recipe = {"merge_method": "linear", "models": [{"model": str(m), "parameters": {"weight": 1}} for m in (folder, other)]}
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    weightsmith.write(recipe, tmp_path / "a.jsonl", rows=2, tokens=8, progress=False)
    weightsmith.write(tmp_path / "merged", tmp_path / "b.jsonl", rows=2, tokens=8, progress=False)
    assert text_of(tmp_path / "a.jsonl") == text_of(tmp_path / "b.jsonl")


@pytest.mark.parametrize("out", ["", ".", "..", "/", "own"])
def test_the_output_is_a_file_of_text(folder: Path, out: str) -> None:
    with pytest.raises(ParameterError, match=r"the output is a text file, whose name ends in \.jsonl") as caught:
        weightsmith.write(folder, out, progress=False)
    assert "own.jsonl" in caught.value.finding.fix


def test_what_cannot_be_written_is_refused_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("mine")
    with pytest.raises(OutputExists, match="the output exists"):
        weightsmith.write(folder, tmp_path / "own.jsonl", progress=False)
    with pytest.raises(ParameterError, match=r"(?s)ends in \.jsonl.*own\.jsonl\."):
        weightsmith.write(folder, tmp_path / "own.txt", progress=False)
    with pytest.raises(StoreError, match="there is no folder"):
        weightsmith.write(folder, tmp_path / "none" / "own.jsonl", progress=False)
    with pytest.raises(PlanError, match="no such"):
        weightsmith.write(tmp_path / "none", tmp_path / "new.jsonl", progress=False)
    assert (tmp_path / "own.jsonl").read_text() == "mine"
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.long
def test_rows_longer_than_the_model_takes_are_refused(folder: Path) -> None:
    with prepare_named(folder) as prepared, writer("llama", prepared, RunOptions()) as draw_text:
        most = opened("llama", prepared).positions
        with pytest.raises(ParameterError, match=f"a row has at most {most:,} tokens"):
            draw_text(WriteSettings(tokens=most), Silent())


@pytest.mark.long
def test_a_model_that_has_written_is_not_in_memory(folder: Path, tmp_path: Path) -> None:
    def numbers() -> int:
        return sum(tensor.numel() for tensor in gc.get_objects() if type(tensor) is torch.nn.Parameter and not tensor.is_meta)

    gc.collect()
    before = numbers()
    gc.disable()  # Python does not collect by itself
    try:
        weightsmith.write(folder, tmp_path / "own.jsonl", rows=1, tokens=2, progress=False)
        assert numbers() == before
    finally:
        gc.enable()


@pytest.mark.long
def test_the_command_says_what_it_wrote(folder: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("write", folder, tmp_path / "own.jsonl", "--rows", "2", "--tokens", "4")
    assert "2 rows written: " in done.out
    assert json.loads(cli("write", folder, tmp_path / "o.jsonl", "--rows", "1", "--tokens", "4", "--json").out)["rows"] == 1
    assert len(text_of(tmp_path / "own.jsonl")) == 2


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_model(folder: Path, template: str) -> Path:
    """A tiny model with a chat template. Its tokens are bytes."""
    save_model(folder, "llama")
    settings = {"chat_template": template, "bos_token": "!", "eos_token": {"content": ";"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.long
def test_rows_of_a_chat_model_also_begin_with_the_turns_of_its_template(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "chat", TEMPLATE)
    starts = ("!", ";", "\n", "\n\n", "![user]", "![user];[assistant]")
    chat = weightsmith.write(model, tmp_path / "chat.jsonl", rows=12, tokens=8, progress=False)
    assert chat.starts == starts
    assert chat.unused_template == ""
    assert chat.to_json()["starts"] == list(starts)
    started = weightsmith.write(model, tmp_path / "given.jsonl", rows=12, tokens=8, start=starts, progress=False)
    assert text_of(chat.out) == text_of(started.out)
    assert weightsmith.write(model, tmp_path / "few.jsonl", rows=2, tokens=8, progress=False).starts == starts[:2]


@pytest.mark.long
def test_a_template_starts_rows_as_transformers_writes_it(tmp_path: Path) -> None:
    """With a system prompt that the template adds, and blocks on lines of their own."""
    template = """
    {%- if messages[0].role != 'system' %}
    {{- bos_token + '[system]Be brief;' }}
    {%- endif %}
    {%- for m in messages %}
    {{- '[' ~ m.role ~ ']' ~ m.content | trim ~ ';' }}
    {%- endfor %}
    {%- if add_generation_prompt %}
    {{- '[assistant]' }}
    {%- endif %}"""
    model = chat_model(tmp_path / "chat", template)
    written = weightsmith.write(model, tmp_path / "chat.jsonl", rows=6, tokens=4, progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), bos_token="!", chat_template=template)
    empty = [{"role": "user", "content": ""}]
    assert written.starts[-1] == tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True)
    assert written.starts[-2] == "![system]Be brief;[user]"


@pytest.mark.matrix("always the same-*", "*__mro__*")
@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 'a' * 10**10 }}", "it takes more than 512 MiB of memory"),
        ("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "it takes more than 1 seconds"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ 'a' * 70000 }}" + TEMPLATE, "it writes more than 65,536 characters before the first turn"),
        ("{{ 'a' * 200 }}" + TEMPLATE, "it takes 207 tokens, and 8 more do not fit into a row"),
        ("always the same", "it does not show where a turn begins"),
    ],
)
def test_without_a_usable_template_rows_begin_plainly_and_it_is_said_why(
    template: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsmith._activations.scored_rows.RENDERING_SECONDS", 1)
    model = chat_model(tmp_path / "chat", template)
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 128}
    (model / "config.json").write_text(json.dumps(settings))
    with prepare_named(model) as prepared, writer("chat", prepared, RunOptions()) as model_writer:
        starts = model_writer.starts(WriteSettings(tokens=8))
    assert starts.ids == ((0,), (26,), (198,), (198, 198))
    assert starts.unused_template == why


@pytest.mark.long
def test_a_template_that_refuses_an_empty_question_still_lets_the_model_ask(tmp_path: Path) -> None:
    refusing = "{% if not messages[0].content %}{{ raise_exception('empty') }}{% endif %}" + TEMPLATE
    written = weightsmith.write(chat_model(tmp_path / "chat", refusing), tmp_path / "o.jsonl", rows=9, tokens=2, progress=False)
    assert written.starts == ("!", ";", "\n", "\n\n", "![user]")


@pytest.mark.long
def test_the_command_says_what_rows_begin_with(tmp_path: Path, cli: Cli) -> None:
    model = chat_model(tmp_path / "chat", TEMPLATE)
    printed = cli("write", model, tmp_path / "a.jsonl", "--rows", "6", "--tokens", "4").out
    assert r'Rows begin with: "!", ";", "\n", "\n\n", "![user]", "![user];[assistant]"' in printed
    broken = chat_model(tmp_path / "broken", "{{ raise_exception('no') }}")
    assert "The chat template is not used: no" in cli("write", broken, tmp_path / "b.jsonl", "--tokens", "4").out


@pytest.mark.long
def test_a_start_without_a_token_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="rows have no token to begin with"):
        weightsmith.write(folder, tmp_path / "own.jsonl", start=("",), progress=False)
