"""Make the golden digests again: `python -m tests.golden.regold [--write] [CASE ...]`.

Prints what differs from the table, old -> new, and writes it only with --write. A change of a digest is a change of what users
get: it belongs in the changelog. Runs all cases unless some are named. Exit status: 0 when nothing differs or the table was
written, else 1.

Where the bytes depend on the machine a record stays as it is while the result agrees with it within its tolerance.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.golden import digests, inputs
from tests.golden.cases import CASES, Golden


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.regold", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write what differs to digests.json")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases; all by default")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    missing = sorted({module for case in chosen for module in case.needs if importlib.util.find_spec(module) is None})
    if missing:
        parser.error(f"these cases need {', '.join(missing)}: install the test extra")
    warnings.simplefilter("ignore")
    old = digests.load() if digests.TABLE.exists() else {"inputs": {}, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "inputs"
        inputs.make(root)
        new, told = remade(old, root, chosen, whole=not options.cases)
    print("\n".join(told))
    changed = sum(not line.startswith(" ") for line in told)
    print(f"{len(chosen)} cases run, {changed} entries differ" + (": written" if options.write and changed else ""))
    if options.write and changed:
        digests.dump(new)
    return int(bool(changed) and not options.write)


def remade(old: digests.Table, root: Path, chosen: Iterable[Golden], *, whole: bool) -> tuple[digests.Table, list[str]]:
    """The new table, and lines that say what differs. whole: cases and inputs that are no more leave the table."""
    input_digests = {name: digests.tree_digest(root / name) for name in inputs.INPUTS}
    told = [
        f"input {name}: {old['inputs'].get(name, 'new')} -> {x}"
        for name, x in input_digests.items()
        if old["inputs"].get(name) != x
    ]
    gone = set(old["inputs"]) - set(input_digests)
    told += [f"input {name}: removed" for name in sorted(gone)]
    cases = dict(old["cases"])
    for case in chosen:
        entry = digests.record(case, root)
        if case.name not in cases:
            told.append(f"{case.name}: new")
        elif lines := digests.differences(cases[case.name], entry):
            told += [f"{case.name}:", *(f"    {line}" for line in lines)]
        else:
            continue
        cases[case.name] = {key: value for key, value in entry.items() if key != "names"}
    if whole:
        for name in sorted(set(cases) - {case.name for case in CASES}):
            told.append(f"{name}: removed")
            del cases[name]
    return {"inputs": input_digests, "cases": cases}, told


if __name__ == "__main__":
    sys.exit(main())
