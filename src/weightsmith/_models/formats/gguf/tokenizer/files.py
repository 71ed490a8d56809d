"""The tokenizer's files from the keys of a GGUF file, and the keys from the tokenizer's files.

Two kinds of tokenizers are in GGUF files of the families that are read: byte-level BPE ("gpt2"), and SentencePiece's BPE with
a fallback to bytes ("llama"). For the first, the file names how text is split before merges (`tokenizer.ggml.pre`); for the
second, it has scores in place of merges.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.base.values import GgufConfig, token_id
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.tokenizer.chat import stops_of, template_keys, with_ends
from weightsmith._models.formats.gguf.tokenizer.kinds import (
    RANKS,
    ranked_tokenizer,
    unigram_keys,
    unigram_parts,
    wordpiece_keys,
    wordpiece_parts,
)
from weightsmith._models.formats.gguf.tokenizer.parts import (
    OF_ENCODERS,
    SPECIAL,
    TokenizerFiles,
    TokenizerKeys,
    added_tokens,
    around_settings,
    around_text,
    is_token,
    list_of,
    numbers_of,
    object_of,
    recognised_name,
    separators,
    setting,
    special_ids,
    unsaid,
    unwritable,
)
from weightsmith._models.formats.gguf.tokenizer.splits import BY_NAME, COMPOSED, GPT2, STARTED, splitting_of
from weightsmith._models.tokenizers.convert import (
    bpe,
    decoders,
    first_prefix,
    is_merge,
    replace,
    template,
    ways,
)
from weightsmith._models.tokenizers.files import json_bytes
from weightsmith._models.tokenizers.vocabulary import BYTES, SPACE, PieceKind, byte_level, byte_of, read_sentencepiece

READ = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", RANKS, "chat_template.jinja", "chat_template.json")
"""The files that the keys are made from, besides config.json, generation_config.json, and templates with a name."""

_MAX_CHARACTERS = 4_000_000  # of all tokens: 262,144 of them have 1.7 million
_ADDED_SCORE = -1000.0

_SHOWN = {
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
}
"""Tokens of special meaning that llama.cpp prints, because it reads answers by them."""

_FOUND_WHOLE = (PieceKind.CONTROL, PieceKind.USER_DEFINED, PieceKind.UNKNOWN)
"""Types of tokens that llama.cpp finds in a text as a whole."""


# ---- reading


def tokenizer_files(
    keys: Mapping[str, Any], architecture: GgufArchitecture, where: str
) -> tuple[dict[str, bytes], list[Finding]]:
    """tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file, and warnings.

    Equal in effect to what transformers makes of the same file. Raises FormatError for tokens and merges that contradict each
    other. Cost: 0.3 s for 50,000 tokens; about 3 s for 262,144 without merges, which are derived from the scores.
    """
    tokens, kind = keys.get("tokenizer.ggml.tokens"), keys.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not isinstance(kind, str) or kind not in (*_READ, architecture.tokenizer):
        what = f"the GGUF file has no tokenizer that can be read (tokenizer.ggml.model is {show(kind)})"
        return {}, [Finding(what, where, fix="copy the tokenizer's files into the output yourself")]
    if not all(isinstance(token, str) for token in tokens) or sum(map(len, tokens)) > _MAX_CHARACTERS:
        what = f"tokenizer.ggml.tokens is no list of texts, or they have more than {_MAX_CHARACTERS:,} characters"
        raise FormatError(what, where=where, fix=DAMAGED)
    if kind != "gpt2" and architecture.name.startswith("gemma"):  # in Gemma's files, runs of spaces are stored as such
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    parts_of = _byte_level if kind == "gpt2" and architecture.encodes else _ENCODER_PARTS.get(kind)
    if parts_of is not None:
        return _encoder_files(keys, tokens, parts_of, where), _guessed(keys, where)
    numbers = {name: token_id(keys, key, len(tokens), where) for name, key in SPECIAL.items()}
    special = {name: None if number is None else tokens[number] for name, number in numbers.items()}
    types = numbers_of(keys, "token_type", PieceKind.NORMAL, tokens, where)
    pre = setting(keys, "pre", "default", where)
    add_bos = setting(keys, "add_bos_token", kind != "gpt2" or pre in STARTED, where)
    add_eos = setting(keys, "add_eos_token", False, where)
    parts = _byte_level(keys, tokens, types, where) if kind == "gpt2" else _sentencepiece(keys, tokens, architecture, where)
    marked = set(special.values()) if kind != "gpt2" else set()
    first = [token] if add_bos and (token := special["bos_token"]) else []
    last = [token] if add_eos and (token := special["eos_token"]) else []
    one, two = [[(token, number) for token in (*first, name, *last)] for number, name in enumerate("AB")]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types, marked),
        **parts,
        "post_processor": template(one, one + two, {token: tokens.index(token) for token in (*first, *last)}),
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"add_bos_token": bool(first), "add_eos_token": bool(last)}
    config |= {name: token for name, token in special.items() if token is not None}
    if (chat := _chat_template(keys)) is not None:
        config["chat_template"] = chat
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    generation = {name: keys[f"tokenizer.ggml.{key}_token_id"] for name, key in ids.items() if special[f"{name[:-3]}"]}
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json_bytes(config),
        "generation_config.json": json_bytes({"_from_model_config": True, **generation}),
    }
    return files, _guessed(keys, where)


def _guessed(keys: Mapping[str, Any], where: str) -> list[Finding]:
    """A warning if the way in which a text is split is not known."""
    pre = setting(keys, "pre", "default", where)
    if pre in BY_NAME or keys.get("tokenizer.ggml.model") != "gpt2":
        return []
    what = f"tokenizer.json splits text as GPT-2's does, because the way called {show(pre)} (tokenizer.ggml.pre) is not known"
    return [Finding(what, where, fix="compare its tokens with those of the original tokenizer, unless you write a GGUF file")]


_Parts = Callable[[Mapping[str, Any], Sequence[str], Sequence[int], str], dict[str, Any]]
_ENCODER_PARTS: Mapping[str, _Parts] = {"bert": wordpiece_parts, "t5": unigram_parts}
_READ = ("gpt2", "llama", *_ENCODER_PARTS)
"""Values of tokenizer.ggml.model."""


def _encoder_files(keys: Mapping[str, Any], tokens: Sequence[str], parts_of: _Parts, where: str) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json with WordPiece or Unigram."""
    types = numbers_of(keys, "token_type", PieceKind.NORMAL, tokens, where)
    processor, named = around_settings(keys, tokens, where, typed=parts_of is wordpiece_parts)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, **named}
    tokenizer: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    tokenizer |= {"added_tokens": added_tokens(tokens, types, set(named.values()))}
    tokenizer |= {**parts_of(keys, tokens, types, where), "post_processor": processor or None}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json_bytes(config),
    }


