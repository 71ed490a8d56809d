"""Does `weightsmith auto` beat the mean? Eleven cases, each with texts and without, judged on texts that nothing was chosen by.

    make demo                                                  # once: the environment
    .venv/bin/python examples/quality/auto_cases.py            # all cases, in build/demo: hours; what is measured is kept
    .venv/bin/python examples/quality/auto_cases.py short same # some
    .venv/bin/python examples/quality/auto_cases.py --build    # only the models
    .venv/bin/python examples/quality/table.py                 # writes the table into docs/quality.md

Most cases are of SmolLM2-135M-Instruct. `demo` has the fine-tunes of the demo. The others are made from them by arithmetic, or
trained here on the `train` texts of testbed.py, without all paragraphs that have something of the texts of examples/testbed.
Statistics and choices read examples/testbed/tune; judged are all rows of 384 tokens of examples/testbed/eval. Gemma has the
texts of testbed.py. Needs Debian 12 with apt, as testbed.py does.

Measurements are kept in measured/auto.json: of each case, for each merge, the mean cross entropy of each row of each text.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(HERE))

import testbed  # noqa: E402
from smollm2 import BASE, FINE_TUNES, build_models, build_once  # noqa: E402

import weightsmith  # noqa: E402
from weightsmith._reports.judge import Judge  # noqa: E402

MEASURED = HERE / "measured" / "auto.json"
TEXTS = EXAMPLES / "testbed"
ROW_TOKENS, ROWS = 256, 2
SHORT_STEPS, STEPS = 24, 40
LORA_RATE, FULL_RATE, WARMUP_STEPS = 1e-3, 5e-5, 5
CHAT_CHARACTERS = 700
"""The length of an answer in the rows of the chat model."""
MATCHING = ("mean", "with", "without")
"""The merges that are judged: the plain mean, `auto` with texts, and `auto` without."""
TUNED = "tuned"
"""One more for the case `demo`: what `weightsmith tune` makes of `ties` with the same texts, in about the time of `auto`."""
TRIALS = 40


@dataclass(frozen=True)
class Case:
    """A base, its fine-tunes, and texts.

    about   what is merged, for the table
    models  (folder to work in) → base and fine-tunes by their names, the base first
    kinds   of the fine-tunes: the texts that they are given, by the fine-tune's name
    judged  kinds of text that merges are judged on: those of the fine-tunes first, then others
    texts   (folder to work in) → the folder with `tune` and `eval`; None: examples/testbed
    rows    of each text that are judged; None: all
    """

    about: str
    models: Callable[[Path], dict[str, Path]]
    kinds: Mapping[str, str]
    judged: tuple[str, ...] = ("fr", "de", "py", "en")
    texts: Callable[[Path], Path] | None = None
    rows: int | None = None


# --- models --------------------------------------------------------------------------------------------------------------


def demo(work: Path) -> dict[str, Path]:
    """The demo's models."""
    return dict(zip((BASE, *FINE_TUNES), build_models(work / "models", TEXTS), strict=True))


def scaled(work: Path, factor: float) -> dict[str, Path]:
    """The demo's models with longer or shorter deltas."""
    models = demo(work)

    def save(name: str, out: Path) -> None:
        recipe = {
            "merge_method": "task_arithmetic",
            "base_model": str(models[BASE]),
            "models": [{"model": str(models[name]), "parameters": {"weight": 1}}],
            "parameters": {"lambda": factor},
        }
        weightsmith.merge(recipe, out / "merged", progress=False)
        _move_up(out / "merged")

    folder = _made(work / "auto" / f"times-{factor:g}")
    return {BASE: models[BASE]} | {name: build_once(folder / name, partial(save, name)) for name in FINE_TUNES}


def _move_up(folder: Path) -> None:
    for file in folder.iterdir():
        file.rename(folder.parent / file.name)
    folder.rmdir()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def noise(work: Path) -> dict[str, Path]:
    """The demo's models, `py` in random directions with the singular values of its deltas."""
    models = demo(work)
    return models | {"py": build_once(_made(work / "auto" / "noise") / "py", partial(_save_noise, models[BASE], models["py"]))}


def _save_noise(base: Path, tuned: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    weights = model.state_dict()
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32, trust_remote_code=False).state_dict().items()
    ):
        delta = tensor - weights[name]
        if delta.ndim == 2 and bool(delta.any()) and ".layers." in name:
            values = torch.linalg.svdvals(delta)[:8]
            left, right = (torch.linalg.qr(torch.randn(side, 8))[0] for side in delta.shape)
            weights[name].add_(left * values @ right.T)
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(out)


