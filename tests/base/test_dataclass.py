"""Our `dataclass` does what the standard library's does."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from dataclasses import KW_ONLY, FrozenInstanceError, dataclass, field

import pytest

from weightsmith._base import dataclass as ours

SETTINGS = [
    {"frozen": frozen, "slots": slots, "eq": eq, "repr": shown, "kw_only": keywords}
    for frozen in (False, True)
    for slots in (False, True)
    for eq in (False, True)
    for shown in (False, True)
    for keywords in (False, True)
]


def _plain() -> type:
    class Point:
        x: int
        y: list[int] = field(default_factory=list)
        name: str = "p"

    return Point


def _hidden() -> type:
    class Secret:
        user: str
        token: str = field(default="", repr=False)
        where: str = field(default="", compare=False)
        size: int = field(init=False, default=3)
        parts: list[int] = field(init=False, default_factory=list)
        _: KW_ONLY
        last: bool = False

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", len(self.user))

    return Secret


def _empty() -> type:
    class Empty:
        pass

    return Empty


def _own() -> type:
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    return Own


CASES = {
    _plain: [{"x": 1}, {"x": 1, "y": [2]}, {"x": 2, "name": "q"}],
    _hidden: [{"user": "a"}, {"user": "a", "token": "t"}, {"user": "a", "where": "w"}, {"user": "bb", "last": True}],
    _empty: [{}],
    _own: [{"x": 1}, {"x": 2}],
}


def _of_hash(value: object) -> str:
    try:
        return "same" if hash(value) == hash(copy.copy(value)) else "differs"
    except TypeError as error:
        return str(error)


def _of_setting(value: object, name: str) -> str:
    try:
        setattr(value, name, getattr(value, name))
    except AttributeError as error:
        return f"{type(error).__name__}: {error}"
    return "set"


@pytest.mark.parametrize("how", SETTINGS, ids=lambda how: "-".join(name for name, value in how.items() if value) or "none")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_objects_are_those_of_the_standard_library(make, how):
    """Fields, values, equality, hashes, texts, copies, signature and errors."""
    theirs, mine = dataclass(**how)(make()), ours.dataclass(**how)(make())
    assert str(inspect.signature(mine)) == str(inspect.signature(theirs))
    assert mine.__init__.__qualname__ == theirs.__init__.__qualname__
    assert mine.__match_args__ == theirs.__match_args__
    assert [f.name for f in dataclasses.fields(mine)] == [f.name for f in dataclasses.fields(theirs)]
    both = [[kind(**given) for given in CASES[make]] for kind in (mine, theirs)]
    for a, b in zip(*both, strict=True):
        assert dataclasses.asdict(a) == dataclasses.asdict(b)
        assert (repr(a) == repr(b)) or not (how["repr"] or "__repr__" in vars(mine))
        assert _of_hash(a) == _of_hash(b)
        for name in dataclasses.asdict(a):
            assert _of_setting(a, name) == _of_setting(b, name)
        assert dataclasses.asdict(copy.deepcopy(a)) == dataclasses.asdict(b)
    for i, a in enumerate(both[0]):
        assert [a == other for other in both[0]] == [both[1][i] == other for other in both[1]]
        assert (copy.copy(a) == a) is (copy.copy(both[1][i]) == both[1][i])
        assert a.__eq__(object()) in (NotImplemented, True)
    messages = []
    for kind in (theirs, mine):
        with pytest.raises(TypeError) as caught:
            kind(nothing=1)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@ours.dataclass(frozen=True, slots=True)
class Base:
    """A record at the top of a module, so that it can be pickled."""

    x: int
    y: list[int] = field(default_factory=list)


@ours.dataclass(frozen=True, slots=True)
class Derived(Base):
    """A record with fields of another."""

    z: int = 0


@dataclass(frozen=True)
class Theirs(Base):
    """A user's, made by the standard library."""

    z: int = 0


class Undecorated(Base):
    """A class with attributes of its own."""


def test_classes_that_derive_from_ours():
    for kind in (Derived, Theirs):
        made = kind(1, [2], 3)
        assert repr(made) == f"{kind.__name__}(x=1, y=[2], z=3)"
        assert made == kind(1, [2], z=3) != Base(1, [2])
        assert pickle.loads(pickle.dumps(made)) == made
        assert dataclasses.replace(made, x=5).x == 5
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'z'"):
            made.z = 4
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
            del made.x
    with pytest.raises(TypeError, match="non-frozen"):
        ours.dataclass(type("Loose", (Base,), {}))
    own = Undecorated(1)
    own.more = 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        own.x = 2


def test_a_field_of_not_a_number_equals_itself():
    """A single value is compared as the tuples of the standard library compare theirs: the same object first."""
    nan = float("nan")

    @ours.dataclass(frozen=True)
    class One:
        value: float

    assert One(nan) == One(nan)


def test_objects_in_order():
    for decorate in (dataclass, ours.dataclass):

        @decorate(frozen=True, order=True)
        class Rate:
            bits: int
            half: bool = False

        rates = [Rate(3), Rate(2, True), Rate(2)]
        assert sorted(rates) == [Rate(2), Rate(2, True), Rate(3)]
        assert Rate(2) <= Rate(2) < Rate(3) >= Rate(3) > Rate(2, True)
        with pytest.raises(TypeError, match="not supported"):
            Rate(2) < 3  # noqa: B015


def test_nothing_is_compiled_while_a_module_is_imported():
    code = """
import builtins, dataclasses
compiled = []
dataclasses.exec = lambda text, *rest: compiled.append(text) or builtins.exec(text, *rest)
import weightsmith._plans.values
print(len(compiled))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"
