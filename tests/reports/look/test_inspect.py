"""`inspect`: what a model is by its headers, and numbers that are torch's in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.reports.look.models import CONFIG, LAYERS, TOKENS, save, weights
from weightsmith._base.errors import PlanError, UnknownName

TESTBED = Path(__file__).parents[3] / "examples/testbed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "base", weights())


def inspect(model: Path | str, **options: object) -> weightsmith.Inspection:
    return weightsmith.inspect(model, progress=False, **options)  # type: ignore[arg-type]


def test_what_headers_and_small_files_say(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: [org/a, org/b]\n---\n")
    inspection = inspect(model)
    assert (inspection.architecture, inspection.model_type) == ("LlamaForCausalLM", "llama")
    assert inspection.elements == sum(tensor.size for tensor in weights().values())
    assert sum(part.elements for part in inspection.parts) == inspection.elements
    assert {part.name: part.tensors for part in inspection.parts}["mlp.up_proj"] == LAYERS
    assert [(d.name, d.nbytes) for d in inspection.dtypes] == [("BF16", 2 * inspection.elements)]
    assert inspection.files == (("model.safetensors", (model / "model.safetensors").stat().st_size),)
    assert [(s.prefix, s.layers) for s in inspection.stacks] == [("model.layers.", LAYERS)]
    assert (inspection.tied, inspection.experts, inspection.quantised, inspection.context) == (False, (0, 0), "", 512)
    assert inspection.tokenizer is not None
    assert (inspection.tokenizer.tokens, inspection.tokenizer.rows, inspection.tokenizer.chat_template) == (
        TOKENS,
        TOKENS,
        True,
    )
    assert (inspection.licence, inspection.lineage) == ("apache-2.0", ("org/a", "org/b"))
    assert inspection.statistics is None
    json.dumps(inspection.to_json(), allow_nan=False)


def test_experts_and_a_tied_head(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": np.ones((4, 4), np.float32) for e in range(3)}
    tensors["model.embed_tokens.weight"] = np.ones((8, 4), np.float32)
    config = {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    inspection = inspect(write_checkpoint(tmp_path / "m", tensors, config))
    assert (inspection.experts, inspection.tied) == ((3, 2), True)
    assert [(p.name, p.tensors) for p in inspection.parts] == [("embed_tokens", 1), ("mlp.experts.up_proj", 3)]
    assert "1 layer: model.layers.0'" in str(inspection.report())


def test_an_adapter() -> None:
    inspection = inspect(TESTBED / "fr")
    assert inspection.adapter is not None
    assert inspection.adapter.ranks == {8: 210}
    assert inspection.adapter.base == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(inspection.adapter.modules) == {f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")}


def test_a_quantised_model_has_the_dtypes_of_its_files(model: Path, tmp_path: Path) -> None:
    weightsmith.quantize(model, tmp_path / "q", "fp8-dynamic", progress=False)
    inspection = inspect(tmp_path / "q")
    assert inspection.quantised
    assert inspection.elements == sum(tensor.size for tensor in weights().values())
    assert "F8_E4M3" in {d.name for d in inspection.dtypes}
    assert "decoded size" in str(inspection.report())


def test_a_gguf_file_has_the_blocks_of_its_file(tmp_path: Path) -> None:
    pytest.importorskip("libgguf")
    pytest.importorskip("gguf")
    from tests.gguf_help import SENTENCEPIECE, SIZES, llama, write_gguf

    inspection = inspect(write_gguf(tmp_path / "m.gguf", "llama", llama(), SIZES | SENTENCEPIECE))
    assert {d.name for d in inspection.dtypes} == {kind for _, kind in llama().values()}
    assert sum(d.nbytes for d in inspection.dtypes) < 2 * inspection.elements
    assert inspection.quantised.startswith("GGUF")
    assert inspection.tokenizer is not None


@pytest.mark.slow
def test_statistics_are_torchs_in_float64(model: Path) -> None:
    torch = pytest.importorskip("torch")
    inspection = inspect(model, stats=True)
    assert inspection.statistics is not None
    for tensor in inspection.statistics:
        x = torch.from_numpy(weightsmith.open_checkpoint(model).read(tensor.name).astype(np.float64))
        assert tensor.norm == pytest.approx(float(x.norm()), rel=1e-12)
        assert tensor.mean == pytest.approx(float(x.mean()), rel=1e-9, abs=1e-12)
        assert tensor.deviation == pytest.approx(float(x.std(correction=0)), rel=1e-9)
        assert (tensor.low, tensor.high) == (float(x.min()), float(x.max()))
        assert tensor.zeros == int((x == 0).sum())
        assert (tensor.nans, tensor.infinities) == (0, 0)


def test_nan_infinities_zeros_and_outlier_rows_are_counted(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensor = random.standard_normal((3000, 64)).astype(np.float32)
    tensor[7] *= 30
    tensor[8, :5], tensor[9, 0], tensor[2999, 1:3] = 0, np.nan, np.inf
    inspection = inspect(write_checkpoint(tmp_path / "m", {"w": tensor.astype(ml_dtypes.bfloat16)}), stats=True, threads=3)
    assert inspection.statistics is not None
    (statistics,) = inspection.statistics
    assert (statistics.nans, statistics.infinities, statistics.zeros) == (1, 2, 5)
    assert math.isfinite(statistics.norm)
    assert [row for row, _ in statistics.outliers] == [7]
    assert statistics.outliers[0][1] == pytest.approx(30, rel=0.2)
    assert statistics == inspect(tmp_path / "m", stats=True, threads=1).statistics[0]  # type: ignore[index]


def test_globs_choose_tensors(model: Path) -> None:
    inspection = inspect(model, tensors=["*.mlp.up_proj.*"])
    assert [part.name for part in inspection.parts] == ["mlp.up_proj"]
    with pytest.raises(UnknownName, match="no tensor matches"):
        inspect(model, tensors=["nothing"])


def test_what_is_no_model_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such folder or file"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(PlanError):
        inspect(tmp_path / "empty")
