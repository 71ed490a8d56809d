"""The pages on how to add something: their files work as they stand, from one file and one entry."""

from __future__ import annotations

import re
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

import weightsmith
import weightsmith.plugin as plugin
from tests.cli_help import environment, make_models, run_process
from tests.mini import write_checkpoint
from tests.plan_help import prepare
from tests.plugin_help import installed, package
from weightsmith._base.errors import OutputExists, PlanError, StoreError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._execution.identity import work_identity
from weightsmith._models.formats import Encoding, StoredFormat, installed_code
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans import Product
from weightsmith.testing import EncodingTests, MethodCase, MethodTests, OutputCase, OutputTests, StoredFormatTests

pytestmark = pytest.mark.repository

Text = Callable[[str], str]
Page = Callable[[str, str], types.ModuleType]
DOCS = Path(__file__).parent.parent / "docs"


def test_the_pages_import_public_names_only_and_use_every_one() -> None:
    pages = {path.name: path.read_text() for path in (*DOCS.glob("adding-*.md"), DOCS / "own-method.md")}
    assert [
        name for name, text in pages.items() if re.search(r"^\s*(?:from|import) weightsmith\S*\._", text, re.MULTILINE)
    ] == []
    text = "".join(pages.values())
    assert [name for name in plugin.__all__ if not re.search(rf"\b{name}\b", text)] == []
    assert all(getattr(plugin, name) is not None for name in plugin.__all__)


@pytest.fixture
def file_of() -> Text:
    """The text of the first Python block of a page."""
    return lambda page: (DOCS / page).read_text().split("```python\n")[1].partition("\n```")[0]


