"""Runs cases in child processes, and says what came of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.fuzz import KINDS
from scripts.fuzz.broken import BROKEN
from scripts.fuzz.kind import MEGABYTES, Rng

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0
"""CPU time."""
WAITING = 30.0
"""Seconds by the clock: the machine may be busy with other things."""
MAX_MESSAGE = 20_000
"""Characters of a message."""
_SPARE = 30.0  # seconds more, after which a child that does not answer is killed
_LIMIT_MEGABYTES = 2 * MEGABYTES  # beyond what a child has at the start: it cannot take the machine with it


class Hang(BaseException):
    """The time of a case is over. No Exception: nobody on the way may catch it."""


def run_case(kind: str, seed: int, case: int, folder: Path) -> Iterator[Callable[[], Any]]:
    """Put the mutated file of a case in place; the calls to make. folder: of the good inputs, the current one."""
    target, rng = (KINDS | BROKEN)[kind], Rng(f"{kind} {seed} {case}")
    file = rng.choice(target.files)
    (folder / file).write_bytes(target.mutate(rng, (folder / file).read_bytes()))
    return target.use(file, rng)


def problem_of(error: BaseException) -> str:
    """What is wrong with an exception as the end of a call; "" if it is a good one."""
    from weightsmith._base.errors import WeightsmithError

    if not isinstance(error, WeightsmithError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = str(error)
    if len(text) > MAX_MESSAGE:
        return f"a message of {len(text):,} characters: {text[:100]!r}"
    strange = [c for c in text if not c.isprintable() and c not in "\n\t"]  # a line of a recipe keeps its tabs
    return f"a message with {strange[0]!r}: {text[:200]!r}" if strange else ""


def work(kind: str, seed: int, cases: Sequence[int], good: Path, limit: float) -> None:
    """Run cases one after another in this process; lines of JSON to stdout. good: a folder with the good inputs."""
    from weightsmith._base.errors import WeightsmithError
    from weightsmith._planning.planner import loading

    loading.installed = lambda: False  # transformers is not what is tested, and takes seconds for each stack
    signal.signal(signal.SIGALRM, lambda *_: _too_late("by the clock"))
    signal.signal(signal.SIGPROF, lambda *_: _too_late("of processor time"))
    place, pristine = good.parent / f"work-{os.getpid()}", good.parent / f"pristine-{os.getpid()}"
    os.chdir(shutil.copytree(good, place))
    (KINDS | BROKEN)[kind].start()
    shutil.copytree(place, pristine)
    for file in (KINDS | BROKEN)[kind].files:  # what is good must be good; this also compiles and imports what the cases use
        calls = [call for n in range((KINDS | BROKEN)[kind].ways) for call in (KINDS | BROKEN)[kind].use(file, _Always(n))]
        taken = 0
        for call in calls:
            with contextlib.suppress(WeightsmithError):  # a layout or a method that is not for these models
                call()
                taken += 1
            _restore(place, pristine)
        if not taken:
            raise RuntimeError(f"{file} is refused as it is")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + (_LIMIT_MEGABYTES << 20), resource.RLIM_INFINITY))
    for case in cases:
        print(json.dumps({"begin": case}), flush=True)
        problems, refused, before, began = [], 0, _reset_peak(), time.process_time()
        for call in run_case(kind, seed, case, place):
            _set_limits(limit, WAITING)
            try:
                call()
            except BaseException as error:
                _set_limits(0, 0)
                refused += 1
                if problem := problem_of(error):
                    problems.append((problem, _where(error), traceback.format_exc()[-3000:]))
            finally:
                _set_limits(0, 0)
        seconds, megabytes = time.process_time() - began, (_status("VmHWM") - before) / (1 << 20)
        if megabytes > MEGABYTES:
            problems.append((f"{megabytes:.0f} MB", "memory", ""))
        fact = {"end": case, "refused": refused > 0, "problems": problems, "seconds": seconds, "megabytes": megabytes}
        print(json.dumps(fact), flush=True)
        _restore(place, pristine)
    os.chdir(good.parent)


class _Always(random.Random):
    """Chooses as others do, but makes every call that is only sometimes made."""

    def random(self) -> float:
        return 0.0


def _restore(place: Path, pristine: Path) -> None:
    """Undo what a case did. Files keep their inodes: work that was begun is of these very files."""
    for entry in list(place.iterdir()):
        if entry.name.startswith(".") or not (pristine / entry.name).exists():
            shutil.rmtree(entry)
            if (pristine / entry.name).exists():
                shutil.copytree(pristine / entry.name, entry)
    for entry in pristine.glob(".*"):
        if not (place / entry.name).exists():
            shutil.copytree(entry, place / entry.name)
    for path in [path for pattern in ("*", "[!.]*/*", "[!.]*/*/*") for path in pristine.glob(pattern) if path.is_file()]:
        copied = place / path.relative_to(pristine)
        if not copied.is_file() or copied.read_bytes() != path.read_bytes():
            copied.write_bytes(path.read_bytes())


def _set_limits(seconds: float, waiting: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting)


def _too_late(how: str) -> None:
    raise Hang(f"too long {how}")


def _where(error: BaseException) -> str:
    """The last place in weightsmith where an error came by."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "weightsmith/" in f.filename and "site-packages" not in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def _status(key: str) -> int:
    """A number of bytes that the kernel knows of this process; 0 where it does not."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10  # type: ignore[index]
    return 0


def _reset_peak() -> int:
    """Bytes that are resident now; the peak counts from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


