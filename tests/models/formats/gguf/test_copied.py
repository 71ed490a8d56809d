"""Tensors of GGUF files that go into another GGUF file as they are, without being decoded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests import llama_cpp, zoo
from tests.cli_help import Cli
from tests.gguf_help import stored
from tests.llama_cpp import needs_llama_cpp
from tests.models.formats.gguf.test_gguf_files import (
    FAMILIES,
    IN_IMAGES,
    OWN,
    imatrix_numbers,
    llama,
    quantize,
    tokenizers,
    with_tokenizer,
)
from tests.models.formats.gguf.test_nvfp4 import save
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.reading import Factors, GgufMovedTensors
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import Plan, plan_from_json

__all__ = ["tokenizers"]

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
STATED_OTHERWISE = {
    "gemma4": {"gemma4.attention.head_count_kv"},
    "mixtral": {"llama.attention.key_length", "llama.attention.value_length"},
}
"""Keys of the same meaning: one number for all layers becomes a list, and a default is written."""


def of_layer(tensors: Stored, number: int) -> Stored:
    prefix = f"blk.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def encoded(plan: Plan) -> list[str]:
    """The stored tensors of blocks that are encoded, not copied."""
    return [out.name for step in plan.steps for out in step.stored if out.dtype.block > 1 and not step.verbatim]


@pytest.fixture
def models(tmp_path: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """GGUF files `a.gguf` and `b.gguf` in the current folder, of Llamas with rows of 256."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        with_tokenizer(llama(tmp_path / name, seed, width=256, layers=4), tokenizers["llama"])
        quantize(name, f"{name}q", "q4_k_m").rename(f"{name}.gguf")
    return tmp_path


def stack(*layers: tuple[str, int, int]) -> dict[str, Any]:
    slices = [{"sources": [{"model": model, "layer_range": [first, end]}]} for model, first, end in layers]
    return {"slices": slices, "merge_method": "passthrough"}


