"""Whether transformers could load the output: its names and shapes against the model that its config.json builds. And what it
calls the modules and tensors of a checkpoint (`describe`).

The check is for outputs whose config.json is a new one: stacks, mixtures, surgery. Where transformers is not installed, nothing
is checked. It runs in a process of its own (`transformers_script.py`): importing it takes seconds and hundreds of MB, and a
config.json of unknown origin may ask for a model of any size. Code that a model brings with it is never executed.

Planning makes a `Question`. `weightsmith plan` waits for its answer; a merge has a `Check` ask it meanwhile, and publishes
only once the answer is there. Answers are kept, one small file for each, in `~/.cache/weightsmith/loading`. A file that is
missing, damaged or cannot be written costs nothing but the time to ask.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from weightsmith._base.errors import Finding, LayerError, PlanError
from weightsmith._base.idioms import Closing
from weightsmith._base.installation import cache_home
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import some_lines
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._plans import PlanDraft

TIMEOUT_SECONDS = 120
"""Ten times what the largest published models take."""

SCRIPT = Path(__file__).with_name("transformers_script.py")

PACKAGES = "torch", "transformers", "accelerate"
_SHOWN = 3
_KINDS = {"missing": "not in the output", "unexpected": "the model class has no such tensor", "shape": ""}
_FIX = "load the output with its own software before you publish it"

Answer = TypeVar("Answer")
Began = Callable[["subprocess.Popen[str]"], None]

Checked = tuple[Mapping[str, Any] | None, tuple[TensorSpec, ...]]
"""config.json and the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Question:
    """What transformers is to say of an output.

    donor    the model that gave config.json: what transformers already misses in it is no fault of the output
    label    the donor's
    where    of an error
    extra    prefixes of the output's prediction layers, which transformers builds for no model
    lacking  what models seem to lack, a line each: it may be the reason of an error
    """

    output: Checked
    donor: Checked
    label: str
    where: str
    extra: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


def question_of(
    plan: PlanDraft,
    config: Mapping[str, Any] | None,
    specs: Iterable[TensorSpec],
    structure: Structure,
    label: str,
    *,
    where: str,
    layers: Mapping[str, Sequence[int]] | None = None,
) -> Question | None:
    """The question about the output of a draft; None without a config.json, or without transformers to ask.

    config, specs, structure  of the donor
    layers                    the donor's layers that each changed stack consists of; the rest as in `Question`
    """
    if plan.config is None or not installed():
        return None
    ends = {stack: len((layers or {}).get(stack.prefix, range(stack.n_layers))) for stack in structure.stacks}
    extra = tuple(f"{stack.prefix}{end + rank}." for stack, end in ends.items() for rank in range(stack.n_extra))
    return Question((plan.config, tuple(step.out for step in plan.steps)), (config, tuple(specs)), label, where, extra)


