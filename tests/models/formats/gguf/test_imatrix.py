"""Importance matrices with columns, or experts, of which they say nothing."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import SENTENCEPIECE, tokenizer_files
from weightsmith._models.formats.gguf.imatrix import RUN, SMALLEST, imatrix_bytes, with_defaults


def test_runs_of_columns_without_importances_count_as_one() -> None:
    ones = np.ones(64, np.float32)
    assert with_defaults(ones * 3, 64)[1] == 0
    values = np.full((2, 40), 3, np.float32)  # the last run has eight columns
    values[0, :20], values[1, 32:], values[1, 0] = 0, SMALLEST / 2, 0
    filled, count = with_defaults(values.reshape(-1), 40)
    expected = values.copy()
    expected[0, :RUN], expected[1, 32:] = 1, 1
    assert count == 2
    assert (filled.reshape(2, 40) == expected).all()
    assert filled.dtype == np.float32


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four experts with rows of 256."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    zoo.save("mixtral", folder, 0, **sizes, num_key_value_heads=2, head_dim=64, vocab_size=269)
    for name, content in tokenizer_files(SENTENCEPIECE).items():
        (folder / name).write_bytes(content)
    return folder


def errors_of(path: Path, plain: Path) -> dict[str, list[float]]:
    """The relative error of each matrix of each tensor."""
    exact = {t.name: np.asarray(t.data, np.float32) for t in gguf.GGUFReader(plain).tensors}
    errors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values, precise = gguf.quants.dequantize(tensor.data, tensor.tensor_type), exact[tensor.name]
        pairs = zip(values, precise, strict=True) if precise.ndim == 3 else [(values, precise)]
        errors[tensor.name] = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
        assert np.isfinite(values).all()
    return errors


@pytest.mark.long
@pytest.mark.parametrize("name", ["q4_k_m", "iq2_xxs", "q5_0"])
def test_an_expert_that_no_token_reached_is_stored_as_well_as_the_others(name: str, mixture: Path, tmp_path: Path) -> None:
    weightsmith.quantize(mixture, tmp_path / "plain", "gguf-f32", progress=False)
    plain = tmp_path / "plain" / "model.gguf"
    rng, importances = np.random.default_rng(0), {}
    for tensor in gguf.GGUFReader(plain).tensors:
        if tensor.name.startswith("blk") and tensor.data.ndim > 1 and "gate_inp" not in tensor.name:
            columns = tensor.data.size // tensor.data.shape[-2]  # of all experts
            importances[tensor.name] = rng.uniform(0.1, 2, columns).astype(np.float32)
    importances["blk.0.attn_q.weight"][:] = 0
    for values in (v for name, v in importances.items() if "exps" in name):
        values.reshape(4, -1)[2] = 0
    importances["blk.0.ffn_down_exps.weight"].reshape(4, -1)[0, 5:60] = 0
    (tmp_path / "zero.dat").write_bytes(imatrix_bytes(importances))
    quantised = weightsmith.quantize(
        mixture, tmp_path / "out", f"gguf-{name}", imatrix=str(tmp_path / "zero.dat"), progress=False
    )
    [warning] = [str(warning) for warning in quantised.warnings if "importances" in str(warning)]
    runs = 256 // RUN
    assert f"{runs + 3 * runs + 2} runs of 16 columns, in 4 tensors, have no importances: they count as 1" in warning
    for tensor, errors in errors_of(tmp_path / "out" / "model.gguf", plain).items():
        assert max(errors) < 0.5, tensor
        assert max(errors) < 1.5 * min(errors) + 1e-6, tensor
