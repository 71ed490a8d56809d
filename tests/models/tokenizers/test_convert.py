"""tokenizer.json from older files encodes text as they do. SentencePiece itself is the judge of SentencePiece models."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.tokenizer_help import OTHER_TEXT, SAMPLES, TEXT, ids, trained, write
from weightsmith._base.errors import Unsupported
from weightsmith._models.tokenizers.convert import convert
from weightsmith._models.tokenizers.vocabulary import Vocabulary, contents_of, read_vocabulary

SPACES = ["a" + " " * n + "b" for n in range(1, 24)] + [" " * n for n in range(20)]
TEXTS = [*SAMPLES, *SPACES, TEXT, OTHER_TEXT, "\u2581x", "a<0x41>b", "e\u0301 \ufb01 \u2460", "\t\tx\u00a0y"]


def converted(folder: Path, **content: bytes) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and its tokenizer_config.json."""
    write(folder, content)
    vocabulary = read_vocabulary("m", folder, list(content))
    assert vocabulary is not None
    data = contents_of(folder, list(content))
    conversion = convert(vocabulary, data)
    return Tokenizer.from_str(json.dumps(conversion.tokenizer)), conversion.settings(
        json.loads(data.get("tokenizer_config.json", b"{}"))
    )


def settings(**keys: object) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(keys).encode()}


# ---- SentencePiece


def sentencepiece(pieces: Sequence[tuple[str, float, int]], kind: int = 2, normalizer: bytes = b"\x20\x00") -> bytes:
    """A model: text, score and type of its pieces; BPE; without removing spaces."""
    data = b""
    for text, score, of in pieces:
        inner = (
            b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([of])
        )
        data += b"\x0a" + bytes([len(inner)]) + inner
    trainer = b"\x18" + bytes([kind]) + b"\x98\x02\x01"
    return data + b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a" + bytes([len(normalizer)]) + normalizer


LOWEST = -1e9
PIECES: list[tuple[str, float, int]] = [
    *[("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *((f"<0x{byte:02X}>", 0, 6) for byte in range(256))],
    *[("\u2581" * n, LOWEST, 1) for n in (2, 3, 4)],
    *[("\u2581b", -1, 1), ("ba", -2, 1), ("\u2581ba", -3, 1), ("ar", -4, 1), ("\u2581bar", -5, 1)],
    *[(piece, -10.0 - i, 1) for i, piece in enumerate(("\u2581", "a", "b", "r"))],
]


def test_spaces_are_merged_as_sentencepiece_does(tmp_path: Path) -> None:
    tokenizer, about = converted(tmp_path, **{"tokenizer.model": sentencepiece(PIECES)})
    expected = {
        "bar bar": ["\u2581bar", "\u2581bar"],
        "bar  bar": ["\u2581bar", "\u2581", "\u2581bar"],
        " bar": ["\u2581", "\u2581bar"],
        "a     ": ["\u2581", "a", "\u2581" * 4, "\u2581"],
        "": [],
        "\u00e9": ["\u2581", "<0xC3>", "<0xA9>"],
    }
    assert {text: tokenizer.encode(text, add_special_tokens=False).tokens for text in expected} == expected
    assert tokenizer.encode("bar<s>bar").tokens == ["<s>", "\u2581bar", "<s>", "\u2581bar"]
    assert tokenizer.decode(tokenizer.encode(" bar  bar").ids) == " bar  bar"
    assert about == {
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    oracle = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=sentencepiece(PIECES))
    assert {text: oracle.encode(text, out_type=str) for text in expected} == expected


def test_settings_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    model = {"tokenizer.model": sentencepiece(PIECES)}
    with_settings = settings(tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=False, add_eos_token=True)
    tokenizer, about = converted(tmp_path / "a", **model, **with_settings)
    assert tokenizer.encode("bar<s>bar").tokens == ["\u2581bar", "<s>", "ba", "r", "</s>"]  # no space after a special token
    assert (about["tokenizer_class"], about["legacy"]) == ("PreTrainedTokenizerFast", False)
    tokenizer, about = converted(tmp_path / "e", **model, **settings(bos_token="</s>"))
    assert (tokenizer.encode("ar").tokens, about["bos_token"]) == (["</s>", "\u2581", "ar"], "</s>")
    tokenizer, _ = converted(tmp_path / "b", **model, **settings(add_prefix_space=False))
    assert tokenizer.encode("bar", add_special_tokens=False).tokens == ["ba", "r"]


def test_tokens_that_a_sentencepiece_model_defines(tmp_path: Path) -> None:
    pieces = [*PIECES, ("\u2581\u2581\u2581\u2581\u2581", 0, 4), ("<b>", 0, 4)]
    no_prefix = b"\x18\x00\x20\x00"
    tokenizer, _ = converted(tmp_path, **{"tokenizer.model": sentencepiece(pieces, normalizer=no_prefix)})
    texts = ["bar" + " " * n + "bar<b>b" for n in range(9)]
    tokens = [tokenizer.encode(text, add_special_tokens=False).tokens for text in texts]
    assert tokens[5:7] == [["ba", "r", "\u2581" * 5, "ba", "r", "<b>", "b"], ["ba", "r", "\u2581" * 5, "\u2581bar", "<b>", "b"]]
    oracle = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_proto=sentencepiece(pieces, normalizer=no_prefix)
    )
    assert tokens == [oracle.encode(text, out_type=str) for text in texts]


EDGES = [
    f"{before}{text}{after}"
    for text in ("", "x", "The  dog", "a\tb", "fox \n dog", "東京 x")
    for before in ("", " ", "   ", "\t", "\n", " \n ")
    for after in ("", " ", "  ", "\t ", "\n")
]


def trained_model(kind: str, rule: str, *, prefix: bool, squeeze: bool, byte_fallback: bool) -> bytes:
    """A SentencePiece model, trained by the package."""
    oracle = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    oracle.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT.splitlines(), *OTHER_TEXT.splitlines(), "x < 0 > 41"] * 8),
        **{"model_writer": model, "model_type": kind, "vocab_size": 420, "byte_fallback": byte_fallback, "minloglevel": 2},
        **{"normalization_rule_name": rule, "add_dummy_prefix": prefix, "remove_extra_whitespaces": squeeze},
        **{"allow_whitespace_only_pieces": True, "hard_vocab_limit": False, "character_coverage": 1.0},
    )
    return model.getvalue()


