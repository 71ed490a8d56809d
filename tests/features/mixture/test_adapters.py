"""Experts that are models with adapters, `base+adapter`: the bytes of the merged models, without writing these."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import weightsmith
from tests.features.mixture.test_layouts import NATIVE
from tests.features.mixture.test_moe import config, llama
from tests.features.mixture.test_moe import recipe as recipe_of
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_lora import P, adapter, factors
from tests.moe_help import Models, recipe
from weightsmith._models.structure.projections import role_of
from weightsmith.abc.layout import ExpertLayout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Models(tmp_path_factory.mktemp("dense"))
    torch.set_num_threads(threads)


def trained(model: Path, folder: Path, seed: int) -> Path:
    """An adapter with factors of each linear layer, as a trainer under FSDP and torch.compile saves it."""
    with weightsmith.open_checkpoint(model) as checkpoint:
        linear = [spec for spec in checkpoint.specs.values() if role_of(spec) == "linear"]
    tensors = {k: v * 0.1 for s in linear for k, v in factors(s.name.removesuffix(".weight"), *s.shape, 2, seed).items()}
    names = (name.replace(P, f"{P}_orig_mod.").replace("layers.", "layers._fsdp_wrapped_module.", 1) for name in tensors)
    pattern = r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj|down_proj))|(?:\bmodel\.layers\..*)"
    return adapter(folder, dict(zip(names, tensors.values(), strict=True)), r=2, target_modules=pattern)


@pytest.mark.matrix("mixtral", "granitemoe", "deepseek_v3")
@pytest.mark.slow
@pytest.mark.parametrize("layout", NATIVE, ids=lambda layout: layout.name)
def test_experts_with_adapters_are_the_merged_models(layout: ExpertLayout, models: Models, tmp_path: Path) -> None:
    base = models.dense(layout.dense[0])
    loras = [trained(base, tmp_path / f"lora {i}", seed=i) for i in range(2)]
    refs = [f"{base}+{lora}" for lora in loras]
    merged = []
    for i, ref in enumerate(refs):
        what = {"merge_method": "passthrough", "models": [{"model": ref}]}
        merged.append(str(weightsmith.merge(what, tmp_path / f"merged {i}", fsync=False, progress=False).out))
    written = []
    for kind, (one, two) in enumerate((refs, merged)):
        keys = {"shared_experts": [{"source_model": two}]} if layout.shared_experts[0] else {}
        source = recipe(base, architecture=layout.name, **keys)
        source["experts"] = [{"source_model": name} for name in (one, str(base), two, one)]
        with weightsmith.open_checkpoint(weightsmith.moe(source, tmp_path / f"out {kind}", progress=False).out) as checkpoint:
            written.append({name: as_bytes(checkpoint.read(name)) for name in checkpoint.specs})
    assert written[0] == written[1]
    names = [name for name in written[0] if "experts" in name or "_linear" in name]
    assert len({written[0][name] for name in names}) > len(names) / 2  # the experts are not all the base


@pytest.mark.process
@pytest.mark.slow
def test_experts_take_the_memory_of_the_factors_of_their_adapters(tmp_path: Path) -> None:
    """Peak memory of a process that writes two equal experts of 12 MB, and of one that writes eight, four of them different."""
    base = write_checkpoint(tmp_path / "base", llama(0, intermediate=60_000), config())
    loras = [trained(base, tmp_path / f"lora{i}", seed=i) for i in range(4)]
    code = "import re, sys, weightsmith\nweightsmith.moe(sys.argv[1], sys.argv[2], check_loading=False)\n"
    # not ru_maxrss, which a child inherits from the process that forked it
    code += "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    peaks = []
    for kind, adapters in enumerate((loras[:1] * 2, loras * 2)):
        source = recipe_of({"base": base}, ["base"] * len(adapters))
        for entry, lora in zip(source["experts"], adapters, strict=True):
            entry["source_model"] += f"+{lora}"
        (tmp_path / f"{kind}.yml").write_text(json.dumps(source) + "\n")
        command = [sys.executable, "-c", code, tmp_path / f"{kind}.yml", tmp_path / f"out{kind}"]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024)
    assert (tmp_path / "out1/model.safetensors").stat().st_size > 80_000_000
    extra_bytes = sum((lora / "adapter_model.safetensors").stat().st_size for lora in loras[1:])
    assert peaks[1] - peaks[0] < 3 * extra_bytes + 20_000_000, peaks


def test_the_sum_of_the_factors_shows_in_an_expert(models: Models, tmp_path: Path) -> None:
    """Not only the same as another road, but what it should be."""
    base = models.dense("llama")
    lora = trained(base, tmp_path / "lora", seed=3)
    source = recipe(base, 2, architecture="mixtral")
    source["experts"] = [{"source_model": f"{base}+{lora}"}, {"source_model": str(base)}]
    with (
        weightsmith.open_checkpoint(weightsmith.moe(source, tmp_path / "out", progress=False).out) as out,
        weightsmith.open_checkpoint(base) as plain,
    ):
        name = "model.layers.0.mlp.up_proj"
        before = plain.read(f"{name}.weight").astype(np.float64)
        a, b = factors(name, *before.shape, 2, 3).values()
        want = before + 4.0 * (b * np.float32(0.1)).astype(np.float64) @ (a * np.float32(0.1)).astype(np.float64)
        stored = "model.layers.0.block_sparse_moe.experts.0.w3.weight"
        np.testing.assert_allclose(out.read(stored).astype(np.float64), want, rtol=2**-8, atol=1e-6)
