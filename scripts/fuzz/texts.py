"""Texts for calibration, conversations and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng
from scripts.fuzz.mutators import mutate_bytes, mutate_json


def _make_texts() -> None:
    """Calibration texts, and a tokenizer for them. Parquet only where pyarrow is installed."""
    Path("m").mkdir()
    vocab = {character: i for i, character in enumerate("?abcdefghijklmnopqrstuvwxyz")}
    model = {"type": "BPE", "vocab": vocab | {"th": 27, "the": 28}, "merges": [["t", "h"], ["th", "e"]], "unk_token": "?"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
    Path("m/tokenizer.json").write_text(json.dumps(tokenizer))
    lines = [f"the quick brown fox {i} jumps over the lazy dog" for i in range(20)]
    Path("t.txt").write_text("\n".join(lines))
    rows = [{"text": line, "source": "x", "n": [1]} if i % 2 else {"a": line, "b": 1} for i, line in enumerate(lines)]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if _PARQUET:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pydict({"text": lines, "n": list(range(20))}), "t.parquet")


def mutate_text(rng: Rng, data: bytes) -> bytes:
    """A tokenizer with other values, a line with another value, or other bytes."""
    if data.startswith(b'{"version"'):
        return mutate_json(rng, data, ("vocab", "merges", "type", "unk_token", "normalizer", "pre_tokenizer", "pattern"))
    lines = data.split(b"\n")
    if data.startswith(b"{") and rng.random() < 0.7:
        i = rng.randrange(len(lines))
        lines[i] = mutate_json(rng, lines[i], ("text",)).replace(b"\n", b"")
        return b"\n".join(lines)
    return mutate_bytes(rng, data)


def _use_texts(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations.rows import rows_of, text_source

    text = file if file.startswith("t") else rng.choice(_TEXTS)
    yield lambda: rows_of(text_source(text, rng.choice((None, 2)), 16, 0), Path("m"), 64, 1)


def _make_conversations() -> None:
    """Chat-formatted texts and a chat template, with the tokenizer of `_make_texts`."""
    _make_texts()
    talk = [{"role": role, "content": f"{role} says the fox"} for role in ("system", "user", "assistant", "user", "assistant")]
    lines = [json.dumps({"messages": talk[i % 2 :], "source": "x"}) for i in range(6)]
    Path("talks.jsonl").write_text("\n".join(lines))
    Path("template.jinja").write_text(_TEMPLATE)


_TEMPLATE = """{%- macro turn(role) %}{{ bos_token ~ role | upper }}{{ "\\n" }}{% endmacro -%}
{%- if messages[0].role == "system" %}{{ messages[0].content | trim }}{% endif -%}
{%- for message in messages if message.role != "system" -%}
{{ turn(message.role) + message["content"] }}{% if message.content %}{{ eos_token }}{% endif %}
{%- endfor -%}
{%- set ns = namespace(n=0) -%}
{%- if add_generation_prompt %}{{ turn("assistant") }}{% endif -%}
"""
_JINJA = """
    {{ {% %} }} {%- -%} {# #} for in range(10**9) range(99999999) endfor if else endif set namespace macro endmacro messages
    message.role message.content loop.index loop.last raise_exception("no") strftime_now("%Y") tojson trim upper | ~ * 10**10
    "x" * 10**10 ().__class__.__mro__ self cycler joiner include "/etc/passwd" import extends block raw endraw none true
    bos_token eos_token add_generation_prompt tools documents generation endgeneration [] {} [0] [::-1] .format(1) break
""".split()


def mutate_conversations(rng: Rng, data: bytes) -> bytes:
    """A line with other messages, or a template with other expressions; or other bytes."""
    if data.startswith(b"{%-") and rng.random() < 0.8:
        text = data.decode(errors="replace")
        for _ in range(rng.randint(1, 4)):
            first, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 3, 10, 40))
            words = " ".join(rng.choice(_JINJA) for _ in range(rng.randint(0, 3)))
            text = text[:first] + rng.choice((words, "{{ " + words + " }}", "{% " + words + " %}")) + text[first + length :]
        return text.encode()
    lines = data.split(b"\n")
    if data.startswith(b'{"') and rng.random() < 0.8:
        i = rng.randrange(len(lines))
        lines[i] = mutate_json(rng, lines[i], ("messages", "role", "content", "assistant", "user", "tool_calls")).replace(
            b"\n", b""
        )
        return b"\n".join(lines)
    return mutate_bytes(rng, data)


def _use_conversations(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations import scored_rows
    from weightsmith._activations.rows import load_tokenizer, text_source
    from weightsmith._activations.scored_rows import Cutter

    scored_rows.RENDERING_SECONDS = 2  # a template may loop for as long as it is let
    names = {"bos_token": "a", "eos_token": "b"}

    def rows() -> Any:
        template = Path("template.jinja").read_text(errors="replace")
        cutter = Cutter(load_tokenizer(Path("m/tokenizer.json")), "m", 64, template, names)
        return cutter.rows(text_source("talks.jsonl", None, rng.choice((60, 200)), 0), 8)

    yield rows


_PARQUET = find_spec("pyarrow") is not None
_TEXTS = ("t.txt", "t.jsonl", *(["t.parquet"] if _PARQUET else []))


KINDS = {
    "calibration": Kind(_make_texts, ("m/tokenizer.json", *_TEXTS), mutate_text, _use_texts),
    "conversations": Kind(_make_conversations, ("talks.jsonl", "template.jinja"), mutate_conversations, _use_conversations),
}
