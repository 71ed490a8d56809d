"""Which of a model's chat templates a GGUF file has: those that transformers uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from weightsmith._models.formats.gguf.tokenizer.chat import NAMED_TEMPLATE, template_keys

LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("stated", "files"),
    [
        ("A", {}),
        (None, {"chat_template.jinja": "B"}),
        ("A", {"chat_template.jinja": "B"}),
        (LISTED, {}),
        (LISTED, {"chat_template.jinja": "B"}),
        (None, {"chat_template.jinja": "B", "additional_chat_templates/tool_use.jinja": "C"}),
        (
            "A",
            {
                "chat_template.jinja": "B",
                "additional_chat_templates/rag.jinja": "R",
                "additional_chat_templates/x-1.jinja": "X",
            },
        ),
        (None, {}),
    ],
)
def test_a_file_has_the_templates_that_transformers_uses(stated: Any, files: dict[str, str], tmp_path: Path) -> None:
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (tmp_path / name).write_bytes(content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if stated is None else {"chat_template": stated})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template
    expected = {"default": expected} if isinstance(expected, str) else expected or {}
    keys = {name: value.value for name, value in template_keys({n: t.encode() for n, t in files.items()}, settings, {}).items()}
    named = {name: text for name, text in expected.items() if name != "default"}
    assert keys.get("tokenizer.chat_template") == expected.get("default")
    assert keys.get("tokenizer.chat_templates", []) == [name.replace("-", "_") for name in named]
    assert [keys[f"tokenizer.chat_template.{name.replace('-', '_')}"] for name in named] == list(named.values())


def test_the_template_of_a_processor_is_the_last_choice() -> None:
    old = {"chat_template": "P"}
    assert template_keys({}, {}, old)["tokenizer.chat_template"].value == "P"
    assert template_keys({}, {"chat_template": "A"}, old)["tokenizer.chat_template"].value == "A"
    assert template_keys({}, {"chat_template": 7}, {"chat_template": [7, {"name": 1, "template": "x"}]}) == {}


def test_only_templates_in_their_folder_have_names() -> None:
    names = ("additional_chat_templates/tool_use.jinja", "additional_chat_templates/../x.jinja", "other/tool_use.jinja")
    assert [NAMED_TEMPLATE.fullmatch(name) is not None for name in names] == [True, False, False]