@dataclass
class Result:
    """What came of the cases of one kind. problems: (what, where) -> numbers of the cases, and one traceback."""

    cases: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.problems: dict[tuple[str, str], tuple[list[int], str]] = {}

    def add(self, what: str, where: str, trace: str, case: int) -> None:
        """A failure. Those that differ in numbers and names alone are of one sort."""
        sort = (re.sub(r"\d+|'[^']*'", "…", what)[:80], where)
        self.problems.setdefault(sort, ([], f"{what}\n{trace}"))[0].append(case)


def fuzz(kind: str, seed: int, cases: Sequence[int], good: Path, limit: float) -> Result:
    """Run cases in children. good: a folder with the good inputs. limit: of a case, seconds of processor time."""
    result, remaining = Result(), list(cases)
    while remaining:
        arguments = ["--child", str(good), "--kinds", kind, "--seed", str(seed), "--seconds", str(limit)]
        command = [sys.executable, "-m", "scripts.fuzz", *arguments]
        command += ["--only", *map(str, remaining[:1000])]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        running: int | None = None
        errors = b""
        assert child.stdout is not None
        assert child.stderr is not None
        os.set_blocking(child.stderr.fileno(), False)
        answered = True
        while answered:
            answered = bool(select.select([child.stdout], [], [], 8 * WAITING + _SPARE)[0])
            line = child.stdout.readline() if answered else b""
            errors = (errors + (child.stderr.read() or b""))[-2000:]
            if not line:
                break
            fact = json.loads(line)
            if "begin" in fact:
                running = fact["begin"]
                continue
            running = None
            remaining.remove(fact["end"])
            result.cases += 1
            result.refused += fact["refused"]
            result.slowest = max(result.slowest, fact["seconds"])
            result.largest = max(result.largest, fact["megabytes"])
            for what, where, trace in fact["problems"]:
                result.add(what, where, trace, fact["end"])
        child.kill()
        status = child.wait()
        child.stdout.close()
        errors = (errors + (child.stderr.read() or b""))[-2000:]
        child.stderr.close()
        if running is not None:
            what = f"the process died with status {status}" if answered else "the process did not answer"
            result.add(what, "process", errors.decode(errors="replace"), running)
            result.cases += 1
            remaining.remove(running)
        elif status not in (0, -signal.SIGKILL) and errors:
            raise RuntimeError(f"{kind}: no case could be run:\n{errors.decode(errors='replace')}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz every kind of input.", epilog=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS | BROKEN, default=list(KINDS), metavar="KIND")
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of processor time for each case")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--keep", type=Path, help="copy the files of the first case of --only here, and run nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cases = args.only or range(args.cases)
    if args.child:
        work(args.kinds[0], args.seed, cases, args.child, args.seconds)
        return 0
    failures = 0
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="weightsmith-fuzz-") as folder:
            good = Path(folder, "good")
            good.mkdir()
            with contextlib.chdir(good):
                (KINDS | BROKEN)[kind].make()
            if args.keep:
                shutil.copytree(good, args.keep)
                with contextlib.chdir(args.keep):
                    run_case(kind, args.seed, cases[0], args.keep.absolute())
                continue
            began = time.monotonic()
            result = fuzz(kind, args.seed, cases, good, args.seconds)
        failures += len(result.problems)
        print(
            f"{kind:16} {result.cases:7,} files, {result.refused:7,} refused, {time.monotonic() - began:6.0f} s, "
            f"slowest {result.slowest:5.2f} s, at most {result.largest:4.0f} MB, "
            f"{sum(len(cases) for cases, _ in result.problems.values()):,} failures of {len(result.problems)} sorts",
            flush=True,
        )
        for (what, where), (numbers, trace) in result.problems.items():
            print(f"  {what} ({where}): {len(numbers)} times, cases {', '.join(map(str, numbers[:5]))}\n{trace}", flush=True)
    return 1 if failures else 0
