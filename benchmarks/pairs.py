"""Two checkouts of weightsmith on the same merges, in turn: has a change made anything slower, larger or different?

    git worktree add /tmp/before COMMIT
    python -m benchmarks.pairs --before /tmp/before [--methods ties sce] [--scale 1b] [--runs 3]

The merges are those of `make bench-methods` and `make bench-moe`. The weight files of both checkouts are compared byte for
byte before anything is timed. Then each merge runs as a whole process, before and after in turn, inputs in the page cache,
output not synced to disk. A ratio is the median of the ratios of neighbouring runs. Peaks of memory below 170 MB are upper
bounds: they are those of the program that starts the others. Status 1 if bytes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import methods, moe
from benchmarks.bench import RESULTS, WORK, Rival, Task, build_models, machine
from benchmarks.process import Measured, prepare_cache, run

MOE = ("random", "hidden")


@dataclass(frozen=True, slots=True)
class Checkout(Rival):
    """The program in a checkout, run with this environment's Python."""

    folder: Path = Path()

    def command(self, task: Task, out: Path) -> list[str]:
        verb = "moe" if task.job.name.startswith("moe") else "merge"
        python = ["env", f"PYTHONPATH={self.folder.resolve() / 'src'}", sys.executable, "-m", "weightsmith"]
        options = ["--overwrite", "--quiet", "--no-fsync", "--threads", str(task.threads)]
        return [*python, verb, str(task.recipe), str(out), *options]


def once(checkout: Checkout, task: Task) -> Measured:
    """One run, its output left in place until the next."""
    out = WORK / "out" / "pair"
    shutil.rmtree(out, ignore_errors=True)
    prepare_cache(task.inputs, "warm")
    return run(checkout.command(task, out), WORK / "log.txt")


def digest(folder: Path) -> str:
    """sha256 of the weight files, names and bytes."""
    hasher = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        hasher.update(path.name.encode())
        with path.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, "sha256").digest())
    return hasher.hexdigest()


def pair(task: Task, before: Checkout, after: Checkout, runs: int) -> tuple[bool, list[tuple[Measured, Measured]]]:
    """Whether the bytes are the same, and what was measured."""
    digests = []
    for checkout in (before, after):  # compiles kernels too
        once(checkout, task)
        digests.append(digest(WORK / "out" / "pair"))
    return digests[0] == digests[1], [(once(before, task), once(after, task)) for _ in range(runs)]


def row(name: str, same: bool, pairs: Sequence[tuple[Measured, Measured]]) -> str:
    """One merge as a line of a Markdown table."""

    def ratio(field: str) -> float:
        return float(statistics.median(getattr(after, field) / getattr(before, field) for before, after in pairs))

    seconds = [statistics.median(pair[i].wall_seconds for pair in pairs) for i in (0, 1)]
    peaks = [max(pair[i].peak_rss_bytes for pair in pairs) / 1e6 for i in (0, 1)]
    return (
        f"| `{name}` | {'same' if same else 'DIFFER'} | {seconds[0]:.2f} | {seconds[1]:.2f} | {ratio('wall_seconds'):.2f} "
        f"| {ratio('cpu_seconds'):.2f} | {peaks[0]:.0f} | {peaks[1]:.0f} |"
    )


def table(args: argparse.Namespace) -> Iterator[str]:
    """The rows, as they are measured."""
    models = build_models(args.scale)
    moe.add_tokenizer(models.folder / "base")
    before, after = (
        Checkout(name, fsync=False, folder=folder) for name, folder in (("before", args.before), ("after", args.after))
    )
    yield "| merge | bytes | before, s | after, s | time, after / before | processor time | before, MB | after, MB |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in args.methods:
        if name in MOE:
            yield row(f"moe, {name} gates", *pair(moe.plan_task(name, models, args.threads), before, after, args.runs))
        else:
            yield row(name, *pair(methods.make_task(name, models, args.threads), before, after, args.runs))


def main() -> None:
    """Measure, print as it goes, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--after", type=Path, default=Path(), help="another one (default: this one)")
    every = [*methods.SETTINGS, *MOE]
    parser.add_argument("--methods", nargs="+", choices=every, default=every)
    parser.add_argument("--scale", default="1b", help="toy, 1b or 2b (models.py)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    shutil.rmtree(WORK / "out", ignore_errors=True)
    (WORK / "out").mkdir(parents=True)
    lines = [f"# Before and after: {args.scale}, page cache warm, {args.threads} threads, {args.runs} runs each in turn", ""]
    lines += [*(f"* {line}" for line in (f"{datetime.now(UTC):%Y-%m-%d}", *machine())), ""]
    print("\n".join(lines), flush=True)
    for line in table(args):
        print(line, flush=True)
        lines.append(line)
    out = (WORK if args.scale == "toy" else RESULTS) / "pairs.md"
    out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    if any("DIFFER" in line for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
