"""Patterns of adapters: the results of Python's `re`, as PEFT uses it, in bounded time."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping

import pytest

from tests.work import steps
from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._models.lora import config as patterns

PARTS = r"a b ab . \. \- [ab] [^a] [a-c] (a|b) (ab|a)* (?:a|) a? b+ b*? a{1,2} a{2} ^ $ \w \d - ] { {} | ( )".split()
NAMES = ["a", "b", "ab", "a.b", "aa", "a.a.b", "ab.ab", "b-a", "a]b", "aab.b.a", "a{", "{}", "7.a"]
MODULE = "model.layers.10.self_attn.q_proj"


def compiled(numbers: Mapping[str, float]) -> patterns.ModulePatterns:
    return patterns.ModulePatterns(numbers, "rank_pattern", "here")


def peft(numbers: Mapping[str, float], name: str) -> float:
    """As `get_pattern_key` of peft finds the key."""
    return next((number for text, number in numbers.items() if re.match(rf"(?:.*\.)?(?:{text})$", name)), -1)


@pytest.mark.long
def test_patterns_mean_what_they_mean_to_re() -> None:
    rng = random.Random(1)
    compared = fitting = 0
    while compared < 20_000:
        texts = ["".join(rng.choices(PARTS, k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        numbers = {text: float(i) for i, text in enumerate(texts)}
        try:
            for text in numbers:
                with warnings.catch_warnings(action="ignore"):
                    re.compile(text)
        except re.error:
            continue
        module_patterns = compiled(numbers)
        for name in NAMES:
            expected = peft(numbers, name)
            assert module_patterns.find(name, -1) == expected, (numbers, name)
            compared, fitting = compared + 1, fitting + (expected >= 0)
    assert compared / 10 < fitting < compared / 2, "the sample says little"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("q_proj", True),
        ("proj", False),
        ("self_attn.q_proj", True),
        ("self_attn_q_proj", False),
        ("self.attn.q.proj", True),  # a dot is any character
        ("^model.layers.10.self_attn.q_proj", True),
        ("^layers.10.self_attn.q_proj", False),
        ("layers.1.self_attn.q_proj", False),
        (r"layers\.(1|10)\.self_attn\.[qkv]_proj", True),
        (r"layers\.\d+\..*_proj$", True),
        (r".*", True),
        ("", False),
    ],
)
def test_a_module_is_found(text: str, fits: bool) -> None:
    assert (compiled({text: 5}).find(MODULE, 2) == 5) == fits == bool(peft({text: 0}, MODULE) == 0)


def test_the_first_that_fits_decides() -> None:
    module_patterns = compiled({"other": 1, r"layers\.\d+\.self_attn\..*": 2, "q_proj": 3, MODULE: 4})
    assert module_patterns.find(MODULE, 0) == 2
    assert module_patterns.find("q_proj", 0) == 3
    assert module_patterns.find("k_proj", 0) == 0


@pytest.mark.parametrize(
    "text", ["a?" * 36 + "a" * 36 + "b", ".*.*.*.*.*.*.*.*x", "(a|a)" * 100 + "b", "(a*)*b", "(a+)+b", "((a?){20}){20}b"]
)
def test_time_is_linear_in_the_name(text: str) -> None:
    """With Python's own patterns each of these takes for ever: pytest ends it."""
    for length in (36, 72, 20_000):
        assert compiled({text: 1}).find("a" * length, 0) == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(", "missing )"),
        ("a)", "unexpected )"),
        ("a)|(b", "unexpected )"),
        ("*", "no argument for repetition operator"),
        ("a**", "bad repetition operator"),
        (r"(a)\1", "is not read"),
        (r"\bq", "is not read"),
        ("(?=a)", "'(?' is not read"),
        ("(?i)a", "'(?' is not read"),
        ("[[:alpha:]]", "'[:' is not read"),
        ("a{,2}", "'{,2' is not read"),
        ("a++", "bad repetition operator"),
        ("[", "missing ]"),
        ("[a", "missing ]"),
        ("[b-a]", "invalid character class range"),
        ("a{2,1}", "invalid repetition size"),
        ("a{99999}", "invalid repetition size"),
        ("((a{20}){20}){20}", "invalid repetition size"),
        ("(a)" * 400, "1,200 characters"),
    ],
)
def test_what_is_not_read_is_refused(text: str, why: str) -> None:
    with pytest.raises(FormatError, match=re.escape(why)) as caught:
        compiled({"q_proj": 1, text: 1})
    assert f"rank_pattern has a pattern {show(text)} that is not read" in str(caught.value)


@pytest.mark.long
def test_many_patterns_are_refused_or_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.{part}_proj" for i in range(40) for j in range(128) for part in ("up", "down")]

    def find(some: list[str]) -> None:
        module_patterns = compiled({name: float(i) for i, name in enumerate(some)})
        assert [module_patterns.find(name, -1) for name in some] == list(range(len(some)))

    assert steps(lambda: find(names)) < 20 * steps(lambda: find(names[::10]))
    with pytest.raises(FormatError, match="more than 100 patterns"):
        compiled({f"a+{i}": 1 for i in range(101)})
    with pytest.raises(FormatError, match="forms of names"):
        compiled({"a" * i: 1 for i in range(1, 1100)})
    monkeypatch.setattr(patterns, "MAX_STEPS", 1000)
    for numbers in ({"a" * i: 1.0 for i in range(1, 100)}, {"(a|b)*c": 1.0}):
        slow = compiled(numbers)
        with pytest.raises(FormatError, match="too long to match"):
            [slow.find("ab" * 50, 0) for _ in range(30)]
