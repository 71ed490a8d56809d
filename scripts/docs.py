"""Writes what the code says into docs/.

python scripts/docs.py           # write it
python scripts/docs.py --check   # status 1 if something is out of date

Whole pages:
    docs/methods/NAME.md      one page a method, from its record; README.md lists them
    docs/moe-layouts.md       every `LAYOUT` of a mixture of experts

Blocks of pages that are otherwise written by hand, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`:
    docs/recipe.md            the tables of `weightsmith.recipe.grammar` and the methods' parameters
    docs/moe.md, docs/moe-surgery.md   the tables of `weightsmith.recipe.moe_grammar`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightsmith.methods import all_methods
from weightsmith.methods.base import BaseRole, Method, Parameter
from weightsmith.methods.describe import BASES, SCOPES, default, doc, models, values
from weightsmith.mixture.layouts import all_layouts
from weightsmith.mixture.layouts.base import ATTENTION_BIASES, QK_NORMS, QKV_BIASES, ExpertLayout
from weightsmith.recipe import HARMLESS, RETIRED
from weightsmith.recipe.grammar import LEVELS
from weightsmith.recipe.kinds import NO_EFFECT, NOT_SUPPORTED, Key, Level
from weightsmith.recipe.moe_grammar import MOE_LEVELS
from weightsmith.tensors import DTYPE_NAMES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/docs.py from the code. Do not edit: run `make docs`. -->\n\n"
BLOCK = re.compile(r"(<!-- ([^\n]+?):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page of which the code writes something, and what it must hold."""
    methods = all_methods()
    found = {
        DOCS / "methods" / "README.md": methods_page(methods),
        DOCS / "moe-layouts.md": layouts_page(all_layouts()),
    }
    found |= {DOCS / "methods" / f"{method.name}.md": method_page(method) for method in methods}
    return found | filled({DOCS / name: (DOCS / name).read_text(encoding="utf-8") for name in WITH_BLOCKS}, methods)


# ---- the recipe

WITH_BLOCKS = ("recipe.md", "moe.md", "moe-surgery.md")


def filled(texts: Mapping[Path, str], methods: Sequence[Method]) -> dict[Path, str]:
    """The pages with the contents of their blocks; each block is in one page."""
    blocks = {f"keys of {level.name}": _level(level) for level in (*LEVELS, *MOE_LEVELS)}
    blocks["parameters"] = _parameters(methods)
    blocks["dtypes"] = ", ".join(f"`{name}`" for name in DTYPE_NAMES)
    blocks["settings without effect"] = _misuse()
    places = [match[2] for text in texts.values() for match in BLOCK.finditer(text)]
    if sorted(places) != sorted(blocks):
        wrong = {name for name in (*blocks, *places) if places.count(name) != 1 or name not in blocks}
        raise SystemExit(f"each block must be in one of {', '.join(WITH_BLOCKS)}, once: {', '.join(sorted(wrong))}")
    return {
        path: BLOCK.sub(lambda match, text=text: f"{match[1]}{_linked_from(text, blocks[match[2]])}\n{match[3]}", text)
        for path, text in texts.items()
    }


