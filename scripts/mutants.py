"""Changes one token of the program at a time, and looks whether the tests of its room notice.

    python scripts/mutants.py                       # 200 mutants of all rooms
    python scripts/mutants.py --rooms outputs engine --count 40 --seed 7
    python scripts/mutants.py --results mutants.jsonl                # saves results; an interrupted run resumes
    python scripts/mutants.py --again mutants.jsonl                  # reruns the survivors against the current tests

A mutant is one changed token: `<` for `<=`, `and` for `or`, `+` for `-`, `1` for `2`, `True` for `False`, `not` left out.
It is killed when a test of its room fails, and lives when all pass: fast ones first, slow ones if it survives them. The sample
depends on the seed and the sources alone. Work is done in copies of the repository; the one this file lies in is not touched.
Mutants that no test can tell from the program are in `equivalent_mutants.txt`, with the reason: they are sampled, and not
counted.

Prints each mutant, and the share that was killed; the status is 1 when that is below `--goal`. At the end the tests that failed
run without a change: 2 when one of them fails there too.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import io
import itertools
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/weightsmith")
SWAPS = {
    **{"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "*": "+", "//": "*", "%": "+"},
    **{"and": "or", "or": "and", "True": "False", "False": "True", "not": "", "+=": "-=", "-=": "+=", "|=": "=", "&": "|"},
    **{"break": "continue", "continue": "break", "min": "max", "max": "min", "any": "all", "all": "any"},
}
BESIDE = {
    "__init__.py": ["test_imports.py"],
    "__main__.py": ["app/cli/test_terminal.py"],
    "_features/adapters": ["test_imports.py"],
    "_version.py": ["test_release.py"],
    "plugin": ["test_adding.py"],
    "abc": ["base/test_plugins.py", "test_adding.py"],
    "abc/approximation.py": ["features/transplant"],
    "abc/job.py": ["methods/jobs", "engine"],
    "abc/layout.py": ["features/mixture/test_layouts.py"],
    "abc/output.py": ["outputs"],
    "abc/product.py": ["engine/products"],
    "abc/stored.py": ["models/formats"],
    "abc/tensors.py": ["models/sources", "models/test_checkpoint.py"],
    "_app/api.py": ["test_merge.py", "execution/test_run.py", "execution/test_stages.py", "app/cli"],
    "_execution/cards.py": ["execution/test_cards.py", "features/quantisation/test_mmproj.py", "app/cli"],
    "_models/structure/diffusers_names.py": ["models/formats/gguf/diffusion", "features/adapters/test_renaming.py"],
    "_kernels/ggml.py": ["models/formats/gguf/test_blocks.py"],
    "_kernels/ggml_fits.py": ["models/formats/gguf/test_blocks.py"],
    "_models/checkpoint.py": ["models/sources", "models/formats", "files/hub"],
    "_app/cli/convert.py": ["features/adapters", "app/test_quantize_commands.py"],
    "_app/cli/merge.py": ["features/mixture", "execution/test_run.py", "app/cli/test_plan.py"],
    "_app/cli/options.py": ["base/test_options.py", "app/test_quantize_commands.py"],
    "_files/containers.py": ["outputs", "files/containers"],
    "_activations": [
        "features/quantisation/test_calibration.py",
        "features/quantisation/test_losses.py",
        "features/mixture/test_gates.py",
    ],
    "_execution/report.py": ["app/cli", "test_merge.py"],
    "_engine": ["test_merge.py", "execution/test_run.py", "engine/products", "features/mixture/test_surgery.py"],
    "_engine/schedule.py": ["engine/test_order.py", "methods/test_matrix_methods.py"],
    "_base/errors.py": ["base/test_errors.py", "app/cli"],
    "_execution": ["test_merge.py", "execution/test_run.py", "execution/test_stages.py", "app/cli"],
    "_files": ["models/sources", "models/test_checkpoint.py", "attacks"],
    "_base/files.py": ["test_hostile_input.py"],
    "_files/state_pickle.py": ["files/test_pytorch.py", "models/sources/test_pytorch.py"],
    "_files/zip_records.py": ["files/test_pytorch.py", "models/sources/test_pytorch.py"],
    "_execution/identity.py": ["execution/test_run.py", "test_merge.py"],
    "_methods/jobs": ["methods", "engine/products", "engine"],
    "_kernels": ["methods", "methods/jobs", "test_merge.py"],
    "_kernels/divergence.py": ["engine/products", "features/quantisation/test_full_measurement.py"],
    "_kernels/exl2.py": ["features/quantisation/test_exl2_matrix.py", "models/formats/exl2"],
    "_kernels/codes.py": ["models/formats"],
    "_kernels/trellis.py": ["models/formats/test_quantised.py"],
    "_kernels/combine.py": ["models/lora"],
    "_kernels/randomness.py": ["features/mixture/test_upcycling.py"],
    "_reports/look": ["app/cli/test_look.py"],
    "_models/lora": ["features/adapters", "app/cli/test_merge.py"],
    "_methods": ["engine/products"],
    "_features/mixture": ["features/quantisation/test_exl2_format.py"],
    "_base/options.py": ["app/cli", "execution/test_run.py"],
    "_base/report": ["base/report", "reports/look", "app/cli/test_look.py"],
    "_planning/planner": ["test_merge.py", "execution/test_stages.py", "app/cli/test_plan.py", "models/structure"],
    "_planning/planner/segments.py": ["app/cli/test_plan.py", "app/cli/test_merge.py"],
    "_planning/planner/encode.py": ["planning/planner/test_quantize.py", "app/test_quantize_commands.py"],
    "_planning/planner/reopen.py": ["execution/test_run.py", "test_hostile_input.py", "models/formats/gguf/test_gguf_files.py"],
    "_execution/state_dicts.py": ["execution/test_memory.py"],
    "_planning/planner/vocabulary.py": ["planning/planner/test_vocabulary.py", "models/tokenizers"],
    "_plans": ["execution/test_run.py", "engine", "test_hostile_input.py", "app/cli/test_plan.py"],
    "_engine/products": ["activations/test_decoder.py", "methods/test_own_method.py", "methods/test_methods.py"],
    "_execution/second_plans.py": ["features/quantisation/test_targets.py", "execution/distributed/test_measured.py"],
    "_execution/progress.py": ["app/cli/test_progress.py", "app/test_python.py"],
    "_features/quantisation": ["app/test_quantize_commands.py", "planning/planner/test_quantize.py"],
    "_features/quantisation/formats.py": [
        "models/formats/gguf/test_gguf_files.py",
        "features/quantisation/test_importances.py",
        "features/quantisation/test_gguf_sizes.py",
    ],
    "_plans/parts.py": ["plans/test_hashes.py", "execution/distributed"],
    "_planning/recipe/written.py": ["planning/recipe/test_load.py", "planning/recipe/test_sums.py"],
    "_planning/recipe/values.py": ["planning/recipe/test_grammar.py", "planning/recipe/test_schedules.py"],
    "_planning/planner/loading.py": ["planning/planner/test_answers.py"],
    "_planning/planner/steps.py": ["planning/planner/test_statistics.py", "planning/planner/test_dtype.py"],
    "_planning/planner/files.py": ["planning/planner/test_companions.py", "models/structure/test_config.py"],
    "_planning/recipe": [
        "app/cli/test_messages.py",
        "app/cli/test_recipe_options.py",
        "app/cli/test_init.py",
        "planning/planner/test_parameters.py",
        "features/mixture",
    ],
    "_models/sources": ["models/test_checkpoint.py", "planning/planner/test_quantize.py"],
    "_models/sources/adapted.py": ["models/lora", "features/adapters"],
    "_outputs": ["test_merge.py", "execution/test_run.py", "app/cli/test_verify.py", "app/cli/test_housekeeping.py"],
    "_models/formats": ["planning/planner/test_quantize.py", "app/test_quantize_commands.py"],
    "_models/formats/verbatim.py": ["features/quantisation/test_copied_codes.py", "models/formats/gguf/test_copied.py"],
    "_models/formats/autoround.py": ["models/formats/test_scaled.py", "models/formats/test_quantised.py"],
    "_models/formats/scaled.py": ["models/formats/compressed_tensors", "models/formats/fp8"],
    "_models/formats/quark.py": ["models/formats/test_quark.py", "models/formats/test_scaled.py"],
    "_models/formats/exl2": ["features/quantisation/test_exl2_format.py", "features/quantisation/test_exl2_matrix.py"],
    "_models/formats/gguf": ["models/formats/gguf/test_gguf_files.py", "features/quantisation/test_importances.py"],
    "_models/structure/projections.py": ["models/structure/test_fused.py", "models/formats"],
    "_models/structure": ["planning/planner", "features/mixture/test_layouts.py"],
    "_base/tensors.py": ["engine", "files", "files/containers", "models/formats", "app/cli/test_plan.py", "app/test_python.py"],
    "testing": ["models/sources", "models/formats"],
    "_base/text.py": ["app/cli/test_terminal.py", "app/test_python.py", "app/cli"],
    "_models/tokenizers": ["planning/planner/test_vocabulary.py", "files", "models/formats/gguf/test_gguf_files.py"],
}
"""Room, folder or module -> tests besides those in the folder of its name. The nearest come first."""
MAX_PROCESSOR_S, STALLED_S = 600, 180
"""An endless loop ends at the first, a deadlock when so long no processor time went by: neither depends on what else runs."""
PRELOADED = ("numpy", "numba", "scipy.stats", "torch", "transformers")
"""Imported once; the tests of each mutant run in a fork."""
_LINES = [line.strip() for line in Path(__file__).with_name("equivalent_mutants.txt").read_text().splitlines()]
EQUIVALENT = dict(zip(_LINES[1::2], _LINES[::2], strict=True))
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
        return self.file.relative_to(PACKAGE).parts[0].strip("_")

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
        """Without the row, so that it is found again when lines have moved."""
        text = (ROOT / self.file).read_text()
        old, new = (t.splitlines()[self.row - 1].strip() for t in (text, self.apply(text)))
        return f"{self.file}: {old} -> {new}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that run together.

    kernels  `kept` from earlier runs, `apart` from those of the user, `compiled` anew for this mutant, or `plain` Python, which
             takes less
    """

    tests: tuple[str, ...]
    marks: str
    kernels: Literal["kept", "apart", "compiled", "plain"] = "kept"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant. by: the test that failed first, or how the run ended; "" if it lives. plain: as plain Python."""

    by: str = ""
    plain: bool = False

    @property
    def lives(self) -> bool:
        return not self.by


def main() -> int:
    """Sample, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--goal", type=float, default=0.9, help="share of mutants to kill (default: 0.9)")
    parser.add_argument("--results", type=Path, help="append what became of each mutant, and skip those that are in it")
    parser.add_argument("--again", type=Path, metavar="RESULTS", help="not a sample, but those that lived in this file")
    parser.add_argument("--near", action="store_true", help="a first look: only the nearest tests of each module, no slow ones")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    options = parser.parse_args()
    if options.again:
        lived = {said for said, outcome in read_results(options.again).items() if outcome.lives}
        mutants = [m for m in every_mutant(options.rooms) if m.describe() in lived]
    else:
        mutants = sample(options.count, options.seed, options.rooms)
    if options.list:
        print(*(mutant.describe() for mutant in mutants), sep="\n")
        return 0
    known = read_results(options.results) if options.results else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for k in range(options.jobs):
            copies.put(copy_of_repository(Path(folder) / str(k)))
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            running = {pool.submit(try_in, copies, m, options.near): m for m in mutants if m.describe() not in known}
            for future in concurrent.futures.as_completed(running):
                said, outcome = running[future].describe(), future.result()
                known[said] = outcome
                print(
                    f"{_word(said, outcome)}  {said} (line {running[future].row})  {outcome.by or EQUIVALENT.get(said, '')}",
                    flush=True,
                )
                if options.results:
                    with options.results.open("a") as file:
                        print(json.dumps({"mutant": said, **asdict(outcome)}), file=file)
        outcomes = {said: known[said] for said in (mutant.describe() for mutant in mutants)}
        wrong = [test for plain in (False, True) for test in failing(Path(folder) / "0", outcomes.values(), plain)]
    words = [_word(said, outcome) for said, outcome in outcomes.items()]
    killed, lived, equivalent = (words.count(word) for word in ("killed", "LIVES", "equivalent"))
    share = killed / max(1, killed + lived)
    print(f"\n{killed} of {killed + lived} killed ({share:.0%}); {equivalent} equivalent")
    print(*(f"fails without any change: {test}" for test in wrong), sep="\n")
    return 2 if wrong else int(share < options.goal)