def trained(work: Path, name: str, *, steps: int = STEPS, full: bool = False, chat: bool = False) -> Path:
    """A fine-tune of the demo's base on the text of one kind."""
    base = demo(work)[BASE]
    kind = "full" if full else "chat" if chat else "short"
    folder = _made(work / "auto" / kind)
    return build_once(folder / name, lambda out: _train(base, _training_text(work, name), out, steps, full=full, chat=chat))


def _training_text(work: Path, name: str) -> str:
    texts = build_once(_made(work / "gemma") / "texts", partial(testbed._save_texts, work / "gemma"))
    reserved = set[int]()
    for file in sorted(TEXTS.glob("[te][uv]*/*.txt")):
        reserved |= testbed._contents(file.read_text(encoding="utf-8"))
    paragraphs = (texts / "train" / f"{name}.txt").read_text(encoding="utf-8").split("\n\n")
    return "\n\n".join(p for p in paragraphs if reserved.isdisjoint(testbed._contents(p)))


def _train(base: Path, text: str, out: Path, steps: int, *, full: bool, chat: bool) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    if not full:
        model = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules=list(testbed.LINEARS), task_type="CAUSAL_LM")
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = FULL_RATE if full else LORA_RATE
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    ids = tokenizer("".join(_conversations(text)) if chat else text)["input_ids"]
    for step, rows in enumerate(islice(_batches(ids), steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / WARMUP_STEPS, (steps - step) / (steps - WARMUP_STEPS))
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"{out.stem}: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    if not full:
        model = model.merge_and_unload()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _batches(ids: Sequence[int]) -> Iterator[Any]:
    """Batches of shuffled rows, int64 [ROWS, ROW_TOKENS], for ever."""
    import torch

    rows = torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS]).view(-1, ROW_TOKENS)
    while True:
        for chosen in torch.randperm(len(rows)).split(ROWS):
            if len(chosen) == ROWS:
                yield rows[chosen]


def _conversations(text: str) -> Iterator[str]:
    """A text as answers of a chat: each question is the beginning of what follows."""
    for start in range(0, len(text) - CHAT_CHARACTERS, CHAT_CHARACTERS):
        answer = text[start : start + CHAT_CHARACTERS]
        question = " ".join(answer.split()[:6])
        yield f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def _of(work: Path, **makers: Callable[[Path], Path]) -> dict[str, Path]:
    """The demo's base, and fine-tunes that are made one after the other."""
    return {BASE: demo(work)[BASE]} | {name: make(work) for name, make in makers.items()}


def _gemma(work: Path) -> dict[str, Path]:
    return dict(zip((BASE, *FINE_TUNES), testbed.build_testbed(work / "gemma"), strict=True))


THREE = {name: name for name in FINE_TUNES}
SHORT = {name: partial(trained, name=name, steps=SHORT_STEPS) for name in FINE_TUNES}
FULL = {name: partial(trained, name=name, full=True) for name in FINE_TUNES}

CASES = {
    "demo": Case("the demo's: French, German, Python", demo, THREE),
    "short": Case("trained for 24 steps", lambda work: _of(work, **SHORT), THREE),
    "noise": Case("the demo's, `py` in random directions", noise, THREE),
    "same": Case(
        "the demo's `fr` and `de`, and a briefly trained `fr`",
        lambda work: {n: p for n, p in demo(work).items() if n != "py"} | {"fr2": SHORT["fr"](work)},
        {"fr": "fr", "de": "de", "fr2": "fr"},
    ),
    "two": Case(
        "the demo's `de`, and a briefly trained `py`",
        lambda work: {n: p for n, p in demo(work).items() if n in (BASE, "de")} | {"py2": SHORT["py"](work)},
        {"de": "de", "py2": "py"},
        ("de", "py", "fr", "en"),
    ),
    "times 2.5": Case("the demo's, with deltas 2.5 times as large", partial(scaled, factor=2.5), THREE),
    "times 0.3": Case("the demo's, with deltas 0.3 times as large", partial(scaled, factor=0.3), THREE),
    "full": Case("all weights trained, 40 steps", lambda work: _of(work, **FULL), THREE),
    "chat": Case(
        "the demo's `de` and `py`, and a `fr` trained on conversations",
        lambda work: demo(work) | {"fr": trained(work, "fr", chat=True)},
        THREE,
    ),
    "five": Case(
        "the demo's, and a briefly trained `fr` and `py`",
        lambda work: demo(work) | {"fr2": SHORT["fr"](work), "py2": SHORT["py"](work)},
        THREE | {"fr2": "fr", "py2": "py"},
    ),
    "gemma": Case("Gemma 3 270M, 40 steps", _gemma, THREE, texts=lambda work: work / "gemma" / "texts", rows=6),
}


# --- measuring -----------------------------------------------------------------------------------------------------------


