"""How errors look: like a compiler's, one fix line in one voice, the same cause once."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightsmith
from weightsmith._base import errors
from weightsmith._base.errors import Finding, NotFound, PlanError, UnknownParameter, WeightsmithError, excerpt, report

SOURCE = Path(weightsmith.__file__).parent
CLASSES = [
    error_class
    for error_class in vars(errors).values()
    if isinstance(error_class, type) and issubclass(error_class, WeightsmithError)
]


def test_every_class_has_a_code_of_its_own() -> None:
    codes = {error_class.__name__: error_class.code for error_class in CLASSES}
    assert len(set(codes.values())) == len(codes)
    assert codes["UnknownParameter"] == "unknown-parameter"
    assert codes["NotFound"] == "not-found"
    assert codes["SyntaxProblem"] == "syntax"
    assert codes["OutputExists"] == "output-exists"


@pytest.mark.parametrize("name", [error_class.__name__ for error_class in CLASSES])
def test_every_error_can_be_imported_from_the_package(name: str) -> None:
    assert getattr(weightsmith, name) is getattr(errors, name)
    assert name in weightsmith.__all__


def test_a_problem_shows_its_code_place_line_caret_and_fix() -> None:
    problem = UnknownParameter("ties has no parameter 'densty'", where="r.yml:2:18", fix="write 'density'")
    text = "models:\n  - parameters: {densty: 0.5}\n"
    assert str(PlanError([problem], ("r.yml", text))) == (
        "error[unknown-parameter]: r.yml:2:18: ties has no parameter 'densty'\n"
        "    2 |   - parameters: {densty: 0.5}\n"
        "      |                  ^^^^^^\n"
        "  -> Write 'density'.\n"
        "Nothing was written. (1 problem)"
    )


def test_problems_of_one_cause_are_one_with_a_count_and_the_first_places() -> None:
    alike = [NotFound("no such folder", where=f"r.yml:{i}:3: ./{i}", fix="write another") for i in range(1, 8)]
    other = NotFound("no such folder", where="r.yml:9:1", fix="write a third")
    assert str(PlanError([*alike, other])) == (
        "error[not-found]: r.yml:1:3: ./1: no such folder\n"
        "  also at r.yml:2:3: ./2, r.yml:3:3: ./3, r.yml:4:3: ./4, 3 more\n"
        "  -> Write another.\n"
        "error[not-found]: r.yml:9:1: no such folder\n"
        "  -> Write a third.\n"
        "Nothing was written. (8 problems)"
    )


@pytest.mark.parametrize(
    ("where", "text", "shown"),
    [
        ("r.yml:1:4", "a: 'two words': 1\n", ["    1 | a: 'two words': 1", "      |    ^^^^^^^^^^^"]),
        ("r.yml:1:5", "日本: x\n", ["    1 | 日本: x", "      |       ^"]),
        ("r.yml:1:2", "\tb: 1\r\n", ["    1 | \tb: 1", "      | \t^"]),
        ("r.yml:1:4", "\ufeffa: 1\n", ["    1 | a: 1", "      |    ^"]),
        ("r.yml:2:4", "a: x\x85b: 1\n", ["    2 | b: 1", "      |    ^"]),
        ("r.yml:1:5", "a: \x1bx\n", ["    1 | a: \ufffdx", "      |     ^"]),
        ("r.yml:1:9", "a: 1\n", ["    1 | a: 1", "      |     ^"]),
        ("r.yml:3:1", "a: 1\n", []),
        ("r.yml:0:1", "a: 1\n", []),
        ("other.yml:1:1", "a: 1\n", []),
        ("model.layers.0", "a: 1\n", []),
    ],
)
def test_the_caret_is_under_the_word(where: str, text: str, shown: list[str]) -> None:
    assert list(excerpt(where, "r.yml", text)) == shown


def test_a_long_line_is_cut_around_the_place() -> None:
    line = "a: {" + "x" * 300 + ", here: 1, " + "y" * 300 + "}"
    first, second = excerpt(f"r.yml:1:{line.index('here') + 1}", "r.yml", line)
    assert len(first) <= 80
    start = second.index("^")
    assert first[start : start + second.count("^")] == "here"


def test_an_error_outside_a_recipe_has_its_code_and_the_state_of_the_disk() -> None:
    error = errors.OutputExists(
        "the output folder already exists", where="out", fix="choose another", state="Nothing was written."
    )
    assert report(error) == (
        "error[output-exists]: out: the output folder already exists\n  -> Choose another.\nNothing was written."
    )


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ("write 'a'", "Write 'a'."),
        ("Write 'a'.", "Write 'a'."),
        ("config.json has it", "config.json has it."),
        ("run `a b`", "Run `a b`."),
        ("", ""),
    ],
)
def test_a_fix_is_a_sentence(fix: str, sentence: str) -> None:
    assert Finding("x", fix=fix).fix == sentence


# ---- one voice

VERBS = frozenset(
    """add allow ask begin call change check choose clone compare convert copy correct create decorate decrypt do download
    drop finish free get give import install join keep leave let list load look make mark merge mount move name open
    pass plan press pull put quote raise read reinstall remove rename repair replace report restore return run save see
    set shorten start take test try tune turn undo unpack unset upload use wait write""".split()
)


def beginnings(node: ast.expr) -> Iterator[str]:
    """What a `fix` in the source begins with, as far as the text is written there."""
    if isinstance(node, ast.IfExp):
        yield from (*beginnings(node.body), *beginnings(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from beginnings(value)
    elif isinstance(node, ast.BinOp):
        yield from beginnings(node.left)
    elif isinstance(node, ast.JoinedStr):
        yield from beginnings(node.values[0])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value


def fixes() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "fix" for t in node.targets)
            if named or (isinstance(node, ast.keyword) and node.arg == "fix"):
                for text in beginnings(node.value):  # type: ignore[attr-defined]
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", text  # type: ignore[attr-defined]


@pytest.mark.long
def test_every_fix_says_what_to_do() -> None:
    all_fixes = list(fixes())
    assert len(all_fixes) > 200
    assert [(where, text) for where, text in all_fixes if text.split()[0].strip(",:").lower() not in VERBS] == []


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WeightsmithError)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not PlanError])
def test_an_error_is_the_same_in_another_process(kind: type[WeightsmithError]) -> None:
    """Workers of a cluster send theirs to the driver."""
    error = kind("what", where="a.yml:1:1", details=("line",), fix="write more", state="Nothing was written.")
    error.product = "thresholds"
    for one in (error, PlanError([error, NotFound("gone")], ("a.yml", "a: 1\n"))):
        again = pickle.loads(pickle.dumps(one))
        assert type(again) is type(one)
        assert (report(again), again.product, again.state) == (report(one), one.product, one.state)