@pytest.fixture
def files(file_of: Text, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Makes a module of the first Python block of a page."""

    def imported(page: str, name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(file_of(page), page, "exec"), module.__dict__)
        return module

    return imported


@pytest.mark.slow
def test_the_pages_program(files: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models, recipes, out = (tmp_path / name for name in ("models", "recipes", "out"))
    for folder in (models, recipes, out):
        folder.mkdir()
    base, french, _ = weightsmith.demo_models(models)
    goal = weightsmith.goals()["average"]
    (recipes / "a.yml").write_text(goal.recipe([str(base), str(french)]))
    (recipes / "b.yml").write_text(goal.recipe([str(base), str(tmp_path)]))
    (recipes / "c.yml").write_text(goal.recipe([str(base), str(models / "none")]))
    (recipes / "d.yml").write_text(goal.recipe([str(base), str(french)]).replace("linear", "evil.py:blend"))
    verdicts = files("adding-a-program.md", "nightly").merge_all(recipes, models, out)
    assert [verdict.startswith("Merged with weightsmith") for verdict in verdicts] == [True]
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {"a", "a.html"}
    said = capsys.readouterr().out
    assert "100%" in said
    assert "b.yml: not in" in said
    assert "d.yml: it names a Python file" in said
    assert "^^^" in said


class TestThePagesMethod(MethodTests):
    @pytest.fixture
    def case(self, files: Page) -> MethodCase:
        return MethodCase(files("adding-a-method.md", "unit_mean").unit_mean, {"weight": 0.5})


@pytest.mark.slow
def test_a_method_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    make_models(tmp_path)
    recipe = {
        "merge_method": "unit_mean",
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": weight}} for name, weight in (("a", 1), ("b", 3))],
        "parameters": {"power": 0},
    }
    with installed(
        tmp_path / "site", "unit_mean = unit_mean:unit_mean", group="methods", unit_mean=file_of("adding-a-method.md")
    ):
        weightsmith.merge(recipe, tmp_path / "out")
    weightsmith.merge({**recipe, "merge_method": "linear", "parameters": {"normalize": True}}, tmp_path / "linear")
    out, linear = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "linear"))
    for name, tensor in linear.items():
        np.testing.assert_allclose(out[name].astype(np.float32), tensor.astype(np.float32), rtol=1e-2, atol=1e-6)
    with pytest.raises(PlanError, match="no merge method is called 'unit_mean'"):
        weightsmith.plan(recipe)


@pytest.mark.slow
def test_a_product_of_an_installed_package(file_of: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._methods import get
    from weightsmith._planning.planner import build

    rng = np.random.default_rng(0)
    models = [{"a.weight": rng.normal(0, 1, (300, 700)).astype(np.float32), "b.weight": np.ones(9, np.float32)} for _ in "abc"]
    models[1]["b.weight"][3] = 99
    for name, tensors in zip("abc", models, strict=True):
        write_checkpoint(tmp_path / name, tensors)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "a"),
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 1}} for name in "bc"],
    }
    method = get("task_arithmetic")
    product = Product("largest", "largest", (TensorSpec("largest", DTYPES["F64"], (2,)),), {}, models=(1, 2))
    needing = replace(method, needs=lambda shared: True, product=lambda merged: product)
    monkeypatch.setattr(build.methods, "find", lambda *_, **__: needing)
    text = file_of("adding-a-product.md")
    identities = []
    for number, code in enumerate((text, f"{text}\n# another")):
        with (
            installed(tmp_path / f"site{number}", "largest = largest:KIND", group="products", largest=code),
            prepare(recipe, RecipeOptions()) as prepared,
        ):
            assert prepared.plan.products == (product,)
            identities.append(work_identity(prepared.plan, prepared.inputs, "cpu"))
            for threads in (1, 3):
                outcome = run(prepared.plan, prepared.inputs, DiscardedOutput(), Resources(threads, 1 << 17), Workload(()))
                deltas = [max(float(np.abs(m[n] - models[0][n]).max()) for n in m) for m in models[1:]]
                assert outcome.results.array("largest").tolist() == deltas
    assert identities[0] != identities[1]


@pytest.mark.slow
def test_a_statistic_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    from tests.activations.test_statistics import Whole, assert_near, computed, models_of, requests_for, with_statistics
    from tests.calibration_help import settings
    from weightsmith._activations.model import array_name

    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    text = file_of("adding-a-statistic.md")
    whole, modules = Whole(tmp_path / "b", quantize_settings), ("self_attn.k_proj", "mlp.down_proj")
    identities = []
    for number, code in enumerate((f"{text}\n# another", text)):
        with (
            installed(tmp_path / f"site{number}", "mean_abs = mean_abs:STATISTIC", group="statistics", mean_abs=code),
            prepare(recipe) as prepared,
        ):
            [request] = requests_for(prepared, quantize_settings, ("mean_abs",), 1)
            asked = with_statistics(prepared, [request])
            identities.append(work_identity(asked.plan, asked.inputs, "cpu"))
            arrays = computed(asked) if number else {}
            for name in [f"model.layers.1.{module}" for module in modules if number]:
                assert_near(arrays[array_name(request, f"{name}.weight")], whole.entering(name).abs().mean(0))
    assert identities[0] != identities[1]


# ---- stored formats, as files of an installed package


@pytest.fixture
def int8_rows(files: Page) -> types.ModuleType:
    return files("adding-a-stored-format.md", "int8_rows")


class TestThePagesFormat(StoredFormatTests):
    @pytest.fixture
    def stored_format(self, int8_rows: types.ModuleType) -> StoredFormat:
        plugin_format: StoredFormat = int8_rows.FORMAT
        return plugin_format


class TestThePagesEncoding(EncodingTests):
    @pytest.fixture
    def encoding(self, int8_rows: types.ModuleType) -> Encoding:
        plugin_encoding: Encoding = int8_rows.FORMAT.encodings[0]
        return plugin_encoding


@pytest.mark.slow
@given(rows=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_error_of_the_pages_encoding_is_within_its_bound(int8_rows: types.ModuleType, rows: np.ndarray) -> None:
    spec, (encoding,) = TensorSpec("x.weight", DTYPES["F32"], rows.shape), int8_rows.FORMAT.encodings
    codes, steps = (np.zeros(out.nbytes, np.uint8) for out in encoding.outs(spec))
    encoding.encode(spec, rows, 0, (codes, steps), np.empty(0, np.float32))
    s = steps.view(np.float32).astype(np.float64)[:, None]
    assert (np.abs(codes.view(np.int8).reshape(rows.shape) * s - rows) <= (0.5 + 2**-12) * s).all()


@pytest.mark.slow
def test_the_pages_format_in_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    """In processes of their own, as `pip install` leaves them."""
    make_models(tmp_path)
    package(tmp_path / "site", "int8_rows = int8_rows:FORMAT", int8_rows=file_of("adding-a-stored-format.md"))
    env = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path / 'site'}"}
    for command in (
        ("quantize", "a", "q", "--format", "int8-rows", "--quiet"),
        ("dequantize", "q", "plain", "--out-dtype", "float32", "--quiet"),
    ):
        ran = run_process(*command, cwd=tmp_path, env=env, fresh=True)
        assert ran.code == 0, ran.err
    plain, stored, back = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "q", "plain"))
    weight = "model.layers.0.mlp.up_proj.weight"
    assert stored[weight].dtype == np.int8
    assert back.keys() == plain.keys()
    np.testing.assert_array_equal(back[weight], stored[weight] * stored[f"{weight}_step"][:, None])
    assert np.abs(back[weight] - plain[weight]).max() <= np.abs(plain[weight]).max() / 250
    without = run_process("dequantize", "q", "other", cwd=tmp_path)
    assert without.code == 1
    assert "'int8-rows' (quantization_config in config.json)" in without.err


def test_files_of_a_format_in_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    np.save(tmp_path / "model.norm.npy", np.arange(4, dtype=np.float32))
    with (
        installed(tmp_path / "site", "npy = npy_files:FORMAT", npy_files=file_of("adding-a-source.md")),
        weightsmith.open_checkpoint(tmp_path / "model.norm.npy") as checkpoint,
    ):
        assert checkpoint.read("model.norm").tolist() == [0, 1, 2, 3]
    with pytest.raises(Unsupported, match="not a weight file"):
        weightsmith.open_checkpoint(tmp_path / "model.norm.npy")


class TestThePagesOutput(OutputTests):
    @pytest.fixture
    def case(self, files: Page, tmp_path: Path) -> OutputCase:
        zip_output, path = files("adding-an-output.md", "zip_output"), tmp_path / "out.zip"

        def contents() -> dict[str, bytes]:
            if not path.exists():
                return {}
            with zipfile.ZipFile(path) as archive:
                return {name: archive.read(name) for name in archive.namelist()}

        def put(name: str, data: bytes) -> None:
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr(name, data)

        return OutputCase(lambda: zip_output.target(f"zip://{path}"), contents, put)


def test_an_output_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    make_models(tmp_path)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "a")}]}
    weightsmith.merge(recipe, tmp_path / "folder")
    out = f"zip://{tmp_path / 'merged.zip'}"
    with installed(tmp_path / "site", "zip = zip_output:SCHEME", group="outputs", zip_output=file_of("adding-an-output.md")):
        weightsmith.verify(tmp_path / "folder")
        assert "zip_output" not in sys.modules
        weightsmith.merge(recipe, out)
        assert weightsmith.verify(out).tensors == weightsmith.verify(tmp_path / "folder").tensors
        with pytest.raises(OutputExists, match="it exists"):
            weightsmith.merge(recipe, out)
    with zipfile.ZipFile(tmp_path / "merged.zip") as archive:
        assert archive.read("model.safetensors") == (tmp_path / "folder" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*merged*")) == ["merged.zip"]
    with pytest.raises(StoreError, match="there is no scheme of outputs 'zip'"):
        weightsmith.merge(recipe, out)


def test_an_expert_layout_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    from tests.moe_help import Models, recipe

    dense = Models(tmp_path).dense("llama")
    text = file_of("adding-an-expert-layout.md")
    with installed(tmp_path / "site", "toy_moe = toy_moe:LAYOUT", group="layouts", toy_moe=text):
        weightsmith.moe(recipe(dense, architecture="mixtral"), tmp_path / "mixtral")
        assert "toy_moe" not in sys.modules
        weightsmith.moe(recipe(dense, architecture="toy_moe"), tmp_path / "toy")
    toy, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("toy", "mixtral"))
    renamed = {"gate": "toy.router", "experts": "toy.experts", "w1": "gate", "w2": "down", "w3": "up"}
    for name, tensor in plain.items():
        head, middle, tail = name.partition("block_sparse_moe.")
        tail = ".".join(renamed.get(part, part) for part in tail.split("."))
        assert toy.pop(head + tail if middle else name).tobytes() == tensor.tobytes()
    assert not toy


def test_a_kind_of_adapter_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    from tests.models.lora.test_lora import adapter, base

    up = "model.layers.0.mlp.up_proj"
    model, rows = base(tmp_path / "base", np.float32), 40
    scale, shift = (np.linspace(0, n, rows, dtype=np.float32) for n in (1, 2))
    tensors = {f"base_model.model.{up}.gain_scale": scale, f"base_model.model.{up}.gain_shift": shift}
    gain = adapter(tmp_path / "gain", tensors)
    (gain / "adapter_config.json").write_text('{"peft_type": "GAIN", "strength": 0.5}')
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{model}+{gain}"}]}
    identities = []
    text = file_of("adding-an-adapter.md")
    for number, code in enumerate((text, text + "\n# another")):
        with (
            installed(tmp_path / f"site{number}", "gain = gain_kind:KIND", group="adapters", gain_kind=code),
            prepare(recipe) as ready,
        ):
            identities.append(work_identity(ready.plan, ready.inputs, "cpu"))
            if not number:
                weightsmith.merge(recipe, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    scaled = before[f"{up}.weight"] * (1 + 0.5 * scale[:, None])
    expected = scaled + 0.5 * shift[:, None] * scaled.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(after[f"{up}.weight"], expected, rtol=1e-5, atol=1e-5)
    assert [name for name in before if (before[name] != after[name]).any()] == [f"{up}.weight"]
    assert identities[0] != identities[1], "other code is other work"
    with pytest.raises(PlanError, match="an adapter of peft_type 'GAIN'"):
        weightsmith.plan(recipe)


def test_a_gguf_architecture_of_an_installed_package(file_of: Text, tmp_path: Path) -> None:
    from tests.gguf_help import SENTENCEPIECE, stored, tokenizer_files
    from tests.models.formats.gguf.test_gguf_files import llama

    changes: dict[str, object] = {"residual_multiplier": 0.5, "sliding_window": 24}
    source = llama(tmp_path / "llama", model_type="toy", architectures=["ToyForCausalLM"], **changes)
    names = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn": "attention", "q_proj": "query"}
    names |= {"k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    with weightsmith.open_checkpoint(source) as plain:
        tensors = {".".join(names.get(part, part) for part in name.split(".")): plain.read(name) for name in plain.specs}
        toy = write_checkpoint(tmp_path / "toy", tensors, plain.config)
    for name, content in tokenizer_files(SENTENCEPIECE).items():
        (toy / name).write_bytes(content)
    text = file_of("adding-a-gguf-architecture.md")
    with installed(tmp_path / "site", "toy = toy_gguf:FAMILY", group="gguf_architectures", toy_gguf=text):
        weightsmith.quantize(toy, tmp_path / "q", "gguf-f32", progress=False)
        assert any("brought 1.0" in code for code in installed_code()), "other code is other work"
        assert stored(tmp_path / "q" / "model.gguf").keys() >= {"blk.0.attn_q.weight", "blk.1.ffn_down.weight"}
        with weightsmith.open_checkpoint(tmp_path / "q") as back:
            assert set(back.specs) == set(tensors)
            for name, array in tensors.items():
                assert np.array_equal(back.read(name), array.astype(np.float32)), name
            assert back.config is not None
            assert {**back.config, "residual_multiplier": 0.5, "sliding_window": 24} == back.config
        write_checkpoint(tmp_path / "bias", tensors, {**(plain.config or {}), "mlp_bias": True})
        for name, content in tokenizer_files(SENTENCEPIECE).items():
            (tmp_path / "bias" / name).write_bytes(content)
        with pytest.raises(PlanError, match=r"mlp_bias is True, and .* takes False for granted"):
            weightsmith.quantize(tmp_path / "bias", tmp_path / "r", "gguf-f32", progress=False)
    with pytest.raises(PlanError, match="no GGUF file can be written of a model of the type 'toy'"):
        weightsmith.quantize(toy, tmp_path / "r", "gguf-f32", progress=False)
    with pytest.raises(Unsupported, match="a GGUF file of the architecture 'toy'"):
        weightsmith.open_checkpoint(tmp_path / "q")
