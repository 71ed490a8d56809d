"""What is hidden as a secret, and what is not: names, numbers and paths, even if a variable of the environment has them."""

from __future__ import annotations

import os

import pytest

from weightsmith._base import redaction
from weightsmith._base.errors import Finding
from weightsmith._base.redaction import redacted
from weightsmith._base.text import table
from weightsmith._planning.recipe import load

TEXT = "./models/a/model.safetensors: model.layers.0.weight of Qwen2.5-7B-Instruct in us-west-2, 12345678 tensors, bfloat16"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SORT_KEY", "model.layers"),
        ("SORT_KEY", "safetensors"),
        ("MODEL_KEY", "Qwen2.5-7B-Instruct"),
        ("API_KEY", "12345678"),
        ("SSH_KEY", "./models/a"),
        ("AWS_DEFAULT_REGION", "us-west-2"),
        ("X_TOKEN", "Instruct"),
        ("HTTPS_PROXY", "http://tensors:tensors@proxy:8080"),
    ],
)
def test_names_numbers_and_paths_are_not_hidden(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert redacted(TEXT) == TEXT
    assert value.partition("//")[2] == "" or "tensors:tensors" not in redacted(value)
    recipe = f"# {TEXT}\nmerge_method: linear\nmodels:\n- {{model: a, parameters: {{weight: 1}}}}\n"
    assert load(recipe).recipe.text == recipe


@pytest.mark.parametrize(
    "value",
    [
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "/K7MDENGbPxRfiCYEXAMPLEKEYwJalrXUtnFEMI",
        "oZNsVjIxJgkYmLXYzTqbiMWjGQCvVLdUwD",
        "sk-proj-4f9a8b7c6d5e4f3a2b1c",
        "123e4567-e89b-12d3-a456-426614174000",
        "correcthorsebatterystaple",
        "p4ssw0rd",
        "пароль-длинный",
    ],
)
def test_keys_are_hidden_wherever_they_stand(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", value)
    assert redacted(f"before {value} after") == "before *** after"


def test_a_change_of_the_environment_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("firstS3cret1", "secondS3cret2"):
        assert redacted(key) == key
        monkeypatch.setenv("MY_TOKEN", key)
        assert redacted(key) == "***"
    monkeypatch.delenv("MY_TOKEN")
    assert redacted(key) == key


def test_the_environment_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 100,000 tensors has a million texts."""
    searched = []
    real = redaction._values
    monkeypatch.setattr(redaction, "_values", lambda environment: searched.append(1) or real(environment))
    monkeypatch.setenv("MY_TOKEN", "firstS3cret1")
    monkeypatch.setattr(type(os.environ), "items", lambda self: pytest.fail("the whole environment is decoded"))
    for _ in range(100):
        redacted("text")
        Finding("what", "where", ("details",), "fix")
        table(("tensor",), [("a",)] * 3)
    assert searched == [1]


@pytest.mark.parametrize(
    "text",
    [
        "see ssh://git@github.com/org/name and hf://gpt2@main",
        "requests.get(f'{url}?token={token}&key=$KEY')",
        "Authorization: required; the Bearer tokenizer_config",
        "https://host/model?token=***",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "written",
    [
        r'"https:\/\/me:p4ssw0rdS@host/a"',
        r'"https://me:p4ssw0rdS\u0040host/a"',
        r'"https://host/a?tok\U00000065n=p4ssw0rdS"',
        r'"\x70\x34ssw0rdS"',
    ],
)
def test_escapes_of_yaml_hide_no_secret(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is shown nor from the check of a recipe, which would be stored with the model."""
    if "://" not in redaction._unescaped(written):
        monkeypatch.setenv("MY_TOKEN", "p4ssw0rdS")
    assert redacted(f"a: {written} # b") == "a: *** # b"
    recipe = f"merge_method: linear\nmodels:\n- {{model: {written}, parameters: {{weight: 1}}}}\n"
    [problem, *_] = [problem for problem in load(recipe).problems if "password" in str(problem)]
    assert problem.finding.where.startswith("<text>:3:")


def test_other_backslashes_stay() -> None:
    for text in (r"C:\models\new and \x41\u0042", "a \\", "\\" * 1001):
        assert redacted(text) == text


def test_a_user_alone_is_hidden_if_it_may_be_a_token() -> None:
    assert redacted("https://ghp_16C7e42F292c6912E7710c838347Ae178B4a@host/a") == "https://***@host/a"


@pytest.mark.parametrize("start", ["", "http://"])
def test_the_password_of_a_proxy_is_known_with_and_without_a_scheme(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"{start}me:p4ssw0rdS@host:8080")
    assert redacted("cannot connect to URL('me:p4ssw0rdS@host:8080')") == "cannot connect to URL('me:***@host:8080')"
