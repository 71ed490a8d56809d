"""Quantising a model on the CPU, beside llm-compressor and llama.cpp: seconds, peak memory, error of the weights.

    python benchmarks/quantize.py MODEL WORK [--peer PYTHON] [--llama-cpp FOLDER] [--format NAME]

MODEL is a folder in bfloat16, WORK a folder for outputs. --peer is the python of an environment with `pip install
llmcompressor`: `model_free_ptq` for the formats without data, and GPTQ for `w4a16-gptq`, on the same tokens. --llama-cpp is a
folder with libllama (see tests/llama_cpp.py): its quantiser reads a GGUF file in bfloat16 that is made before. Without these
only weightsmith is measured. Each run is a process of its own. Ours run twice, to compile and to warm the page cache. The
error is ‖read back - original‖ / ‖original‖ over the weights that are quantised; all outputs are read by weightsmith.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import weightsmith

ROWS, TOKENS = 16, 512
"""Rows and tokens of a row for the calibrated formats."""

FORMATS = {
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8": "W8A8",
    "w4a16": "W4A16",
    "nvfp4a16": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
"""Ours → llm-compressor's scheme."""

GGUF = {"gguf-q8_0": 7, "gguf-q6_k": 18, "gguf-q4_k_m": 15}
"""Ours → llama.cpp's number of the mixture."""

CALIBRATED = "w4a16-gptq"

_DATA_FREE = """
import sys
from llmcompressor import model_free_ptq
ignore = ["lm_head", "re:.*embed_tokens.*"]
options = {"scheme": sys.argv[3], "ignore": ignore, "device": "cpu", "max_workers": 2}
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], **options)
"""

_GPTQ = """
import sys
from pathlib import Path
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
source, out, text, rows, tokens, group = *sys.argv[1:4], *map(int, sys.argv[4:7])
tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
ids = tokenizer(Path(text).read_text())["input_ids"][: rows * tokens]
data = Dataset.from_dict({"input_ids": [ids[i : i + tokens] for i in range(0, len(ids), tokens)]})
args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
scheme = {"all": QuantizationScheme(targets=["Linear"], weights=args)}
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map="cpu", trust_remote_code=False)
recipe = [GPTQModifier(config_groups=scheme, ignore=["lm_head"])]
oneshot(model=model, processor=tokenizer, dataset=data, recipe=recipe, max_seq_length=tokens, num_calibration_samples=rows)
model.save_pretrained(out, save_compressed=True)
"""

_LLAMA_CPP = """
import sys
from pathlib import Path
from tests.llama_cpp import quantize
Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
sys.exit(not quantize(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
"""


class Failed(Exception):
    """A program did not finish."""


@dataclass(frozen=True, slots=True)
class Run:
    """A program that writes one output. environment: added to ours."""

    program: str
    command: tuple[str, ...]
    out: Path
    environment: Mapping[str, str]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--format", choices=[*FORMATS, *GGUF, CALIBRATED], help="this one alone")
    parser.add_argument("--peer", help="python of an environment with llm-compressor")
    parser.add_argument("--llama-cpp", type=Path, help="folder with libllama")
    parser.add_argument("--text", type=Path, help=f"text of {CALIBRATED}, at least {ROWS} rows of {TOKENS} tokens")
    parser.add_argument("--group-size", type=int, default=64, help=f"of {CALIBRATED}; it divides the widths of the model")
    args = parser.parse_args()
    asked = [args.format] if args.format else [*FORMATS, *GGUF, *([CALIBRATED] if args.text else [])]
    if CALIBRATED in asked and not args.text:
        parser.error(f"{CALIBRATED} needs --text")
    print(f"{'format':12} {'program':15} {'seconds':>8} {'peak MB':>8} {'error':>8}")
    for name in asked:
        ours = our_run(name, args)
        for program in (ours, *peers(name, args)):
            try:
                if program is ours:
                    measure(program)
                seconds, peak_mb = measure(program)
                moved = error(args.model, program.out)
                print(f"{name:12} {program.program:15} {seconds:8.2f} {peak_mb:8.0f} {moved:8.4f}", flush=True)
            except Failed as failed:
                print(f"{name:12} {program.program:15} {failed}", flush=True)


def our_run(name: str, args: argparse.Namespace) -> Run:
    """weightsmith's."""
    out, options = args.work / name, ["--format", name]
    if name == CALIBRATED:
        text = ["--calibration", str(args.text), "--calibration-rows", str(ROWS), "--calibration-tokens", str(TOKENS)]
        options = ["--format", "w4a16", "--group-size", str(args.group_size), *text]
    command = (sys.executable, "-m", "weightsmith", "quantize", str(args.model), str(out), *options)
    return Run("weightsmith", (*command, "--overwrite", "--quiet", "--no-fsync"), out, {})


def peers(name: str, args: argparse.Namespace) -> list[Run]:
    """Those of the other programs that are there and have the format."""
    out = args.work / f"{name}-peer"
    if name in GGUF and args.llama_cpp:
        source = args.work / "gguf-bf16"
        if not source.exists():
            weightsmith.quantize(args.model, source, "gguf-bf16", progress=False)
        environment = {"WEIGHTSMITH_LIBLLAMA": str(args.llama_cpp)}
        files = str(source / "model.gguf"), str(out / "model.gguf")
        return [Run("llama.cpp", (sys.executable, "-c", _LLAMA_CPP, *files, str(GGUF[name])), out, environment)]
    if name in FORMATS and args.peer:
        return [Run("llm-compressor", (args.peer, "-c", _DATA_FREE, str(args.model), str(out), FORMATS[name]), out, {})]
    if name == CALIBRATED and args.peer:
        numbers = map(str, (ROWS, TOKENS, args.group_size))
        return [Run("llm-compressor", (args.peer, "-c", _GPTQ, str(args.model), str(out), str(args.text), *numbers), out, {})]
    return []


def measure(run: Run) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process. Raises Failed with the last line that it printed."""
    began = time.monotonic()
    environment = {**os.environ, **run.environment}
    process = subprocess.Popen(
        run.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, errors="replace"
    )
    assert process.stderr is not None
    text = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise Failed(text.strip().rpartition("\n")[2][:90])
    return time.monotonic() - began, usage.ru_maxrss / 1000


def error(model: Path, out: Path) -> float:
    """The relative error of the weights that are quantised."""
    moved = norm = 0.0
    with weightsmith.open_checkpoint(model) as plain, weightsmith.open_checkpoint(out) as stored:
        for tensor in (name for name, spec in plain.specs.items() if len(spec.shape) == 2):
            before = plain.read(tensor).astype(np.float64)
            change = ((stored.read(tensor) - before) ** 2).sum()
            moved, norm = moved + change, norm + ((before**2).sum() if change else 0)
    return float(np.sqrt(moved / norm))


if __name__ == "__main__":
    main()
