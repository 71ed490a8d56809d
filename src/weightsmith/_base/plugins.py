"""Plug-ins of each kind: weightsmith's own by name, and those that installed packages bring as entry points.

    [project.entry-points."weightsmith.layouts"]
    toy_moe = "toy_moe:LAYOUT"

A module is imported when its plug-in is first used. A package cannot replace a plug-in of weightsmith's.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from weightsmith._base.errors import PluginError, UnknownName, nearest

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Plugins(Generic[Kind]):
    """All plug-ins of one kind.

    noun   what one is called in messages: "expert layout"
    group  the entry points of packages that bring one: "weightsmith.layouts"
    kind   the class that each must be an instance of
    builtin  weightsmith's: name → `module:attribute`, in the order of preference

    >>> from fractions import Fraction
    >>> plugins = Plugins("fraction", "weightsmith.fractions", Fraction, {"half": "tests.base.test_plugins:HALF"})
    >>> plugins.names, "third" in plugins
    (('half',), False)
    >>> plugins.get("halv")
    Traceback (most recent call last):
    weightsmith._base.errors.UnknownName: there is no fraction 'halv' (did you mean 'half'?)
      -> Write one of half.
    """

    noun: str
    group: str
    kind: type[Kind]
    builtin: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all plug-ins: weightsmith's, then those of installed packages."""
        return (*self.builtin, *self.brought)

    @property
    def brought(self) -> tuple[str, ...]:
        """The names of those of installed packages."""
        return tuple(name for name in installed(self.group) if name not in self.builtin)

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in installed(self.group)

    def __iter__(self) -> Iterator[Kind]:
        return map(self.get, self.names)

    def get(self, name: str, where: str = "") -> Kind:
        """The plug-in of this name. where: who names it, for messages.

        Raises UnknownName, and PluginError for one of a package that does not work.
        """
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            plugin: object = getattr(import_module(module), attribute)
        elif name in installed(self.group):
            plugin = _load(self.noun, installed(self.group)[name])
        else:
            what = f"there is no {self.noun} '{name}'{nearest(name, self.names)}"
            raise UnknownName(what, where=where, fix=f"write one of {', '.join(self.names)}")
        if not isinstance(plugin, self.kind):
            what = f"the {self.noun} {name} is a {type(plugin).__name__}, not a {self.kind.__name__}"
            raise PluginError(what, where=self.source(name), fix="name an instance in the entry point")
        return plugin

    def identity(self, name: str) -> str:
        """Package, version and sha256 of the module of an installed plug-in, "" for weightsmith's own. Imports the module.

        Belongs to the identity of work whose bytes the plug-in decides.
        """
        if name in self.builtin:
            return ""
        self.get(name)
        point = installed(self.group)[name]
        file = getattr(sys.modules.get(point.module), "__file__", None)
        return f"{package_of(point)} {hashlib.sha256(Path(file).read_bytes() if file else b'').hexdigest()}"

    def source(self, name: str) -> str:
        """Where it comes from: the package and its version, or weightsmith's module."""
        return self.builtin[name] if name in self.builtin else package_of(installed(self.group)[name])


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group, by name; of several packages with one name, the first."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return points


def package_of(point: EntryPoint) -> str:
    """Name and version of the package that brings an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _load(noun: str, point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        what = f"the {noun} {point.name} cannot be loaded: {type(error).__name__}: {error}"
        raise PluginError(what, where=package_of(point), fix="reinstall or update the package") from error


# ---- Public names that are imported when they are first used: a package lists them in its `__init__.pyi`


def public_names(package: str, init: str, namespace: dict[str, Any]) -> tuple[list[str], Callable[[str], Any]]:
    """The names that `__init__.pyi` beside `init` lists, sorted, and the package's `__getattr__` for them.

    package    its name, for errors
    init       its `__file__`
    namespace  its `globals()`: a name that was used once is found there
    """
    listed = Path(init).with_suffix(".pyi").read_text("utf-8")
    homes = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", listed, re.MULTILINE)}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        namespace[name] = value = getattr(import_module(homes[name]), name)
        return value

    return sorted(homes), find