def measure(name: str, merge: str, work: Path) -> dict[str, Any]:
    """Make one merge of a case and judge it.

    Returns the rows' losses by kind of text; of `auto`: also what was chosen and why, and processor seconds and peak memory.
    """
    case = CASES[name]
    texts = case.texts(work) if case.texts else TEXTS
    base, *fine_tunes = case.models(work).items()
    out = work / "auto" / "merged" / name.replace(" ", "-") / merge
    for folder in (out, out.with_name(f"{merge}.auto")):  # with the texts that an earlier run wrote, no run would write any
        shutil.rmtree(folder, ignore_errors=True)
    _made(out.parent)
    about: dict[str, Any] = {}
    if merge == "mean":
        models = [{"model": str(path), "parameters": {"weight": 1}} for _, path in fine_tunes]
        weightsmith.merge({"merge_method": "linear", "models": models}, out, progress=False)
    elif merge == TUNED:
        about = _run_tune(base[1], dict(fine_tunes), case, texts, out)
    else:
        about = _run_auto(base[1], dict(fine_tunes), case, texts if merge == "with" else None, out)
    judge = Judge.of_folder(out)
    rows = {kind: judge.losses((texts / "eval" / f"{kind}.txt").read_text("utf-8"), case.rows) for kind in case.judged}
    shutil.rmtree(out)
    return {"rows": rows} | about


def _run_auto(base: Path, fine_tunes: dict[str, Path], case: Case, texts: Path | None, out: Path) -> dict[str, Any]:
    """`weightsmith auto`, whose time and memory are counted."""
    command = [sys.executable, "-m", "weightsmith", "auto", str(base)]
    links = _made(out.parent / "models")
    for name, path in fine_tunes.items():  # texts are given by the last part of a path, which two fine-tunes may share
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(path)
        command.append(str(links / name))
    command += [str(out), "--json", "--quiet"]
    for name, kind in case.kinds.items() if texts else ():
        command += ["--text", f"{name}={texts / 'tune' / kind}.txt"]
    result, cost = _timed(command)
    return {key: result[key] for key in ("choice", "reading", "candidates", "fine_tunes")} | cost


def _run_tune(base: Path, fine_tunes: dict[str, Path], case: Case, texts: Path, out: Path) -> dict[str, Any]:
    """The recipe of docs/tune.md, with weights that `weightsmith tune` finds, merged."""
    weights = {"weight": {"tune": [0, 1.5]}, "density": 0.5}
    models = [{"model": str(path), "parameters": weights} for path in fine_tunes.values()]
    recipe, tuned = out.with_suffix(".range.yml"), out.with_suffix(".yml")
    recipe.write_text(json.dumps({"merge_method": "ties", "base_model": str(base), "models": models}))
    command = [sys.executable, "-m", "weightsmith", "tune", str(recipe), str(tuned), "--json", "--quiet", "--no-resume"]
    for kind in case.kinds.values():
        command += ["--text", f"{texts / 'tune' / kind}.txt"]
    result, cost = _timed([*command, "--budget", str(TRIALS), "--tokens", "384"])
    weightsmith.merge(tuned, out, progress=False)
    return {"values": result["values"], "reading": result["reading"], "trials": len(result["trials"])} | cost


def _timed(command: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command answers as JSON; the processor time, time and memory that it took."""
    began, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(command, stdout=answer)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, _peak_bytes(process.pid))
            time.sleep(0.2)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"it failed: {shlex.join(command)}")
        answer.seek(0)
        result: dict[str, Any] = json.load(answer)
    return result, {
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": peak,
    }


def _peak_bytes(pid: int) -> int:
    """The most memory that a running process had so far. `ru_maxrss` also counts this process, which started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def main() -> None:
    """Measure what is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for texts and models")
    parser.add_argument("--build", action="store_true", help="only build the models")
    parser.add_argument("--merges", nargs="+", choices=(*MATCHING, TUNED), default=MATCHING)
    asked = parser.parse_args()
    for setting, value in {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
        os.environ.setdefault(setting, value)
    work = asked.work.resolve()
    for name in asked.cases or CASES:
        if asked.build:
            print(name, *CASES[name].models(work).values(), flush=True)
            continue
        for merge in asked.merges:
            if merge in known().get(name, {}):
                continue
            result = measure(name, merge, work)
            everything = known()
            everything.setdefault(name, {})[merge] = result
            MEASURED.write_text(json.dumps(everything, indent=1) + "\n")
            print(name, merge, result.get("choice", {}).get("name", ""), result.get("processor_seconds", ""), flush=True)


def known() -> dict[str, dict[str, Any]]:
    """What is measured: case → merge → its measurement."""
    measured: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return measured


if __name__ == "__main__":
    main()
