"""A fine-tune that was trained too long, and what is left of the damage at smaller weights.

    python examples/over_tuning.py               # needs the base of `make demo`, or makes it; some minutes of training

Trains a LoRA adapter of rank 8 on the German text of testbed/tune, again and again, until the model has it almost by heart.
Then every weight of task_arithmetic is judged on testbed/eval. The table goes to WORK/over_tuning.md too.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from pathlib import Path
from typing import Any

from judge import DOMAINS, judge
from measured import mean
from smollm2 import build_base, build_once

import weightsmith
from weightsmith._reports.judge import ROW_TOKENS

HERE = Path(__file__).resolve().parent
OVER = "over"
STEPS, RATE = 60, 1e-3
WEIGHTS = (0.25, 0.5, 0.75)


def main() -> None:
    """Train, merge, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--rows", type=int, help="rows of 384 tokens of each text; all if not given")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    work: Path = args.work.resolve()
    base, over = build_base(work / "models"), build_over(work / "models")
    lines = [f"| weight | {' | '.join(DOMAINS)} | geometric mean |", "| --- |" + " ---: |" * (len(DOMAINS) + 1)]
    print("\n".join(lines))

    def judged(label: str, folder: Path) -> None:
        perplexities = judge(folder, HERE / "testbed" / "eval", "Der", args.rows, new_tokens=1).perplexity
        lines.append(f"| {label} | {' | '.join(f'{perplexities[d]:.2f}' for d in DOMAINS)} | {mean(perplexities):.2f} |")
        print(lines[-1], flush=True)

    judged("0: the base", base)
    for weight in WEIGHTS:
        models = [{"model": str(over), "parameters": {"weight": weight}}]
        recipe = {"merge_method": "task_arithmetic", "base_model": str(base), "models": models, "dtype": "bfloat16"}
        merged = weightsmith.merge(recipe, work / "merged" / "over", overwrite=True, fsync=False, progress=False)
        judged(f"{weight}", merged.out)
        shutil.rmtree(merged.out)
    judged("1: the fine-tune", over)
    (work / "over_tuning.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_over(models: Path) -> Path:
    """The over-tuned model, unless it already exists."""
    base = build_base(models)
    return build_once(models / OVER, lambda out: _train(base, out))


def _train(base: Path, out: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    text = (HERE / "testbed" / "tune" / "de.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS]).view(-1, ROW_TOKENS)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE, weight_decay=0.0)
    order = torch.cat([torch.randperm(len(rows)) for _ in range(math.ceil(STEPS / len(rows)))])
    for step in range(STEPS):
        row = rows[order[step]][None]
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f} on {len(rows)} rows that it sees again and again", flush=True)
    merged = model.merge_and_unload().to(torch.bfloat16)
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