def _byte_level(keys: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    """The parts of a tokenizer.json with byte-level BPE."""
    pre = setting(keys, "pre", "default", where)
    vocab = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        whole = kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED) or BYTES.keys() >= set(token)
        vocab[token if whole else byte_level(token.encode())] = i
    merges = _listed(keys, vocab, where)
    splitting = BY_NAME.get(pre)
    none = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": splitting.as_json() if splitting is not None else GPT2,
        "decoder": {**GPT2, "add_prefix_space": True},
        "model": bpe(vocab, merges, **none, ignore_merges=splitting is not None and pre in splitting.whole),
    }


def _listed(keys: Mapping[str, Any], vocab: Mapping[str, int], where: str) -> list[tuple[str, ...]]:
    """The merges of a file. Raises FormatError for one that gives no token."""
    listed = keys.get("tokenizer.ggml.merges")
    merges = [tuple(merge.split(" ")) for merge in listed] if isinstance(listed, list) else []
    for merge in merges:
        if not is_merge(merge, vocab):
            what = f"tokenizer.ggml.merges has {show(' '.join(merge))}, which is not two tokens that give a third"
            raise FormatError(what, where=where, fix=DAMAGED)
    return merges


def _sentencepiece(
    keys: Mapping[str, Any], tokens: Sequence[str], architecture: GgufArchitecture, where: str
) -> dict[str, Any]:
    """The parts of a tokenizer.json with SentencePiece's BPE."""
    scores = numbers_of(keys, "scores", 0.0, tokens, where)
    gemma = architecture.name.startswith("gemma")
    prefixed = not gemma
    if gemma:  # the scores do not follow the order of the merges, but the tokens do
        scores = [float(-i) for i in range(len(tokens))]
    marked = replace({"String": " "}, SPACE)
    normalizer: dict[str, Any] | None = None
    splitter: dict[str, Any] | None = None
    if gemma:
        normalizer = marked
        splitter = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    elif architecture.name == "phi3":
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, marked]}
    else:
        normalizer = marked
        prefixed = setting(keys, "add_space_prefix", True, where)
        splitter = first_prefix() if prefixed else None
    unknown = keys.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unknown] if gemma and unknown is not None else None
    numbers = {token: i for i, token in enumerate(tokens)}
    merges = _merges(numbers, scores) if architecture.tokenizer == "llama" else _listed(keys, numbers, where)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "decoder": {"type": "Sequence", "decoders": decoders(prefixed=prefixed)},
        "model": bpe(numbers, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True),
    }


