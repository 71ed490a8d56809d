"""What the tokenizers of GGUF files have in common: tokens of special meaning, those that are added, what is around a text.

And what tokenizer.json says and a GGUF file cannot.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.strict_json import parse_object
from weightsmith._models.formats.gguf.base.values import token_id
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.tokenizers.convert import FLAGS, template
from weightsmith._models.tokenizers.vocabulary import SPACE, PieceKind

T = TypeVar("T")

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Settings of tokenizer_config.json, and llama.cpp's names of them before `_token_id`."""
OF_ENCODERS = {"cls_token": "cls", "sep_token": "seperator", "mask_token": "mask"}
"""More of them. llama.cpp spells the separator so."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer of the Hub's layout.

    tokenizer  tokenizer.json
    model      its model
    settings   tokenizer_config.json
    config     config.json
    added      those entries of `added_tokens` that have a row
    rows       of the embedding
    """

    tokenizer: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    added: Sequence[Mapping[str, Any]]
    rows: int


@dataclass(frozen=True, slots=True)
class TokenizerKeys:
    """A tokenizer in a GGUF file.

    tokens, types  of each row: text and llama.cpp's number of its kind
    values         other keys
    unsaid         normalisers that llama.cpp does not have, as in tokenizer.json
    """

    tokens: list[str]
    types: list[int]
    values: dict[str, Value]
    unsaid: list[Mapping[str, Any]]


_MAX_JSON_MEMORY = 2 << 30


def setting(keys: Mapping[str, Any], name: str, default: T, where: str) -> T:
    """A value of the type of its default."""
    value = keys.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not type(default):
        what = f"tokenizer.ggml.{name} is {show(value)}, not {'a text' if isinstance(default, str) else 'true or false'}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return value


def numbers_of(keys: Mapping[str, Any], name: str, default: float, tokens: Sequence[str], where: str) -> list[Any]:
    """A number for each token."""
    values = keys.get(f"tokenizer.ggml.{name}")
    numbers = [default] * len(tokens) if values is None else getattr(values, "tolist", list)()
    if len(numbers) != len(tokens):
        what = f"tokenizer.ggml.{name} has {len(numbers):,} numbers for {len(tokens):,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    return numbers


def added_tokens(tokens: Sequence[str], types: Sequence[int], marked: set[str | None]) -> list[dict[str, Any]]:
    """Tokens that are found in text as a whole: those of special meaning, and those that a user has defined."""
    return [
        {"id": i, "content": token, **FLAGS, "special": kind != PieceKind.USER_DEFINED or token in marked}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token and (kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED) or token in marked)
    ]


def object_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    return parse_object(files[name], name, name, "repair it, or download it again", unique=False, max_memory=_MAX_JSON_MEMORY)


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def is_token(number: object, token: object) -> bool:
    return type(number) is int and number >= 0 and isinstance(token, str)


def unwritable(what: str) -> Unsupported:
    fix = "try llama.cpp's convert_hf_to_gguf.py, which may know it, or choose another format"
    return Unsupported(f"a tokenizer that cannot be written to a GGUF file: {what}", where="tokenizer.json", fix=fix)


def special_ids(
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    added: Sequence[Mapping[str, Any]],
    vocab: Mapping[str, Any],
    rows: int,
    names: Mapping[str, str] = SPECIAL,
) -> dict[str, int]:
    """The tokens of special meaning: as tokenizer_config.json names them, else as config.json numbers them."""
    numbers = {**vocab, **{entry["content"]: entry["id"] for entry in added}}
    special: dict[str, int] = {}
    for name, key in names.items():
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = numbers.get(token) if isinstance(token, str) else None
        number = config.get(f"{name}_id") if number is None else number
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < rows:
            special[key] = number
    return special


def around_text(processor: object, *, pair: bool = False) -> list[str | None]:
    """What post-processors put around a text, or two, in order; None for a text, "" for what is no token."""
    processors = [processor] if isinstance(processor, dict) else []
    processors += [one for step in processors for one in list_of(step.get("processors")) if isinstance(one, dict)]
    around: list[str | None] = []
    for one in processors:
        parts = list_of(one.get("pair" if pair else "single"))
        around = [_name_in(part) for part in parts] or _by_kind(one, pair=pair) or around
    return around if len(around) > 1 else []


def _name_in(part: object) -> str | None:
    """The token of an entry of a template; None for a text."""
    special = part.get("SpecialToken") if isinstance(part, dict) else None
    name = special.get("id") if isinstance(special, dict) else None
    return name if isinstance(name, str) else None


def _by_kind(processor: Mapping[str, Any], *, pair: bool) -> list[str | None]:
    """What the processors of BERT and of RoBERTa put around a text; [] for others."""
    first, last = (list_of(processor.get(name))[:1] for name in ("cls", "sep"))
    between = {"BertProcessing": 1, "RobertaProcessing": 2}.get(str(processor.get("type")), 0)
    if not between or not all(isinstance(token, str) for token in (*first, *last)):
        return []
    return [*first, None, *([*last * between, None] if pair else []), *last]


# ---- tokenizers of encoders: WordPiece and Unigram