@pytest.mark.matrix("llama", "gemma3-text", "qwen3-next", "gpt-oss", "deepseek-v3", "granite-hybrid-moe")
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {*IN_IMAGES}))
def test_every_family_is_copied_byte_by_byte(name: str, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save(name, tmp_path / "m", 1, **OWN.get(name, {}))
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    first = quantize(source, tmp_path / "q", "q8_0")
    result = weightsmith.quantize(first, tmp_path / "c", "gguf-copy", progress=False)
    second = tmp_path / "c" / "model.gguf"
    assert stored(second) == stored(first)
    zeros = [out.name for step in result.plan.steps if step.op == "fill" for out in step.stored]
    assert set(encoded(result.plan)) <= set(zeros), "but for what llama.cpp loads and never reads"
    assert not [str(warning) for warning in result.warnings if "quantised already" in str(warning)]
    before, after = (read_gguf_header(path).keys for path in (first, second))
    differ = {key for key in before | after if str(before.get(key)) != str(after.get(key))}
    assert differ == {"general.name", *STATED_OTHERWISE.get(name, ())}


def test_layers_of_a_stack_keep_their_bytes(models: Path) -> None:
    result = weightsmith.merge(stack(("a.gguf", 0, 3), ("b.gguf", 1, 4)), "out", quantize="gguf-copy", progress=False)
    a, b, out = stored(Path("a.gguf")), stored(Path("b.gguf")), stored(Path("out/model.gguf"))
    taken = [(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3)]
    assert [of_layer(out, i) for i in range(6)] == [of_layer(tensors, layer) for tensors, layer in taken]
    ends = {name: tensor for name, tensor in out.items() if not name.startswith("blk.")}
    assert ends == {"token_embd.weight": a["token_embd.weight"], "output_norm.weight": b["output_norm.weight"]}
    assert not encoded(result.plan)
    assert not [str(warning) for warning in result.warnings if "quantised already" in str(warning)]
    assert {kind for kind, _, _ in out.values()} == {"F32", "Q4_K", "Q6_K", "Q5_0", "Q8_0"}
    assert read_gguf_header(Path("out/model.gguf")).keys["general.file_type"] == 15
    card = Path("out/README.md").read_text()
    assert card.count("`a.gguf`") == card.count("`b.gguf`") == 1
    assert len(result.plan.refs) == 2


@pytest.mark.long
@needs_llama_cpp
def test_llama_cpp_runs_a_stack_of_one_model_as_the_model(models: Path) -> None:
    weightsmith.merge(stack(("a.gguf", 0, 2), ("a.gguf", 2, 4)), "out", quantize="gguf-copy", progress=False)
    logits = []
    for path in ("a.gguf", "out/model.gguf"):
        with llama_cpp.Judge(Path(path)) as judge:
            logits.append(judge.logits(list(range(10))))
    assert (logits[0] == logits[1]).all()


@pytest.mark.long
def test_types_of_a_format_that_a_file_has_are_copied(models: Path) -> None:
    """As llama.cpp's quantiser does. The layers are other ones, so a rule gives some another type than they have."""
    recipe = stack(("a.gguf", 0, 4), ("a.gguf", 2, 4))
    result = weightsmith.merge(recipe, "out", quantize="gguf-q4_k_m", progress=False)
    again = set(encoded(result.plan))
    a, out = stored(Path("a.gguf")), stored(Path("out/model.gguf"))
    assert again
    for number in range(6):
        for name, tensor in of_layer(out, number).items():
            same = tensor == of_layer(a, number if number < 4 else number - 2)[name]
            assert same == (f"blk.{number}.{name}" not in again), name
    assert any("quantised already" in str(warning) for warning in result.warnings)
    weightsmith.quantize("a.gguf", "same", "gguf-q4_k_m", progress=False)
    assert stored(Path("same/model.gguf")) == a


@pytest.mark.long
def test_a_merge_is_encoded_in_the_types_of_its_inputs(models: Path) -> None:
    recipe = {"models": [{"model": "a.gguf"}, {"model": "b.gguf"}], "merge_method": "linear", "parameters": {"weight": 0.5}}
    result = weightsmith.merge(recipe, "out", quantize="gguf-copy", progress=False)
    a, out = stored(Path("a.gguf")), stored(Path("out/model.gguf"))
    assert {name: tensor[:2] for name, tensor in out.items()} == {name: tensor[:2] for name, tensor in a.items()}
    blocks = [name for name, tensor in a.items() if tensor[0] != "F32"]
    assert sorted(encoded(result.plan)) == sorted(blocks)
    [warning] = [str(warning) for warning in result.warnings if "with blocks are encoded" in str(warning)]
    assert f"{len(blocks)} of {len(blocks)} tensors" in warning


@pytest.mark.long
def test_experts_of_a_mixture_are_copied_from_dense_files(models: Path) -> None:
    recipe = {"base_model": "a.gguf", "gate_mode": "random", "architecture": "mixtral"}
    recipe |= {"experts": [{"source_model": name, "positive_prompts": ["x"]} for name in ("a.gguf", "b.gguf")]}
    weightsmith.moe(recipe, "out", quantize="gguf-copy", progress=False)
    a, b, out = stored(Path("a.gguf")), stored(Path("b.gguf")), stored(Path("out/model.gguf"))
    for number in range(4):
        for part in ("gate", "up", "down"):
            kind, shape, data = out[f"blk.{number}.ffn_{part}_exps.weight"]
            first, second = (tensors[f"blk.{number}.ffn_{part}.weight"] for tensors in (a, b))
            if first[0] == second[0] == kind:
                assert (shape, data) == ((2, *first[1]), first[2] + second[2])
    again = weightsmith.quantize("out", "again", "gguf-copy", progress=False)
    assert stored(Path("again/model.gguf")) == out
    assert not encoded(again.plan)


@pytest.mark.long
def test_factors_of_nvfp4_are_copied_too(tmp_path: Path) -> None:
    path = quantize(save("qwen3-moe", tmp_path / "m"), tmp_path / "q", "nvfp4")
    for name in ("copy", "nvfp4"):
        assert stored(quantize(path, tmp_path / name, name)) == stored(path), name
    assert any(name.endswith("_exps.scale") for name in stored(path))


@pytest.mark.long
def test_a_type_that_is_asked_for_wins(models: Path) -> None:
    result = weightsmith.quantize("a.gguf", "out", "gguf-copy", tensor_types=["ffn_down=Q5_1"], progress=False)
    a, out = stored(Path("a.gguf")), stored(Path("out/model.gguf"))
    assert (
        {name for name in out if out[name] != a[name]}
        == {f"blk.{i}.ffn_down.weight" for i in range(4)}
        == set(encoded(result.plan))
    )
    assert out["blk.0.ffn_down.weight"][0] == "Q5_1"


@pytest.mark.long
def test_a_model_as_its_file_has_it_closes_the_decoded_one(models: Path) -> None:
    model = weightsmith.open_checkpoint("a.gguf")
    with model.undecoded() as undecoded:
        assert undecoded.specs["token_embd.weight"].dtype.name == "U8"
        assert model.folder.is_dir()
    assert not model.folder.exists()


def test_a_copy_of_plain_weights_is_refused(models: Path) -> None:
    with pytest.raises(PlanError, match="no tensor of the output comes from a GGUF file"):
        weightsmith.quantize("a", "out", "gguf-copy", progress=False)
    assert not Path("out").exists()


@pytest.mark.long
def test_weights_of_a_plain_model_in_a_stack_keep_their_dtype(models: Path) -> None:
    result = weightsmith.merge(stack(("a.gguf", 0, 2), ("b", 2, 4)), "out", quantize="gguf-copy", progress=False)
    a, out = stored(Path("a.gguf")), stored(Path("out/model.gguf"))
    assert of_layer(out, 1) == of_layer(a, 1)
    assert {tensor[0] for tensor in of_layer(out, 2).values()} == {"BF16", "F32"}
    assert not encoded(result.plan)
    [warning] = [str(warning) for warning in result.warnings if "plain numbers" in str(warning)]
    assert "14 of 38 tensors" in warning


@pytest.mark.long
def test_a_plan_of_copies_runs_later_and_in_parts(models: Path) -> None:
    recipe = stack(("a.gguf", 0, 3), ("b.gguf", 1, 4))
    weightsmith.merge(recipe, "out", quantize="gguf-copy", progress=False)
    plan = weightsmith.plan(recipe, quantize="gguf-copy")
    again = plan_from_json(json.loads(json.dumps(plan.to_json())))
    weightsmith.run(again, "later", progress=False)
    assert Path("later/model.gguf").read_bytes() == Path("out/model.gguf").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoding": "gguf-q6_k"}, "gguf-q6_k does not store it as the plan says"),
        ({"encoding": "gguf-f32"}, "gguf-f32 does not store it as the plan says"),
        ({"encoding": "gguf-copied-q4_k"}, "gguf-copied-q4_k"),
        ({"op": "join"}, "its pieces do not have 24,576 elements in total"),
        ({"op": "cast"}, "a join must have pieces, and other steps must not"),
        ({"encoding": "plain", "stored": []}, "its pieces are not copies that fill its stored tensors"),
        ({"pieces": []}, "copy needs an input"),
    ],
)
def test_a_forged_plan_of_copies_is_refused(change: dict[str, Any], words: str, models: Path) -> None:
    plan = weightsmith.plan(stack(("a.gguf", 0, 4)), quantize="gguf-copy").to_json()
    step = next(step for step in plan["steps"] if step.get("encoding") == "gguf-q4_k")
    step |= change
    with pytest.raises(weightsmith.WeightsmithError, match=words), reopen(plan_from_json(plan)):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "cast"}, "its pieces are not copies that fill its stored tensors"),
        ({"dtype": "BF16", "shape": [96, 72]}, "does not store it as the plan says"),
        ({"shape": [95, 144]}, "its pieces do not fill its stored tensors"),
        ({"shape": [97, 144]}, "its pieces are not copies that fill its stored tensors"),
        ({"shape": [0, 144]}, "its pieces are not copies that fill its stored tensors"),
    ],
)
def test_a_forged_piece_of_a_copy_is_refused(change: dict[str, Any], words: str, models: Path) -> None:
    plan = weightsmith.plan(stack(("a.gguf", 0, 4)), quantize="gguf-copy").to_json()
    step = next(step for step in plan["steps"] if step["name"] == "model.layers.1.mlp.up_proj.weight")
    step["pieces"][0] |= change
    with pytest.raises(weightsmith.WeightsmithError, match=words), reopen(plan_from_json(plan)):
        pass


