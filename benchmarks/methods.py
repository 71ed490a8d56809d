"""Every merge method beside mergekit's: the error of both on the same inputs, time and memory of both. `make bench-methods`.

    python -m benchmarks.methods [--methods ties sce] [--scale 1b] [--skip-mergekit] [--again]

Errors are taken on the toy models, all tensors, against the float64 reference that the tests hold the method to
(tests/cases); methods that draw lots have none. Times are of whole processes on the large models, inputs in the page
cache, one run each (mergekit takes minutes), weightsmith waiting for the disk and mergekit not. Peaks of memory are upper
bounds: below 170 MB it is the program that starts the others. What was measured is kept in build/bench/methods.json, so that
an interrupted run goes on; the table is written to benchmarks/results/methods.md. Status 1 when a method of ours is more than
1 ulp off.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import MERGEKIT, RESULTS, WORK, Floor, Mergekit, Models, Rival, Task, Weightsmith, build_models, machine
from benchmarks.checkpoint import tensors
from benchmarks.jobs import Job
from benchmarks.process import prepare_cache, run
from benchmarks.reference import ulps

MERGEKIT_HAS = frozenset(
    "linear slerp nuslerp multislerp karcher model_stock task_arithmetic ties dare_linear dare_ties della della_linear "
    "breadcrumbs breadcrumbs_ties sce ram ramplus_tl nearswap arcee_fusion passthrough".split()
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one method is measured: the models, the parameters of each and of all, and the case whose reference is meant."""

    models: tuple[str, ...] = ("a", "b")
    parameters: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    base: str = "base"


TRIM = {"weight": 1.0, "density": 0.5}
SETTINGS: dict[str, Setting] = {
    "linear": Setting(parameters={"weight": 0.5}, base=""),
    "slerp": Setting(("a", "b"), shared={"t": 0.3}, base="a"),
    "nuslerp": Setting(parameters={"weight": 0.5}, base=""),
    "multislerp": Setting(parameters={"weight": 0.5}),
    "karcher": Setting(base=""),
    "model_stock": Setting(),
    "geometric_median": Setting(("a", "b", "c"), shared={"max_iter": 1000, "tol": 1e-13}, base=""),
    "task_arithmetic": Setting(parameters={"weight": 0.6}),
    "ties": Setting(parameters=TRIM),
    "dare_linear": Setting(parameters=TRIM),
    "dare_ties": Setting(parameters=TRIM),
    "della": Setting(parameters=TRIM | {"epsilon": 0.2}),
    "della_linear": Setting(parameters=TRIM | {"epsilon": 0.2}),
    "breadcrumbs": Setting(parameters=TRIM | {"gamma": 0.01}),
    "breadcrumbs_ties": Setting(parameters=TRIM | {"gamma": 0.01}),
    "sce": Setting(shared={"select_topk": 0.1}),
    "ram": Setting(),
    "ramplus_tl": Setting(),
    "ramplus": Setting(),
    "nearswap": Setting(("a",), shared={"t": 0.0001}),
    "arcee_fusion": Setting(("a",)),
    "consensus_ta": Setting(),
    "magmax": Setting(),
    "localize_and_stitch": Setting(parameters={"density": 0.1}),
    "cabs": Setting(),
    "passthrough": Setting(("a",), base=""),
}


def recipe(method: str, setting: Setting, models: Path) -> str:
    """The recipe, the same for both programs."""
    lines = [f"merge_method: {method}", *([f"base_model: {models}/{setting.base}"] if setting.base else []), "models:"]
    for name in setting.models:
        lines.append(f"  - model: {models}/{name}")
        if setting.parameters:
            lines.append(f"    parameters: {json.dumps(dict(setting.parameters))}")
    if setting.shared:
        lines.append(f"parameters: {json.dumps(dict(setting.shared))}")
    return "\n".join([*lines, "dtype: bfloat16", ""])


def make_task(method: str, models: Models, threads: int) -> Task:
    """What a rival is asked to do."""
    setting = SETTINGS[method]
    names = tuple(dict.fromkeys([*([setting.base] if setting.base else []), *setting.models]))
    path = WORK / f"method-{method}.yml"
    path.write_text(recipe(method, setting, models.folder.resolve()), encoding="utf-8")
    files = tuple(file for name in names for file in sorted((models.folder / name).glob("*.safetensors")))
    job = Job(method, names, lambda folder, layers: "")
    return Task(job, path, files, models.model_bytes * len(names), models.model_bytes, threads)


# ---- errors


def errors(method: str, rival: Rival, models: Models, threads: int) -> dict[str, float]:
    """Largest error in ulp and the share of elements more than one off, over all tensors of the toy models."""
    expected = REFERENCES.get(method)
    if expected is None:
        return {}
    setting = SETTINGS[method]
    out = WORK / "out" / "errors"
    shutil.rmtree(out, ignore_errors=True)
    run(rival.command(make_task(method, models, threads), out), WORK / "log.txt")
    got = tensors(out)
    names = [*([setting.base] if setting.base and setting.base not in setting.models else []), *setting.models]
    inputs = [tensors(models.folder / name) for name in names]
    largest, off, count = 0.0, 0.0, 0
    for name, place in got.items():
        arrays = [source[name].read() for source in inputs]
        error = ulps(place.read(), expected(arrays), arrays)
        largest, off, count = max(largest, float(error.max())), off + float(np.sum(error > 1)), count + error.size
    return {"max_ulps": largest, "off_share": off / count}


