"""The approximations of missing tokens, in a file for each idea.

To add one, add it here, with its name in `_FILES` and `../options.py`; or a package with an entry point of the group
`weightsmith.approximations`. `abc/approximation.py` is the record of an approximation, and the problem that it solves.
"""

from __future__ import annotations

from weightsmith._base.plugins import Plugins
from weightsmith._features.transplant import options
from weightsmith.abc.approximation import Approximation

_FILES = {
    "averages": ("common_interpolation", "subword", "mean"),
    "pursuit": ("omp", "mp_rope"),
    "maps": ("hybrid", "landmark_pca"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}

APPROXIMATIONS = Plugins(
    "approximation",
    "weightsmith.approximations",
    Approximation,
    {name: f"weightsmith._features.transplant.approximations.{_FILE_OF[name]}:{name}" for name in options.APPROXIMATIONS},
)
"""In the order of the docs.

>>> APPROXIMATIONS.get("subword").pieces
True
"""

find_approximation = APPROXIMATIONS.get