def _word(said: str, outcome: Outcome) -> str:
    return "equivalent" if said in EQUIVALENT else "LIVES" if outcome.lives else "killed"


def read_results(file: Path) -> dict[str, Outcome]:
    """What is known of mutants. The last line about one counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.pop("mutant"): Outcome(**line) for line in map(json.loads, lines)}


# ---- mutants


def sample(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Mutants of all rooms, or of some; a file counts by its number of tokens."""
    every = list(every_mutant(rooms))
    random.Random(seed).shuffle(every)
    return list(itertools.islice((mutant for mutant in every if mutant.is_program()), count))


def every_mutant(rooms: Sequence[str]) -> Iterator[Mutant]:
    """All of them, in the order of the files."""
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield from (m for m in mutants_of(file.relative_to(ROOT)) if not rooms or m.room in rooms)


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


# ---- tests


KEEPING = {"compiler", "identity", "internals", "jit"}
"""Modules that decide which kernels are kept, and under which names."""
QUICK = "not slow and not second and not sweep"
OTHERS = "(slow or long or matrix) and not (process or reader or repository or store or sweep)"
"""Marks of tests: those of the first ring that are fast, and all others that run in one process."""


def stages(file: Path, near: bool) -> Iterator[Stage]:
    """What a mutant of this module has to survive."""
    groups = list(tests_of(file))
    of_kernels = file.is_relative_to(PACKAGE / "_kernels")
    kernels: Literal["kept", "apart", "compiled"] = (
        "apart" if of_kernels or file == PACKAGE / "_base" / "tensors.py" else "kept"
    )
    if of_kernels and file.stem in KEEPING:
        kernels = "compiled"
    if of_kernels:
        yield Stage(("tests/kernels",), QUICK, "plain")
    yield Stage((str(file), *groups[0]), QUICK, kernels)
    if not near:
        for tests in groups[1:]:
            yield Stage(tests, QUICK, kernels)
        yield Stage(tuple(test for tests in groups for test in tests), OTHERS, kernels)


