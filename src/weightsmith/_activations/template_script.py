"""Conversations as a chat template writes them. `bounded_script.py` runs it for `scored_rows.py`.

A template is a program from the internet, and Jinja's sandbox bounds neither its time nor its memory.

Input, JSON: {"template": …, "names": {"bos_token": …}, "talks": [[{"role": …, "content": …}, …], …]}. Output, one line of JSON
for each conversation: its text, where its answers begin and end in it, and how many of them have no such place: [text,
[[first, last], …], missing].
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

DOING = "it"
MAX_CHARACTERS = 1 << 28
"""The most characters of all texts together."""


def load() -> tuple[dict[str, Any], Any]:
    """The request on stdin, and the environment of the template."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # type: ignore[misc,unused-ignore]  # Jinja counts as having no types
        """`{% generation %}`: marks answers for training, and writes what is in it."""

        tags = {"generation"}  # noqa: RUF012  Jinja reads it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    # The day of the evaluation must not change its numbers.
    environment.globals["strftime_now"] = lambda form: datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC).strftime(form)
    return json.load(sys.stdin), environment


def run(loaded: tuple[dict[str, Any], Any]) -> None:
    """Write the conversations."""
    asked, environment = loaded
    template, written = environment.from_string(asked["template"]), 0

    def render(messages: list[Any], prompts: bool) -> str:
        return template.render(messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **asked["names"])

    for talk in asked["talks"]:
        placed = _placed(talk, render)
        written += len(placed[0])
        if written > MAX_CHARACTERS:
            sys.exit(f"its texts have more than {MAX_CHARACTERS:,} characters")
        print(json.dumps(placed), flush=True)


def _placed(talk: list[Any], render: Any) -> tuple[str, list[tuple[int, int]], int]:
    """The text of a conversation up to its last answer, and the places of the answers.

    An answer is what the text has after the prompt for it. If the template writes earlier turns in another way when the
    conversation goes on, they have no place in the text.
    """
    numbers = [i for i, message in enumerate(talk) if message.get("role") == "assistant"]
    if not numbers:
        return "", [], 0
    whole = render(talk[: numbers[-1] + 1], False)
    places, missing = [], 0
    for i in numbers:
        prompt, upto = render(talk[:i], True), render(talk[: i + 1], False)
        if upto.startswith(prompt) and whole.startswith(upto) and len(prompt) < len(upto):
            places.append((len(prompt), len(upto)))
        else:
            missing += 1
    return whole, places, missing
