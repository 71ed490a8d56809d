"""Merge, stack and quantise LLM checkpoints.

    import weightsmith
    weightsmith.merge("recipe.yml", "./merged")

`__init__.pyi` lists the public names. They are imported when they are first used, so that
`import weightsmith` takes milliseconds and needs no torch.
"""

from __future__ import annotations

from weightsmith._base.plugins import public_names
from weightsmith._version import __version__ as __version__

__all__, __getattr__ = public_names(__name__, __file__, globals())


def __dir__() -> list[str]:
    return __all__