def same(actual: list[int], expected: list[int], kind: str, judge: Any) -> bool:
    """Equal; of unigram pieces, or another segmentation that is as probable: SentencePiece takes any of them."""
    if kind == "bpe" or actual == expected:
        return actual == expected
    scores = [sum(map(judge.get_score, token_ids)) for token_ids in (actual, expected)]
    return judge.decode(actual) == judge.decode(expected) and scores[0] == pytest.approx(scores[1], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "rule", "prefix", "squeeze", "byte_fallback"),
    [  # every pair of settings
        (kind, rule, prefix, (kind == "bpe") == (rule == "identity"), (kind == "bpe") == prefix)
        for kind, rule, prefix in product(("bpe", "unigram"), ("identity", "nmt_nfkc"), (True, False))
    ],
)
def test_a_trained_sentencepiece_model(
    tmp_path: Path, kind: str, rule: str, prefix: bool, squeeze: bool, byte_fallback: bool
) -> None:
    """With and without `legacy`: it decides whether a space is put after special tokens too."""
    data = trained_model(kind, rule, prefix=prefix, squeeze=squeeze, byte_fallback=byte_fallback)
    oracle = pytest.importorskip("sentencepiece")
    judge = oracle.SentencePieceProcessor(model_proto=data)
    bare = oracle.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")  # the same without a space before a text
    legacy, _ = converted(tmp_path / "legacy", **{"spiece.model": data})
    first, _ = converted(tmp_path / "first", **{"spiece.model": data}, **settings(legacy=False))
    end = judge.eos_id()
    for text in (*TEXTS, *EDGES):
        for tokenizer in (legacy, first):
            actual, expected = ids(tokenizer, text), judge.encode(text)
            assert same(actual, expected, kind, judge), repr(text)
        if rule == "identity" and not squeeze and byte_fallback and "\u2581" not in text:
            assert first.decode(ids(first, text)) == text
    for before, after in zip(EDGES, reversed(EDGES), strict=True):
        actual = ids(legacy, f"{before}</s>{after}")
        cut = actual.index(end)
        assert same(actual[:cut], judge.encode(before), kind, judge), (before, after)
        assert same(actual[cut + 1 :], judge.encode(after), kind, judge), (before, after)
        actual = ids(first, f"{before}</s>{after}")
        cut = actual.index(end)
        assert same(actual[:cut], judge.encode(before), kind, judge), (before, after)
        if not squeeze:  # else one of the spaces after a special token stays
            assert same(actual[cut + 1 :], bare.encode(after), kind, judge), (before, after)


# ---- other files


