"""`weightsmith schema`."""

from __future__ import annotations

import json

from weightsmith.cli.failures import failures
from weightsmith.cli.text import result


def schema() -> None:
    """Print the JSON Schema of recipes.

    Editors complete and check recipes with it: save it to a file, and begin a recipe with the comment
    `# yaml-language-server: $schema=FILE`.
    """
    with failures():
        from weightsmith.methods import all_methods
        from weightsmith.recipe import schema as make

        result(json.dumps(make(all_methods()), indent=2, ensure_ascii=False))