def _linked_from(page: str, block: str) -> str:
    """A block whose links to headings that the page does not have lead to docs/recipe.md."""
    headings = {heading.lower() for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    return re.sub(r"\(#([^)]+)\)", lambda link: link[0] if link[1] in headings else f"(recipe.md#{link[1]})", block)


def _level(level: Level) -> str:
    rows = [(f"`{key.name}`", key.kind.words, _needed(key, level), key.doc) for key in level.keys]
    return table(("key", "takes", "", "meaning"), rows)


def _needed(key: Key, level: Level) -> str:
    return "required" if key.required else f"one of {len(level.one_of)}" if key.name in level.one_of else ""


def _parameters(methods: Sequence[Method]) -> str:
    """One row for each parameter and meaning; methods that differ in nothing but the default share it."""
    rows: dict[tuple[str, str, str, str], list[tuple[Method, Parameter]]] = {}
    for method in methods:
        for p in method.parameters:
            rows.setdefault((p.name, values(p, markdown=True), p.scope, doc(p)), []).append((method, p))
    lines = []
    for (name, allowed, scope, text), uses in sorted(rows.items(), key=lambda row: row[0][0]):
        by_default: dict[str, list[str]] = {}
        for method, p in uses:
            by_default.setdefault(default(p, markdown=True), []).append(_link(method, "methods/"))
        shown = [value if len(by_default) == 1 else f"{value} in {', '.join(names)}" for value, names in by_default.items()]
        links = ", ".join(_link(method, "methods/") for method, _ in uses)
        lines.append((f"`{name}`", allowed, "; ".join(shown), SCOPES[scope], text, links))
    return table(("parameter", "value", "default", "given for", "meaning", "methods"), lines)


def _misuse() -> str:
    rows = [(f"`{key}`", "error", what, fix) for key, (what, fix) in {**NOT_SUPPORTED, **RETIRED}.items()]
    rows += [(f"`{key}`", "warning", what, "Remove it.") for key, what in {**NO_EFFECT, **HARMLESS}.items()]
    return table(("setting", "is", "because", "do"), rows)


# ---- the methods


def method_page(method: Method) -> str:
    """The page of one method."""
    base = "" if method.base == "input" else " besides the base"
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
            f"**Models:** {models(method)}{base}; {_base(method.base)}.",
            "",
            "## Parameters",
            "",
            table(
                ("parameter", "value", "default", "given for", "meaning"),
                [
                    (f"`{p.name}`", values(p, markdown=True), default(p, markdown=True), SCOPES[p.scope], doc(p))
                    for p in method.parameters
                ],
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
            *(f"* `{role}`: {_base(role)}." for role in BASES),
            "",
            "Errors, times and memory of every method, beside mergekit's: [results](../../benchmarks/results/methods.md). "
            "What they do to a small language model: [quality](../quality.md).",
            "",
            "What a method does to the bytes: [architecture](../architecture.md). [Adding a method](../adding-a-method.md).",
            "",
        ]
    )


def _base(role: BaseRole) -> str:
    return BASES[role].replace("base_model", "`base_model`")


# ---- layouts of mixtures of experts


