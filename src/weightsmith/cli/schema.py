"""`weightsmith schema`."""

from __future__ import annotations

import json

from weightsmith.cli.failures import failures
from weightsmith.cli.text import result, warn


def schema() -> None:
    """Print the JSON Schema of recipes, with the methods of installed packages.

    Editors complete and check recipes with it: save it to a file, and begin a recipe with the comment
    `# yaml-language-server: $schema=FILE`.
    """
    with failures():
        from weightsmith.methods import all_methods, installed_methods
        from weightsmith.recipe import schema as make

        installed, broken = installed_methods()
        for error in broken:
            warn(error.finding)
        result(json.dumps(make((*all_methods(), *installed)), indent=2, ensure_ascii=False))