class Beside(Closing, Generic[Answer]):
    """Has another process asked something beside other work, from a thread of its own.

    ask  is called with a function that is to be given each process when it has begun

    `close` it, or use it as a context manager: the process is ended then, if it still runs.
    """

    def __init__(self, ask: Callable[[Began], Answer]) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._answer: Future[Answer] = Future()
        self._thread = threading.Thread(target=self._run, args=(ask,), name="weightsmith-check", daemon=True)
        self._thread.start()

    def done(self, seconds: float = 0) -> bool:
        """Whether the answer is there, or comes within so long."""
        return bool(wait_for([self._answer], seconds).done)

    def answer(self) -> Answer:
        """Wait for the answer. Raises what asking raised."""
        return self._answer.result()

    def close(self) -> None:
        """End the process. May be called twice."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self, ask: Callable[[Began], Answer]) -> None:
        try:
            self._answer.set_result(ask(self._began))
        except BaseException as error:
            self._answer.set_exception(error)

    def _began(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            if self._closed:
                process.kill()
            self._process = process


class Check(Beside["LayerError | Finding | None"]):
    """Asks a question beside other work. None: there is nothing to ask.

    source  of the recipe, for the error
    """

    def __init__(self, question: Question | None, source: tuple[str, str] = ("", "")) -> None:
        self.error: PlanError | None = None
        self._source = source
        super().__init__(partial(check_loading, question))

    def poll(self) -> None:
        """Raise PlanError if the answer is there and transformers could not load the output."""
        if self.done():
            self.wait()

    def wait(self) -> tuple[Finding, ...]:
        """The warnings; at most two minutes for each of two models. Raises as `poll`."""
        outcome = self.answer()
        if isinstance(outcome, LayerError):
            self.error = self.error or PlanError([outcome], self._source)
            raise self.error
        return () if outcome is None else (outcome,)


def check_loading(question: Question | None, began: Began = lambda _process: None) -> LayerError | Finding | None:
    """What transformers would say of the output: an error if it could not load it, a warning where that is not known.

    began  is given each process when it has begun

    Cost: 2 to 10 seconds, and a second pass over the donor when a difference is found.
    """
    if question is None:
        return None
    label = question.label
    answer = _compare(question.output, began)
    if "unknown" in answer:
        return _unchecked(f"transformers has no {answer['unknown']}")
    if not answer.get("failed") and not answer["differences"]:
        return None
    itself = _compare(question.donor, began)
    if "unknown" in itself:
        return _unchecked(f"transformers has no {itself['unknown']} for {label}")
    if "failed" in answer:
        if "failed" in itself:
            return _unchecked(f"transformers cannot load {label} itself: {itself['failed']}")
        return _refused([answer["failed"]], question)
    from weightsmith._planning.planner.transformers_script import pattern_of

    # What no layer of the donor's model loads is no loss of the output's. What some of them load may be whole layers.
    before = {(kind, pattern_of(name)) for kind, name, _ in itself.get("differences", ())}
    partly = frozenset(itself.get("loaded", ()))

    def known(kind: str, name: str) -> bool:
        pattern = pattern_of(name)
        return (kind, pattern) in before and (pattern not in partly or name.startswith(question.extra))

    differences = [(kind, name, text) for kind, name, text in answer["differences"] if not known(kind, name)]
    if not differences:
        return None
    return _refused([f"{name}: {text or _KINDS[kind]}" for kind, name, text in differences], question)


def installed() -> bool:
    """True where the check can run: from_pretrained places tensors on the meta device by accelerate."""
    return all(find_spec(name) is not None for name in PACKAGES)


def with_lacking(error: LayerError, lacking: Sequence[str]) -> LayerError:
    """The same error with what models seem to lack, a line each: it may be the reason."""
    if not lacking:
        return error
    finding = error.finding
    fix = f"{finding.fix} Download or save a model again, if it should have what it lacks."
    details = (*finding.details, *some_lines(lacking, _SHOWN))
    return LayerError(finding.what, where=finding.where, details=details, fix=fix)


def _refused(differences: list[str], question: Question) -> LayerError:
    what = "transformers could not load the output: its config.json would build a model with other tensors"
    fix = "choose other layers; to write it all the same, use --no-check-loading (check_loading=False)"
    error = LayerError(what, where=question.where, details=some_lines(differences, _SHOWN), fix=fix)
    return with_lacking(error, question.lacking)


def _unchecked(why: str) -> Finding:
    return Finding(f"the output's config.json was not checked: {why}", fix=_FIX)


def _compare(checkpoint: Checked, began: Began) -> dict[str, Any]:
    """The script's answer about a checkpoint."""
    config, specs = checkpoint
    return _ask(["compare", config, [[s.name, s.dtype.torch, s.shape] for s in specs]], PACKAGES, lists_differences, began)


def _ask(question: list[Any], packages: tuple[str, ...], sound: Sound, began: Began) -> dict[str, Any]:
    """The script's answer, or the one it gave before to the same packages."""
    text = json.dumps(question)
    key = key_of(text, SCRIPT, packages)
    answer = find_answer(key, sound)
    if answer is None:
        answer = ask_script(text, began)
        keep_answer(key, answer, sound)
    return answer