def _merges(numbers: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary with scores implies, best first: every way to put a token together from two others."""
    merges = [
        (scores[i], len(first), len(second), first, second)
        for token, i in numbers.items()
        for first, second in ways(token, numbers)
    ]
    merges.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [merge[3:] for merge in merges]


def _chat_template(keys: Mapping[str, Any]) -> Any:
    """The chat template, or a list of several with names; None if there is none."""
    prefix = "tokenizer.chat_template"
    templates = [{"name": "default", "template": keys[prefix]}] if isinstance(keys.get(prefix), str) else []
    named_templates = keys.get(f"{prefix}s")
    for name in named_templates if isinstance(named_templates, list) else ():
        if isinstance(keys.get(f"{prefix}.{name}"), str):
            templates.append({"name": name, "template": keys[f"{prefix}.{name}"]})
    return templates[0]["template"] if len(templates) == 1 else templates or None


# ---- writing


def tokenizer_keys(
    files: Mapping[str, bytes], config: Mapping[str, Any], architecture: GgufArchitecture, rows: int, name: str
) -> tuple[dict[str, Value], list[Finding]]:
    """The keys of a GGUF file that describe the tokenizer, and the model's name, by which llama.cpp splits text; and warnings.

    files   the contents of those of `READ`, of generation_config.json and of templates with a name that the model has
    config  config.json, for tokens that the tokenizer's files do not name
    rows    of the embedding: tokens beyond them are left out, and rows without a token are called `[PAD17]`
    name    of the model, which may be spelled otherwise in the file

    Raises Unsupported for a tokenizer that llama.cpp does not know, FormatError for damaged files.
    """
    described = _described(files, config, rows)
    tokenizer, settings, added = dict(described.tokenizer), described.settings, described.added
    warnings, examples, encoders = list[Finding](), list[str](), _ENCODERS.get(str(described.model.get("type", "BPE")))
    if encoders is not None:
        result = encoders(described)
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": result.unsaid}
    else:
        result, warnings, examples = _bpe_keys(files, described, architecture)
    found_whole = [token for token, kind in zip(result.tokens, result.types, strict=True) if kind in _FOUND_WHOLE]
    stripping = frozenset(entry["content"] for entry in added if entry.get("rstrip") is True)
    name = recognised_name(name, found_whole, stripping)
    values = result.values | {"tokenizer.ggml.tokens": Value("str", result.tokens)}
    values |= {"tokenizer.ggml.token_type": Value("i32", result.types)}
    values |= {"general.name": Value("str", name)} if name else {}
    if architecture.encodes:
        count = GgufConfig(config).count("type_vocab_size", 1, least=0)
        values["tokenizer.ggml.token_type_count"] = Value("u32", max(1, count))
    pieces = encoders is None and bool(described.model.get("byte_fallback"))
    warnings += unsaid(tokenizer, added, name, pieces=pieces, examples=examples)
    return values | template_keys(files, settings, object_of(files, "chat_template.json")), warnings


_ENCODERS: Mapping[str, Callable[[TokenizerFiles], TokenizerKeys]] = {"WordPiece": wordpiece_keys, "Unigram": unigram_keys}
"""Models of tokenizer.json that encoders have."""


def _bpe_keys(
    files: Mapping[str, bytes], described: TokenizerFiles, architecture: GgufArchitecture
) -> tuple[TokenizerKeys, list[Finding], list[str]]:
    """The keys of a tokenizer with BPE, warnings, and examples of words that llama.cpp looks up or splits otherwise."""
    tokenizer, model, settings = described.tokenizer, described.model, described.settings
    config, added, rows = described.config, described.added, described.rows
    pieces = bool(model.get("byte_fallback"))
    tokens, types = _tokens_and_types(model["vocab"], added, architecture, rows, pieces=pieces)
    stops = stops_of((config, object_of(files, "generation_config.json")), rows)
    names = {**SPECIAL, **(OF_ENCODERS if architecture.encodes else {})}
    special = special_ids(settings, config, added, model["vocab"], rows, names)
    if settings.get("add_eos_token") is not False:
        special = _with_last(special, tokenizer.get("post_processor"), tokens)
    special, warnings = with_ends(special, stops, tokens, config.get("model_type"))
    if pieces and "unknown" in special:
        types[special["unknown"]] = PieceKind.UNKNOWN
    known = set(tokens)  # none beyond the rows
    merges = [pair for pair in _pairs(model.get("merges")) if known.issuperset((*pair, "".join(pair)))]
    examples: list[str] = []
    if pieces:
        values = _piece_values(tokenizer, files.get("tokenizer.model"), architecture, tokens, types, merges)
    else:
        whole = bool(model.get("ignore_merges"))
        splitting = splitting_of(tokenizer.get("pre_tokenizer"))
        pre = splitting.name(architecture, whole=whole)
        values = {
            "tokenizer.ggml.model": Value("str", "gpt2"),
            "tokenizer.ggml.pre": Value("str", pre),
            **_merge_values(merges),
        }
        if whole != (pre in splitting.whole) and (word := _unmerged(tokens, types, merges)):
            examples.append(f"{show(word)} (ignore_merges)")
        if splitting.apart and (word := _marked(tokens, types)):
            examples.append(f"{word!a} (combining marks)")
    values |= {f"tokenizer.ggml.{key}_token_id": Value("u32", number) for key, number in special.items()}
    if architecture.encodes:
        values["tokenizer.ggml.add_sep_token"] = Value("bool", separators(tokenizer.get("post_processor")) > 1)
    for end in ("bos", "eos"):
        adds = settings.get(f"add_{end}_token")
        adds = _adds(tokenizer.get("post_processor"), end, special, tokens) if not isinstance(adds, bool) else adds
        values[f"tokenizer.ggml.add_{end}_token"] = Value("bool", adds)
    return TokenizerKeys(tokens, types, values, []), warnings, examples


def _described(files: Mapping[str, bytes], config: Mapping[str, Any], rows: int) -> TokenizerFiles:
    """A tokenizer of which keys can be result. Raises Unsupported for one with another model."""
    tokenizer = object_of(files, "tokenizer.json") if "tokenizer.json" in files else ranked_tokenizer(files, rows)
    if tokenizer is None:
        fix = (
            "put the tokenizer.json into the model's folder (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
        raise Unsupported("no tokenizer.json, and a GGUF file contains its tokenizer", where="tokenizer", fix=fix)
    model = tokenizer.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else model
    vocab = list if kind == "Unigram" else dict
    if not isinstance(model, dict) or kind not in ("BPE", *_ENCODERS) or not isinstance(model.get("vocab"), vocab):
        raise unwritable(f"a model of the type {show(kind)}")
    entries = [entry for entry in list_of(tokenizer.get("added_tokens")) if isinstance(entry, dict)]
    added = [entry for entry in entries if is_token(entry.get("id"), entry.get("content")) and entry["id"] < rows]
    return TokenizerFiles(tokenizer, model, object_of(files, "tokenizer_config.json"), config, added, rows)


def _piece_values(
    tokenizer: Mapping[str, Any],
    sentencepiece: bytes | None,
    architecture: GgufArchitecture,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[tuple[str, str]],
) -> dict[str, Value]:
    """The keys of a tokenizer of SentencePiece's kind: scores, or merges. sentencepiece: its own file."""
    values = {"tokenizer.ggml.model": Value("str", architecture.tokenizer)}
    values["tokenizer.ggml.add_space_prefix"] = Value("bool", _has_prefix(tokenizer))
    if architecture.tokenizer != "llama":
        return values | _merge_values(merges)
    values["tokenizer.ggml.pre"] = Value("str", "default")
    values["tokenizer.ggml.scores"] = Value("f32", _scores(sentencepiece, tokens, types, merges))
    return values


def _merge_values(merges: Iterable[tuple[str, str]]) -> dict[str, Value]:
    texts = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    return {"tokenizer.ggml.merges": Value("str", texts)}


def _tokens_and_types(
    vocab: Mapping[str, Any], added: Sequence[Mapping[str, Any]], architecture: GgufArchitecture, rows: int, *, pieces: bool
) -> tuple[list[str], list[int]]:
    """The token of each row, and its type."""
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types: list[int] = [PieceKind.UNUSED] * rows
    for token, number in vocab.items():
        if is_token(number, token) and number < rows:
            tokens[number], types[number] = token, PieceKind.NORMAL
    for i, token in enumerate(tokens if pieces else ()):
        if types[i] == PieceKind.NORMAL and byte_of(token) is not None:
            types[i] = PieceKind.BYTE
    for entry in added:
        number, token = entry["id"], entry["content"]
        is_control = (bool(entry.get("special")) or _looks_special(token)) and token not in _SHOWN.get(
            architecture.tokenizer, ()
        )
        tokens[number] = token if is_control else token.replace(SPACE, " ")
        types[number] = PieceKind.CONTROL if is_control else PieceKind.USER_DEFINED
    return tokens, types


def _unmerged(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]) -> str:
    """A word that is a token and that no merge makes, as text; "" if there is none."""
    merged = {first + second for first, second in merges}
    for token, kind in zip(tokens, types, strict=True):
        word = token.removeprefix("\u0120")
        if kind == PieceKind.NORMAL and len(token) > 1 and word.isascii() and word.isalpha() and token not in merged:
            return token.replace("\u0120", " ")
    return ""


