"""What ExLlamaV2's and exllamav3's own loaders compute from a checkpoint, on a GPU.

    python -m tests.models.formats.readers.loaders PROGRAM TEXT FOLDER...

runs PROGRAM (`exllamav2`, `exllamav3`) on the models of the folders, with the text of the file TEXT, and writes `PROGRAM.npz`
into each folder:

tokens     int64 [n]: the text, by the program's tokenizer
whole      float32 [n, vocabulary]: logits of one pass without a cache, in which weights are reconstructed
short      float32 [SHORT, vocabulary]: of one pass of the first tokens, by the kernels that multiply with the stored codes
steps      float32 [STEPS, vocabulary]: of the last tokens, one at a time, after the others have filled the cache
wide       float32 [n, vocabulary]: of the first of so many copies that exllamav3 reconstructs rotated weights (exllamav3 only)
generated  int64 [GENERATED]: what the program's generator continues the first SHORT tokens with, greedily

A folder that fails also gets `PROGRAM.error`, the traceback. After an error of CUDA the process ends, because no later model
would run in it. Nothing of weightsmith is imported.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHORT, STEPS, GENERATED = 24, 6, 12
_CACHE = 512
_WIDE_ROWS = 1024
"""So many rows exllamav3 1.6.5 multiplies with weights that are rotated back; with fewer, it rotates the rows."""

Arrays = dict[str, np.ndarray]


def exllamav2(folder: Path, text: str, outputs: Arrays) -> None:
    """Fill `outputs` with logits and tokens, as above."""
    import torch
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

    config = ExLlamaV2Config(str(folder))
    config.max_seq_len = _CACHE
    # Without flash-attn, 0.3.2 calls torch's attention with the mask of images, which is none: tokens would see later ones.
    config.no_sdpa = True
    model = ExLlamaV2(config)
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=_CACHE)
    tokenizer = ExLlamaV2Tokenizer(config)
    with torch.inference_mode():
        ids = tokenizer.encode(text)
        outputs["tokens"] = ids[0].numpy()
        for name, part in ("whole", ids), ("short", ids[:, :SHORT]):
            outputs[name] = _rows(model.forward(part), config)
        model.forward(ids[:, :-STEPS], cache, preprocess_only=True)
        last = range(ids.shape[1] - STEPS, ids.shape[1])
        outputs["steps"] = np.concatenate([_rows(model.forward(ids[:, i : i + 1], cache), config) for i in last])
        cache.current_seq_len = 0
        generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer, paged=False)
        greedy = ExLlamaV2Sampler.Settings.greedy()
        job = ExLlamaV2DynamicJob(input_ids=ids[:, :SHORT], max_new_tokens=GENERATED, gen_settings=greedy)
        outputs["generated"] = _generated(generator, job)
    model.unload()


def exllamav3(folder: Path, text: str, outputs: Arrays) -> None:
    """Fill `outputs` with logits and tokens, as above."""
    import torch
    from exllamav3 import Cache, Config, Generator, GreedySampler, Job, Model, Tokenizer

    config = Config.from_directory(str(folder))
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=_CACHE)
    model.load(device="cuda:0", progressbar=False)
    tokenizer = Tokenizer.from_config(config)
    cached: dict[str, Any] = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, _CACHE)}
    with torch.inference_mode():
        ids = tokenizer.encode(text)
        outputs["tokens"], n = ids[0].numpy(), ids.shape[1]
        for name, part in ("whole", ids), ("short", ids[:, :SHORT]), ("wide", ids.repeat(-(-_WIDE_ROWS // n), 1)):
            outputs[name] = _rows(model.forward(part, {"attn_mode": "flash_attn_nc"}), config)
        model.prefill(ids[:, :-STEPS], {**cached, "past_len": 0})
        steps = [model.forward(ids[:, i : i + 1], {**cached, "past_len": i}) for i in range(n - STEPS, n)]
        outputs["steps"] = np.concatenate([_rows(step, config) for step in steps])
        generator = Generator(model=model, cache=cache, tokenizer=tokenizer)
        job = Job(input_ids=ids[:, :SHORT], max_new_tokens=GENERATED, sampler=GreedySampler())
        outputs["generated"] = _generated(generator, job)
    model.unload()


def _rows(logits: Any, config: Any) -> np.ndarray:
    """Logits of the first row of a batch, without the columns that pad the vocabulary: float32 [tokens, vocabulary]."""
    return np.asarray(logits[0, :, : config.vocab_size].float().cpu().numpy())


def _generated(generator: Any, job: Any) -> np.ndarray:
    """The tokens of a job, with what has been held back for a longer match or an unfinished character."""
    generator.enqueue(job)
    ids: list[int] = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            for part in (result, result.get("held", {})):
                if "token_ids" in part:
                    ids += part["token_ids"].flatten().tolist()
    return np.array(ids, np.int64)


PROGRAMS: dict[str, Callable[[Path, str, Arrays], None]] = {"exllamav2": exllamav2, "exllamav3": exllamav3}


def main(program: str, text: str, *folders: str) -> None:
    """Run a program on models."""
    for folder in map(Path, folders):
        outputs: Arrays = {}
        try:
            PROGRAMS[program](folder, Path(text).read_text(), outputs)
        except Exception:
            error = traceback.format_exc()
            (folder / f"{program}.error").write_text(error)
            if "CUDA error" in error:
                sys.exit(error)
        finally:
            np.savez(folder / f"{program}.npz", **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
