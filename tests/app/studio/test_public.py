"""The studio is a program on public names: it could be a package of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import weightsmith._app.studio

PUBLIC = ("weightsmith", "weightsmith.abc", "weightsmith.plugin", "weightsmith._app.studio")


def modules(tree: ast.AST) -> list[str]:
    """The modules of weightsmith that a file imports, at the top or in a function, for types too."""
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return [name for name in imported if name.split(".")[0] == "weightsmith"]


def test_the_studio_imports_public_names_only() -> None:
    files = sorted(Path(weightsmith._app.studio.__file__).parent.glob("*.py"))
    assert len(files) > 5
    imported = {(path.name, name) for path in files for name in modules(ast.parse(path.read_text("utf-8")))}
    assert ("tasks.py", "weightsmith.plugin") in imported
    private = [
        module
        for module in sorted(imported)
        if not module[1].startswith(("weightsmith.abc.", PUBLIC[3])) and module[1] not in PUBLIC
    ]
    assert private == []


def test_what_is_imported_in_a_function_and_by_module_is_seen() -> None:
    text = "import weightsmith._base.text\ndef f():\n    from weightsmith._plans import Plan\n"
    assert modules(ast.parse(text)) == ["weightsmith._plans", "weightsmith._base.text"]
