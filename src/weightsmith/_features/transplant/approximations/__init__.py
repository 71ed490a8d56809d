"""The approximations of missing tokens, one file each.

To add one, add its file here and its name to `../options.py`; or a package with an entry point of the group
`weightsmith.approximations`. `abc/approximation.py` is the record of an approximation, and the problem that it solves.
"""

from __future__ import annotations

from weightsmith._base.plugins import Plugins
from weightsmith._features.transplant import options
from weightsmith.abc.approximation import Approximation

APPROXIMATIONS = Plugins(
    "approximation",
    "weightsmith.approximations",
    Approximation,
    {name: f"weightsmith._features.transplant.approximations.{name}:{name}" for name in options.APPROXIMATIONS},
)
"""In the order of the docs.

>>> APPROXIMATIONS.get("subword").pieces
True
"""

find_approximation = APPROXIMATIONS.get
