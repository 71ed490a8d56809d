"""Models with other tokenizers: bits per byte on held-out text, for every approximation of missing tokens.

    python examples/transplants.py gemma         # Gemma 3 270M with the vocabulary of SmolLM2: see gemma3.py
    python examples/transplants.py trained       # SmolLM2 with a tokenizer of 16,000 tokens that is trained here

The vocabulary of SmolLM2 has 49,152 tokens, of which Gemma lacks 3,004. The trained tokenizer has no embeddings, so only the
approximations that need none take part. Bits per byte are of the first 3,000 characters of each text of the testbed, in rows
of 384 tokens that each begin with the BOS token, computed in float32. The table goes to WORK/transplants-NAME.md too.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma3 import build_gemma
from smollm2 import build_base

import weightsmith
from weightsmith._features.transplant.approximations import APPROXIMATIONS

HERE = Path(__file__).resolve().parent
DOMAINS = ("en", "fr", "de", "py")
CHARACTERS, ROW_TOKENS, TRAINED_TOKENS = 3000, 384, 16_000


def main() -> None:
    """Transplant, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("gemma", "trained"), help="which model, with which tokenizer")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--texts", default="eval", choices=("eval", "tune"), help="tune on one, report on the other")
    parser.add_argument("--only", nargs="+", help="approximations to try; all if not given")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    small = build_base(work / "models")
    model, donor = (build_gemma(work / "models"), small) if args.model == "gemma" else (small, train(work))
    lines = ["| model | " + " | ".join(DOMAINS) + " | error |", "| --- | " + "---: | " * 5]

    def judged(label: str, folder: Path, error: float | None = None) -> None:
        bits = " | ".join(f"{bits_per_byte(folder, domain, args.texts):.4f}" for domain in DOMAINS)
        lines.append(f"| {label} | {bits} | {'' if error is None else f'{error:.3f}'} |")
        print(lines[-1], flush=True)

    print("\n".join(lines))
    if not args.only:
        judged("its own tokenizer", model)
    for approximation in APPROXIMATIONS:
        if args.only and approximation.name not in args.only:
            continue
        if args.model == "trained" and approximation.donor:
            continue
        transplanted = weightsmith.transplant_tokenizer(
            model,
            donor,
            work / "transplanted",
            approximation=approximation.name,
            overwrite=True,
            resume=False,
            fsync=False,
            progress=False,
        )
        report: Any = transplanted.reports["rows of missing tokens"]
        judged(approximation.name, transplanted.out, report.error)
    if not args.only:
        (work / f"transplants-{args.model}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train(work: Path) -> Path:
    """A byte-level BPE tokenizer of Python's standard library and the testbed's tuning text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    out = work / "trained"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}\n'
    (out / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    return out


def _texts() -> Iterable[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
    for domain in DOMAINS:
        yield (HERE / "testbed" / "tune" / f"{domain}.txt").read_text(encoding="utf-8")


_loaded: dict[Path, Any] = {}


def bits_per_byte(folder: Path, domain: str, texts: str = "eval") -> float:
    """Of the beginning of a text of the testbed."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    key = folder / str((folder / "model.safetensors").stat().st_mtime_ns)
    if key not in _loaded:
        _loaded.clear()
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        if any(report.values()):
            sys.exit(f"{folder}: transformers did not load it whole: {report}")
        _loaded[key] = model.eval()
    model = _loaded[key]
    text = (HERE / "testbed" / texts / f"{domain}.txt").read_text(encoding="utf-8")[:CHARACTERS]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids), ROW_TOKENS):
            row = torch.tensor([model.config.bos_token_id, *ids[start : start + ROW_TOKENS]])
            logits = model(input_ids=row[None]).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return total / math.log(2) / len(text.encode())


if __name__ == "__main__":
    main()
