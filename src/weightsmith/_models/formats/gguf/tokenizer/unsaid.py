"""What tokenizer.json says and a GGUF file cannot: spaces that a token swallows, whole words, and normalisers.

llama.cpp splits a text at special tokens as they are, with one exception: in a model whose name has "phi-3" or "phi3", all but
three of them swallow the spaces behind them. So `recognised_name` chooses a name by which it does what tokenizer.json says.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._models.tokenizers.vocabulary import SPACE

_PHI3 = re.compile(r"phi-3|phi3", re.IGNORECASE)
_ALMOST_PHI3 = re.compile(r"phi 3", re.IGNORECASE)
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""The tokens of Phi-3 that swallow nothing. llama.cpp does not load a file with its name and without them, or without </s>."""

_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
_NORMALISERS: Mapping[str, Callable[[str], str]] = {
    **{form: partial(unicodedata.normalize, form) for form in _FORMS},
    "Nmt": lambda text: text.replace("\u200b", " "),
    "Precompiled": lambda text: unicodedata.normalize("NFKC", text),
    "Lowercase": str.lower,
    "BertNormalizer": str.lower,
    "StripAccents": lambda text: "".join(c for c in text if not unicodedata.combining(c)),
    "Strip": str.strip,
}
_EXAMPLES = ("A", "e\u0301", "\u00e9", "\ufb01", "\u200b", " a ")


def recognised_name(name: str, special: Iterable[str], stripping: frozenset[str]) -> str:
    """A model's name, with or without "phi-3" so that llama.cpp lets the right tokens swallow the spaces behind them.

    special    all tokens that are found in a text as a whole
    stripping  those of them that swallow the spaces behind them

    >>> recognised_name("Phi 3 Mini", ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|end|>"], frozenset({"</s>", "<|end|>"}))
    'Phi-3 Mini'
    >>> recognised_name("my-phi3", ["<s>"], frozenset())
    'my-phi 3'
    """
    listed = set(special)
    if stripping and stripping == listed - {*_PHI3_PLAIN} and listed.issuperset((*_PHI3_PLAIN, "</s>")):
        if _PHI3.search(name):
            return name
        return _ALMOST_PHI3.sub("Phi-3", name, count=1) if _ALMOST_PHI3.search(name) else f"{name} (Phi-3)".lstrip()
    return _PHI3.sub(lambda match: f"{match[0][:3]} 3", name)


def unsaid(
    tokenizer: Mapping[str, Any], added: Sequence[Mapping[str, Any]], name: str, *, pieces: bool, merged: str
) -> list[Finding]:
    """The warning that llama.cpp splits some texts otherwise, with an example of each kind; [] if it does not.

    added   entries of `added_tokens` that the file has
    name    of the model, from `recognised_name`
    pieces  the tokenizer is SentencePiece's, whose spaces are replaced
    merged  a word that llama.cpp looks up whole, or merges, and transformers does not; "" for none
    """
    examples = [*_flag_examples(added, phi3=_PHI3.search(name) is not None), *_normaliser_examples(tokenizer, pieces=pieces)]
    examples += _prefix_examples(tokenizer, added) if pieces else ()
    if merged:
        examples.append(f"{show(merged)} (ignore_merges)")
    if not examples:
        return []
    what = f"llama.cpp splits some texts otherwise than transformers, which a GGUF file cannot say: {'; '.join(examples)}"
    return [Finding(what, "tokenizer.json", fix="write prompts without such texts, or compare their tokens")]


def _flag_examples(added: Sequence[Mapping[str, Any]], *, phi3: bool) -> Iterator[str]:
    """A text for each flag that a token has and llama.cpp does not know."""
    for flag, text in (("rstrip", "{} a"), ("lstrip", "a {}"), ("single_word", "a{}a")):
        tokens = [entry["content"] for entry in added if entry.get(flag) and not (flag == "rstrip" and phi3)]
        if tokens:
            count = f" of {len(tokens):,} tokens" if len(tokens) > 1 else ""
            yield f"{show(text.format(tokens[0]))} ({flag}{count})"


def _prefix_examples(tokenizer: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """llama.cpp puts a space before a text behind a special token too, if it puts one before the first."""
    splitter = tokenizer.get("pre_tokenizer")
    listed = splitter.get("pretokenizers") if isinstance(splitter, dict) else None
    for step in [splitter, *(listed if isinstance(listed, list) else [])]:
        if added and isinstance(step, dict) and step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            yield f"{show(added[-1]['content'] + 'a')} (prepend_scheme first)"


def _normaliser_examples(tokenizer: Mapping[str, Any], *, pieces: bool) -> Iterator[str]:
    for normaliser in _normalisers(tokenizer.get("normalizer")):
        kind, pattern = normaliser.get("type"), normaliser.get("pattern")
        if kind == "Replace" and isinstance(pattern, dict):
            if pieces and pattern.get("String") == " " and normaliser.get("content") == SPACE:
                continue
            yield f"{show(next(iter(pattern.values()), ''))} (normalizer Replace)"
        elif kind == "Prepend":
            if not (pieces and normaliser.get("prepend") == SPACE):
                yield f"{show('a')} (normalizer Prepend)"
        elif isinstance(kind, str):
            change = _NORMALISERS.get(kind)
            text = next((text for text in _EXAMPLES if change is not None and change(text) != text), "")
            yield f"{text!a} (normalizer {kind})" if text else f"any text (normalizer {show(kind)})"


def _normalisers(normaliser: object) -> Iterator[Mapping[str, Any]]:
    """Each normaliser of a sequence."""
    if isinstance(normaliser, dict):
        listed = normaliser.get("normalizers")
        if normaliser.get("type") == "Sequence" and isinstance(listed, list):
            for step in listed:
                yield from _normalisers(step)
        else:
            yield normaliser
