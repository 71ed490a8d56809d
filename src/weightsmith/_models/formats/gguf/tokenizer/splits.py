"""How byte-level BPE splits a text before it merges: pre-tokenizers of tokenizer.json, and llama.cpp's names for them.

The names are values of `tokenizer.ggml.pre` (llama.cpp: src/llama-vocab.cpp). Most of its regular expressions are those of the
models' tokenizer.json, which comments there quote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.files import show
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.tokenizer.kinds import KIMI_SPLIT
from weightsmith._models.formats.gguf.tokenizer.parts import list_of, unwritable
from weightsmith._models.tokenizers.convert import QWEN2_SPLIT, Json

_BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2: Json = {**_BYTES, "use_regex": True}
"""Splits a text as GPT-2 does, and writes bytes as characters."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """One way to split a text.

    steps  pre-tokenizers of tokenizer.json, in order
    names  llama.cpp's names
    whole  names with which it looks up a whole word before it merges the word: `ignore_merges` of tokenizer.json
    apart  whether it ends a word at a combining mark, unlike tokenizer.json

    The first name is written.
    """

    steps: tuple[Json, ...]
    names: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    apart: bool = False

    def as_json(self) -> Json:
        """`pre_tokenizer` of tokenizer.json."""
        return self.steps[0] if len(self.steps) == 1 else {"type": "Sequence", "pretokenizers": list(self.steps)}

    def name(self, architecture: GgufArchitecture, *, whole: bool) -> str:
        """The name to write. whole: whether the tokenizer looks up a whole word; if llama.cpp cannot, the other name."""
        names = (*self.whole, *self.names) if whole else (*self.names, *self.whole)
        of_glm = [name for name in names if "glm" in name]  # with these, llama.cpp takes no token for the start of a text
        return of_glm[0] if of_glm and architecture.name.startswith("glm") else names[0]

    def is_written_as(self, steps: Sequence[Mapping[str, Any]]) -> bool:
        """Whether pre-tokenizers split a text in this way."""
        covering = len(steps) == 2  # the one pattern matches all of a text, so what matches may as well be kept
        alike = [_is_alike(known, step, covering=covering) for known, step in zip(self.steps, steps, strict=False)]
        return len(steps) == len(self.steps) and all(alike)


def _is_alike(known: Json, step: Mapping[str, Any], *, covering: bool) -> bool:
    """Whether a pre-tokenizer does what a known one does. Which characters it says a word came from does not matter."""
    if covering and (step.get("behavior"), step.get("invert")) == ("Removed", True):
        step = {**step, "behavior": "Isolated", "invert": False}
    step = {"add_prefix_space": False, "use_regex": True, "invert": False, **step, "trim_offsets": True}
    return all(step.get(key) == value for key, value in known.items())


def _pattern(expression: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _patterns(*expressions: str, digits: bool = False) -> tuple[Json, ...]:
    """Regular expressions, one after the other. digits: then each digit is a word."""
    return (*map(_pattern, expressions), *([_DIGITS] if digits else []), _BYTES)


_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_WORDS}\p{{N}}{{1,3}}|{_REST}"
_QWEN35 = QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (*[f"{_ENDINGS}?"] * 2, r"\p{N}{1,3}")
_SEED = rf"{_WORDS}\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
EXAONE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Several words with single spaces between them are one piece."""
_MINICPM5 = rf"{_WORDS}\p{{N}}+|{_REST}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_LINES = r"[^\n]+|[\n]+"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"
"""Digits in threes, counted from the last."""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_TRINITY = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3[2],
)
"""As llama.cpp splits a text for Trinity. Its tokenizer.json may say so in other words."""
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE)
_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-"
    "\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-"
    "\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that are large or small."""
_DEEPSEEK = (
    "[\r\n]",
    rf"\s?[{_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE,
)
_FALCON: tuple[Json, ...] = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    GPT2,
    {"type": "Digits", "individual_digits": False},
    _pattern("[0-9][0-9][0-9]"),
)

_LLAMA = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_BYTE_LEVEL = "gpt-2 phi-2 mpt olmo jais trillion gigachat a.x-4.0 mellum modern-bert exaone4 granite-docling roberta-bpe"
_JINA = "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"


def _named(steps: tuple[Json, ...], names: str, whole: str = "", *, apart: bool = False) -> Splitting:
    return Splitting(steps, tuple(names.split()), tuple(whole.split()), apart)


SPLITTINGS = (
    _named((GPT2,), f"{_BYTE_LEVEL} {_JINA}"),
    _named((_DIGITS, GPT2), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    _named(_FALCON, "falcon"),
    _named(_patterns(_LLAMA3), "smaug-bpe dbrx chatglm-bpe", f"{_LLAMA} glm4 glm5"),
    _named(_patterns(QWEN2_SPLIT), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    _named(_patterns(_QWEN35), "qwen35"),
    _named(_patterns(_LINES, QWEN2_SPLIT), "laguna"),
    _named(_patterns(_TEKKEN), "", "tekken", apart=True),
    _named(_patterns(_GPT4O), "gpt-4o llama4 kanana2 talkie minimax-m2", apart=True),
    _named(_patterns(_THOUSANDS, _GPT4O), "tiny_aya cohere2moe"),
    _named(_patterns(_SEED), "seed-coder"),
    _named(_patterns(*_DEEPSEEK, digits=True), "deepseek-llm"),
    _named(_patterns(*_DEEPSEEK_CODER, digits=True), "deepseek-coder"),
    _named(_patterns(*_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    _named(_patterns(*_TRINITY), "afmoe"),
    _named(_patterns(EXAONE), "exaone-moe"),
    _named(_patterns(KIMI_SPLIT), "kimi-k2", apart=True),
    _named(_patterns(_BAILING), "bailingmoe bailingmoe2 llada-moe"),
    _named(_patterns(r"\p{N}{1,3}", _MINICPM5), "", "minicpm5"),
)
BY_NAME = {name: splitting for splitting in SPLITTINGS for name in (*splitting.names, *splitting.whole)}
"""Each way, by llama.cpp's names."""

STARTED = frozenset([*_LLAMA.split(), "tekken"])
"""Names with which llama.cpp puts a token at the start of a text, unless a file says otherwise."""

COMPOSED = frozenset("qwen2 qwen35 command-r olmo mpt modern-bert".split())
"""Names of tokenizers that compose letters and their accents first (NFC), which llama.cpp does not do.

Those of Qwen, Cohere and GPT-NeoX in transformers; OLMo, MPT and ModernBERT have GPT-NeoX's.
"""


def splitting_of(splitter: object) -> Splitting:
    """The way in which `pre_tokenizer` of a tokenizer.json splits a text. Raises Unsupported if it is not known."""
    listed: list[Any] = [splitter]
    if isinstance(splitter, dict) and splitter.get("type") == "Sequence":
        listed = list_of(splitter.get("pretokenizers"))
    steps = [step if isinstance(step, dict) else {} for step in listed]
    for splitting in SPLITTINGS:
        if splitting.is_written_as(steps):
            return splitting
    raise unwritable(f"it splits text by {show(splitter)}")