@pytest.mark.long
def test_another_file_in_the_place_of_the_planned_one_is_noticed(models: Path) -> None:
    plan = weightsmith.plan(stack(("a.gguf", 0, 4)), quantize="gguf-copy")
    Path("b.gguf").rename("a.gguf")
    with pytest.raises(weightsmith.WeightsmithError, match=r"not the model that the plan was made for|have changed"):
        weightsmith.run(plan, "out", progress=False)
    assert not Path("out").exists()


@pytest.mark.long
def test_types_that_need_importances_are_copied_and_not_computed(models: Path) -> None:
    ones = {name: np.ones(shape[-1], np.float32) for name, (_, shape, _) in stored(Path("a.gguf")).items() if len(shape) > 1}
    for name in "ab":
        quantize(name, f"{name}i", "iq2_xxs", imatrix=str(imatrix_numbers(models / "ones.dat", ones)))
    weightsmith.merge(stack(("ai", 0, 3), ("bi", 1, 4)), "out", quantize="gguf-copy", progress=False)
    assert of_layer(stored(Path("out/model.gguf")), 3) == of_layer(stored(Path("bi/model.gguf")), 1)
    assert "IQ2_XXS" in {kind for kind, _, _ in stored(Path("out/model.gguf")).values()}
    recipe = {"models": [{"model": "ai"}, {"model": "bi"}], "merge_method": "linear", "parameters": {"weight": 0.5}}
    with pytest.raises(PlanError, match=r"garbage without importances[^>]*> Choose another type for it with --tensor-type"):
        weightsmith.plan(recipe, quantize="gguf-copy")