def tests_of(file: Path) -> Iterator[tuple[str, ...]]:
    """The tests of a module, nearest first: those named for it, then those of each folder around it."""
    inside = file.relative_to(PACKAGE)
    groups = []
    for place in (inside, *inside.parents[:-1]):
        mirror = Path(*(part.lstrip("_") for part in place.parts))
        mirror_test = mirror.with_name(f"test_{mirror.name}") if place == inside else mirror
        groups.append([str(mirror_test), *BESIDE.get(str(place), [])])
    seen: set[Path] = set()
    for group in groups:
        places = [ROOT / "tests" / name for name in group]
        files = [file for place in places for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])]
        tests = [test for test in dict.fromkeys(files) if test not in seen and test.exists()]
        seen.update(tests)
        if tests:
            yield tuple(str(test.relative_to(ROOT)) for test in tests)


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


def try_in(copies: queue.Queue[Path], mutant: Mutant, near: bool) -> Outcome:
    """Run the stages of a mutant until a test fails."""
    copy = copies.get()
    file = copy / mutant.file
    text = file.read_text()
    try:
        file.write_text(mutant.apply(text))
        for stage in stages(mutant.file, near):
            passed, tests = run_tests(copy, stage, "-x")
            if not passed:
                return Outcome(tests[0], stage.kernels == "plain")
        return Outcome()
    finally:
        file.write_text(text)
        for leftover in (copy / ".hypothesis", copy / ".kernels"):  # examples and kernels of this mutant
            shutil.rmtree(leftover, ignore_errors=True)
        copies.put(copy)


