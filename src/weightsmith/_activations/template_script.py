"""Conversations as a chat template writes them. Run by `conversations.py` in a process of its own.

A template is a program from the internet, and Jinja's sandbox bounds neither its time nor its memory. Here the system does:
memory and processor time of this process. No module of weightsmith is imported.

Input, JSON: {"template": …, "names": {"bos_token": …}, "talks": [[{"role": …, "content": …}, …], …]}. Output, one line of JSON
for each conversation: its text, where its answers begin and end in it, and how many of them have no such place: [text,
[[first, last], …], missing]. An error is a line on stderr and status 1.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from typing import Any

MAX_CHARACTERS = 1 << 28
"""Of all texts."""


def main() -> None:
    """Arguments: bytes of memory, besides what the libraries take, and seconds of processor time."""
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

    asked = json.load(sys.stdin)
    _limit(int(sys.argv[1]), int(sys.argv[2]))
    written = 0
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        # The day of the evaluation must not change its numbers.
        environment.globals["strftime_now"] = lambda form: datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC).strftime(form)
        template = environment.from_string(asked["template"])

        def render(messages: list[Any], prompts: bool) -> str:
            found: str = template.render(
                messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **asked["names"]
            )
            return found

        for talk in asked["talks"]:
            found = _placed(talk, render)
            written += len(found[0])
            if written > MAX_CHARACTERS:
                sys.exit(f"its texts have more than {MAX_CHARACTERS:,} characters")
            print(json.dumps(found), flush=True)
    except BrokenPipeError:
        raise
    except MemoryError:
        sys.exit(f"it takes more than {int(sys.argv[1]) >> 20:,} MiB of memory")
    except Exception as error:  # a template raises anything
        sys.exit((str(error).strip().splitlines() or [type(error).__name__])[0][:500])


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


def _limit(nbytes: int, seconds: int) -> None:
    """Bound the memory of this process to `nbytes` more than it has, and its processor time. Not on Windows."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with open("/proc/self/statm") as file:  # noqa: PTH123  fewer imports
            now = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
