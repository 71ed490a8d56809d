"""Unions are judged on text: what the base encodes stays as it is, and each added token of the others is one id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.tokenizer_help import OTHER_TEXT, SAMPLES, files, ids, trained, write
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.tokenizers.matching import extend, missing_tokens
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary

FAMILIES = ["byte-level BPE", "SentencePiece BPE", "unigram", "WordPiece"]


def read(folder: Path, tokenizer: Tokenizer) -> Vocabulary:
    write(folder, files(tokenizer))
    vocabulary = read_vocabulary(folder.name, folder, [path.name for path in folder.iterdir()])
    assert vocabulary is not None
    return vocabulary


@pytest.mark.parametrize("family", FAMILIES)
def test_a_union_encodes_text_as_its_base_and_added_tokens_as_one_id(tmp_path: Path, family: str) -> None:
    base = trained(family)
    donor = trained(family, ["</s>", "<|im_start|>", "<|im_end|>", "[TOOL]"], text=OTHER_TEXT)
    donor.add_tokens(
        [AddedToken("<think>", normalized=False), *(AddedToken(text, normalized=False) for text in ("Fuchs", "\n\n"))]
    )
    first, second = read(tmp_path / "base", base), read(tmp_path / "donor", donor)
    assert (first.family, second.family) == (family, family)
    united = extend(first, missing_tokens(first, [second], ""), base.to_str().encode())
    plain = [token for token in ("Fuchs", "\n\n") if token not in first.ids]  # a piece of the base stays one
    new = ["<|im_start|>", "<|im_end|>", "[TOOL]", "<think>", *plain]
    assert list(united.new) == new
    tokenizer = Tokenizer.from_buffer(united.tokenizer)
    assert {t: n for t, n in tokenizer.get_vocab().items() if t not in new} == base.get_vocab()
    assert tokenizer.get_vocab() == dict(united.vocabulary.ids)
    for text in SAMPLES:
        if not any(token in text for token in new):
            assert ids(tokenizer, text) == ids(base, text), text
    for token in new:
        assert ids(tokenizer, token) == [united.vocabulary.ids[token]]
        assert united.vocabulary.ids[token] in ids(tokenizer, f"The fox{token}the dog")
    added = {e.content: e for e in tokenizer.get_added_tokens_decoder().values()}
    assert added["[TOOL]"].special
    assert not added["<think>"].special


@pytest.mark.parametrize("listed", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_no_added_token_is_left_out_whatever_it_looks_like(tmp_path: Path, listed: str) -> None:
    """Markers of tools that are not special, as DeepSeek's: no pair of brackets tells them from a word."""
    markers = ["\uff5cDSML\uff5c", "<dsml:", "</dsml:", "<\uff5c/table>\uff5c"]
    base, donor = trained(), trained(text=OTHER_TEXT)
    n = donor.get_vocab_size()
    entries = {str(n + i): {"content": token, "special": False, "normalized": False} for i, token in enumerate(markers)}
    if listed == "tokenizer.json":
        donor.add_tokens([AddedToken(token, normalized=False) for token in markers])
    write(tmp_path / "donor", files(donor, **({"added_tokens_decoder": entries} if listed == "tokenizer_config.json" else {})))
    if listed == "added_tokens.json":
        added = {token: n + i for i, token in enumerate(markers)}
        write(tmp_path / "donor", {"added_tokens.json": json.dumps(added).encode()})
    second = read_vocabulary("donor", tmp_path / "donor", ["tokenizer.json", "tokenizer_config.json", listed])
    assert second is not None
    first = read(tmp_path / "base", base)
    united = extend(first, missing_tokens(first, [second], ""), base.to_str().encode())
    assert list(united.new) == markers
    tokenizer = Tokenizer.from_buffer(united.tokenizer)
    for i, token in enumerate(markers):
        assert ids(tokenizer, f"a{token}b") == [*ids(base, "a"), base.get_vocab_size() + i, *ids(base, "b")]


def test_a_piece_that_tokenizer_config_lists_is_an_added_token(tmp_path: Path) -> None:
    """So transformers reads it: what tokenizer_config.json lists is added to tokenizer.json."""
    data = json.loads(trained(special=[]).to_str())
    n = len(data["model"]["vocab"])
    data["model"]["vocab"]["<dsml:"] = n
    listed = {str(n): {"content": "<dsml:", "special": False}, "7": {"content": "fox", "special": False}}
    config = json.dumps({"added_tokens_decoder": listed}).encode()
    write(tmp_path / "other", {"tokenizer.json": json.dumps(data).encode(), "tokenizer_config.json": config})
    other = read_vocabulary("other", tmp_path / "other", ["tokenizer.json", "tokenizer_config.json"])
    assert other is not None
    base = read(tmp_path / "base", trained())
    assert list(missing_tokens(base, [other], "")) == ["fox", "<dsml:"]
    ids_of = {**data["model"]["vocab"], "fox": n + 1}
    data["model"]["vocab"] = ids_of
    write(tmp_path / "other", {"tokenizer.json": json.dumps(data).encode()})
    other = read_vocabulary("other", tmp_path / "other", ["tokenizer.json", "tokenizer_config.json"])
    assert other is not None
    assert (other.ids["fox"], "fox" in other.added) == (n + 1, False)  # the piece has another id than the entry


