"""Writes the pages of docs/ that are made from the code.

python scripts/docs.py           # write them
python scripts/docs.py --check   # status 1 if one is out of date

docs/recipe.md            scripts/recipe.md with the tables of `weightsmith.recipe.grammar` and the methods' parameters
docs/recipe.schema.json   what `weightsmith schema` prints
docs/methods/NAME.md      one page a method, from its `METHOD`; README.md lists them
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightsmith.methods import all_methods
from weightsmith.methods.base import Method, Parameter
from weightsmith.recipe import HARMLESS, RETIRED, schema
from weightsmith.recipe.grammar import LEVELS, Key, Level
from weightsmith.recipe.misuse import REFUSED, UNUSED
from weightsmith.recipe.schedules import DECAYS
from weightsmith.recipe.single import DTYPE_NAMES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEMPLATE = ROOT / "scripts" / "recipe.md"

MADE = "<!-- Made by scripts/docs.py from the code. Do not edit: run `make docs`. -->\n\n"
MADE_RECIPE = "<!-- Made by scripts/docs.py from scripts/recipe.md and the code. Do not edit: run `make docs`. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    methods = all_methods()
    found = {
        DOCS / "recipe.md": recipe_page(TEMPLATE.read_text(encoding="utf-8"), methods),
        DOCS / "recipe.schema.json": json.dumps(schema(methods), indent=2, ensure_ascii=False) + "\n",
        DOCS / "methods" / "README.md": methods_page(methods),
    }
    return found | {DOCS / "methods" / f"{method.name}.md": method_page(method) for method in methods}


# ---- the recipe


def recipe_page(template: str, methods: Sequence[Method]) -> str:
    """The template with each `<!-- insert: NAME -->` replaced by the table of that name."""
    parts = {f"keys of {level.name}": _level(level) for level in LEVELS}
    parts["parameters"] = _parameters(methods)
    parts["dtypes"] = ", ".join(f"`{name}`" for name in DTYPE_NAMES)
    parts["settings without effect"] = _misuse()
    used = set()

    def insert(match: re.Match[str]) -> str:
        used.add(match[1])
        return parts[match[1]]

    text = re.sub(r"<!-- insert: (.+?) -->", insert, template)
    unused = sorted(parts.keys() - used)
    if unused:
        raise SystemExit(f"{TEMPLATE} has no place for: {', '.join(unused)}")
    return MADE_RECIPE + text


def _level(level: Level) -> str:
    rows = [(f"`{key.name}`", _takes(key), _needed(key, level), key.doc) for key in level.keys]
    return table(("key", "takes", "", "meaning"), rows)


def _takes(key: Key) -> str:
    """What may stand behind a key; every kind of `grammar.Kind` has its words."""
    inner = f"[{key.of.name}](#{key.of.name})" if key.of is not None else ""
    return {
        "text": "text",
        "dtype": "a [dtype](#dtypes)",
        "model": "a [model](#models)",
        "path": "text, or a [path](#path)",
        "layer_range": "`[first, end]`",
        "parameters": "[parameters](#parameters)",
        "value": "a number, `true`, `false` or text; a list of them; or a [schedule](#schedule)",
        "share": "a number from 0 to below 1",
        "count": "a whole number from 1 on",
        "decay": ", ".join(f"`{name}`" for name in DECAYS),
        "list": f"a list of {inner}",
        "named": f"names, each with a {inner}",
        "refused": "an error for now",
        "unused": "anything; a warning",
    }[key.kind]


def _needed(key: Key, level: Level) -> str:
    return "required" if key.required else f"one of {len(level.one_of)}" if key.name in level.one_of else ""


def _parameters(methods: Sequence[Method]) -> str:
    """One row for each parameter and meaning; methods that differ in nothing but the default share it."""
    rows: dict[tuple[str, str, str, str], list[tuple[Method, Parameter]]] = {}
    for method in methods:
        for p in method.parameters:
            rows.setdefault((p.name, values(p), p.scope, doc(p)), []).append((method, p))
    lines = []
    for (name, allowed, scope, text), uses in sorted(rows.items(), key=lambda row: row[0][0]):
        by_default: dict[str, list[str]] = {}
        for method, p in uses:
            by_default.setdefault(default(p), []).append(_link(method, "methods/"))
        shown = [value if len(by_default) == 1 else f"{value} in {', '.join(names)}" for value, names in by_default.items()]
        links = ", ".join(_link(method, "methods/") for method, _ in uses)
        lines.append((f"`{name}`", allowed, "; ".join(shown), SCOPES[scope], text, links))
    return table(("parameter", "value", "default", "given for", "meaning", "methods"), lines)


def _misuse() -> str:
    rows = [(f"`{key}`", "error", what, fix) for key, (what, fix) in {**REFUSED, **RETIRED}.items()]
    rows += [(f"`{key}`", "warning", what, "Remove it.") for key, what in {**UNUSED, **HARMLESS}.items()]
    return table(("setting", "is", "because", "do"), rows)


# ---- the methods


SCOPES: Mapping[str, str] = {"model": "each model", "tensor": "the merge"}
BASES: Mapping[str, str] = {
    "required": "`base_model` is needed, and takes no parameters of its own",
    "optional": "`base_model` may be given",
    "input": "a `base_model` is an input like the others",
}


def method_page(method: Method) -> str:
    """The page of one method."""
    beside = "" if method.base == "input" else " beside the base"
    return MADE + "\n".join(
        [
            f"# {method.name}: {method.title}",
            "",
            method.summary.strip(),
            "",
            "```text",
            method.formula,
            "```",
            "",
            f"**When to use it:** {method.use.strip()}",
            "",
            f"**Passes over the inputs:** {method.passes.strip()}",
            "",
            f"**Models:** {models(method)}{beside}; {BASES[method.base]}.",
            "",
            "## Parameters",
            "",
            table(
                ("parameter", "value", "default", "given for", "meaning"),
                [(f"`{p.name}`", values(p), default(p), SCOPES[p.scope], doc(p)) for p in method.parameters],
            ),
            "",
            "Every value may be a gradient over the layers, and differ by tensor name: [parameters](../recipe.md#parameters).",
            "",
            "## Example",
            "",
            "```yaml",
            method.example.strip(),
            "```",
            "",
            "## Source",
            "",
            _linked(method.source),
            "",
        ]
    )


def methods_page(methods: Sequence[Method]) -> str:
    """The list of all methods."""
    rows = [
        (_link(m), m.title, models(m), m.base, ", ".join(f"`{p.name}`" for p in m.parameters if not p.ignored)) for m in methods
    ]
    return MADE + "\n".join(
        [
            "# Merge methods",
            "",
            "What `merge_method` in a recipe may be. `weightsmith methods` prints the list, `weightsmith methods NAME` one.",
            "",
            table(("method", "", "models", "base", "parameters"), rows),
            "",
            "**models** counts the inputs besides the base, or all inputs where the base is one of them. **base**:",
            "",
            *(f"* `{role}`: {text}." for role, text in BASES.items()),
            "",
            "Errors, times and memory of every method, beside mergekit's: [results](../../benchmarks/results/methods.md). "
            "What they do to a small language model: [quality](../quality.md).",
            "",
            "What a method does to the bytes, and how one is added: [architecture](../architecture.md#adding-a-method).",
            "",
        ]
    )


def models(method: Method) -> str:
    """How many inputs, in words."""
    low, high = method.min_models, method.max_models
    return f"{low}" if low == high else f"{low} to {high}" if high is not None else f"{low} or more"


def values(p: Parameter) -> str:
    """What a parameter may be."""
    if p.choices:
        return ", ".join(f"`{choice}`" for choice in p.choices)
    if p.kind == "bool":
        return "`true`, `false`"
    low, high = p.minimum, p.maximum
    bounds = f" {low:g} to {high:g}" if low is not None and high is not None else ""
    bounds = bounds or (f" ≥ {low:g}" if low is not None else f" ≤ {high:g}" if high is not None else "")
    return {"float": "number", "int": "whole number", "str": "text"}[p.kind] + bounds


def default(p: Parameter) -> str:
    """The default as it is written in a recipe."""
    if p.default is None:
        return "required" if p.required else "none"
    return f"`{str(p.default).lower() if isinstance(p.default, bool) else p.default}`"


def doc(p: Parameter) -> str:
    """What a parameter does, and why it may do nothing."""
    return f"{p.doc} No effect: {p.ignored}." if p.ignored else p.doc


# ---- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _link(method: Method, folder: str = "") -> str:
    return f"[{method.name}]({folder}{method.name}.md)"


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s,;]+", r"<\g<0>>", text)


# ---- writing


def stale(found: Mapping[Path, str]) -> Iterator[tuple[Path, str]]:
    """Pages that are missing or different, and pages of methods that are gone, each with what is wrong."""
    for path, text in found.items():
        if not path.exists():
            yield path, "is missing"
        elif path.read_text(encoding="utf-8") != text:
            yield path, "is out of date"
    for path in sorted((DOCS / "methods").glob("*.md")):
        if path not in found:
            yield path, "describes no method"


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    args = parser.parse_args()
    found = pages()
    wrong = list(stale(found))
    for path, what in wrong:
        print(f"{path.relative_to(ROOT)} {what}{'; run `make docs`' if args.check else ', now not'}")
    if args.check:
        sys.exit(bool(wrong))
    for path, _ in wrong:
        if path in found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found[path], encoding="utf-8")
        else:
            path.unlink()


if __name__ == "__main__":
    main()
