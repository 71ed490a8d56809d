"""Building blocks for plug-ins and programs: the parts that weightsmith's own methods, formats, outputs and studio share.

`weightsmith.abc` says what a plug-in must be, this package helps to write it, `weightsmith.testing` checks it. Programs
on top of weightsmith (docs/adding-a-program.md) need this package alone.
`__init__.pyi` lists the names, by kind of plug-in. The pages docs/adding-*.md use every one of them.
"""

from __future__ import annotations

from weightsmith._base.plugins import public_names

__all__, __getattr__ = public_names(__name__, __file__, globals())


def __dir__() -> list[str]:
    return __all__
