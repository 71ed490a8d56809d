"""The tables of docs/calibration.md: size and perplexity of a small model in each format.

    make demo                                          # once: the environment and the models, in build/demo
    .venv/bin/python examples/quantised/table.py       # SmolLM2-135M-Instruct: quantises, dequantises and judges every row
    .venv/bin/python examples/quantised/table.py --model gemma ["ROW" ...]     # Gemma 3 270M: see examples/gemma3.py

Size is that of the weight files; perplexity is of testbed/eval, in float32. Calibrations use the text that comes with
weightsmith; nothing was tuned on testbed/eval (--tune shows testbed/tune, --rows reads the beginning only). Measurements are
cached in WORK/quantised.json, by model, row and text, so that an interrupted run resumes; --again discards the cache.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))

from gemma3 import build_gemma  # noqa: E402
from judge import DOMAINS, judge  # noqa: E402
from measured import Measured, Row, Texts, ask, mean  # noqa: E402
from smollm2 import build_base  # noqa: E402

import weightsmith  # noqa: E402

MODELS = {"smollm2": build_base, "gemma": build_gemma}
BASE = "bf16"
BITS = (2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
GROUP = 64
"""128 does not divide the width of this model, 576."""
GROUP_BITS = 4 + 16 / 64
"""Bits of w4a16 for each weight of a linear layer, with its scales. Its head is not quantised either."""

NONE, TEXT = {"calibration": "none"}, {"calibration": "built-in"}
REUSED = {"measurement": "measurement.json", "imatrix": "imatrix.dat"}
"""Files of the first output that has them, which later rows are made from: the model is measured once."""
PLAIN = ("fp8-dynamic", "fp8-block", "int8", "nvfp4a16", "mxfp4", "mlx-8bit", "mlx-4bit")
GROUPED = ("w4a16", "w8a16", "gptq-4bit", "gptq-8bit", "awq-4bit")
GGUF = ("gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q4_0", "gguf-iq4_xs", "gguf-q3_k_m", "gguf-q2_k")
ROWS: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in (*PLAIN, *GGUF)},
    **{f"{name}, imatrix": {"format": name, **TEXT} for name in GGUF if name != "gguf-q8_0"},
    **{
        f"exl2 {bits}, {name}": {"format": "exl2", "bits": bits, **options}
        for bits in BITS
        for name, options in (
            ("data-free", NONE),
            ("calibrated, uniform", {"uniform": True}),
            ("calibrated, measured", {}),
        )
    },
    f"exl2 {GROUP_BITS}, head in float16, calibrated, measured": {"format": "exl2", "bits": GROUP_BITS, "head_bits": 16},
    **{
        f"{name}, {how}": {"format": name, "group_size": GROUP, **options}
        for name in GROUPED
        for how, options in (("data-free", {}), ("GPTQ", TEXT))
    },
}


def main() -> None:
    """Quantise, judge, print."""
    asked = ask(__doc__ or "", EXAMPLES / "testbed", models=tuple(MODELS))
    base = MODELS[asked.model](asked.work / "models")
    work = asked.work / f"quantised-{asked.model}"
    work.mkdir(exist_ok=True)
    kept = Measured(asked.work / "quantised.json", again=asked.again)
    if unknown := sorted(set(asked.recipes) - {BASE, *ROWS}):
        raise SystemExit(f"no row is called {', '.join(unknown)}; rows: {', '.join((BASE, *ROWS))}")
    print(f"| | MB | {' | '.join(DOMAINS)} | geometric mean |\n| --- |{' ---: |' * (len(DOMAINS) + 2)}")
    for name in (BASE, *ROWS):
        if not asked.recipes or name in asked.recipes:
            key = Path(f"{asked.model} {name}")
            row = kept.row(key, asked.texts, lambda name=name: _measure(name, base, asked.texts, work))
            print(_line(name, row), end="", flush=True)


def _line(name: str, row: Row) -> str:
    return f"| {name} | {row['bytes'] / 1e6:.1f} | {' | '.join(f'{row[d]:.2f}' for d in DOMAINS)} | {mean(row):.2f} |\n"


def _measure(name: str, base: Path, texts: Texts, work: Path) -> Row:
    if name == BASE:
        return _judge(base, base, texts)
    quantised, plain = work / name.replace(" ", "-"), work / "plain"
    try:
        weightsmith.quantize(base, quantised, overwrite=True, **_options(name, work))
        for file in REUSED.values():
            if (quantised / file).exists():
                shutil.copyfile(quantised / file, work / file)
        weightsmith.dequantize(quantised, plain, overwrite=True)
        return _judge(plain, quantised, texts)
    finally:
        for folder in (quantised, plain):
            shutil.rmtree(folder, ignore_errors=True)


def _options(name: str, work: Path) -> dict[str, Any]:
    """What to call `quantize` with: a measurement of an earlier row instead of another one."""
    options = ROWS[name]
    if name.endswith(", measured") and (work / REUSED["measurement"]).exists():
        return options | {"measurement": str(work / REUSED["measurement"])}
    if name.endswith(", imatrix") and (work / REUSED["imatrix"]).exists():
        return {"format": options["format"], "imatrix": str(work / REUSED["imatrix"])}
    return options


def _judge(folder: Path, sized: Path, texts: Texts) -> Row:
    row: Row = dict(judge(folder, texts.folder, "La fonction renvoie", texts.rows, new_tokens=1).perplexity)
    files = (*sized.glob("*.safetensors"), *sized.glob("*.gguf"))
    return row | {"bytes": sum(file.stat().st_size for file in files)}


if __name__ == "__main__":
    main()
