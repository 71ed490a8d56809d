"""YAML text to positioned values: what PyYAML accepts, refuses or chokes on, and where each problem is said to be."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from weightsmith._base.errors import SyntaxProblem
from weightsmith._planning.recipe.yaml import MAX_BYTES, MAX_NODES, plain, read_yaml


def problems(text: str) -> list[str]:
    document = read_yaml(text, "r.yml")[0]
    assert all(isinstance(p, SyntaxProblem) for p in document.problems)
    return [str(p) for p in document.problems]


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 0x10\nc: 1e-5\nd: 1.0e-5\ne: yes\nf: off\ng: ~\nh:\ni: 1_000\nj: 012\nk: 1:30\nl: .5\nm: -.inf\n",
        "a: '1'\nb: \"x\\ty\"\nc: |\n  two\n  lines\nd: >\n  folded\n  text\n",
        "a: &x {p: 1, q: [1, 2]}\nb: *x\nc: {<<: *x, p: 2}\nd: {p: 3, <<: *x}\n",
        "a: &x {p: 1}\nb: &y {p: 2, q: 3}\nc: {<<: [*x, *y], r: 4}\n",
        "# comment\n---\na: [] # end\nb: {}\n...\n",
        '{"json": [true, false, null, 1.5, "text"]}',
        "\ufeffa: 1\n",
        "a: !!str 3\nb: !!int '4'\nc: !!float 5\nd: ! 6\n",
        "'<<': literal\n'on': key\n",
    ],
)
def test_the_values_are_those_of_the_safe_loader(text: str) -> None:
    document = read_yaml(text, "r.yml")[0]
    assert document.problems == ()
    assert document.root is not None
    assert plain(document.root) == yaml.safe_load(text)
    assert list(plain(document.root)) == list(yaml.safe_load(text))


def test_dates_stay_the_text_they_were_written_as() -> None:
    document = read_yaml("a: 2024-01-02\nb: =\n", "r.yml")[0]
    assert document.root is not None
    assert plain(document.root) == {"a": "2024-01-02", "b": "="}


def test_keys_and_values_have_positions_and_an_aliased_value_has_that_of_its_anchor() -> None:
    root: Any = read_yaml("models:\n  - model: a\n    weight:  &w 0.5\nagain: *w\n", "dir/r.yml")[0].root
    entry = root.value["models"].value.value[0]
    assert entry.where == "dir/r.yml:2:5"
    assert entry.value["weight"].where == "dir/r.yml:3:5"
    assert entry.value["weight"].value.where == "dir/r.yml:3:14"
    assert root.value["again"].where == "dir/r.yml:4:1"
    assert root.value["again"].value.where == "dir/r.yml:3:14"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "merge_method: linear\nmodels:\n  - model: a\n   parameters: 3\n",
            "r.yml:4:4: not valid YAML: this line does not line up with the lines above\n"
            "  while parsing a block collection, from r.yml:3:3\n"
            "  the line reads: parameters: 3\n"
            "  -> Start the keys of one mapping, and the dashes of one list, in the same column.",
        ),
        (
            "models:\n\t- model: a\n",
            "r.yml:2:1: not valid YAML: a tab where spaces are needed\n"
            "  the line reads: - model: a\n"
            "  -> Indent with spaces: YAML does not allow tabs.",
        ),
        (
            "dtype: float16: x\n",
            "r.yml:1:15: not valid YAML: a ':' where no key can be\n"
            "  the line reads: dtype: float16: x\n"
            "  -> Check the indentation of this line, or put a value that holds ': ' in quotes.",
        ),
        (
            "a: 1\nmodels\nb: 2\n",
            "r.yml:3:1: not valid YAML: a key without ':'\n"
            "  while scanning a simple key, from r.yml:2:1\n"
            "  the line reads: b: 2\n"
            "  -> Write a colon and a space after the key.",
        ),
        (
            "model: @org/name\n",
            "r.yml:1:8: not valid YAML: found character '@' that cannot start any token\n"
            "  the line reads: model: @org/name\n"
            "  -> Put a value that starts with this character in quotes.",
        ),
        (
            'a: "C:\\models"\n',
            "r.yml:1:8: not valid YAML: found unknown escape character 'm'\n"
            "  while scanning a double-quoted scalar, from r.yml:1:4\n"
            '  the line reads: a: "C:\\models"\n'
            "  -> Write a Windows path in single quotes, or with forward slashes.",
        ),
        (
            "a: 'x\nb: 2\n",
            "r.yml:3:1: not valid YAML: a quote that is never closed\n  while scanning a quoted scalar, from r.yml:1:4",
        ),
        (
            "a: 1\nb: 2\na: 3\n",
            "r.yml:3:1: duplicate key 'a' in this mapping\n"
            "  first at r.yml:1:1\n"
            "  mergekit silently took the last one\n"
            "  -> Keep one of the two.",
        ),
        ("a: 1\non: 3\n", "r.yml:2:1: a key must be text, but 'on' reads as true\n  -> Put it in quotes: \"on\"."),
        ("7.5: a\n", "r.yml:1:1: a key must be text, but '7.5' reads as the number 7.5\n  -> Put it in quotes: \"7.5\"."),
        ("07: a\n", "r.yml:1:1: a key must be text, but '07' reads as the number 7\n  -> Put it in quotes: \"07\"."),
        ("?\n: b\n", "r.yml:1:2: a key is empty\n  -> Write a name before the colon."),
        ("? [a]\n: b\n", "r.yml:1:3: a key must be a string, not a list of 1"),
        (
            "a:\n  b: !!python/object/apply:os.system [ls]\n",
            "r.yml:2:6: the tag !!python/object/apply:os.system is refused: a recipe holds plain values only\n"
            "  -> Remove the tag.",
        ),
        ("a: !mine x\n", "r.yml:1:4: the tag !mine is refused: a recipe holds plain values only\n  -> Remove the tag."),
        ("a: !!int x\n", "r.yml:1:4: 'x' is not a valid int"),
        (
            "a: &x [1, *x]\n",
            "r.yml:1:11: the alias *x is inside the value that it refers to\n  -> Write the value out instead of *x.",
        ),
        ("a: *x\n", "r.yml:1:4: the alias *x has no anchor\n  -> Mark the value meant with &x, above this line."),
        ("a: {<<: 3}\n", "r.yml:1:5: '<<' takes a mapping or a list of mappings, not the number 3"),
        (
            "a: &x {}\nb:\n  <<: *x\n  <<: *x\n",
            "r.yml:4:3: duplicate key '<<' in this mapping\n  -> Write one key: <<: [*first, *second].",
        ),
        ("# nothing\n", "r.yml:1:1: the recipe is empty\n  -> Write a recipe with `weightsmith init`."),
        ("a: 1\nb: \x07\n", "r.yml:2:4: the character U+0007 is not allowed in YAML text\n  -> Remove it."),
        ('a: "\\ud800"\n', "r.yml:1:4: text that is not valid Unicode (a lone surrogate)"),
        ("a: " + "[" * 70 + "]" * 70, "r.yml:1:68: nested more than 64 deep"),
    ],
)
def test_each_problem_says_what_is_wrong_where_and_what_to_do(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_all_problems_that_do_not_end_the_reading_are_reported() -> None:
    messages = problems("a: 1\na: 2\non: 3\nb: !x 4\n")
    assert [p.split(": ")[0] for p in messages] == ["r.yml:2:1", "r.yml:3:1", "r.yml:4:4"]


def test_leniently_the_last_of_two_equal_keys_counts_with_a_warning() -> None:
    document = read_yaml("a: 1\na: 2\n", "r.yml", lenient=True)[0]
    assert document.problems == ()
    assert document.root is not None
    assert plain(document.root) == {"a": 2}
    assert [f.where for f in document.findings] == ["r.yml:2:1"]


def test_an_alias_bomb_is_refused_at_the_alias_that_goes_too_far() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    (message,) = problems("\n".join(lines))
    assert message == f"r.yml:6:15: the recipe has more than {MAX_NODES:,} values once its aliases are expanded"


@pytest.mark.slow
def test_a_bomb_of_merge_keys_is_refused() -> None:
    lines = ["a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}"]
    lines += [f"a{i}: &a{i} {{<<: *a{i - 1}, n{i}: 1}}" for i in range(1, 300)]
    (message,) = problems("\n".join(lines))
    assert "values once its aliases are expanded" in message


def test_aliases_that_stay_within_bounds_are_expanded() -> None:
    document = read_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "r.yml")[0]
    assert document.root is not None
    assert plain(document.root)["b"] == [[1, 2], [1, 2]]
    assert document.root.size == 1 + (1 + 3) + (1 + 7)


def test_values_are_counted_while_collections_are_still_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._planning.recipe.yaml.MAX_NODES", 10)
    (message,) = problems("[1, 1, 1, 1, 1, 1, [1, 1, 1, 1, 1, 1]]")
    assert message == "r.yml:1:27: the recipe has more than 10 values once its aliases are expanded"


def test_text_beyond_the_size_limit_is_refused_unread() -> None:
    assert problems("a: " + "x" * MAX_BYTES) == [f"r.yml:1:1: the recipe is larger than {MAX_BYTES:,} bytes"]