def test_the_ids_of_the_base_never_change(tmp_path: Path) -> None:
    base = read(tmp_path / "base", trained())
    other = read(tmp_path / "other", trained(special=["</s>", "<s>", "<x>"], text=OTHER_TEXT))
    united = extend(base, missing_tokens(base, [other], ""), trained().to_str().encode()).vocabulary
    assert {t: united.ids[t] for t in base.ids} == dict(base.ids)
    assert united.ids["<x>"] == max(base.ids.values()) + 1


def test_a_piece_of_the_base_becomes_one_token_where_another_model_has_it_as_one(tmp_path: Path) -> None:
    data = json.loads(trained().to_str())
    n = len(data["model"]["vocab"])
    data["model"]["vocab"]["<|im|>"] = n
    data["added_tokens"] = []
    write(tmp_path / "base", {"tokenizer.json": json.dumps(data).encode()})
    base = read_vocabulary("base", tmp_path / "base", ["tokenizer.json"])
    assert base is not None
    other = read(tmp_path / "other", trained(special=["<|im|>", "!", "the"]))
    new = missing_tokens(base, [other], "")
    assert ("!" in base.ids, list(new)) == (True, ["<|im|>", "the"])  # "!" is in plain text; "the" is no piece of the base
    united = extend(base, new, json.dumps(data).encode())
    assert (united.vocabulary.ids["<|im|>"], united.vocabulary.ids["the"]) == (n, n + 1)
    assert ids(Tokenizer.from_buffer(united.tokenizer), "<|im|>") == [n]


def test_truncation_and_padding_of_a_training_run_are_removed_from_a_new_tokenizer(tmp_path: Path) -> None:
    base = trained("WordPiece")
    base.enable_truncation(4)
    base.enable_padding(length=4)
    first = read(tmp_path / "base", base)
    tokenizer = Tokenizer.from_buffer(extend(first, {"[X]": {}}, base.to_str().encode()).tokenizer)
    base.no_truncation()
    base.no_padding()
    text = "the quick brown fox jumps over the lazy dog"
    assert ids(tokenizer, text) == ids(base, text)
    assert len(ids(tokenizer, text)) > 4


def test_tokens_that_only_tokenizer_config_lists_keep_their_ids(tmp_path: Path) -> None:
    base = trained()
    n = base.get_vocab_size()
    write(tmp_path, files(base, added_tokens_decoder={str(n): {"content": "<pad>", "special": True}}))
    first = read_vocabulary("base", tmp_path, ["tokenizer.json", "tokenizer_config.json"])
    assert first is not None
    assert first.ids["<pad>"] == n
    tokenizer = Tokenizer.from_buffer(extend(first, {"<x>": {}}, base.to_str().encode()).tokenizer)
    assert (tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("<x>")) == (n, n + 1)


def test_ids_with_gaps_are_refused_because_readers_would_number_the_new_tokens_otherwise(tmp_path: Path) -> None:
    data = json.loads(trained(special=[]).to_str())
    data["model"]["vocab"]["zz"] = 5000
    write(tmp_path, {"tokenizer.json": json.dumps(data).encode()})
    first = read_vocabulary("base", tmp_path, ["tokenizer.json"])
    assert first is not None
    with pytest.raises(Unsupported, match="its ids have gaps"):
        extend(first, {"<x>": {}}, json.dumps(data).encode())


def test_families_that_cannot_be_united_are_refused_with_what_works(tmp_path: Path) -> None:
    first, second = read(tmp_path / "a", trained()), read(tmp_path / "b", trained("SentencePiece BPE"))
    with pytest.raises(Unsupported) as caught:
        missing_tokens(first, [second], "r.yml:3:1")
    assert str(caught.value) == (
        "r.yml:3:1: tokenizers of different families cannot be united\n"
        "  a: byte-level BPE\n  b: SentencePiece BPE\n"
        "  -> Use 'tokenizer_source: base', or the model whose tokenizer you want: rows are then found by the bytes of their "
        "tokens."
    )


def test_tokens_of_different_families_are_compared_as_bytes(tmp_path: Path) -> None:
    first, second = read(tmp_path / "a", trained()), read(tmp_path / "b", trained("SentencePiece BPE"))
    find = second.find(first)
    assert find("Ġfox") == second.ids["\u2581fox"]
    assert find("Ċ") == second.ids["\n"] == trained("SentencePiece BPE").token_to_id("\n")  # not <0x0A>, which no text gives
    assert find("</s>") == second.ids["</s>"]
    assert find("Ġzebra") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "has no model"),
        (b'{"model": {"vocab": {"a": -1}}}', "has a vocabulary that is neither"),
        (b'{"model": {"vocab": {"a": 1e9}}}', "has a vocabulary that is neither"),
        (b'{"model": {"vocab": [["a"], []]}}', "has a vocabulary that is neither"),
        (b'{"model": {"vocab": {}}, "added_tokens": 3}', "has added tokens that are not a list"),
        (b'{"model": {"vocab": {}}, "added_tokens": [{"content": 3, "id": 1}]}', "has an added token without content or id"),
        (b'{"model": {"vocab": {}}, "added_tokens": [{"content": "a", "id": 99999999}]}', "has an added token without"),
        (b"[" * 100 + b"]" * 100, "is JSON nested too deeply"),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    write(tmp_path, {"tokenizer.json": content})
    with pytest.raises(FormatError) as caught:
        read_vocabulary("m", tmp_path, ["tokenizer.json"])
    assert said in str(caught.value)
    assert "m: tokenizer.json" in str(caught.value)
