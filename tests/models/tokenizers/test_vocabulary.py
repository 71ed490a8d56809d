"""Tokens and ids from the files of each kind of tokenizer."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.tokenizer_help import files, trained, write
from weightsmith._base.errors import FormatError
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary, without_merges


def read(folder: Path, **content: bytes) -> Vocabulary | None:
    write(folder, content)
    return read_vocabulary("m", folder, list(content))


def piece(text: str, kind: int = 1) -> bytes:
    """A piece of a SentencePiece model: text, score -1.5, type."""
    data = text.encode()
    inner = b"\x0a" + bytes([len(data)]) + data + b"\x15\x00\x00\xc0\xbf" + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(inner)]) + inner


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    pieces = piece("<unk>", 2) + piece("<s>", 3) + piece("\u2581the") + piece("<0x0A>", 6) + piece("<|x|>", 4)
    vocabulary = read(tmp_path, **{"tokenizer.model": pieces + b"\x12\x02\x18\x02"})
    assert vocabulary is not None
    assert vocabulary.family == "SentencePiece BPE"
    assert vocabulary.ids == {"<unk>": 0, "<s>": 1, "\u2581the": 2, "<0x0A>": 3, "<|x|>": 4}
    assert {token: entry["special"] for token, entry in vocabulary.added.items()} == {"<s>": True, "<|x|>": False}
    assert vocabulary.as_bytes[b" the"] == 2
    assert vocabulary.as_bytes[b"\n"] == 3
    unigram = read(tmp_path, **{"spiece.model": pieces + b"\x12\x02\x18\x01"})
    assert unigram is not None
    assert unigram.family == "unigram"


NAN = b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f"
HUGE = b"\x0a\x08\x08" + b"\xff" * 6 + b"\x7f"
"""A piece whose text is a number: as a count of bytes it would be half a petabyte."""


@pytest.mark.parametrize(
    "data", [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x0b", b"\x0a\x03\x0a\x01\xff", HUGE, NAN]
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.model is not a SentencePiece model"):
        read(tmp_path, **{"tokenizer.model": data})


@pytest.mark.parametrize(
    ("data", "rest", "merges"),
    [
        (
            b'{"model": {"merges" : [ "a b" , "c \\" ]" ] , "x": 1}}',
            b'{"model": {"merges":[] , "x": 1}}',
            b'[ "a b" , "c \\" ]" ]',
        ),
        (b'{"m": {"merges": [["]", "\\\\"], ["a", "b"]]}}', b'{"m": {"merges":[]}}', b'[["]", "\\\\"], ["a", "b"]]'),
        (b'{"merges": [], "vocab": {"merges": 1}}', b'{"merges":[], "vocab": {"merges": 1}}', b"[]"),
        (b'{"vocab": {"x\\"merges\\": [\\"a\\"]": 3}}', b'{"vocab": {"x\\"merges\\": [\\"a\\"]": 3}}', b"[]"),
        (b'{"merges": [["a", "b", "c"]]}', b'{"merges": [["a", "b", "c"]]}', b"[]"),
        (b'{"merges": ["a b"', b'{"merges": ["a b"', b"[]"),
    ],
)
def test_merges_are_cut_out_of_a_tokenizer_json(data: bytes, rest: bytes, merges: bytes) -> None:
    assert without_merges(data) == (rest, merges)


def test_ranks_of_tiktoken(tmp_path: Path) -> None:
    lines = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate((b"a", b" the", b"\xc3\xa9")))
    for name in ("tokenizer.model", "qwen.tiktoken"):
        vocabulary = read(tmp_path / name, **{name: lines})
        assert vocabulary is not None
        assert (vocabulary.family, vocabulary.ids) == ("byte-level BPE", {"a": 0, "\u0120the": 1, "\u00c3\u00a9": 2})


def test_tekken(tmp_path: Path) -> None:
    ranks = [{"token_bytes": base64.b64encode(token).decode()} for token in (b"a", b" b", b"not used")]
    config = {"default_vocab_size": 4, "default_num_special_tokens": 2}
    tekken = {"config": config, "vocab": ranks, "special_tokens": [{"rank": 1, "token_str": "<s>"}]}
    vocabulary = read(tmp_path, **{"tekken.json": json.dumps(tekken).encode()})
    assert vocabulary is not None
    assert vocabulary.ids == {"a": 2, "\u0120b": 3, "<SPECIAL_0>": 0, "<s>": 1}
    with pytest.raises(FormatError, match="a token that is not base64"):
        read(tmp_path, **{"tekken.json": json.dumps(tekken | {"vocab": [{"token_bytes": "%"}]}).encode()})
    with pytest.raises(FormatError, match="has no vocabulary"):
        read(tmp_path, **{"tekken.json": b"{}"})


def test_older_files(tmp_path: Path) -> None:
    bpe = read(tmp_path / "gpt2", **{"vocab.json": b'{"a": 0, "b": 1}', "added_tokens.json": b'{"<x>": 2}', "merges.txt": b""})
    bert = read(tmp_path / "bert", **{"vocab.txt": b"[PAD]\n[CLS]\r\nthe\n##ing\n"})
    assert bpe is not None
    assert bert is not None
    assert (bpe.family, bpe.ids, list(bpe.added)) == ("byte-level BPE", {"a": 0, "b": 1, "<x>": 2}, ["<x>"])
    assert (bert.family, bert.ids) == ("WordPiece", {"[PAD]": 0, "[CLS]": 1, "the": 2, "##ing": 3})
    assert bert.as_bytes == {b" [PAD]": 0, b" [CLS]": 1, b" the": 2, b"ing": 3}
    assert read(tmp_path / "none", **{"config.json": b"{}"}) is None


def test_equal_files_are_read_once(tmp_path: Path) -> None:
    seen: dict[str, Vocabulary] = {}
    for name in "ab":
        write(tmp_path / name, files(trained()))
    first, second = (read_vocabulary(name, tmp_path / name, ["tokenizer.json"], seen) for name in "ab")
    assert first is second


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({"pad_token": "[PAD]"}, None),
        ({"pad_token": {"content": "[PAD]"}, "eos_token": "</s>", "bos_token": "<b>"}, {"pad_token": "<other>"}),
        ({"additional_special_tokens": ["<x>", "<s>"], "sep_token": "[SEP]"}, None),
        ({"extra_special_tokens": {"image_token": "<image>"}, "boi_token": "<boi>", "cls_token": None}, {"unk_token": "<u>"}),
        ({"extra_special_tokens": {"image_token": "<image>"}, "image_token": "<x>", "boi_token": "<boi>"}, None),
        ({"added_tokens_decoder": {"322": {"content": "<x>"}}, "pad_token": "[PAD]"}, {"unk_token": "<u>"}),
    ],
    ids=str,
)
def test_special_tokens_that_only_settings_name_have_the_ids_that_transformers_gives_them(
    tmp_path: Path, settings: dict[str, object], roles: dict[str, object] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    content = files(trained(), **settings)
    content |= {} if roles is None else {"special_tokens_map.json": json.dumps(roles).encode()}
    vocabulary = read(tmp_path, **content)
    assert vocabulary is not None
    assert dict(vocabulary.ids) == transformers.AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert all(map(vocabulary.is_special, vocabulary.added.keys() - {"<x>"}))


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3, "<unk>": 4}, "merges": [["a", "b"]], "unk_token": "<unk>"}
WORDPIECE = {
    **{"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2}, "unk_token": "[UNK]"},
    **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
}
UNIGRAM = {"type": "Unigram", "vocab": [[token, 0.0] for token in ("<s>", "<pad>", "b", "<unk>", "a")], "unk_id": 3}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        *((kind, BPE) for kind in ("LlamaTokenizerFast", "GemmaTokenizerFast", "GPT2Tokenizer", "CodeGenTokenizerFast")),
        *((kind, BPE) for kind in ("GPTNeoXTokenizerFast", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "CohereTokenizerFast")),
        *((kind, BPE) for kind in ("RobertaTokenizer", "PreTrainedTokenizerFast")),
        *((kind, WORDPIECE) for kind in ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")),
        *((kind, UNIGRAM) for kind in ("XLMRobertaTokenizer", "T5Tokenizer")),
    ],
)
def test_special_tokens_that_a_class_implies_come_before_those_that_settings_name(
    tmp_path: Path, kind: str, model: dict[str, object]
) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"tokenizer_class": kind, "sep_token": "<x>", "additional_special_tokens": ["<y>"]}
    vocabulary = read(
        tmp_path,
        **{
            "tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode(),
            "tokenizer_config.json": json.dumps(settings).encode(),
        },
    )
    assert vocabulary is not None
    assert dict(vocabulary.ids) == transformers.AutoTokenizer.from_pretrained(tmp_path, extra_ids=0).get_vocab()


SENTINELS = [f"<extra_id_{i}>" for i in range(4)]


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"extra_ids": 0}, {"extra_ids": 4, "pad_token": "<q>", "sep_token": "<x>"}),
        *({"extra_ids": 4, "additional_special_tokens": SENTINELS}, {"extra_ids": 0, "additional_special_tokens": SENTINELS}),
        {"extra_ids": 4, "additional_special_tokens": ["<y>", *SENTINELS]},
        {"extra_ids": 4, "added_tokens_decoder": {str(9 + i): {"content": SENTINELS[3 - i]} for i in range(4)}},
    ],
    ids=str,
)
def test_t5_puts_its_sentinels_after_the_pieces_the_first_one_last(tmp_path: Path, settings: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = piece("<pad>", 3) + piece("</s>", 3) + piece("<unk>", 2) + piece("\u2581a") + piece("b")
    settings_file = json.dumps({"tokenizer_class": "T5Tokenizer", **settings}).encode()
    vocabulary = read(tmp_path, **{"spiece.model": pieces + b"\x12\x02\x18\x01", "tokenizer_config.json": settings_file})
    assert vocabulary is not None
    assert dict(vocabulary.ids) == transformers.AutoTokenizer.from_pretrained(tmp_path).get_vocab()


def test_a_small_file_cannot_ask_for_millions_of_sentinels(tmp_path: Path) -> None:
    settings_file = json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 4_000_000}).encode()
    with pytest.raises(FormatError, match=r"tokenizer_config\.json has extra_ids 4,000,000, and at most 100,000 are supported"):
        read(tmp_path, **{"spiece.model": piece("a") + b"\x12\x02\x18\x01", "tokenizer_config.json": settings_file})


def test_no_rows_are_expected_for_tokens_that_a_class_alone_implies(tmp_path: Path) -> None:
    for settings in ({}, {"eos_token": "<s>"}, {"bos_token": "<x>"}):
        vocabulary = read(tmp_path, **files(trained(), tokenizer_class="Qwen2Tokenizer", **settings))
        assert vocabulary is not None
        assert "<|endoftext|>" not in vocabulary.ids
        assert vocabulary.ids.get("<x>") == (322 if "bos_token" in settings else None)


def test_no_ids_are_counted_where_an_unknown_class_may_add_tokens_of_its_own(tmp_path: Path) -> None:
    vocabulary = read(tmp_path, **files(trained(), tokenizer_class="CodeLlamaTokenizer", sep_token="<x>"))
    assert vocabulary is not None
    assert "<x>" not in vocabulary.ids


def test_added_tokens_json_counts_only_where_the_settings_list_no_added_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, settings in {"both": {"added_tokens_decoder": {"322": {"content": "<x>"}}}, "alone": {}}.items():
        content = files(trained(), **settings) | {"added_tokens.json": b'{"<y>": 322}'}
        vocabulary = read(tmp_path / name, **content)
        assert vocabulary is not None
        assert dict(vocabulary.ids) == transformers.AutoTokenizer.from_pretrained(tmp_path / name).get_vocab()
        assert ("<y>" in vocabulary.ids) == (name == "alone")


def test_names_that_code_or_another_package_numbers_are_left_to_it(tmp_path: Path) -> None:
    named = {"pad_token": "[PAD]"}
    own_code = files(trained(), **named, auto_map={"AutoTokenizer": ["tokens.Tokens", None]})
    ranks = {"tokenizer.model": base64.b64encode(b"a") + b" 0\n", "tokenizer_config.json": json.dumps(named).encode()}
    for folder, content in (("code", own_code), ("tiktoken", ranks)):
        vocabulary = read(tmp_path / folder, **content)
        assert vocabulary is not None
        assert "[PAD]" not in vocabulary.ids
