"""Changes one token of the program at a time, and looks whether the tests of its room notice.

    python scripts/mutants.py                       # 200 mutants of all rooms
    python scripts/mutants.py --rooms store engine --count 40 --seed 7

A mutant is one changed token: `<` for `<=`, `and` for `or`, `+` for `-`, `1` for `2`, `True` for `False`, `not` left out.
It is killed when a test of its room fails, and lives when all pass. The sample depends on the seed and the sources alone.
Work is done in copies of the repository; the one this file lies in is not touched. Mutants that no test can tell from the
program are named in `EQUIVALENT`, with the reason: they are sampled, and not counted.

Prints each living mutant, and the share that was killed; the status is 1 when that is below `--goal`.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import io
import itertools
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/weightsmith")
SWAPS = {
    **{"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "*": "+", "//": "*", "%": "+"},
    **{"and": "or", "or": "and", "True": "False", "False": "True", "not": "", "+=": "-=", "-=": "+=", "|=": "=", "&": "|"},
    **{"break": "continue", "continue": "break", "min": "max", "max": "min", "any": "all", "all": "any"},
}
BESIDE = {
    **{"jobs": ["methods", "products"], "products": ["test_decoder.py"], "plans": ["engine", "test_run.py"]},
    **{"containers": ["store"], "structure": ["planner"], "encodings": ["planner/test_quantize.py"], "cards.py": ["cli"]},
    **{"api.py": ["test_merge.py", "test_run.py", "cli"], "identity.py": ["test_run.py", "test_merge.py"]},
    **{
        "checkpoint.py": ["test_checkpoint.py", "sources"],
        "memory.py": ["test_memory.py"],
        "distance": ["cli", "test_merge.py"],
    },
    **{
        "options.py": ["cli", "test_run.py"],
        "tensors.py": ["engine", "formats"],
        "errors.py": ["test_errors.py", "cli"],
        "text.py": ["cli"],
        "progress.py": ["cli", "test_python.py"],
        "engine": ["test_merge.py"],
    },
    **{"store": ["test_merge.py"], "testing": ["sources", "encodings"], "formats": ["sources"], "planner": ["test_merge.py"]},
}
"""Room -> tests besides those in the folder of its name."""
MAX_PROCESSOR_S, MAX_WALL_S = 400, 3600
"""Limits of one room's tests: an endless loop meets the first, a deadlock the second. A busy machine changes neither much."""
EQUIVALENT: dict[str, str] = {}
"""`file: old line -> new line` -> why no test can tell."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed token. row: from 1, column: from 0."""

    file: Path
    row: int
    column: int
    old: str
    new: str

    @property
    def room(self) -> str:
        return self.file.relative_to(PACKAGE).parts[0]

    def apply(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        line = lines[self.row - 1]
        lines[self.row - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        return "".join(lines)

    def is_program(self) -> bool:
        try:
            ast.parse(self.apply((ROOT / self.file).read_text()))
        except SyntaxError:
            return False
        return True

    def describe(self) -> str:
        text = (ROOT / self.file).read_text()
        old, new = (t.splitlines()[self.row - 1].strip() for t in (text, self.apply(text)))
        return f"{self.file}:{self.row}: {old} -> {new}"


def main() -> int:
    """Sample, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--goal", type=float, default=0.9, help="share of mutants to kill (default: 0.9)")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    options = parser.parse_args()
    mutants = sample(options.count, options.seed, options.rooms)
    if options.list:
        print(*(mutant.describe() for mutant in mutants), sep="\n")
        return 0
    killed = lived = equivalent = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for k in range(options.jobs):
            copies.put(copy_of_repository(Path(folder) / str(k)))
        if broken := [room for room in sorted({m.room for m in mutants}) if not passes(Path(folder) / "0", room)]:
            parser.error(f"tests fail without any change: {', '.join(broken)}")
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for mutant, dead in zip(mutants, pool.map(lambda m: try_in(copies, m), mutants), strict=True):
                said = mutant.describe()
                reason = EQUIVALENT.get(said)
                killed, lived, equivalent = (
                    killed + (dead and not reason),
                    lived + (not dead and not reason),
                    equivalent + bool(reason),
                )
                print("killed" if dead else f"equivalent ({reason})" if reason else "LIVES ", said, flush=True)
    share = killed / max(1, killed + lived)
    print(f"\n{killed} of {killed + lived} killed ({share:.0%}); {equivalent} equivalent; seed {options.seed}")
    return int(share < options.goal)


def sample(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Mutants of all rooms, or of some; a file counts by its number of tokens."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    every = [m for file in files for m in mutants_of(file.relative_to(ROOT)) if not rooms or m.room in rooms]
    random.Random(seed).shuffle(every)
    return list(itertools.islice((mutant for mutant in every if mutant.is_program()), count))


def mutants_of(file: Path) -> Iterator[Mutant]:
    """One mutant for each token that can be swapped, outside of texts, comments, annotations and blocks for type checkers."""
    text = (ROOT / file).read_text()
    skipped = {row for node in ast.walk(ast.parse(text)) for row in _skipped(node)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, column), old = token.start, token.string
        if row in skipped:
            continue
        if token.type == tokenize.NUMBER and old.isdecimal():
            yield Mutant(file, row, column, old, str(int(old) + 1))
        elif token.type in (tokenize.OP, tokenize.NAME) and old in SWAPS and not _unary(token):
            yield Mutant(file, row, column, old, SWAPS[old])


def _unary(token: tokenize.TokenInfo) -> bool:
    """True for the stars and signs in front of something: their swaps are no programs."""
    before = token.line[: token.start[1]].rstrip()
    return token.string in "*+-" and (not before or before[-1] in "([{,=:*" or before.endswith(("return", "lambda")))


def _skipped(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from range(node.lineno, node.body[0].lineno)
    elif isinstance(node, ast.ClassDef):  # what a record is frozen for, no test of bytes can tell
        yield from (decorator.lineno for decorator in node.decorator_list)
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def copy_of_repository(to: Path) -> Path:
    """What git knows, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def try_in(copies: queue.Queue[Path], mutant: Mutant) -> bool:
    """True if a test fails, or the tests do not end within their time."""
    copy = copies.get()
    file = copy / mutant.file
    text = file.read_text()
    try:
        file.write_text(mutant.apply(text))
        return not passes(copy, mutant.room, mutant.file)
    finally:
        file.write_text(text)
        copies.put(copy)


def passes(copy: Path, room: str, *more: Path) -> bool:
    """True if the tests of a room pass in this copy. more: modules with doctests."""
    tests = [f"tests/{name}" for name in (room.removesuffix(".py"), *BESIDE.get(room, []))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *map(str, more)]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command += [name for name in tests if (copy / name).exists()]
    try:
        ended = subprocess.run(
            ["bash", "-c", f'ulimit -t {MAX_PROCESSOR_S} && exec "$@"', "tests", *command],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=MAX_WALL_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
