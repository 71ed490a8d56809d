"""Kill every command at random moments and resume it; write outputs to object stores that fail. Compare the bytes.

    python scripts/attacks.py kills                       # 500 cases over all commands
    python scripts/attacks.py kills --cases 40 --seed 3 --only 'quantize-*' moe-hidden
    python scripts/attacks.py stores                      # 200 outputs in S3 and Google Cloud Storage, through a faulty proxy

A case of `kills` runs one command up to four times in processes that kill themselves: before the n-th call that changes the
disk, or after some time. The number of threads changes from run to run. After each kill, OUT must be absent, or complete, or
still the checkpoint that the run was to replace. Then the command runs to its end. OUT must have the bytes of an undisturbed
run, nothing may lie beside it, and the inputs must be unchanged.

A case of `stores` writes to a bucket through a proxy that loses requests and answers and returns errors. Some of the runs are
killed as well. The bucket must hold the files of a local run and nothing else.

The seed and the number of a case decide everything but the timing of threads. Prints each failure and a summary; the exit
status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
CALLS = ("mkdir", "rename", "unlink", "rmdir", "write", "pwrite", "ftruncate", "fsync", "fdatasync")
SECONDS = 600.0
"""By the clock: a process that is not done by then hangs."""


@dataclass(frozen=True)
class Command:
    """One or more commands that make OUT; `OUT` in an argument is its path. before: what makes the checkpoint to replace."""

    name: str
    runs: Sequence[Sequence[str]]
    before: Sequence[str] = ()


def _command(name: str, *arguments: str, before: Sequence[str] = ()) -> Command:
    return Command(name, [arguments], before)


def commands() -> list[Command]:
    """Every command that writes a checkpoint, with the kinds of products that it can have."""
    calibrated = ("--calibration", "text.txt", "--calibration-rows", "6", "--calibration-tokens", "16")
    exl2 = ("quantize", "a", "OUT", "--format", "exl2", "--bits", "4.1")
    merges = ("linear", "ties-model", "dare", "tsv", "stages", "stack", "union", "adapters", "cores", "ramplus")
    return [
        *(_command(f"merge-{name}", "merge", f"{name}.yml", "OUT") for name in merges),
        _command("merge-shards", "merge", "linear.yml", "OUT", "--max-shard-size", "60KB"),
        _command("merge-keep-stages", "merge", "stages.yml", "OUT", "--keep-stages"),
        _command("merge-fp8", "merge", "dare.yml", "OUT", "--quantize", "fp8-dynamic"),
        _command("merge-gguf", "merge", "linear.yml", "OUT", "--quantize", "gguf-q8_0"),
        _command("merge-exl2", "merge", "linear.yml", "OUT", "--quantize", "exl2", "--bits", "4.1", *calibrated),
        _command("merge-overwrite", "merge", "ties-model.yml", "OUT", "--overwrite", before=("merge", "linear.yml", "OUT")),
        _command("merge-overwrite-shards", "merge", "linear.yml", "OUT", "--overwrite", "--max-shard-size", "60KB",
                 before=("merge", "ties-model.yml", "OUT")),
        _command("moe-hidden", "moe", "hidden.yml", "OUT"),
        _command("moe-random", "moe", "random.yml", "OUT"),
        _command("quantize-w4a16", "quantize", "a", "OUT", "--format", "w4a16", "--group-size", "32", *calibrated),
        _command("quantize-exl2-measured", *exl2, *calibrated),
        _command("quantize-exl2-full", *exl2, "--measure", "full", *calibrated),
        _command("quantize-exl2-uniform", *exl2, "--uniform", *calibrated),
        _command("quantize-exl2-plain", *exl2, "--calibration", "none"),
        _command("quantize-gguf-imatrix", "quantize", "a", "OUT", "--format", "gguf-iq4_nl", *calibrated),
        _command("quantize-mixture", "quantize", "mixture", "OUT", "--format", "w4a16", "--group-size", "32", *calibrated),
        _command("dequantize", "dequantize", "fp8", "OUT"),
        _command("extract-lora", "extract-lora", "b", "a", "OUT", "--max-rank", "4"),
        _command("extract-lora-energy", "extract-lora", "b", "a", "OUT", "--energy", "0.8"),
        _command("transplant-omp", "transplant-tokenizer", "a", "words", "OUT", "--k", "8"),
        _command("transplant-landmarks", "transplant-tokenizer", "a", "words", "OUT", "--approximation", "landmark_pca"),
        _command("auto", "auto", "base", "near-a", "near-b", "OUT"),
        _command("auto-texts", "auto", "base", "near-a", "near-b", "OUT",
                 "--text", "near-a=near-a.txt", "--text", "near-b=near-b.txt"),
        _command("run", "run", "plan.json", "OUT"),
        Command("run-parts", [("run", "plan.json", "OUT", "--part", "1/2"), ("run", "plan.json", "OUT", "--part", "2/2"),
                              ("run", "plan.json", "OUT")]),
    ]  # fmt: skip


TEXT = " ".join(f"The {word} has {n} {word}s, and {n * n} more." for n, word in enumerate("cat dog bird fish".split() * 9))


def _recipes() -> dict[str, list[dict[str, Any]]]:
    """Recipes, file → its documents."""
    plain = [{"model": "a"}, {"model": "b"}]
    half = [{"model": m, "parameters": {"weight": 0.5, "density": 0.5}} for m in ("a", "b")]
    adapters = [{"model": m, "parameters": {"weight": 0.5}} for m in ("lora-a", "lora-b")]
    average = {"merge_method": "linear", "parameters": {"weight": 1}}
    tsv = {"merge_method": "tsv_m", "base_model": "base", "models": plain}
    stacked = [{"sources": [{"model": m, "layer_range": [0, 2]}]} for m in ("a", "b")]
    experts = [{"source_model": m, "positive_prompts": [f"{m} {m}, the {m}"]} for m in ("a", "b")]
    mixture = {"base_model": "base", "experts": experts, "experts_per_token": 1}
    return {
        "linear": [{**average, "models": plain}],
        "ties-model": [{"merge_method": "ties", "base_model": "base", "models": half, "parameters": {"scope": "model"}}],
        "dare": [{"merge_method": "dare_ties", "base_model": "base", "models": half}],
        "tsv": [tsv],
        "ramplus": [{"merge_method": "ramplus", "base_model": "base", "models": plain}],
        "stages": [{"name": "first", **tsv}, {**average, "models": [{"model": "first"}, {"model": "b"}]}],
        "stack": [{"merge_method": "passthrough", "slices": stacked}],
        "union": [{**average, "models": [{"model": "a"}, {"model": "words"}], "tokenizer": {"source": "union"}}],
        "adapters": [{"merge_method": "task_arithmetic", "models": adapters}],
        "cores": [{"merge_method": "ties", "models": [{**m, "parameters": {"weight": 1, "density": 0.5}} for m in adapters]}],
        "hidden": [{**mixture, "gate_mode": "hidden"}],
        "random": [{**mixture, "gate_mode": "random"}],
    }


def make_inputs(folder: Path) -> None:
    """Models, adapters, recipes, a text and a plan."""
    from tests.calibration_help import noisy_copy, save_model

    for seed, name in enumerate(("base", "a", "b", "words")):
        save_model(folder / name, seed=seed)
    save_model(folder / "mixture", "mixtral")
    file = folder / "words" / "tokenizer.json"
    words = json.loads(file.read_text())
    alphabet = list(words["model"]["vocab"])[::-1]
    pairs = [(first, second) for first in "aeiou" for second in "nrst"]
    words["model"]["vocab"] = {token: n for n, token in enumerate([*alphabet[len(pairs) :], *(a + b for a, b in pairs)])}
    words["model"]["merges"] = [list(pair) for pair in pairs]
    file.write_text(json.dumps(words))
    (folder / "text.txt").write_text(TEXT)
    words_of_text, shuffled = sorted({*TEXT.split()}), random.Random(0)
    for seed, name in enumerate(("near-a", "near-b")):
        noisy_copy(folder / "base", folder / name, seed)
        (folder / f"{name}.txt").write_text(" ".join(shuffled.choices(words_of_text, k=1100)))
    for name, documents in _recipes().items():
        (folder / f"{name}.yml").write_text("\n---\n".join(json.dumps(document) for document in documents))
    for arguments in (
        ("extract-lora", "a", "base", "lora-a", "--max-rank", "4", "--skip-undecomposable"),
        ("extract-lora", "b", "base", "lora-b", "--max-rank", "6", "--skip-undecomposable"),
        ("quantize", "a", "fp8", "--format", "fp8-dynamic"),
    ):
        check(run(arguments, folder), arguments)
    planned = run(("plan", "ties-model.yml", "--json"), folder)
    check(planned, ("plan",))
    (folder / "plan.json").write_text(planned.out)


# ---- processes


@dataclass
class Ended:
    """A process that ended: exit code (negative: the signal), what it printed, and how many calls changed the disk."""

    code: int
    out: str
    err: str
    calls: int = 0
    seconds: float = 0.0


def check(ended: Ended, arguments: Sequence[str]) -> None:
    if ended.code != 0:
        raise Failure(f"{' '.join(arguments)}: status {ended.code}\n{ended.out[-2000:]}{ended.err[-4000:]}")


class Failure(Exception):
    """What did not hold."""


def apart(make: Callable[[Path], object], folder: Path) -> None:
    """Call a function in a fork: if this process computed with torch, forks would hang, without the threads of OpenMP."""
    process = multiprocessing.get_context("fork").Process(target=make, args=(folder,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit("the inputs cannot be made")


def run(
    arguments: Sequence[str],
    folder: Path,
    kill_call: int = 0,
    kill_seconds: float = 0.0,
    prepare: Callable[[], None] = lambda: None,
) -> Ended:
    """`weightsmith ARGUMENTS` in a fork of this process, with `folder` as the current folder.

    kill_call     SIGKILL before this call of those that change the disk, 1 for the first
    kill_seconds  the time after which the kernel ends the process
    prepare       called in the fork, first
    """
    clock = time.monotonic()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads of libraries
            pid = os.fork()
        if pid == 0:
            _child(arguments, folder, [file.fileno() for file in files], kill_call, kill_seconds, prepare)
        status = _wait(pid, clock + SECONDS)
        if status is None:
            raise Failure(f"{' '.join(arguments)}: not done after {SECONDS:.0f} s")
        out, err, calls = (os.pread(file.fileno(), 1 << 24, 0) for file in files)
    return Ended(status, out.decode(), err.decode(), int.from_bytes(calls, "little"), time.monotonic() - clock)


def _wait(pid: int, until: float) -> int | None:
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def _child(
    arguments: Sequence[str],
    folder: Path,
    files: Sequence[int],
    kill_call: int,
    kill_seconds: float,
    prepare: Callable[[], None],
) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = ["weightsmith", *arguments]
        prepare()
        _count_calls(files[2], kill_call)
        if kill_seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
            signal.setitimer(signal.ITIMER_REAL, kill_seconds)
        from weightsmith._app.cli import main

        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _count_calls(file: int, kill_call: int) -> None:
    """Count the calls that change the disk, in the first 8 bytes of a file; SIGKILL before the call `kill_call`."""
    from weightsmith._outputs import disk

    count = 0
    plain_open, plain_pwrite = os.open, os.pwrite

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_call:
                os.kill(os.getpid(), signal.SIGKILL)
            plain_pwrite(file, count.to_bytes(8, "little"), 0)
            return function(*args, **kwargs)

        return wrapper

    open_to_write = counted(plain_open)

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        function = open_to_write if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) else plain_open
        return int(function(path, flags, *args, **kwargs))

    os.open = opened
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    disk.exchange = counted(disk.exchange)
    disk.reserve = counted(disk.reserve)


# ---- what a folder holds


MANIFEST = "weightsmith.json"


def tree(folder: Path) -> dict[str, str]:
    """File → sha256 of its bytes.

    Of the manifest without two lines: the identity of the work, which has the inodes and times of the files that it read (the
    result of an earlier recipe of the file is one of them), and the checksum over it.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(folder)): digest(path.name, path.read_bytes()) for path in files}