@pytest.mark.long
def test_results_of_other_recipes_are_copies_of_their_inputs(models: Path) -> None:
    recipe = """
name: st
slices:
- sources: [{model: a.gguf, layer_range: [0, 3]}]
- sources: [{model: b.gguf, layer_range: [2, 4]}]
merge_method: passthrough
dtype: float32
---
slices:
- sources: [{model: st, layer_range: [1, 5]}]
- sources: [{model: a.gguf, layer_range: [0, 1]}]
merge_method: passthrough
"""
    result = weightsmith.merge(recipe, "out", quantize="gguf-copy", progress=False)
    a, b, out = stored(Path("a.gguf")), stored(Path("b.gguf")), stored(Path("out/model.gguf"))
    taken = [(a, 1), (a, 2), (b, 2), (b, 3), (a, 0)]
    assert [of_layer(out, i) for i in range(5)] == [of_layer(tensors, layer) for tensors, layer in taken]
    assert not encoded(result.plan)
    weightsmith.run(weightsmith.plan(recipe, quantize="gguf-copy"), "again", progress=False)
    assert stored(Path("again/model.gguf")) == out


@pytest.mark.long
def test_an_adapter_leaves_what_it_does_not_change(models: Path) -> None:
    (models / "lora").mkdir()
    rng = np.random.default_rng(0)
    factors = {
        f"base_model.model.model.layers.{i}.self_attn.v_proj.lora_{part}.weight": rng.standard_normal(shape).astype(np.float32)
        for i in range(4)
        for part, shape in (("A", (2, 256)), ("B", (128, 2)))
    }
    save_file(factors, models / "lora/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["v_proj"]}
    (models / "lora/adapter_config.json").write_text(json.dumps(config))
    result = weightsmith.quantize("a.gguf+lora", "out", "gguf-copy", progress=False)
    a, out = stored(Path("a.gguf")), stored(Path("out/model.gguf"))
    changed = {f"blk.{i}.attn_v.weight" for i in range(4)}
    assert {name for name in out if out[name] != a[name]} == changed == set(encoded(result.plan))
    assert {name: tensor[0] for name, tensor in out.items()} == {name: tensor[0] for name, tensor in a.items()}


def test_a_part_with_factors_is_not_copied_without_them(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save("granite-moe", tmp_path / "m", 1, **OWN["granite-moe"])
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, tmp_path / "q", "q8_0")
    with weightsmith.open_checkpoint(path) as model:
        assert isinstance(model.source, GgufMovedTensors)
        whole = "model.layers.0.block_sparse_moe.input_linear.weight"
        assert model.source.stored_as(whole).encoding.startswith("gguf-")
        parts = model.source._blocks._stored
        factors = Factors(path, 0, 1, "blk.0.ffn_up_exps.scale")
        parts["blk.0.ffn_up_exps.weight"] = replace(parts["blk.0.ffn_up_exps.weight"], factors=factors)
        place = model.source.stored_as(whole)
        assert (place.encoding, [part.dtype.name for part in place.parts]) == ("", ["Q8_0", "Q8_0"])


@pytest.mark.long
def test_the_distance_of_a_merge_counts_what_comes_from_the_base(models: Path) -> None:
    slices = [{"sources": [{"model": "a.gguf", "layer_range": [0, 1]}]}]
    slices.append({"sources": [{"model": name, "layer_range": [1, 4]} for name in ("a.gguf", "b.gguf")]})
    recipe = {"slices": slices, "base_model": "a.gguf", "merge_method": "task_arithmetic", "parameters": {"weight": 1.0}}
    distances = {}
    for name in (None, "gguf-q4_k_m", "gguf-copy"):
        result = weightsmith.merge(recipe, "out", quantize=name, progress=False, overwrite=True)
        distances[name] = [moved.share for moved in result.distance]
        card = Path("out/README.md").read_text()
        assert ("codes are copied from an input do not count" in card) == (name == "gguf-copy")
    assert distances["gguf-q4_k_m"] == pytest.approx(distances[None], rel=1e-3)
    assert len(distances["gguf-copy"]) < len(distances[None])


@pytest.mark.long
def test_importances_that_change_nothing_are_pointed_out(models: Path) -> None:
    ones = {name: np.ones(shape[-1], np.float32) for name, (_, shape, _) in stored(Path("a.gguf")).items() if len(shape) > 1}
    imatrix = imatrix_numbers(models / "ones.dat", ones)
    result = weightsmith.quantize("a.gguf", "out", "gguf-q4_k_m", imatrix=str(imatrix), progress=False)
    assert stored(Path("out/model.gguf")) == stored(Path("a.gguf"))
    assert any("importances change nothing for them" in str(warning) for warning in result.warnings)


@pytest.mark.long
def test_the_name_of_the_mixture_is_that_of_the_inputs(models: Path) -> None:
    path = quantize("a", "s", "q4_k_s")
    copy = quantize(path, "c", "copy")
    assert [read_gguf_header(p).keys["general.file_type"] for p in (path, copy)] == [14, 14]
    weightsmith.merge(stack(("s", 0, 2), ("a.gguf", 2, 4)), "out", quantize="gguf-copy", progress=False)
    assert read_gguf_header(Path("out/model.gguf")).keys["general.file_type"] == 15


@pytest.mark.long
def test_what_is_shown_of_a_copy(
    models: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Cli(monkeypatch, capsys)
    for name in ("a.gguf", "ds"):
        recipe = {"models": [{"model": name}], "merge_method": "passthrough"}
        Path(f"{name.removesuffix('.gguf')}.yml").write_text(json.dumps(recipe))
    weightsmith.quantize("a.gguf", "out", "gguf-copy", progress=False)
    assert len(json.loads(Path("out/weightsmith.json").read_text())["inputs"]) == 1
    shown = run("plan", "a.yml", "--quantize", "gguf-copy", "--explain", "model.layers.1.mlp.up_proj.weight")
    assert shown.out.startswith("model.layers.1.mlp.up_proj.weight [96, 256] BF16, made by copy")
    assert "stored as gguf-q4_k: blk.1.ffn_up.weight Q4_K" in shown.out + shown.err
    source = zoo.save("deepseek-v3", models / "m", 1, **OWN["deepseek-v3"])
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    quantize(source, "ds", "q8_0")
    shown = run("plan", "ds.yml", "--quantize", "gguf-copy", "--explain", "model.layers.1.self_attn.kv_b_proj.weight")
    assert "blk.1.attn_k_b.weight F16, blk.1.attn_v_b.weight F16" in shown.out + shown.err
    assert "merged as a tensor of its own" not in shown.out