def _references() -> dict[str, Any]:
    from tests.cases import elementwise as e
    from tests.cases import gram as g
    from tests.cases import task_vectors as t
    from tests.cases.case import deltas, f64
    from tests.kernels import reference

    formulas: dict[str, Any] = {
        "linear": lambda a: reference.combine(f64(a), [0.5, 0.5]),
        "slerp": lambda a: reference.slerp(f64(a)[0], f64(a)[1], 0.3),
        "nuslerp": lambda a: reference.nuslerp(f64(a)[0], f64(a)[1], 0.5),
        "multislerp": lambda a: f64(a)[0] + g.nlerp(deltas(a), (0.5, 0.5)),
        "karcher": lambda a: g.karcher(f64(a)),
        "model_stock": lambda a: g.stock(f64(a)[0], deltas(a)),
        "geometric_median": lambda a: g.median(f64(a)),
        "task_arithmetic": lambda a: t.merged(a, [0.6, 0.6], t.everything),
        "ties": lambda a: t.merged(a, [1, 1], t.largest(0.5), elect=True, mean=True),
        "breadcrumbs": lambda a: t.merged(a, [1, 1], lambda d, i: t.band(d, 0.5, 0.01)),
        "breadcrumbs_ties": lambda a: t.merged(a, [1, 1], lambda d, i: t.band(d, 0.5, 0.01), elect=True),
        "sce": lambda a: e.sce(a, 0.1),
        "ram": lambda a: e.ram(a, (1.0, 1.0)),
        "ramplus_tl": lambda a: e.ram(a, None),
        "nearswap": lambda a: e.nearswap(a, 1e-4),
        "arcee_fusion": e.fusion,
        "consensus_ta": lambda a: e.consensus(a, (0.4, 0.4), 2, 1.0),
        "magmax": lambda a: t.largest_alone(a, [1.0, 1.0]),
        "cabs": lambda a: t.in_turn(a, [1.0, 1.0], 64, 256),
        "passthrough": lambda a: f64(a)[0],
    }
    return formulas


REFERENCES = _references()


# ---- times


def timed(task: Task, rival: Rival) -> dict[str, float]:
    """One run."""
    out = WORK / "out" / "timed"
    shutil.rmtree(out, ignore_errors=True)
    if not rival.merges:
        out.mkdir(parents=True)
    prepare_cache(task.inputs, "warm")
    measured = run(rival.command(task, out), WORK / "log.txt")
    shutil.rmtree(out, ignore_errors=True)
    return {"seconds": rival.seconds(measured), "peak_rss_bytes": measured.peak_rss_bytes}


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The rows, in the registry's order."""
    yield (
        "| method | error, ulp (share over 1) | mergekit's error | s | MB | mergekit s | MB | times as fast | time / floor |"
    )
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for method, row in results.items():
        ours, theirs, floor = row.get("weightsmith", {}), row.get("mergekit", {}), row.get("floor", {})
        cells = [
            f"`{method}`",
            _error(row.get("errors")),
            _error(row.get("mergekit errors")),
            *_time(ours),
            *_time(theirs),
            f"{theirs['seconds'] / ours['seconds']:.1f}" if theirs and ours else "",
            f"{ours['seconds'] / floor['seconds']:.2f}" if floor and ours else "",
        ]
        yield f"| {' | '.join(cells)} |"


def _error(differences: Mapping[str, float] | None) -> str:
    return f"{differences['max_ulps']:.3g} ({differences['off_share']:.3%})" if differences else ""


def _time(measured: Mapping[str, float]) -> tuple[str, str]:
    return (f"{measured['seconds']:.1f}", f"{measured['peak_rss_bytes'] / 1e6:.0f}") if measured else ("", "")


def main() -> None:
    """Measure what is not measured yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--scale", default="1b")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip-mergekit", action="store_true", help="keep what was measured of it before")
    parser.add_argument("--skip-times", action="store_true", help="errors only")
    parser.add_argument("--again", action="store_true", help="measure weightsmith again where it was measured before")
    args = parser.parse_args()
    shutil.rmtree(WORK / "out", ignore_errors=True)  # what an interrupted benchmark left
    (WORK / "out").mkdir(parents=True)
    kept = WORK / "methods.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    toy = build_models("toy")
    large = toy if args.skip_times else build_models(args.scale)
    floor, ours = Floor("floor", fsync=True, merges=False), Weightsmith("weightsmith", fsync=True)
    theirs = Mergekit("mergekit", fsync=False, program=MERGEKIT)
    for method in args.methods:
        row = results.setdefault(method, {})
        jobs = [("errors", ours, toy), ("floor", floor, large), ("weightsmith", ours, large)]
        if method in MERGEKIT_HAS and not args.skip_mergekit:
            jobs += [("mergekit errors", theirs, toy), ("mergekit", theirs, large)]
        for key, rival, models in jobs:
            measured_before = key in row and not (args.again and "mergekit" not in key)
            is_error = "errors" in key
            if measured_before or (args.skip_times and not is_error):
                continue
            row[key] = (
                errors(method, rival, models, args.threads)
                if is_error
                else timed(make_task(method, models, args.threads), rival)
            )
            kept.write_text(json.dumps(results, indent=1))
            print(method, key, row[key], file=sys.stderr, flush=True)
    ordered = {method: results[method] for method in SETTINGS if method in results}
    about = [f"{datetime.now(UTC):%Y-%m-%d}", *machine()]
    lines = [f"# Every method: {args.scale}, page cache warm, {args.threads} threads, one run each", ""]
    lines += [*(f"* {line}" for line in about), "", *table(ordered), ""]
    out = WORK if args.skip_times else RESULTS
    out.mkdir(exist_ok=True)
    (out / "methods.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    wrong = [method for method, row in ordered.items() if row.get("errors", {}).get("max_ulps", 0) > 1]
    if wrong:
        raise SystemExit(f"more than 1 ulp off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