def ask_script(question: str, began: Began) -> dict[str, Any]:
    """The script's answer, as JSON; {"unknown": why} or {"failed": why} without one."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "TQDM_DISABLE": "1"}
    # -P: the folder of the script holds modules whose names are common.
    command = [sys.executable, "-P", str(SCRIPT), str(int(TIMEOUT_SECONDS) + 10)]  # it ends itself if nobody does
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **quiet}) as process:
            try:
                began(process)
                said, complaint = process.communicate(question, timeout=TIMEOUT_SECONDS)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            lines = complaint.strip().splitlines() or [f"the process ended with status {process.returncode}"]
            return {"unknown": f"answer: {lines[-1][:300]}"}
        answer: dict[str, Any] = json.loads(said)
    except subprocess.TimeoutExpired:
        return {"unknown": f"answer after {TIMEOUT_SECONDS} seconds"}  # a busy machine is slow, too
    except (OSError, ValueError) as error:
        return {"unknown": f"answer: {error}"}
    return answer


_KEYS = frozenset({"modules", "tensors", "names", "tied", "redirected", "refused", "experts", "rows", "peft"})


def describe(model: Checkpoint, began: Began = lambda _process: None) -> dict[str, Any]:
    """The script's answer about a checkpoint, or {"unknown": why}. Cost: 2 to 10 seconds, unless it was asked before."""
    if model.config is None:
        return {"unknown": "it has no config.json"}
    if not installed():
        return {"unknown": "transformers is not installed"}
    packages = (*PACKAGES, *(["peft"] if find_spec("peft") else []))
    answer = _ask(["describe", model.config, list(model.specs)], packages, _sound, began)
    return answer if _sound(answer) else {"unknown": str(answer.get("unknown") or answer.get("failed") or "no answer")}


def built_names(model: Checkpoint) -> dict[str, str]:
    """Tensor of a checkpoint → tensor of the model that transformers builds; {} if that is not known."""
    return {name: key for name, (key, _) in describe(model).get("names", {}).items()}


def _sound(answer: Mapping[str, Any]) -> bool:
    return set(answer) == _KEYS and all(isinstance(answer[key], dict) for key in ("modules", "tensors", "names"))


_OURS = re.compile(r"[0-9a-f]{1,64}\.(json|\d+)")
MAX_ANSWERS = 200
MAX_ANSWER_BYTES = 1 << 20
"""The longest answer that is kept."""

Sound = Callable[[dict[str, Any]], bool]


def answers_folder() -> Path:
    """Where answers are kept. Raises RuntimeError without a home."""
    return cache_home() / "loading"


def key_of(question: str, script: Path, packages: tuple[str, ...]) -> str:
    """The name of a question's file; "" if its answer is not to be kept.

    packages  that answer; a version under development is no version: what it says may change
    """
    try:
        versions = [metadata.version(name) for name in packages]
        if any(not version or "dev" in version for version in versions):  # none: its metadata is damaged
            return ""
        parts = [script.read_text(), sys.version, sys.prefix, *versions, question]
    except (OSError, ValueError, metadata.PackageNotFoundError):
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def lists_differences(answer: dict[str, Any]) -> bool:
    """Whether an answer is a list of differences."""
    listed = answer.get("differences") if set(answer) == {"differences"} else None
    return isinstance(listed, list) and all(isinstance(row, list) and [*map(type, row)] == [str] * 3 for row in listed)


def find_answer(key: str, sound: Sound = lists_differences) -> dict[str, Any] | None:
    """The answer that was kept; None if there is none.

    sound  whether it is an answer at all: files may be damaged
    """
    if not key:
        return None
    try:
        with (answers_folder() / f"{key}.json").open("rb") as file:
            answer = json.loads(file.read(MAX_ANSWER_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and sound(answer) else None


def keep_answer(key: str, answer: dict[str, Any], sound: Sound = lists_differences) -> None:
    """Keep an answer; what may change with memory or other packages, a failure, is not kept. The oldest files make room."""
    data = json.dumps(answer)
    if not key or not sound(answer) or len(data) > MAX_ANSWER_BYTES:
        return
    try:
        place = answers_folder()
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f"{key}.{os.getpid()}"
        unfinished.write_text(data)
        unfinished.replace(place / f"{key}.json")
        files = sorted((p for p in place.iterdir() if _OURS.fullmatch(p.name)), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_ANSWERS]:
            path.unlink()
    except (OSError, RuntimeError):
        return