def failing(copy: Path, outcomes: Iterable[Outcome], plain: bool) -> list[str]:
    """Those of the tests that killed mutants that fail in an unchanged copy."""
    tests = sorted({outcome.by for outcome in outcomes if "::" in outcome.by and outcome.plain == plain})
    return run_tests(copy, Stage(tuple(tests), "not sweep", "plain" if plain else "kept"))[1] if tests else []


def run_tests(copy: Path, stage: Stage, *options: str) -> tuple[bool, list[str]]:
    """Whether all tests of a stage pass in a copy; those that fail, or how the run ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_in_fork, args=(there, copy, stage, options))
    process.start()
    there.close()
    used = 0.0
    since = time.monotonic()
    while process.is_alive():
        process.join(1)
        now = processor_s(process.pid or 0)
        if now > used + 0.5:
            used, since = now, time.monotonic()
        if used > MAX_PROCESSOR_S or time.monotonic() - since > STALLED_S:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return False, ["no end" if used > MAX_PROCESSOR_S else "deadlock"]
    try:
        passed, tests = here.recv()
    except EOFError:
        if process.exitcode == 1:  # an exception in this script
            raise RuntimeError((copy / ".output").read_text()[-2000:]) from None
        return False, [f"the process ended with {process.exitcode}"]
    return passed, tests


def processor_s(session: int) -> float:
    """Processor time of a session's processes, and of those they waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class _Failures:
    """A plugin of pytest: the tests that failed, in order."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        self._note(report)

    def pytest_collectreport(self, report: object) -> None:
        self._note(report)

    def _note(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]
            self.tests.append(report.nodeid)  # type: ignore[attr-defined]


def _in_fork(there: Connection, copy: Path, stage: Stage, options: Sequence[str]) -> None:
    """Run pytest in this process: it has what is preloaded, and nothing of weightsmith."""
    os.setsid()
    with (copy / ".output").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(copy)
    sys.path[0] = str(copy / "src")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPATH"] = sys.path[0]
    options = [*options, "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # some of what is preloaded has plugins
    if stage.kernels == "plain":
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        options += ["-W", "ignore::RuntimeWarning"]
    elif stage.kernels in ("apart", "compiled"):
        os.environ["NUMBA_CACHE_DIR"] = str(copy.parent / "kernels" if stage.kernels == "apart" else copy / ".kernels")

    import numba.core.config
    import pytest

    numba.core.config.reload_config()
    failures = _Failures()
    command = ["-q", "-p", "no:cacheprovider", "--timeout=0", "-o", "faulthandler_timeout=0", *options, "-m", stage.marks]
    code = pytest.main([*command, *stage.tests], plugins=[failures])
    passed = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    there.send((passed, failures.tests or ([] if passed else [f"pytest ended with {code}"])))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the fork server too
    sys.exit(main())