def layouts_page(layouts: Sequence[ExpertLayout]) -> str:
    """Every architecture that a mixture of experts can have."""
    return MADE + "\n".join(
        [
            "# Architectures of mixtures of experts",
            "",
            "What `architecture` in a recipe of `weightsmith moe` may be. Where a recipe names none, it is the first in this "
            "list that can hold the models. Upper and lower case, spaces and hyphens do not count, nor does the end of a name: "
            "the names that mergekit-moe takes mean what they mean there.",
            "",
            table(
                ("architecture", "", "from dense", "experts' weights"),
                [(f"`{o.name}`", _titled(o), _dense(o), o.routing) for o in layouts],
            ),
            "",
            "With experts that are all the base, a checkpoint of any of these computes what the base does, whatever the router "
            "says: config.json tells the program to make the weights of the chosen experts sum to 1. The tests hold every pair "
            "of this table to it in transformers (`deepseek`, for which it has no class, in arithmetic of their own). Where "
            "that cannot be, the plan warns and says what would make it so.",
            "",
            "## What they can hold",
            "",
            table(
                ("architecture", "shared experts", "sliding window", "attention's biases and norms", "besides"),
                [(f"`{o.name}`", _shared(o), WINDOWS[o.windows], _attention(o), _besides(o)) for o in layouts],
            ),
            "",
            "What does not fit is refused before tensor data is read, with the architectures that would do. No architecture "
            "here has biases in its MLPs, layers without rotary embeddings (SmolLM3's), or other embeddings in some layers.",
            "",
            "A shared expert is one that every token goes through. Its output is *added* to that of the routed ones, so with "
            "experts like the base, and a shared one, layers put out more than the base's. `residual_scale: 0.5` for every "
            "expert begins where the base is; in `qwen2_moe`, where the shared expert has a sigmoid of the hidden state for a "
            "factor, `residual_scale: 0` for that one does. The plan warns where neither is written.",
            "",
            "## In other programs",
            "",
            "Tiny models of these architectures, whose experts differ, were converted by llama.cpp (that of llama-cpp-python "
            "0.3.36) and run by it, and their probabilities compared with those of transformers, and with the dense model's "
            "where all experts are the base: `WEIGHTSMITH_LLAMA_CPP=CHECKOUT pytest tests/mixture/test_llama_cpp.py`.",
            "",
            table(("architecture", "in llama.cpp"), [(f"`{o.name}`", o.llama_cpp) for o in layouts]),
            "",
            "vLLM was not run. By the source of 0.33.0 it divides the weights of the chosen experts as config.json says for "
            "`qwen2_moe`, `qwen3_moe`, `glm4_moe`, `deepseek_v2` and `deepseek_v3`, always for `mixtral` and `granitemoe`, and "
            "never for `olmoe`; it has `flex_olmo` by way of transformers, and no longer `dots1`.",
            "",
            "## Names on disk",
            "",
            "As `save_pretrained` of transformers writes them, and as programs that read the hub's models expect them. Inside "
            "a layer (`model.layers.0.`), with `{e}` for the expert; several parts of one tensor are joined along the rows; "
            "without `{e}` the tensor is [experts, rows, columns].",
            "",
            table(
                ("architecture", "experts", "router", "shared expert"),
                [(f"`{o.name}`", _names(o.tensors), f"`{o.router}`", _shared_names(o)) for o in layouts],
            ),
            "",
            "Everything else keeps its name. `e_score_correction_bias` is float32 and zero.",
            "",
        ]
    )


WINDOWS: Mapping[str, str] = {"none": "none", "all": "of all layers, or of none", "any": "of any layers"}


def _titled(layout: ExpertLayout) -> str:
    return f"{layout.title} ({', '.join(layout.aliases)})" if layout.aliases else layout.title


def _dense(layout: ExpertLayout) -> str:
    return ", ".join(f"`{name}`" for name in layout.dense) or "none that transformers has"


def _shared(layout: ExpertLayout) -> str:
    low, high = layout.shared_experts
    return "none" if high == 0 else f"{low}" if low == high else f"{low} or {high}"


def _attention(layout: ExpertLayout) -> str:
    """Its biases and norms, in words."""
    if "self_attn.k_proj.weight" not in layout.layer:
        return "latent, with biases or without"
    norms = f"queries and keys normed ({layout.norms})"
    words = [norms] * (layout.layer >= QK_NORMS) + [f"{norms} or not"] * (QK_NORMS in layout.optional)
    words += ["biases of q, k, v, o or none"] * (ATTENTION_BIASES in layout.optional)
    words += ["biases of q, k, v or none"] * (QKV_BIASES in layout.optional)
    words += ["biases of q, k, v"] * (layout.layer >= QKV_BIASES)
    return "; ".join(words) or "neither"


def _besides(layout: ExpertLayout) -> str:
    more = [f"at least {layout.min_experts} experts"] * (layout.min_experts > 1)
    more += ["part of a head may be rotated (Phi-3, GLM)"] * layout.partial
    more += ["Granite's multipliers"] * layout.multipliers
    return "; ".join([*more, layout.note] if layout.note else more)


def _names(tensors: Sequence[tuple[str, Sequence[str]]]) -> str:
    return ", ".join(f"`{name}`" + (f" ({' and '.join(parts)})" if len(parts) > 1 else "") for name, parts in tensors)


def _shared_names(layout: ExpertLayout) -> str:
    return ", ".join(filter(None, (_names(layout.shared), layout.shared_router and f"`{layout.shared_router}`"))) or "none"


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
        print(f"{path.relative_to(ROOT)} {what}{'; run `make docs`' if args.check else ': fixed'}")
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
