"""`weightsmith moe` beside mergekit-moe and the copy floor: four 1.1 B models as experts. `make bench-moe`.

    python -m benchmarks.moe [--scale 1b] [--gates random hidden] [--runs 3] [--skip-mergekit]

The base and three fine-tunes of it (models.py) become the experts of a Mixtral. What weightsmith writes is checked first:
every expert's bytes are its donor's, all else is the base's. Then each rival runs `--runs` times (mergekit once: minutes),
interleaved, inputs in the page cache. `hidden` gates take a forward pass of the base over eight prompts, with a tokenizer of
single bytes. The floor reads what must be read and writes as many bytes as the output has. Timings fail nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.bench import MERGEKIT, RESULTS, WORK, Floor, Models, Rival, Task, build_models, machine
from benchmarks.checkpoint import tensors
from benchmarks.jobs import Job
from benchmarks.process import Measured, prepare_cache, run

EXPERTS = ("base", "a", "b", "c")
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PROMPTS = {
    "base": ("the weather is mild", "a letter to a friend"),
    "a": ("def main(argv):", "return [x for x in range(10)]"),
    "b": ("der Hund und die Katze", "das Wetter ist heute mild"),
    "c": ("le chien et le chat", "il fait beau aujourd'hui"),
}


@dataclass(frozen=True, slots=True)
class Moe(Rival):
    """The command line of the package in this environment."""

    def command(self, task: Task, out: Path) -> list[str]:
        program = str(Path(sys.executable).with_name("weightsmith"))
        options = ["--overwrite", "--quiet", "--threads", str(task.threads)]
        return [program, "moe", str(task.recipe), str(out), *options, *([] if self.fsync else ["--no-fsync"])]


@dataclass(frozen=True, slots=True)
class MergekitMoe(Rival):
    """mergekit's command line, from its own environment. It never waits for the disk."""

    def command(self, task: Task, out: Path) -> list[str]:
        return [str(MERGEKIT.with_name("mergekit-moe")), str(task.recipe), str(out), "--quiet"]


def recipe(models: Path, gates: str) -> str:
    """The recipe, word for word the same for both."""
    lines = [f"base_model: {models}/base", f"gate_mode: {gates}", "dtype: bfloat16", "experts_per_token: 2", "experts:"]
    for name in EXPERTS:
        lines += [f"  - source_model: {models}/{name}", "    positive_prompts:"]
        lines += [f"      - {json.dumps(prompt)}" for prompt in PROMPTS[name]]
    return "\n".join(lines) + "\n"


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes for the synthetic base, if it has none: hidden gates need one."""
    if (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))


def plan_task(gates: str, models: Models, threads: int) -> Task:
    """The task, with its recipe written and its bytes counted: MLPs of all, the rest of the base."""
    path = WORK / f"moe-{gates}.yml"
    path.write_text(recipe(models.folder.resolve(), gates), encoding="utf-8")
    inputs = tuple(file for name in EXPERTS for file in sorted((models.folder / name).glob("*.safetensors")))
    base = tensors(models.folder / "base")
    mlp = sum(2 * math.prod(place.shape) for name, place in base.items() if ".mlp." in name)
    nbytes = models.model_bytes + (len(EXPERTS) - 1) * mlp
    return Task(Job(f"moe, {gates} gates", EXPERTS, lambda folder, layers: ""), path, inputs, nbytes, nbytes, threads)


def check(models: Path, out: Path) -> None:
    """Raises SystemExit if a tensor is not a copy of what it should be."""
    donors = [tensors(models / name) for name in EXPERTS]
    wrong, seen = [], 0
    for name, place in tensors(out).items():
        source = donors[0].get(name)
        if ".experts." in name:
            before, _, after = name.partition(".block_sparse_moe.experts.")
            e, w, _ = after.split(".")
            part = next(part for part, short in NAMES.items() if short == w)
            source = donors[int(e)][f"{before}.mlp.{part}.weight"]
        elif name.endswith(".gate.weight"):
            continue
        seen += 1
        if source is None or source.shape != place.shape or source.read().tobytes() != place.read().tobytes():
            wrong.append(name)
    if wrong or not seen:
        raise SystemExit("\n".join([f"wrong output in {out}", *wrong[:10]]))


def main() -> None:
    """Check, measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="1b", help="toy, 1b or 2b (models.py)")
    parser.add_argument("--gates", nargs="+", choices=("random", "hidden"), default=["random", "hidden"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip-mergekit", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(WORK / "out", ignore_errors=True)
    (WORK / "out").mkdir(parents=True)
    RESULTS.mkdir(exist_ok=True)
    models = build_models(args.scale)
    add_tokenizer(models.folder / "base")
    ours = (Moe("weightsmith, no fsync", fsync=False), Moe("weightsmith", fsync=True))
    floors = (Floor("floor", fsync=False, merges=False), Floor("floor, fsync", fsync=True, merges=False))
    rivals: list[Rival] = [*floors, *ours]
    if not args.skip_mergekit:
        rivals.append(MergekitMoe("mergekit-moe", fsync=False))
    lines = [
        "| gates | who | wall s: median (min to max) | times as fast as mergekit-moe | time / floor | CPU s | peak RSS MB |"
    ]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for gates in args.gates:
        task = plan_task(gates, models, args.threads)
        once(ours[0], task)  # compiles kernels, and is checked
        check(models.folder, WORK / "out" / "moe")
        runs: dict[str, list[Measured]] = {rival.name: [] for rival in rivals}
        for i in range(args.runs):
            for rival in rivals:
                if i == 0 or not isinstance(rival, MergekitMoe):
                    runs[rival.name].append(once(rival, task))
                    print(gates, rival.name, round(rival.seconds(runs[rival.name][-1]), 2), flush=True)
        lines += rows(gates, rivals, runs)
    text = "\n".join(
        [
            f"# moe, 4 x {args.scale}: page cache warm, {args.threads} threads, {args.runs} runs each, mergekit-moe one",
            "",
            *(f"* {line}" for line in (f"{datetime.now(UTC):%Y-%m-%d}", *machine())),
            "",
            *lines,
            "",
        ]
    )
    out = (WORK if args.scale == "toy" else RESULTS) / f"moe-{args.scale}.md"
    out.write_text(text, encoding="utf-8")
    print("\n" + text + f"\nwritten to {out}")


def once(rival: Rival, task: Task) -> Measured:
    """One run, its output left in place until the next."""
    out = WORK / "out" / "moe"
    shutil.rmtree(out, ignore_errors=True)
    if not rival.merges:
        out.mkdir(parents=True)
    prepare_cache(task.inputs, "warm")
    return run(rival.command(task, out), WORK / "log.txt")


def rows(gates: str, rivals: list[Rival], runs: dict[str, list[Measured]]) -> list[str]:
    """The results as lines of a Markdown table."""
    seconds = {rival.name: [rival.seconds(m) for m in runs[rival.name]] for rival in rivals}
    median = {name: statistics.median(times) for name, times in seconds.items()}
    lines = []
    for rival in rivals:
        times = seconds[rival.name]
        ratio = median["mergekit-moe"] / median[rival.name] if rival.merges and "mergekit-moe" in median else None
        cells = [
            gates,
            rival.name,
            f"{median[rival.name]:.2f} ({min(times):.2f} to {max(times):.2f})",
            f"{ratio:.1f}" if ratio else "",
            f"{median[rival.name] / median['floor, fsync' if rival.fsync else 'floor']:.2f}",
            f"{statistics.median(m.cpu_seconds for m in runs[rival.name]):.1f}",
            f"{max(m.peak_rss_bytes for m in runs[rival.name]) / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
