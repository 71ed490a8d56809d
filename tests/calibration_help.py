"""Tiny models with a tokenizer, and short ways to run a text through them and to calibrate them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.made_once import made_once
from tests.zoo import SIZES
from weightsmith._activations.model import TextRun, result_of, text_for
from weightsmith._activations.rows import rows_of, text_source
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats.exl2 import model as exl2_model
from weightsmith._models.formats.exl2.model import ATTENTION, MLP
from weightsmith._outputs.staging import Staging
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import PlanDraft, Product
from weightsmith.abc.product import Arrays

TINY = {**SIZES, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
TEXT = " ".join(f"The {word} has {n} {word}s, and {n * n} more." for n, word in enumerate("cat dog bird fish".split() * 9))
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "llama-128": lambda: transformers.LlamaConfig(**{**TINY, "hidden_size": 128}),
    "narrow": lambda: transformers.LlamaConfig(**{**TINY, "intermediate_size": 104}),
    "biased": lambda: transformers.LlamaConfig(**TINY, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, head_dim=16, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8),
    "phi3": lambda: transformers.Phi3Config(**TINY),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **{**TINY, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    ),
}


def save_model(folder: Path, name: str = "llama", seed: int = 0) -> Path:
    """A random model with a tokenizer of bytes."""
    config = CONFIGS[name]()

    def make(kept: Path) -> None:
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(kept)

    made_once(folder, __file__, (config.to_json_string(), seed), make)
    torch.manual_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def noisy_copy(folder: Path, copy: Path, seed: int, size: float = 0.05) -> None:
    """A copy of a model with noise on all weights: a fine-tune."""
    shutil.copytree(folder, copy)
    noise = torch.Generator().manual_seed(seed)
    tensors = load_file(copy / "model.safetensors")
    noisy = {name: (t.float() + size * torch.randn(t.shape, generator=noise)).to(t.dtype) for name, t in tensors.items()}
    save_file(noisy, copy / "model.safetensors", metadata={"format": "pt"})


def changed(folder: Path, **scales: float) -> None:
    """Multiply the tensors whose names end so."""
    tensors = load_file(folder / "model.safetensors")
    for end, scale in scales.items():
        for name in tensors:
            if name.endswith(f"{end}.weight"):
                tensors[name] *= scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def settings(folder: Path, **options: Any) -> QuantizeSettings:
    """A calibration with a short text."""
    (folder / "text.txt").write_text(TEXT)
    default = {
        "bits": 4.1,
        "calibration": str(folder / "text.txt"),
        "calibration_rows": 6,
        "calibration_tokens": 16,
        "uniform": True,
    }
    return QuantizeSettings(**default | options)


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Expect a run to be interrupted before it keeps the product of this name."""
    keep = Staging.keep

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if product.name == name:
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture
def few_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of a block that is measured takes time: three for the attention, three for the MLP."""
    monkeypatch.setattr(exl2_model, "ATTENTION", ATTENTION[::9])
    monkeypatch.setattr(exl2_model, "MLP", MLP[::8])


def prepared_for(source: Any, quantize_settings: QuantizeSettings, name: str = "exl2", seed: int = 0) -> Prepared:
    """The plan of a quantised model. source: its folder, or a recipe."""
    recipe = source if isinstance(source, Mapping) else {"merge_method": "passthrough", "models": [{"model": str(source)}]}
    return prepare_any(recipe, RecipeOptions(seed=seed, quantize=name), quantize_settings)


def quantise(source: Any, out: Path, quantize_settings: QuantizeSettings, threads: int = 2, **options: Any) -> Merged:
    """Make it."""
    with prepared_for(source, quantize_settings, **options) as prepared:
        return execute(prepared, out, RunOptions(threads=threads, card=False))


class Captured(DiscardedOutput):
    """An engine output that takes no tensors, and shows the products."""

    def __init__(self) -> None:
        self.arrays: dict[str, Arrays] = {}
        self.log: list[str] = []

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        self.log.append(product.name)
        self.arrays[product.name] = [np.array(array) for array in arrays]
        return arrays

    def forget(self, product: Product) -> None:
        self.log.append(f"-{product.name}")

    def location(self, name: str) -> None:
        return None

    def write(self, name: str, start_byte: int, buffer: Any) -> None: ...

    def finish(self, name: str, checksum: str, distance: Any, made_from: str) -> None: ...


def captured(prepared: Prepared, products: Sequence[Product], memory: int | None = None, threads: int = 2) -> Captured:
    output = Captured()
    folders = [model.folder for model in prepared.inputs]
    resources = Resources(threads, product_bytes=memory)
    run(prepared.plan, prepared.inputs, output, resources, Workload(steps=(), products=products, folders=folders))
    return output


def text_run(prepared: Prepared, quantize_settings: QuantizeSettings) -> TextRun:
    """The products of the text of a calibration, for the result of a plan."""
    model = result_of(PlanDraft.of(prepared.plan), prepared.inputs, prepared.plan.steps)
    return TextRun(
        model,
        text_for(
            model, quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
        ),
    )


def rows_for(quantize_settings: QuantizeSettings, folder: Path) -> torch.Tensor:
    text = text_source(
        quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
    )
    return torch.from_numpy(rows_of(text, folder, 256, 1).astype(np.int64))