def digest(name: str, data: bytes) -> str:
    """sha256 of a file, hex."""
    if name == MANIFEST:
        data = re.sub(rb'\n  "(checksum|plan)": "[0-9a-f]+",', b"", data)
    return hashlib.sha256(data).hexdigest()


def difference(actual: dict[str, str], expected: dict[str, str]) -> str:
    """The files that are not the same; "" if there is none."""
    names = [name for name in sorted({*actual, *expected}) if actual.get(name) != expected.get(name)]
    return ", ".join(
        f"{name} ({'other bytes' if name in actual and name in expected else 'missing' if name in expected else 'extra'})"
        for name in names
    )


# ---- kills


@dataclass
class Undisturbed:
    """A command's result without kills: what OUT held before and holds after, and what a kill can hit."""

    before: dict[str, str]
    after: dict[str, str]
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def undisturbed(command: Command, inputs: Path, folder: Path) -> Undisturbed:
    folder.mkdir()
    out = folder / "out"
    before: dict[str, str] = {}
    if command.before:
        check(run(_with_out(command.before, out), inputs), command.before)
        before = tree(out)
    undisturbed_run = Undisturbed(before, {})
    for arguments in command.runs:
        ended = run(_with_out(arguments, out), inputs)
        check(ended, arguments)
        undisturbed_run.calls.append(ended.calls)
        undisturbed_run.seconds.append(ended.seconds)
    undisturbed_run.after = tree(out)
    _check_alone(folder)
    return undisturbed_run


