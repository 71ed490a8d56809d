"""Texts and conversations as rows of tokens to score."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from weightsmith._activations.rows import text_source
from weightsmith._activations.scored_rows import UNSCORED, Cutter, _bytes_of, conversations, rendered, together
from weightsmith._base.errors import FormatError, ParameterError, Unsupported, WeightsmithError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Café"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "No."},
    ]
}


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Tokens 0 to 255 are bytes; then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<|user|>", "<|assistant|>", "<|end|>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def cutter(*, bos: bool = False, template: str = TEMPLATE, vocabulary: int = 260) -> Cutter:
    return Cutter(byte_tokenizer(bos=bos), "m", vocabulary, template, {"bos_token": "<s>"})


def rows_of(file: Path, tokens: int, rows: int | None = None, most: int = 100, **how: Any) -> Any:
    return cutter(**how).rows(text_source(str(file), rows, tokens, 0, "text"), most)


def words(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_rows_follow_each_other_and_what_is_left_over_is_not_scored(tmp_path: Path) -> None:
    file = words(tmp_path / "t.txt", "abcdefghijk")
    rows = rows_of(file, 4)
    tokenizer = byte_tokenizer()
    assert [tokenizer.decode(row) for row in rows.ids.tolist()] == ["abcd", "efgh"]
    assert rows.nbytes.tolist() == [[UNSCORED, 1, 1, 1]] * 2
    assert rows.tokens == 6
    assert rows_of(file, 4, rows=1).ids.shape == (1, 4)
    assert rows_of(file, 4, most=1).ids.shape == (1, 4)
    short = rows_of(file, 64)
    assert (short.ids.shape, short.tokens) == ((1, 11), 10)


def test_every_row_begins_with_what_the_tokenizer_puts_before_texts(tmp_path: Path) -> None:
    rows = rows_of(words(tmp_path / "t.txt", "abcdefg"), 4, bos=True)
    assert rows.ids[:, 0].tolist() == [256, 256]
    assert rows.nbytes.tolist() == [[UNSCORED, 1, 1, 1]] * 2


def test_the_bytes_of_a_character_are_those_of_its_first_token(tmp_path: Path) -> None:
    rows = rows_of(words(tmp_path / "t.txt", "aé🙂z"), 64)
    assert rows.nbytes.tolist() == [[UNSCORED, 2, 0, 4, 0, 0, 0, 1]]
    assert int(rows.nbytes[0, 1:].sum()) == len("é🙂z".encode())


@pytest.mark.parametrize(
    ("text", "how", "words_said"),
    [
        ("a", {}, "it has fewer than two tokens\n  -> Give a longer text"),
        ("", {}, "it has fewer than two tokens"),
        ("abcdefgh", {"rows": 3}, "it has 2 rows of 4 tokens, not 3\n  -> Give a longer text, or fewer or shorter rows"),
        ("abcdefgh", {"vocabulary": 50}, "the tokenizer produces token .*, but the embedding has 50 rows"),
    ],
)
def test_a_text_that_cannot_be_scored_is_one_error(text: str, how: dict[str, Any], words_said: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsmithError, match=words_said):
        rows_of(words(tmp_path / "t.txt", text), 4, **how)


def test_texts_of_different_widths_are_one_set_of_rows(tmp_path: Path) -> None:
    a, b = (rows_of(words(tmp_path / f"{n}.txt", text), 8) for n, text in enumerate(("abcdefghijklmnop", "xyz")))
    both = together([a, b])
    assert both.ids.shape == (3, 8)
    assert both.tokens == a.tokens + b.tokens == 16
    assert (both.nbytes[2, 3:] == UNSCORED).all()


def talks(file: Path, *lines: Any) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.slow
def test_answers_are_scored_up_to_their_end(tmp_path: Path) -> None:
    """Special tokens are scored, and are no bytes of the text."""
    rows = rows_of(talks(tmp_path / "t.jsonl", TALK), 64)
    [ids], [nbytes] = rows.ids, rows.nbytes
    tokenizer = byte_tokenizer()
    told = tokenizer.decode(ids[nbytes >= 0].tolist(), skip_special_tokens=False)
    assert told == "Café<|end|>\nNo.<|end|>\n"
    assert nbytes[nbytes >= 0].sum() == len("Café\nNo.\n".encode())
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False).startswith("<s><|user|>Hi<|end|>\n<|assistant|>Café")


@pytest.mark.long
def test_conversations_of_sharegpt_are_those_of_messages(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TALK["messages"]]
    rows = rows_of(talks(tmp_path / "s.jsonl", {"id": "identity_0", "conversations": turns}, TALK), 64)
    for mine, theirs in zip(rows.ids, rows_of(talks(tmp_path / "t.jsonl", TALK, TALK), 64).ids, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.slow
def test_conversations_that_do_not_fit_a_row_are_cut_and_counted(tmp_path: Path) -> None:
    short = {"messages": TALK["messages"][:2]}
    rows = rows_of(talks(tmp_path / "t.jsonl", short, TALK), 15)
    assert rows.ids.shape == (2, 15)
    assert rows.shortened == 1
    assert rows.unplaced == 0


@pytest.mark.long
def test_answers_that_the_template_rewrites_later_are_counted(tmp_path: Path) -> None:
    only_last = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    )
    only_last += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    rows = rows_of(talks(tmp_path / "t.jsonl", TALK), 64, template=only_last)
    assert rows.unplaced == 1
    assert byte_tokenizer().decode(rows.ids[0][rows.nbytes[0] >= 0].tolist()) == "No."


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for m in %}", "Expected an expression"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{% set x = 'a' * 10 ** 10 %}{{ x }}", "MiB of memory"),
    ],
)
def test_a_hostile_template_is_bounded_or_refused(
    template: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsmith._activations.scored_rows.RENDERING_SECONDS", 1)
    with pytest.raises(FormatError, match="the chat template failed: ") as caught:
        rows_of(talks(tmp_path / "t.jsonl", TALK), 64, template=template)
    assert why in str(caught.value)


def test_what_templates_of_transformers_use_is_there() -> None:
    template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% break %}{% endif %}{% endfor %}{{ messages | tojson | length }}"
    )
    [(whole, places, missing)] = rendered([TALK["messages"][:2]], template, {}, "m")
    assert whole == "2024Café77"
    assert (places, missing) == ([], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([TALK, {"text": "a"}], "line 2 is no conversation, unlike the first"),
        ([{"messages": [{"content": "a"}]}], "line 1 is no conversation"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "it has no token to score"),
    ],
)
def test_lines_that_are_no_conversations_are_one_error(lines: list[Any], what: str, tmp_path: Path) -> None:
    with pytest.raises((FormatError, ParameterError), match=what):
        rows_of(talks(tmp_path / "t.jsonl", *lines), 64)


def test_conversations_need_a_template_and_other_lines_are_text(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="conversations need the model's chat template, and it has none"):
        rows_of(talks(tmp_path / "t.jsonl", TALK), 64, template="")
    assert conversations(text_source(str(talks(tmp_path / "u.jsonl", {"text": "abc"})), None, 4, 0)) is None
    assert rows_of(tmp_path / "u.jsonl", 64).tokens == 2
    assert np.array_equal(rows_of(tmp_path / "u.jsonl", 64).ids, rows_of(words(tmp_path / "t.txt", "abc"), 64).ids)


@pytest.mark.long
def test_a_conversation_is_written_as_transformers_writes_it(tmp_path: Path) -> None:
    """With a template that has whitespace control, a filter and a loop."""
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{- bos_token }}\n{%- for m in messages %}\n    {%- if m['role'] == 'assistant' %}\n"
        "        {{- '<|assistant|>' + m['content'] | trim + '<|end|>' }}\n    {%- else %}\n"
        "{{ '<|user|>' + m.content }}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>", chat_template=template)
    expected = theirs.apply_chat_template(TALK["messages"], tokenize=True, return_dict=False)
    rows = rows_of(talks(tmp_path / "t.jsonl", TALK), 64, template=template)
    assert rows.ids[0].tolist() == list(expected)
    assert byte_tokenizer().decode(rows.ids[0][rows.nbytes[0] >= 0].tolist(), skip_special_tokens=False) == (
        "Café<|end|>No.<|end|>"
    )


def test_a_token_without_a_place_in_the_text_has_no_bytes() -> None:
    """And is not taken for one that is not scored."""
    encoding = SimpleNamespace(offsets=[(0, 1), (0, 0), (1, 3)])
    assert _bytes_of("aéz", encoding).tolist() == [1, 0, 3]