def _marked(tokens: Sequence[str], types: Sequence[int]) -> str:
    """A token with a combining mark behind a letter, as text; "" if there is none."""
    for token, kind in zip(tokens, types, strict=True):
        if kind == PieceKind.NORMAL and not token.isascii() and BYTES.keys() >= set(token):
            text = bytes(BYTES[character] for character in token).decode("utf-8", "ignore")
            if any(a.isalpha() and unicodedata.category(b).startswith("M") for a, b in pairwise(text)):
                return text
    return ""


def _looks_special(token: str) -> bool:
    """Tokens that some models do not mark as special, though they are."""
    names = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    around = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return token in names or any(token.startswith(a) and token.endswith(b) for a, b in around)


def _pairs(merges: object) -> list[tuple[str, str]]:
    """The merges, in whichever of the two forms of tokenizer.json."""
    pairs = []
    for merge in list_of(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise FormatError(f"the merge {show(merge)} is not two tokens", where="tokenizer.json", fix="download it again")
        pairs.append((pair[0], pair[1]))
    return pairs


def _has_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text."""
    steps = [tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")]
    for step in steps:  # a sequence's steps follow
        if isinstance(step, dict):
            steps += [*list_of(step.get("normalizers")), *list_of(step.get("pretokenizers"))]
            first = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            if step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and first != "never"):
                return True
    return False


def _scores(
    sentencepiece: bytes | None, tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]
) -> list[float]:
    """The scores by which llama.cpp merges, highest first: SentencePiece's, or else the order of the merges."""
    stated: dict[str, float] = {}
    if sentencepiece is not None:
        try:
            stated = {piece.text: piece.score for piece in read_sentencepiece(sentencepiece).pieces}
        except ValueError as error:
            what = f"not a SentencePiece model: {show(str(error))}"
            raise FormatError(what, where="tokenizer.model", fix="download it again") from error
    ranks: dict[str, int] = {}
    if not stated:
        for rank, (first, second) in enumerate(merges):
            ranks.setdefault(first + second, rank)
    scores = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (PieceKind.NORMAL, PieceKind.BYTE):
            scores.append(
                stated.get(token, 0.0) if stated else 0.0 if kind == PieceKind.BYTE else -float(ranks.get(token, len(merges)))
            )
        else:
            scores.append(stated.get(token, _ADDED_SCORE) if kind != PieceKind.UNUSED else -10_000.0)
    return scores


def _with_last(special: Mapping[str, int], processor: object, tokens: Sequence[str]) -> dict[str, int]:
    """Tokens of special meaning, where the end of a text is the token that the post-processor puts there.

    It may be another one than the tokenizer's, as in Qwen3-Embedding, whose vectors are those of this token. That of the
    tokenizer then ends a turn. The start is that of the post-processor if the tokenizer names none, as in ModernBERT.
    """
    around = around_text(processor)
    if around and around[0] in tokens:
        special = {"bos": tokens.index(around[0]), **special}
    last = around[-1] if around else None
    if last is None or last not in tokens or special.get("eos") == (number := tokens.index(last)):
        return dict(special)
    return {**({"eot": special["eos"]} if "eos" in special else {}), **special, "eos": number}


def _adds(processor: object, name: str, special: Mapping[str, int], tokens: Sequence[str]) -> bool:
    """Whether the post-processor puts the first or the last token of a text there."""
    around = around_text(processor)
    if not around or name not in special:
        return False
    return around[0 if name == "bos" else -1] == tokens[special[name]]
