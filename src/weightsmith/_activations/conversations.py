"""Conversations: lines of a .jsonl file with `messages` or `conversations`, written as a model's chat template writes them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith._activations.bounded import BoundedScript
from weightsmith._activations.packages import missing
from weightsmith._activations.rows import read_lines
from weightsmith._base.errors import FormatError
from weightsmith._plans.statistics import TextSource

Conversation = Sequence[Mapping[str, Any]]
"""Messages: `role` and `content`, and whatever else a template reads."""

ROLES: Mapping[str, str] = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""What the names that ShareGPT has for the speakers are as roles of messages."""
RENDERING_BYTES = 512 << 20
"""Memory limit of rendering, on top of Jinja's own code."""
RENDERING_SECONDS = 20
"""Limit of its processor time, plus a second for each 100 conversations."""


def conversations(text: TextSource) -> Iterator[Conversation] | None:
    """The conversations of a text; None if its first line has none. Raises FormatError for a line without one."""
    if Path(text.source).suffix != ".jsonl":
        return None
    lines = read_lines(text)
    first = next(lines, None)
    if first is None or not isinstance(first[1], dict) or not {"messages", "conversations"} & first[1].keys():
        return None
    return (_checked(value, number, text.source) for number, value in itertools.chain([first], lines))


def _checked(value: Any, number: int, where: str) -> Conversation:
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(value, dict) and messages is None and isinstance(turns := value.get("conversations"), list):
        messages = [_message(turn) for turn in turns]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        what = f"line {number} is no conversation, unlike the first"
        raise FormatError(what, where=where, fix='write {"messages": [{"role": "user", "content": "…"}, …]} on each line')
    return messages


def _message(turn: Any) -> Any:
    """A turn of the form of ShareGPT, `from` and `value`, as a message; anything else as it is."""
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        return turn
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def rendered(
    talks: Sequence[Conversation], template: str, names: Mapping[str, str], where: str
) -> Iterator[tuple[str, list[tuple[int, int]], int]]:
    """The text of each conversation, where its answers begin and end in it, and how many answers have no such place.

    names  the special tokens that the template may use
    where  the model, for messages

    The template runs in a process with bounded memory and time. Raises FormatError if it fails or takes more; Unsupported
    without Jinja.
    """
    if problems := missing(("jinja2",), "chat templates", "calibration"):
        raise problems[0]
    seconds = RENDERING_SECONDS + len(talks) // 100
    asked = {"template": template, "names": dict(names), "talks": talks}
    with tempfile.TemporaryFile("w+") as given:
        json.dump(asked, given)
        given.seek(0)
        count = 0
        with BoundedScript("template_script", "it", RENDERING_BYTES, seconds, given) as script:
            for line in script.out:
                whole, answers, without = json.loads(line)
                yield whole, answers, without
                count += 1
            why = script.failure()
    if why or count < len(talks):
        what = f"the chat template failed: {why or 'it wrote too little'}"
        raise FormatError(what, where=where, fix="check the model's chat template, and the messages")