def around_values(files: TokenizerFiles, tokens: Sequence[str], vocab: Mapping[str, int]) -> dict[str, Value]:
    """The keys of tokens of special meaning, and of those around a text. Raises Unsupported for what llama.cpp cannot add."""
    numbers = {token: i for i, token in reversed(list(enumerate(tokens)))} | dict(vocab)
    numbers |= {entry["content"]: entry["id"] for entry in files.added}
    processor = files.tokenizer.get("post_processor")
    one = around_text(processor)
    names = {**SPECIAL, **OF_ENCODERS}
    special = special_ids(files.settings, files.config, files.added, vocab, files.rows, names)
    if one != [*one[:1], None, *one[-1:]] or not all(token in numbers for token in one if token is not None):
        raise unwritable(f"it puts {show(one)} around a text, and llama.cpp puts one token before it and one behind it")
    special |= {"bos": numbers[str(one[0])], "eos": numbers[str(one[2])]}
    special |= {"cls": special.get("cls", special["bos"]), "seperator": special["eos"]}
    values = {f"tokenizer.ggml.{key}_token_id": Value("u32", number) for key, number in special.items()}
    adds = {"bos": True, "eos": True, "sep": separators(processor) > 1}
    values |= {f"tokenizer.ggml.add_{end}_token": Value("bool", add) for end, add in adds.items()}
    return values


def separators(processor: object) -> int:
    """How many tokens a post-processor puts between two texts."""
    two = around_text(processor, pair=True)
    return len(two) - 2 - two.index(None) - two[::-1].index(None) if None in two else 0


def around_settings(
    keys: Mapping[str, Any], tokens: Sequence[str], where: str, *, typed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The post-processor of an encoder, and what tokenizer_config.json says. typed: a second text has the type 1."""
    special = {name: token_id(keys, key, len(tokens), where) for name, key in {**SPECIAL, **OF_ENCODERS}.items()}
    first, last = (special[name] for name in ("bos_token", "sep_token"))
    first = special["cls_token"] if first is None else first
    last = special["eos_token"] if last is None else last
    named = {name: tokens[number] for name, number in special.items() if number is not None}
    if typed:  # BERT has none
        named = {name: token for name, token in named.items() if name not in ("bos_token", "eos_token")}
    if first is None or last is None:
        return {}, named
    start, end, kind = tokens[first], tokens[last], int(typed)
    between = [end] * (2 if setting(keys, "add_sep_token", False, where) else 1)
    one = [(start, 0), ("A", 0), (end, 0)]
    two = [(start, 0), ("A", 0), *((token, 0) for token in between), ("B", kind), (end, kind)]
    named = {"cls_token": start, "sep_token": end, **named}
    return template(one, two, {start: first, end: last}), named


def steps_of(step: object, name: str) -> Iterator[Mapping[str, Any]]:
    """Each step of a normaliser or pre-tokenizer. name: of its list, if it is a sequence."""
    if isinstance(step, dict):
        inner = step.get(name)
        if step.get("type") == "Sequence" and isinstance(inner, list):
            for one in inner:
                yield from steps_of(one, name)
        else:
            yield step


# ---- What tokenizer.json says and a GGUF file cannot: spaces that a token swallows, whole words, and normalisers. llama.cpp
# splits a text at special tokens as they are, with one exception: in a model whose name has "phi-3" or "phi3", all but three of
# them swallow the spaces behind them. So `recognised_name` chooses a name by which it does what tokenizer.json says.


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
    swallow = stripping and stripping == listed - {*_PHI3_PLAIN} and listed.issuperset((*_PHI3_PLAIN, "</s>"))
    return name_like(name, "phi-3" if swallow else "")


def name_like(name: str, like: str) -> str:
    """A model's name, with "phi-3" if `like` has it, else without.

    >>> name_like("My Phi 3", "phi3-mini"), name_like("phi-3 and others", "")
    ('My Phi-3', 'phi 3 and others')
    """
    if not _PHI3.search(like):
        return _PHI3.sub(lambda match: f"{match[0][:3]} 3", name)
    if _PHI3.search(name):
        return name
    return _ALMOST_PHI3.sub("Phi-3", name, count=1) if _ALMOST_PHI3.search(name) else f"{name} (Phi-3)".lstrip()


def unsaid(
    tokenizer: Mapping[str, Any], added: Sequence[Mapping[str, Any]], name: str, *, pieces: bool, examples: Sequence[str]
) -> list[Finding]:
    """The warning that llama.cpp splits some texts otherwise, with an example of each kind; [] if it does not.

    added     entries of `added_tokens` that the file has
    name      of the model, from `recognised_name`
    pieces    the tokenizer is SentencePiece's, whose spaces are replaced
    examples  that are known already
    """
    listed = [*_flag_examples(added, phi3=_PHI3.search(name) is not None), *_normaliser_examples(tokenizer, pieces=pieces)]
    listed += _prefix_examples(tokenizer, added) if pieces else ()
    listed += examples
    if not listed:
        return []
    what = f"llama.cpp splits some texts otherwise than transformers, which a GGUF file cannot say: {'; '.join(listed)}"
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
