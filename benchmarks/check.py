"""Is a merged folder right? Compares it with reference.py and prints one line of JSON.

    python -m benchmarks.check ties build/bench/models/toy OUT

Every tensor's name, shape and dtype is checked; the values of all tensors of a small model, and of a large one those of
the first and last layer, the final norm and the head. Status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import reference
from benchmarks.checkpoint import Place, tensors
from benchmarks.jobs import DENSITY, LINEAR_WEIGHTS, SLERP_T, stack

MAX_ULPS = {"linear": 0.51, "slerp": 1.0, "ties": 1.0}
ALL_VALUES_BELOW_BYTES = 64 << 20


@dataclass(slots=True)
class Findings:
    """What the comparison found.

    values       elements compared
    max_ulps     the largest error; None where the method draws lots or copies
    off_share    share of elements more than one ulp off (drawing lots: that no mask explains; copies: not equal)
    problems     everything that is wrong, empty if nothing is
    """

    values: int = 0
    max_ulps: float | None = None
    off_share: float = 0.0
    problems: list[str] = field(default_factory=list)


def check(method: str, models: Path, out: Path) -> Findings:
    """Compare the merge of `models` found in `out` with the reference."""
    inputs = {name: tensors(models / name) for name in ("base", "a", "b")}
    layers = json.loads((models / "base" / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    expected = dict(_sources(method, inputs["a"], layers))
    got = tensors(out)

    findings = Findings()
    for name in sorted(expected.keys() ^ got.keys()):
        findings.problems.append(f"{name}: {'missing' if name in expected else 'not expected'}")
    common = [name for name in expected if name in got]
    for name in common:
        model, source = expected[name]
        want = inputs[model][source]
        if (got[name].dtype, got[name].shape) != (want.dtype, want.shape):
            findings.problems.append(f"{name}: {got[name].dtype} {got[name].shape}, not {want.dtype} {want.shape}")
    if findings.problems:
        return findings

    off = 0.0
    for name in _sample(common, inputs["a"]):
        place = got[name]
        model, source = expected[name]
        off += _check_values(method, name, place, {m: t.get(source) for m, t in inputs.items()}, model, findings)
        findings.values += int(np.prod(place.shape))
    findings.off_share = off / findings.values
    limit = MAX_ULPS.get(method)
    if limit is not None and (findings.max_ulps or 0) > limit:
        findings.problems.append(f"{findings.max_ulps:.2f} ulp off, at most {limit} allowed")
    return findings


def _check_values(
    method: str, name: str, place: Place, inputs: dict[str, Place | None], model: str, findings: Findings
) -> float:
    """Check one tensor; returns how many of its elements are off."""
    out = place.read()
    base, a, b = (p.read() for p in inputs.values() if p is not None)
    if method == "passthrough":
        source = inputs[model]
        assert source is not None
        wrong = int(np.sum(out.view(np.uint16) != source.read().view(np.uint16)))
        if wrong:
            findings.problems.append(f"{name}: {wrong} elements are not {model}'s")
        return wrong
    if method == "dare_ties":
        problems, unexplained = reference.dare_ties_problems(out, base, a, b, DENSITY)
        findings.problems += [f"{name}: {problem}" for problem in problems]
        return unexplained * out.size
    exact = {
        "linear": lambda: reference.linear([a, b], LINEAR_WEIGHTS),
        "slerp": lambda: reference.slerp(a, b, SLERP_T),
        "ties": lambda: reference.ties(base, [a, b], [1, 1], DENSITY),
    }[method]()
    errors = reference.ulps(out, exact, [base, a, b])
    findings.max_ulps = max(findings.max_ulps or 0.0, float(errors.max()))
    return float(np.sum(errors > 1))


def _sources(method: str, names: dict[str, Place], layers: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Output name -> (model, its tensor) that gives the shape, and for copies the values."""
    if method != "passthrough":
        yield from ((name, ("a", name)) for name in names)
        return
    (first, *_), (last, *_) = slices = stack(layers)
    origin = [(model, layer) for model, start, end in slices for layer in range(start, end)]
    for name in names:
        if not name.startswith("model.layers."):
            yield name, (first if name == "model.embed_tokens.weight" else last, name)
    for new, (model, old) in enumerate(origin):
        for name in names:
            if name.startswith(f"model.layers.{old}."):
                yield name.replace(f".{old}.", f".{new}.", 1), (model, name)


def _sample(names: list[str], model: dict[str, Place]) -> list[str]:
    if sum(2 * int(np.prod(place.shape)) for place in model.values()) < ALL_VALUES_BELOW_BYTES:
        return names
    last = max(int(name.split(".")[2]) for name in names if name.startswith("model.layers."))
    prefixes = ("model.layers.0.", f"model.layers.{last}.", "model.norm", "lm_head")
    return [name for name in names if name.startswith(prefixes)]


def main() -> None:
    """Check from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    findings = check(args.method, args.models, args.out)
    print(json.dumps(asdict(findings)))
    sys.exit(bool(findings.problems))


if __name__ == "__main__":
    main()