def kill_case(command: Command, inputs: Path, folder: Path, expected: Undisturbed, rng: random.Random) -> int:
    """Run a command with kills. Returns how many processes were killed."""
    folder.mkdir()
    out = folder / "out"
    if command.before:
        check(run(_with_out(command.before, out), inputs), command.before)
    kills = 0
    for number, arguments in enumerate(command.runs):
        last = number == len(command.runs) - 1
        for kills_left in range(rng.choice((1, 1, 2, 4)), -1, -1):  # the last one runs to its end
            by_call = rng.random() < 0.7
            with_threads = [*_with_out(arguments, out), "--threads", str(rng.choice((1, 2, 3)))]
            published = last and out.exists() and tree(out) == expected.after
            ended = run(
                with_threads,
                inputs,
                kill_call=rng.randint(1, expected.calls[number] + 1) if kills_left and by_call else 0,
                kill_seconds=rng.uniform(0.001, expected.seconds[number]) if kills_left and not by_call else 0,
            )
            _check_out(out, expected, last)
            if ended.code in (-signal.SIGKILL, -signal.SIGALRM):
                kills += 1
                continue
            # Killed after it was published: the next run clears up, and says that OUT exists.
            if not (published and ended.code == 3 and "output-exists" in ended.err):
                check(ended, with_threads)
            break
    actual = tree(out)
    if text := difference(actual, expected.after):
        raise Failure(f"other bytes than those of an undisturbed run: {text}")
    _check_verified(out, inputs)
    _check_alone(folder)
    return kills


