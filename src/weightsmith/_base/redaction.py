r"""Secrets in texts: `redacted` hides them in everything that weightsmith says.

Every text that leaves the program goes through it: errors and warnings (`errors.Finding`), both streams and JSON (`text`),
pages (`pages`), and what other libraries write to stderr (`text.prepare_streams`). It hides

* what looks like a secret: the user and password of an address, query parameters such as `token`, `sig` or
  `X-Amz-Signature`, authorization headers, tokens of the Hub, account keys; also where YAML or JSON escapes a part of it;
* the values of the secrets of this process: environment variables whose name says so (HF_TOKEN, AWS_SECRET_ACCESS_KEY, ...),
  passwords in addresses that the environment holds (endpoints, proxies), the Hub token that is stored, tokens given to calls.

A value that reads like a name, a number or a path is not hidden where it stands alone: a variable SORT_KEY=weight must not
change what is said of weights. Texts that are data, such as a plan's JSON or a recipe in a model card, are not altered. A
recipe with a secret is refused.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_LEAST = 8
"""Characters of a value that is hidden wherever it occurs: shorter ones are parts of ordinary words."""
_ORDINARY = re.compile(r"[A-Z]?[a-z]{0,15}(?:[A-Z][a-z]{2,15})*|[A-Z]{1,15}|[0-9]{1,15}|[A-Za-z0-9]{1,7}")
"""A part, between punctuation, of names, numbers and paths: `Qwen2.5-7B-Instruct` has four. Keys have longer ones."""

_WORDS = (
    "token|secret|passw(?:or)?d|passphrase|signature|credential|(?:api|access|account|private|shared)[_-]?(?:access)?[_-]?key"
)
_PARAMETER = rf"(?:[\w.-]{{0,40}}(?:{_WORDS})[\w.-]{{0,40}}|sig|key|pwd|pass|auth|code|jwt|sas)"
_SECRET = re.compile(
    rf"(?:[?&;#]|%3F|%26)(?:amp;)?{_PARAMETER}(?:=|%3D)(?![{{$*\[])(?P<parameter>[^\s&;#\"'<>]+)"
    r"|\bAccountKey=(?P<account>[^\s;\"']+)"
    r"|\b(?:Authorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:Basic|Bearer|Token)\s|(?=\S*[0-9]))|Bearer\s(?=\S*[0-9]))(?P<header>[\w.~+/=-]{8,})"
    r"|\b(?P<hub>hf_[A-Za-z0-9]{20,})",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S+")
_PASSWORD = re.compile(r"(?!\[)[^/?#@:]*:(?!\d{1,5}(?:[/?#\"'<>),\]]|$))")
_PLACE = re.compile(r"[^/?#\"'<>]*")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U00([0-9A-Fa-f]{6})|(.))")

_NAMES = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|SAS|SIGNATURE|CONNECTION_STRING)$", re.IGNORECASE)
_PARTS = re.compile(r"(?:AccountKey|SharedAccessSignature|SharedAccessKey|\"private_key\")\s*[=:]\s*\"?([^;\"]+)")

_registered: set[str] = set()


def know(secret: object) -> None:
    """Hide this value from now on: a token that a call was given. Anything but text is no secret."""
    if isinstance(secret, str):
        _registered.add(secret)


def redacted(text: str) -> str:
    """The text without secrets.

    >>> redacted("GET https://me:hunter2@host/a?x=1&token=abc failed; see https://host:8080/org/name@main")
    'GET https://***@host/a?x=1&token=*** failed; see https://host:8080/org/name@main'
    """
    return redactor()(text)


def redactor(*, of_equal_length: bool = False) -> Callable[[str], str]:
    """`redacted`, for several texts: the secrets of the process are looked up once.

    of_equal_length  hide each character by one `*`, so that columns stay where they are

    >>> redactor(of_equal_length=True)("https://me:pw@host/a")
    'https://*****@host/a'
    """
    known = _secrets_now()

    def hidden(secret: str) -> str:
        return "*" * len(secret) if of_equal_length else HIDDEN

    def word(match: re.Match[str]) -> str:
        parts, at = list[str](), 0
        for start, end in _users(match[0]):
            parts += [match[0][at:start], hidden(match[0][start:end])]
            at = end
        return "".join([*parts, match[0][at:]])

    def parameter(match: re.Match[str]) -> str:
        start, end = match.span(match.lastgroup or 0)
        return match.string[match.start() : start] + hidden(match.string[start:end]) + match.string[end : match.end()]

    def plain(text: str) -> str:
        text = _WORD.sub(word, text) if "://" in text and "@" in text else text
        text = _SECRET.sub(parameter, text)
        return text if known is None else known.sub(lambda match: hidden(match[0]), text)

    def escaped(match: re.Match[str]) -> str:
        if "\\" not in match[0]:
            return match[0]
        meant = _unescaped(match[0])
        return match[0] if plain(meant) == meant else hidden(match[0])

    def hide(text: str) -> str:
        text = plain(text)
        return _WORD.sub(escaped, text) if "\\" in text else text

    return hide


def _unescaped(word: str) -> str:
    r"""A word with the characters that YAML's and JSON's escapes in it mean; a space for those that are in no secret.

    >>> print(_unescaped(r"https:\/\/me:\x68unter2\u0040host"))
    https://me:hunter2@host
    """

    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code:
            return chr(min(int(code, 16), 0x10FFFF))
        return " " if match[4].isalnum() else match[4]

    return _ESCAPE.sub(character, word)


def _users(word: str) -> Iterator[tuple[int, int]]:
    """Where passwords are in text without spaces: after `://`, before an `@`, with the user. A user alone may be a token."""
    end = 0
    while (mark := word.find("://", end)) >= 0:
        start = end = mark + 3
        # A password may hold a slash: one ends at the last @, unless what follows the colon is a port.
        place = _PLACE.match(word, start)
        at = word.rfind("@", start) if _PASSWORD.match(word, start) else word.rfind("@", start, place.end() if place else start)
        if at > start:
            if ":" in word[start:at] or not _is_ordinary(word[start:at]):
                yield start, at
            end = at


def redacted_values(value: Any) -> Any:
    """The texts of a tree of lists and dicts, keys too, without secrets.

    >>> redacted_values({"at": ["s3://KEY:SECRET@bucket"], "n": 1})
    {'at': ['s3://***@bucket'], 'n': 1}
    """
    hide = redactor()

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return hide(value)
        if isinstance(value, dict):
            return {walk(key): walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

    return walk(value)


def has_secret(text: str) -> bool:
    """Whether `redacted` changes the text."""
    return redacted(text) != text


def _is_ordinary(value: str) -> bool:
    """Whether a value reads like a name, a number or a path.

    >>> [_is_ordinary(value) for value in ("model.layers", "Qwen2.5-7B-Instruct", "hf_oZNsVjIxJgkYmLXYzT", "wJalrXUtnFEMI/K7")]
    [True, True, False, False]
    """
    return len(value) < _LEAST or all(_ORDINARY.fullmatch(part) for part in re.split(r"[\W_]", value))


def _secrets_now() -> re.Pattern[str] | None:
    """The values of this process's secrets; None if there is none."""
    # As the system has it: to decode a hundred variables for every text takes longer than to hide secrets in it.
    stored = dict(vars(os.environ).get("_data", os.environ))
    global _last
    environment, registered, pattern = _last
    if environment != stored or registered != _registered:
        registered = {*_registered}
        forms = {form for value in (*registered, *_values({**os.environ})) if not _is_ordinary(value) for form in _forms(value)}
        longest_first = sorted(forms, key=lambda value: (-len(value), value))
        pattern = re.compile("|".join(map(re.escape, longest_first))) if forms else None
        _last = stored, registered, pattern
    return pattern


_last: tuple[dict[Any, Any] | None, set[str], re.Pattern[str] | None] = None, set(), None


def _values(environment: dict[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _NAMES.search(name) and not os.path.exists(value):  # noqa: PTH110  it takes any text
            yield value
        yield from _PARTS.findall(value)
        if name.upper().endswith("_PROXY") and "://" not in value:  # clients add it
            value = f"http://{value}"
        for start, end in _users(value):
            user, colon, password = value[start:end].partition(":")
            yield from (password if colon else user, base64.b64encode(unquote(value[start:end]).encode()).decode())
    stored = _stored_token(environment)
    if stored:
        yield stored


def _forms(value: str) -> Iterator[str]:
    """A secret as addresses and JSON write it."""
    value = value.strip()
    yield from (value, quote(value, safe=""), unquote(value), json.dumps(value)[1:-1])


def _stored_token(environment: dict[str, str]) -> str:
    """The token that `hf auth login` stored, where huggingface_hub looks for it."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    try:
        path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
        return path.read_text(encoding="utf-8")[:1000].strip() if path.is_file() else ""
    except (OSError, ValueError, RuntimeError):
        return ""
