"""Two models with different vocabularies: merges by token, and OMP for missing tokens, beside mergekit.

    python -m benchmarks.vocabulary [--tokens 128000] [--width 2048] [--mergekit BIN] [--union] [--omp 3000 10000]

The tokenizers are byte-level BPE with seeded random merges, and share 60 % of their tokens; the models are Llamas of two layers
with tied embeddings. Each merge is a process of its own: user and system seconds, which other work on the machine changes less
than wall time, and peak memory. 200 rows of the output are compared with numpy's before a time is printed. BIN is the folder of
commands of an environment with mergekit. Its union of 128,000 tokens takes far more than ten minutes: it runs with --union.

OMP is timed on 46,000 random atoms of 576 columns, k = 64, one thread, within this process; mergekit's on 512 targets.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import ml_dtypes
import numpy as np

import weightsmith
from benchmarks.process import Measured, run
from weightsmith._features.transplant.approximations.pursuit import pursue
from weightsmith._models.tokenizers.vocabulary import read_vocabulary
from weightsmith.abc.approximation import Problem, Tables

EMBEDDING = "model.embed_tokens.weight"
SHARED, CHECKED, RIVALS = 0.6, 200, 512
ATOMS, COLUMNS, K = 46_000, 576, 64
_OMP = """
import os, resource
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from mergekit.tokensurgeon.omp import batch_omp
torch.set_num_threads(1)
atoms, targets = torch.randn({atoms}, {columns}), torch.randn({targets}, {columns})
def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
start = seconds()
batch_omp(targets, atoms, {k})
print(seconds() - start)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--mergekit", type=Path, help="bin folder of an environment with mergekit")
    parser.add_argument("--union", action="store_true", help="mergekit's union too")
    parser.add_argument("--omp", type=int, nargs="*", default=[], help="numbers of missing tokens")
    args = parser.parse_args()
    # What needs memory runs in processes of its own: see benchmarks/process.py.
    apart = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as work, apart:
        folder = Path(work)
        for i, name in enumerate(("base", "other")):
            apart.submit(build, folder / name, args.tokens, args.width, i).result()
        for source in ("base", "union"):
            recipe = folder / f"{source}.yml"
            recipe.write_text(json.dumps(recipe_of(folder, source)))
            out = folder / "out"
            ours = run([sys.executable, "-m", "weightsmith", "merge", str(recipe), str(out), "--overwrite"], folder / "log")
            apart.submit(check, folder, out).result()
            show(f"{source}: weightsmith", ours)
            if args.mergekit and (source == "base" or args.union):
                show(
                    f"{source}: mergekit", run([str(args.mergekit / "mergekit-yaml"), str(recipe), f"{out}-m"], folder / "log")
                )
        if args.omp and args.mergekit:
            script = _OMP.format(atoms=ATOMS, columns=COLUMNS, targets=RIVALS, k=K)
            finished = run([str(args.mergekit / "python"), "-c", script], folder / "log")
            print(f"OMP, {RIVALS} tokens: mergekit {float(finished.output.split()[-1]):.1f} s")
    for n in args.omp:
        print(f"OMP, {n:,} tokens: weightsmith {omp(n):.1f} s")


def build(folder: Path, tokens: int, width: int, seed: int) -> None:
    """A model with a tokenizer of about so many tokens."""
    folder.mkdir()
    vocab, merges = pieces(tokens, seed)
    bpe = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocab)}, "merges": merges}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    special = [f"<|{seed}|>", "<|end|>"]
    added = [{"id": len(vocab) + i, "content": token, "special": True} for i, token in enumerate(special)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [{**entry, **flags} for entry in added],
        "normalizer": None,
    }
    document |= {"pre_tokenizer": level, "post_processor": None, "decoder": level, "model": bpe}
    rows = len(vocab) + len(special)
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (rows, width), "model.norm.weight": (width,)}
    for i in range(2):
        inner: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj.weight": (width, width) for p in "qkvo"}
        inner |= {"mlp.gate_proj.weight": (64, width), "mlp.up_proj.weight": (64, width), "mlp.down_proj.weight": (width, 64)}
        inner |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in inner.items()}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": rows},
        **{"tie_word_embeddings": True, "dtype": "bfloat16", "torch_dtype": "bfloat16", "max_position_embeddings": 512},
    }
    tensors = {
        name: (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    weightsmith.save_model(tensors, folder, config=config)
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}')


def pieces(tokens: int, seed: int) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and their merges: the first 60 % are the same for every seed."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    vocab, merges, known = list(letters), [], set(letters)
    rng = np.random.default_rng(0)
    while len(vocab) < tokens:
        if len(vocab) == int(SHARED * tokens):
            rng = np.random.default_rng(1 + seed)
        left, right = vocab[rng.integers(len(vocab))], letters[rng.integers(len(letters))]
        if len(left) < 12 and left + right not in known:
            vocab.append(left + right)
            known.add(left + right)
            merges.append(f"{left} {right}")
    return vocab, merges


def recipe_of(folder: Path, source: str) -> dict[str, object]:
    """The mean of both models."""
    models = [{"model": str(folder / name), "parameters": {"weight": 0.5}} for name in ("base", "other")]
    about = {"merge_method": "linear", "base_model": str(folder / "base"), "models": models, "dtype": "bfloat16"}
    return {**about, "tokenizer_source": source}


def check(folder: Path, out: Path) -> None:
    """Compare rows of the output with numpy's; raises ValueError."""
    ids = {name: vocabulary(folder / name) for name in ("base", "other")}
    out_ids, rng = vocabulary(out), np.random.default_rng(0)
    tokens = [*rng.choice(sorted(out_ids), CHECKED).tolist(), "<|0|>", "<|end|>"]
    tables = {name: rows(folder / name) for name in ids}
    merged = rows(out)
    for token in tokens:
        token_rows = [tables[name][ids[name][token]] for name in ids if token in ids[name]]
        if not np.allclose(merged[out_ids[token]], np.mean(token_rows, axis=0), rtol=2**-7, atol=1e-6):
            raise ValueError(f"the row of {token!r} is wrong")


def vocabulary(folder: Path) -> Mapping[str, int]:
    """Id by token."""
    parsed = read_vocabulary(folder.name, folder, ["tokenizer.json"])
    assert parsed is not None
    return parsed.ids


def rows(folder: Path) -> np.ndarray:
    """The embedding, as float32."""
    with weightsmith.open_checkpoint(folder) as model:
        return np.asarray(model.read(EMBEDDING).astype(np.float32))


def omp(n: int) -> float:
    """Processor seconds of OMP for so many tokens."""
    rng = np.random.default_rng(0)
    atoms, targets = (rng.standard_normal((count, COLUMNS), np.float32) for count in (ATOMS, n))
    nothing = np.zeros((0, 2), np.int64)
    start = seconds()
    pursue(targets, atoms, K, Problem(nothing[:, 0], nothing, (), False, cast(Tables, None)))
    return seconds() - start


def seconds() -> float:
    """CPU seconds of this process, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def show(name: str, measured: Measured) -> None:
    """Print one row."""
    print(f"{name}: {measured.cpu_seconds:.1f} s, {measured.peak_rss_bytes / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
