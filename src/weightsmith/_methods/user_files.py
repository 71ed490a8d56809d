"""Sources of user-defined methods: a file named in a recipe, an installed package, or a Python function.

Such a method goes by its name with the hash of its source, `./my_method.py:blend@1f0c…`: in a plan, so that work is resumed
only with the code that began it, and in the registry, where the engine finds it. The hash of a Python function is a number of
this process: what it calls and closes over cannot be hashed, so another process resumes nothing that it began.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import CheckpointError, MethodError, PluginError, nearest
from weightsmith._base.files import expand_user, read_bounded, real_path
from weightsmith._base.plugins import Plugins
from weightsmith._files.copied import MAX_CODE_BYTES
from weightsmith._methods.base import Method
from weightsmith._methods.steps import with_steps
from weightsmith._methods.user import OwnMethod, method_of
from weightsmith._plans import OwnCode

METHODS: Plugins[object] = Plugins("merge method", "weightsmith.methods", object, {})
"""The methods of installed packages: functions marked as such, or records. weightsmith's own come before them."""


@dataclass(frozen=True, slots=True)
class LoadedMethod:
    """A method that is not one of weightsmith's: its record, and where it comes from."""

    method: Method
    code: OwnCode


_loaded: dict[str, LoadedMethod] = {}
_modules: dict[tuple[str, str], dict[str, Any]] = {}


def loaded(name: str) -> LoadedMethod | None:
    """The loaded method that goes by this name in a plan."""
    return _loaded.get(name)


def names_file(name: str) -> bool:
    """True for `./my_method.py:blend` and similar names.

    >>> names_file("m.py:blend"), names_file("ties")
    (True, False)
    """
    return name.endswith(".py") or ".py:" in name


def load_file(name: str, folder: Path, *, allow_code: bool) -> Method:
    """The method that a recipe names as `file.py:function`. Runs the file, once for each content that it has.

    folder      that the file's path starts from
    allow_code  the user has said that it may run

    Raises MethodError.
    """
    file, colon, function = name.rpartition(":")
    path = real_path(folder / expand_user(file if colon else name))
    try:
        source = read_bounded(path, MAX_CODE_BYTES)
    except CheckpointError as error:
        fix = error.finding.fix or "write the path relative to the recipe's folder"
        raise MethodError(f"the file of the merge method, {path}, cannot be read: {error.finding.what}", fix=fix) from None
    if not colon or not function.isidentifier():
        raise MethodError(f"merge_method {name} names no function", fix=f"write {file if colon else name}:FUNCTION")
    if not allow_code:
        raise MethodError(
            f"merge_method {name} would run code: the file {path}",
            fix="read that file, and if you trust it add --allow-code (allow_code=True)",
        )
    digest = hashlib.sha256(source).hexdigest()
    module = _modules.get((str(path), digest))
    if module is None:
        module = _modules[str(path), digest] = _run(path, source, digest)
    if function not in module:
        known = [n for n, value in module.items() if isinstance(value, OwnMethod | Method)]
        listed = f"methods in it: {', '.join(known)}" if known else ""
        raise MethodError(f"{path} has no function '{function}'{nearest(function, known)}", fix=listed)
    code = OwnCode(name, str(real_path(folder)), digest)
    return _enter(module[function], code, f"{name}, sha256 {digest}")


def _run(path: Path, source: bytes, digest: str) -> dict[str, Any]:
    """The names that the file defines."""
    module = types.ModuleType(f"weightsmith_own_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look up its definitions there
    try:
        # These bytes, and not what importlib would read again: the hash is of what runs.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = f"{path}{line} cannot be loaded: {type(error).__name__}: {error}"
        raise MethodError(what, fix=f"see the traceback of: python {path}") from error
    return module.__dict__


def load_installed(name: str) -> Method:
    """The method that an installed package brings under this name. Raises MethodError when it does not work."""
    try:
        plugin, identity = METHODS.get(name), METHODS.identity(name)
    except PluginError as error:  # it gets its place in the recipe
        raise MethodError(f"{error.finding.where}: {error.finding.what}", fix=error.finding.fix) from error
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return _enter(plugin, OwnCode(name, "", digest), f"package {METHODS.source(name)}")


def _enter(method_like: object, code: OwnCode, source: str) -> Method:
    """The record of what was found under a name, known to the registry from now on."""
    planned = f"{code.name}@{code.sha256[:16]}"
    method = _record(method_like, code.name, planned, source)
    _loaded[planned] = LoadedMethod(method, code)
    return method


def _record(method_like: object, name: str, planned: str, source: str) -> Method:
    if isinstance(method_like, Method):
        return with_steps(replace(method_like, name=planned))
    if isinstance(method_like, OwnMethod):
        return with_steps(method_of(method_like, planned, source))
    raise MethodError(
        f"{name} is a {type(method_like).__name__}, not a merge method",
        fix="write @weightsmith.block_method or @weightsmith.tensor_method above the function",
    )


PROCESS = "<process>"
"""In place of the folder of a method's file: it is a function of the process that made the plan."""

_PLANNED = re.compile(r"(.+)@[0-9a-f]{16}")
_process = os.urandom(16)
_functions: dict[int, tuple[object, str]] = {}  # by identity; the function is kept, so that no other takes its place


def name_of(function: object) -> str:
    """The name in recipes and plans of a function that a Python recipe holds as `merge_method`; it is loaded from now on.

    Raises MethodError unless it is a merge method.
    """
    if (entry := _functions.get(id(function))) is not None:
        return entry[1]
    called = _called(function)
    digest = hashlib.sha256(_process + len(_functions).to_bytes(8, "little")).hexdigest()
    method = _enter(function, OwnCode(called, PROCESS, digest), "a Python function")
    _functions[id(function)] = function, method.name
    return method.name


def function_of(planned: str) -> str:
    """The name of the Python function that a plan or recipe of another process means; "" for other methods.

    >>> function_of("blend@0123456789abcdef"), function_of("./m.py:blend@0123456789abcdef"), function_of("ties")
    ('blend', '', '')
    """
    match = _PLANNED.fullmatch(planned)
    return match[1] if match is not None and not names_file(match[1]) else ""


def _called(function: object) -> str:
    plain = function.plain if isinstance(function, OwnMethod) else function
    return str(getattr(plain, "__name__", "") or getattr(plain, "name", "own"))


@contextmanager
def at_hand(function: object) -> Iterator[Method]:
    """The record of a function, in the registry until the end of the block."""
    called = _called(function)
    number = 1
    name = called
    while (
        _loaded.setdefault(name, mine := LoadedMethod(_record(function, called, name, "the caller"), OwnCode(called, "", "")))
        is not mine
    ):
        number += 1
        name = f"{called}-{number}"
    try:
        yield mine.method
    finally:
        del _loaded[name]
