"""`dataclass` of the standard library, but it compiles nothing while a module is imported.

The standard library writes `__init__`, `__repr__`, `__eq__` and others as text and compiles it: 0.5 to 0.9 ms for a class. A
command imports 300 classes and makes objects of a third of them. Here `__init__` is compiled when the first object is made, and
the other methods are closures.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from dataclasses import dataclass as _standard
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **how):
        """`dataclasses.dataclass` with these settings: the same fields, methods and messages."""
        return (lambda cls: _made(cls, **how)) if cls is None else _made(cls, **how)


def _made(
    cls: Any,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    order: bool = False,
    repr: bool = True,
    kw_only: bool = False,
) -> Any:
    own = {name for name, value in cls.__dict__.items() if value is not None}  # Python sets __hash__ to None beside an __eq__
    # The standard library compiles two methods of a frozen class, so it is told only if it looks at a base that is frozen.
    inherits = is_dataclass(cls)
    made: Any = _standard(cls, init=False, repr=False, eq=False, frozen=frozen and inherits, slots=slots, kw_only=kw_only)
    made.__dataclass_params__.frozen = frozen
    methods: dict[str, Any] = {"__init__": _LateInit(made)}
    if repr:
        methods["__repr__"] = recursive_repr()(_repr)
    if eq:
        methods |= _comparison([each.name for each in fields(made) if each.compare], order=order)
        if not frozen:
            methods["__hash__"] = None
    if frozen and not inherits:
        methods |= {"__setattr__": _refuse_setting, "__delattr__": _refuse_deleting}
        if slots:
            methods |= {"__getstate__": _state_of, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    return made


class _LateInit:
    """`__init__` of a dataclass. Compiles it and puts it in its own place as soon as somebody asks for it."""

    def __init__(self, owner: type[Any]) -> None:
        self.owner = owner

    def __get__(self, instance: object, kind: type[Any] | None = None) -> Any:
        self.owner.__init__ = made = _compiled_init(self.owner)
        return made.__get__(instance, kind)


class _Factory:
    """The default of a parameter whose value a function makes."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _compiled_init(owner: Any) -> Any:
    given = fields(owner)
    frozen, slots = owner.__dataclass_params__.frozen, "__slots__" in owner.__dict__
    values: dict[str, Any] = {"_set": object.__setattr__, "_factory": _FACTORY}
    lines = []
    for each in given:
        value = each.name
        if each.default is not MISSING:
            values[f"_default_{each.name}"] = each.default
        if each.default_factory is not MISSING:
            values[f"_make_{each.name}"] = each.default_factory
            value = f"_make_{each.name}()" + f" if {each.name} is _factory else {each.name}" * each.init
        elif not each.init:
            if each.default is MISSING or not slots:  # set later, or found in the class
                continue
            value = f"_default_{each.name}"
        lines.append(f"_set(self, {each.name!r}, {value})" if frozen else f"self.{each.name} = {value}")
    if hasattr(owner, "__post_init__"):
        lines.append("self.__post_init__()")
    places = [_parameter(each) for each in given if each.init and not each.kw_only]
    names = [_parameter(each) for each in given if each.init and each.kw_only]
    head = f"def __init__({', '.join(['self', *places, *['*'] * bool(names), *names])}):"
    body = [head, *(f"  {line}" for line in lines or ["pass"]), "return __init__"]
    text = "\n  ".join([f"def enclose({', '.join(values)}):", *body])
    space: dict[str, Any] = {}
    exec(text, vars(sys.modules[owner.__module__]), space)
    made = space["enclose"](**values)
    made.__qualname__ = f"{owner.__qualname__}.__init__"
    made.__annotations__ = {each.name: each.type for each in given if each.init} | {"return": None}
    return made


def _parameter(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return f"{each.name}=_default_{each.name}"
    return each.name if each.default_factory is MISSING else f"{each.name}=_factory"


def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _comparison(names: list[str], *, order: bool) -> dict[str, Any]:
    """`__eq__`, `__hash__` and, with order, `__lt__` and the others: over the fields of these names."""
    names = names * 2 if len(names) == 1 else names  # attrgetter makes a tuple of two or more
    values = operator.attrgetter(*names) if names else lambda instance: ()

    def by(compare: Any) -> Any:
        return lambda self, other: compare(values(self), values(other)) if other.__class__ is self.__class__ else NotImplemented

    found = {"__eq__": by(operator.eq), "__hash__": lambda self: hash(values(self))}
    return found | {f"__{each.__name__}__": by(each) for each in (operator.lt, operator.le, operator.gt, operator.ge) if order}


def _refuse_setting(self: Any, name: str, value: object) -> None:
    _check_free(self, name, "assign to")
    object.__setattr__(self, name, value)


def _refuse_deleting(self: Any, name: str) -> None:
    _check_free(self, name, "delete")
    object.__delattr__(self, name)


def _check_free(instance: Any, name: str, what: str) -> None:
    """Raise FrozenInstanceError. A class that is derived from a dataclass, and none itself, may have attributes of its own."""
    if is_dataclass(instance) and ("__dataclass_fields__" in type(instance).__dict__ or name in instance.__dataclass_fields__):
        raise FrozenInstanceError(f"cannot {what} field {name!r}")


def _state_of(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