def test_vocab_json_with_merges(tmp_path: Path) -> None:
    base = trained(special=["<|endoftext|>"])
    base.model.save(str(tmp_path))
    files = {name: (tmp_path / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    files["vocab.json"] = json.dumps(base.get_vocab()).encode()
    tokenizer, about = converted(tmp_path / "m", **files)
    assert tokenizer.get_vocab() == base.get_vocab()
    for text in TEXTS:
        assert ids(tokenizer, text) == ids(base, text)
    end = base.token_to_id("<|endoftext|>")
    assert ids(tokenizer, "fox<|endoftext|>") == [*ids(base, "fox"), end]
    assert about["eos_token"] == "<|endoftext|>"
    tokenizer, _ = converted(tmp_path / "b", **files, **settings(tokenizer_class="GPT2Tokenizer", add_bos_token=True))
    assert tokenizer.encode("fox").ids == [end, *ids(base, "fox")]
    tokenizer, _ = converted(tmp_path / "s", **files, **settings(add_prefix_space=True))
    assert ids(tokenizer, "fox") == ids(base, " fox")
    tokenizer, _ = converted(tmp_path / "q", **files, **settings(tokenizer_class="Qwen2Tokenizer"))
    assert ids(tokenizer, "e\u0301 12") == [*ids(base, "\u00e9"), *ids(base, " "), *ids(base, "1"), *ids(base, "2")]


def test_vocab_txt(tmp_path: Path) -> None:
    base = trained("WordPiece", ["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    vocab = sorted(base.get_vocab(), key=base.get_vocab().__getitem__)
    tokenizer, about = converted(tmp_path / "m", **{"vocab.txt": "\n".join(vocab).encode()})
    for text in TEXTS:
        assert ids(tokenizer, text) == ids(base, text)
    assert tokenizer.encode("fox", "dog").tokens == [
        "[CLS]",
        *base.encode("fox").tokens,
        "[SEP]",
        *base.encode("dog").tokens,
        "[SEP]",
    ]
    assert tokenizer.encode("fox", "dog").type_ids[-1] == 1
    assert about["mask_token"] == "[MASK]"
    tokenizer, _ = converted(
        tmp_path / "b", **{"vocab.txt": BERT, **settings(pad_token="[P]")}
    )  # has an id like any added token
    assert tokenizer.encode("fox[P]").tokens == ["[CLS]", "fox", "[P]", "[SEP]"]
    tokenizer, _ = converted(tmp_path / "c", **{"vocab.txt": "\n".join(vocab).encode()}, **settings(do_lower_case=False))
    assert tokenizer.encode("Fox", add_special_tokens=False).tokens == ["[UNK]"]


def test_tekken(tmp_path: Path) -> None:
    base = trained(special=[])
    vocabulary = Vocabulary("m", "byte-level BPE", base.get_vocab(), {})
    vocab = sorted(vocabulary.ids, key=vocabulary.ids.__getitem__)
    ranks = [{"token_bytes": base64.b64encode(vocabulary.key(token)).decode()} for token in vocab]
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    config = {"default_vocab_size": len(vocab) + 4, "default_num_special_tokens": 4, "pattern": pattern}
    tokenizer, about = converted(tmp_path, **{"tekken.json": json.dumps({"config": config, "vocab": ranks}).encode()})
    for text in TEXTS:
        assert [number - 4 for number in ids(tokenizer, text)] == ids(base, text)
    assert tokenizer.encode("fox[INST]").tokens == ["<s>", *base.encode("fox").tokens, "[INST]"]
    assert (about["bos_token"], about["eos_token"]) == ("<s>", "</s>")


# ---- what is refused

BERT = b"[UNK]\n[CLS]\n[SEP]\nfox"
TEKKEN = b'{"config": {"default_vocab_size": 1, "default_num_special_tokens": 1}, "vocab": []}'
RANKS = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate((b"a", b"b")))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tokenizer.model": RANKS}, "its special tokens and the rule that splits text are not in the file"),
        ({"vocab.txt": BERT, **settings(auto_map={"AutoTokenizer": ["x.Y", None]})}, "the model has code of its own for it"),
        ({"vocab.txt": BERT, **settings(tokenizer_class="HerbertTokenizer")}, "what HerbertTokenizer does with it is not in"),
        ({"tekken.json": TEKKEN, **settings(pad_token="[P]")}, r"'\[P\]' in tokenizer_config.json has no id"),
        ({"vocab.txt": b"fox"}, r"it has no \[UNK\], \[CLS\] or \[SEP\]"),
        ({"vocab.json": b'{"a": 0}'}, r"there is no merges.txt"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\na b\n"}, r"merges.txt has tokens that it lacks"),
        ({"spiece.model": sentencepiece(PIECES), **settings(tokenizer_class="T5Tokenizer")}, "what T5Tokenizer does with it"),
        ({"spiece.model": sentencepiece(PIECES, kind=3)}, "of words or characters"),
        ({"spiece.model": sentencepiece([*PIECES, ("x", 0, 5)])}, "it has pieces that are marked as unused"),
        ({"spiece.model": sentencepiece([*PIECES, ("\u2581x", 0, 4)])}, "and defines tokens of spaces"),
        ({"tekken.json": TEKKEN}, "no pattern"),
    ],
)
def test_what_is_not_in_the_files_is_refused(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        converted(tmp_path, **files)