def _with_out(arguments: Sequence[str], out: Path) -> list[str]:
    return [str(out) if argument == "OUT" else argument for argument in arguments]


def _check_out(out: Path, expected: Undisturbed, may_be_done: bool) -> None:
    actual = tree(out) if out.exists() else {}
    if actual != expected.before and not (may_be_done and actual == expected.after):
        raise Failure(f"OUT holds neither what it held before nor the result: {difference(actual, expected.after)}")


def _check_alone(folder: Path) -> None:
    leftovers = sorted(path.name for path in folder.iterdir() if path.name not in ("out", "out.stage-first", "out.auto"))
    if leftovers:
        raise Failure(f"left beside OUT: {', '.join(leftovers)}")


def _check_verified(out: Path, inputs: Path) -> None:
    check(run(("verify", str(out), "--quiet"), inputs), ("verify",))


def kills(args: argparse.Namespace, folder: Path) -> int:
    inputs = folder / "inputs"
    inputs.mkdir()
    apart(make_inputs, inputs)
    original = tree(inputs)
    chosen = [c for c in commands() if not args.only or any(fnmatch.fnmatch(c.name, pattern) for pattern in args.only)]
    failures = 0
    known: dict[str, Undisturbed] = {}
    counts = {command.name: [0, 0, 0] for command in chosen}
    for number in range(args.cases) if args.case is None else (args.case,):
        command = chosen[number % len(chosen)]
        case = folder / "case"  # of one name: plans of several stages name folders beside OUT
        try:
            if command.name not in known:
                known[command.name] = undisturbed(command, inputs, case)
                shutil.rmtree(case)
            killed = kill_case(command, inputs, case, known[command.name], random.Random(f"{args.seed}:{number}"))
            counts[command.name][0] += 1
            counts[command.name][1] += killed
            shutil.rmtree(case)
        except Failure as error:
            failures += 1
            counts[command.name][2] += 1
            print(f"FAILED: case {number} (seed {args.seed}), {command.name}: {error}", flush=True)
            if args.keep:
                shutil.copytree(case, args.keep / f"{command.name}-{number}", symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(case, ignore_errors=True)
    if text := difference(tree(inputs), original):
        failures += 1
        print(f"FAILED: inputs were changed: {text}")
    for name, (done, killed, failed) in counts.items():
        print(f"{name}: {done} cases, {killed} kills, {failed} failures")
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    print(f"{total[0]} cases, {total[1]} kills, {failures} failures")
    return failures


# ---- stores


def _in_a_hurry() -> None:
    """Hardly any waits between attempts."""
    from weightsmith._files.remote import retries

    retries.PATIENCE = retries.Patience(most_seconds=0.005)


def store_case(server: Any, recipe: str, inputs: Path, expected: dict[str, str], rng: random.Random) -> int:
    """Write to a bucket through faults, with a kill now and then. Returns how many faults there were."""
    from tests.bucket_help import FAULTS, FaultyProxy, environment_at, environment_of

    out = server.address(f"case-{rng.getrandbits(64):x}/out")
    command, options = _store_command(recipe)
    faults = [fault for fault in FAULTS if fault != "damage"]  # not all servers compare checksums
    proxy = FaultyProxy(server.port, rng.choice((0.1, 0.3, 0.5)), faults, rng.getrandbits(32))
    try:
        for _ in range(rng.choice((1, 2, 3))):
            os.environ.update(environment_at(server.scheme, proxy.port))
            threads = str(rng.choice((1, 2, 3)))
            kill_seconds = rng.choice((0.0, rng.uniform(0.05, 2.0)))
            ended = run([command, f"{recipe}.yml", out, *options, "--threads", threads], inputs, 0, kill_seconds, _in_a_hurry)
            if ended.code not in (0, 3, -signal.SIGALRM):
                check(ended, [command, recipe, out])
            if ended.code == 0:
                break
    finally:
        count = sum(proxy.counts.values())
        proxy.close()
        os.environ.update(environment_of(server))
    if ended.code != 0:
        ended = run([command, f"{recipe}.yml", out, *options], inputs)
        if not (ended.code == 3 and "output-exists" in ended.err):
            check(ended, [command, recipe, out])
    prefix = out.removeprefix(f"{server.scheme}://{server.bucket}/").removesuffix("/out")
    actual = {name: digest(Path(name).name, data) for name, data in server.contents(prefix).items()}
    if text := difference(actual, {f"out/{name}": known for name, known in expected.items()}):
        raise Failure(f"the bucket differs from a local output: {text}")
    if parts := server.parts():  # an upload whose first answer was lost stays, without parts
        raise Failure(f"{len(parts)} uploaded parts of no object are left")
    return count


def _store_command(recipe: str) -> tuple[str, list[str]]:
    from tests.outputs.bucket.test_runs import RECIPES

    command, _, options = RECIPES[recipe]
    flags = {"max_shard_bytes": "--max-shard-size", "quantize": "--quantize"}
    arguments = [str(text) for key, value in options.items() if key in flags for text in (flags[key], value)]
    return command, [*arguments, *(["--no-check-loading"] if "check_loading" in options else [])]


def stores(args: argparse.Namespace, folder: Path) -> int:
    from tests.bucket_help import GOOGLE, MOTO, GoogleFront, GoogleServer, S3Server, environment_of, serving
    from tests.outputs.bucket.test_runs import RECIPES, make_llamas

    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))]:
        del os.environ[name]
    inputs = folder / "inputs"
    inputs.mkdir()
    apart(make_llamas, inputs)
    expected: dict[str, dict[str, str]] = {}
    for name, (_, recipe, _) in RECIPES.items():
        (inputs / f"{name}.yml").write_text(json.dumps(recipe))
        command, options = _store_command(name)
        check(run([command, f"{name}.yml", "out", *options], inputs), [command, name])
        expected[name] = tree(inputs / "out")
        shutil.rmtree(inputs / "out")
    failures = faults = 0
    with serving(MOTO) as moto, serving(GOOGLE) as google, contextlib.closing(GoogleFront(google, moto)) as front:
        for number in range(args.cases) if args.case is None else (args.case,):
            rng = random.Random(f"{args.seed}:{number}")
            server = rng.choice((lambda: S3Server(MOTO, moto), lambda: GoogleServer(front)))()
            os.environ.update(environment_of(server))
            recipe = rng.choice([*RECIPES])
            try:
                faults += store_case(server, recipe, inputs, expected[recipe], rng)
            except Failure as error:
                failures += 1
                print(f"FAILED: case {number} (seed {args.seed}), {server.kind}, {recipe}: {error}", flush=True)
    print(f"{args.cases} cases, {faults} faults, {failures} failures")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=("kills", "stores"))
    parser.add_argument("--cases", type=int, help="how many [default: 500 kills, 200 stores]")
    parser.add_argument("--case", type=int, help="one case again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="names of commands, with * and ?")
    parser.add_argument("--keep", type=Path, help="copy the folders of cases that failed into this folder")
    args = parser.parse_args()
    args.cases = args.cases or {"kills": 500, "stores": 200}[args.attack]
    sys.path.insert(0, str(ROOT))
    # Imported once, not in each process. Nothing may be computed here: threads do not survive a fork.
    for module in ("tokenizers", "torch", "transformers", "weightsmith._app.cli"):
        importlib.import_module(module)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        failures = {"kills": kills, "stores": stores}[args.attack](args, Path(name))
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
