"""Which rows of a model serve for the tokens of another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightsmith._models.tokenizers.matching import WAYS, match, pieces_of, roles_of, same_roles
from weightsmith._models.tokenizers.vocabulary import Vocabulary


def tokens(family: Any, *pieces: str, special: tuple[str, ...] = ()) -> Vocabulary:
    ids = {piece: i for i, piece in enumerate((*pieces, *special))}
    return Vocabulary(family, family, ids, {s: {"id": ids[s], "content": s, "special": True} for s in special})


BYTES = tokens("byte-level BPE", "the", "\u0120the", "A", "\u010a", "\u00c3", "\u0120theory", special=("<s>", "<end>"))
SENTENCES = tokens("SentencePiece BPE", "<0x41>", "\u2581the", "<0x0A>", "<0xC3>", "the", "A", "<s>", special=("<bos>", "</s>"))


def matched(out: Vocabulary, model: Vocabulary, **options: Any) -> dict[str, tuple[int, str]]:
    options = {"roles": {"<s>": "<bos>", "<end>": "</s>"}, "size": len(model.ids), **options}
    matching = match(out, model, len(out.ids), **options)
    return {token: (int(matching.rows[i]), WAYS[matching.ways[i]]) for token, i in out.ids.items()}


def test_between_families_bytes_are_compared_and_special_tokens_by_role() -> None:
    assert matched(BYTES, SENTENCES) == {
        "the": (4, "same token"),
        "\u0120the": (1, "same token"),
        "A": (5, "same token"),  # the piece, not <0x41>, which no text gives
        "\u010a": (2, "same byte"),
        "\u00c3": (3, "same byte"),
        "\u0120theory": (-1, "missing"),
        "<s>": (7, "same role"),  # not the ordinary piece <s>
        "<end>": (8, "same role"),
    }


def test_bytes_and_prefixes_match_only_where_they_may() -> None:
    strict, loose = matched(BYTES, SENTENCES, byte=False), matched(BYTES, SENTENCES, prefix=True)
    assert strict["\u010a"] == (-1, "missing")
    assert strict["A"] == (5, "same token")
    assert loose["\u0120theory"] == (1, "prefix")
    assert matched(SENTENCES, tokens("SentencePiece BPE", "A"), roles={})["<0x41>"] == (0, "same byte")


def test_ghosts_have_no_row_and_padding_takes_padding() -> None:
    assert matched(BYTES, SENTENCES, size=5)["A"] == (-1, "missing")
    longer = match(BYTES, SENTENCES, 12, 12, {})
    assert longer.rows[8:].tolist() == [11, 9, 10, 11]  # 8 is a token of the model: its last row of padding
    assert {WAYS[way] for way in longer.ways[8:]} == {"no token"}
    same = match(BYTES, BYTES, 12, 10, {})
    assert same.rows.tolist() == [*range(10), -1, -1]
    assert same.missing.tolist() == [10, 11]


@pytest.mark.parametrize("kind", ["text", "object"])
def test_roles_come_from_the_settings_of_the_tokenizer_else_from_ids(tmp_path: Path, kind: str) -> None:
    bos: Any = "<s>" if kind == "text" else {"content": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "unk_token": "<none>"}))
    roles = roles_of(
        BYTES, tmp_path, ["tokenizer_config.json"], {"eos_token_id": [7, 3], "bos_token_id": 7, "pad_token_id": None}
    )
    assert roles == {"bos": "<s>", "eos": "<end>"}
    assert same_roles(roles, {"bos": "<bos>"}) == {"<s>": "<bos>"}


def test_pieces_are_the_fewest_and_the_longest_first() -> None:
    model = tokens("byte-level BPE", "a", "b", "ab", "abc", "c", "bcd", "d", "abcd", special=("cd",))
    ids = model.ids
    asked = [b"abcd", b"abab", b"abx", b"", b"a", b"abcab"]
    assert pieces_of(asked, model, len(ids)) == [
        (ids["abc"], ids["d"]),  # not abcd itself
        (ids["ab"], ids["ab"]),
        (),
        (),
        (),
        (ids["abc"], ids["ab"]),
    ]
    assert pieces_of([b"abcd"], model, ids["abc"]) == [()]  # ghosts are no pieces
