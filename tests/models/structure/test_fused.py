"""Tensors of several matrices: which they are, and that a merge of fused models is the fused merge of the unfused ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
import weightsmith._app.api
from tests.cases import CASES, MERGED
from tests.cases.case import Case
from tests.mini import as_bytes, write_checkpoint
from weightsmith import _methods as methods
from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse
from weightsmith._models.structure.projections import SubMatrix, fused_parts
from weightsmith._plans import Step, plan_from_json

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
H, INNER, E = 24, 20, 3
LAYER = "model.layers.{}."

Tensors = dict[str, np.ndarray]


# ---- which tensors hold which matrices


def parts_by_suffix(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None = None, layer: str = LAYER
) -> dict[str, list[tuple[str, int, tuple[int, ...]]]]:
    """For each suffix of layer 1 its parts: suffix, offset, shape."""
    specs = {
        name: TensorSpec(name, DTYPES["BF16"], shape)
        for i in (0, 1)
        for suffix, shape in shapes.items()
        for name in [layer.format(i) + suffix]
    }
    structure = analyse(specs.values(), config)
    prefix = layer.format(1)
    return {
        suffix: [
            (part.name.removeprefix(prefix), part.offset, part.shape)
            for part in fused_parts(specs[prefix + suffix], specs, structure, config)
        ]
        for suffix in shapes
    }


@pytest.mark.parametrize("leaf", ["qkv_proj", "qkv", "Wqkv"])
def test_q_k_and_v_have_the_rows_that_the_config_gives(leaf: str) -> None:
    parts = parts_by_suffix({f"attn.{leaf}.weight": (64, H), f"attn.{leaf}.bias": (64,)}, HEADS)
    names = [leaf.replace("qkv", x) for x in "qkv"]
    assert parts[f"attn.{leaf}.weight"] == [
        (f"attn.{names[0]}.weight", 0, (32, H)),
        (f"attn.{names[1]}.weight", 32 * H, (16, H)),
        (f"attn.{names[2]}.weight", 48 * H, (16, H)),
    ]
    assert parts[f"attn.{leaf}.bias"] == [
        (f"attn.{names[0]}.bias", 0, (32,)),
        (f"attn.{names[1]}.bias", 32, (16,)),
        (f"attn.{names[2]}.bias", 48, (16,)),
    ]


def test_each_stack_has_the_heads_of_its_own_config() -> None:
    vision = {"vision_config": {"depth": 2, "num_heads": 2}, "text_config": HEADS}
    parts = parts_by_suffix({"attn.qkv.weight": (72, H)}, vision, "visual.blocks.{}.")
    assert [shape for _, _, shape in parts["attn.qkv.weight"]] == [(24, H)] * 3


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (None, 64),
        ({"num_hidden_layers": 2}, 64),
        (HEADS, 65),
        (HEADS, 96),  # three times the heads, as linear attention has
        (HEADS | {"head_dim": 16}, 64),
        ({"num_hidden_layers": 2, "num_attention_heads": 5}, 72),  # 24 columns are not 5 heads
        ({"n_layer": 2, "n_head": 4}, 72),  # CodeGen: in blocks, and v before k
    ],
)
def test_rows_that_do_not_fit_the_config_are_one_matrix(config: Mapping[str, Any] | None, rows: int) -> None:
    assert parts_by_suffix({"attn.qkv_proj.weight": (rows, H)}, config) == {"attn.qkv_proj.weight": []}


def test_heads_that_may_be_interleaved_are_taken_apart_only_where_there_is_one_kv_head() -> None:
    one = HEADS | {"num_key_value_heads": 1}
    parts = parts_by_suffix({"attention.query_key_value.weight": (48, H)}, one)
    assert [name for name, _, _ in parts["attention.query_key_value.weight"]] == [
        f"attention.{x}.weight" for x in ("query", "key", "value")
    ]
    for rows in (96, 64):
        assert parts_by_suffix({"attention.query_key_value.weight": (rows, H)}, HEADS) == {
            "attention.query_key_value.weight": []
        }


@pytest.mark.parametrize(
    ("fused", "after"),
    [("gate_up_proj", "down_proj"), ("input_linear", "output_linear"), ("Wi", "Wo"), ("dense_h_to_4h", "dense_4h_to_h")],
)
def test_gate_and_up_are_halves_where_the_matrix_after_them_fits(fused: str, after: str) -> None:
    shapes = {f"mlp.{fused}.weight": (2 * INNER, H), f"mlp.{fused}.bias": (2 * INNER,), f"mlp.{after}.weight": (H, INNER)}
    parts = parts_by_suffix(shapes)
    assert [part[1:] for part in parts[f"mlp.{fused}.weight"]] == [(0, (INNER, H)), (INNER * H, (INNER, H))]
    assert [part[1:] for part in parts[f"mlp.{fused}.bias"]] == [(0, (INNER,)), (INNER, (INNER,))]
    assert parts[f"mlp.{after}.weight"] == []
    plain = parts_by_suffix({f"mlp.{fused}.weight": (2 * INNER, H), f"mlp.{after}.weight": (H, 2 * INNER)})
    assert plain[f"mlp.{fused}.weight"] == [], "not gated: an MLP of one matrix before the activation"
    assert parts_by_suffix({f"mlp.{fused}.weight": (2 * INNER, H)})[f"mlp.{fused}.weight"] == []


def test_experts_are_named_as_in_an_unfused_model() -> None:
    parts = parts_by_suffix({"mlp.experts.gate_up_proj": (2, 2 * INNER, H), "mlp.experts.down_proj": (2, H, INNER)})
    assert parts["mlp.experts.gate_up_proj"] == [
        ("mlp.experts.0.gate_proj.weight", 0, (INNER, H)),
        ("mlp.experts.0.up_proj.weight", INNER * H, (INNER, H)),
        ("mlp.experts.1.gate_proj.weight", 2 * INNER * H, (INNER, H)),
        ("mlp.experts.1.up_proj.weight", 3 * INNER * H, (INNER, H)),
    ]
    assert parts["mlp.experts.down_proj"] == [
        ("mlp.experts.0.down_proj.weight", 0, (H, INNER)),
        ("mlp.experts.1.down_proj.weight", INNER * H, (H, INNER)),
    ]


def test_experts_fused_along_the_columns_are_one_matrix_each() -> None:
    parts = parts_by_suffix({"mlp.experts.gate_up_proj": (2, H, 2 * INNER), "mlp.experts.down_proj": (2, INNER, H)})
    assert parts["mlp.experts.gate_up_proj"] == [
        ("mlp.experts.0.gate_up_proj.weight", 0, (H, 2 * INNER)),
        ("mlp.experts.1.gate_up_proj.weight", 2 * INNER * H, (H, 2 * INNER)),
    ]


@pytest.mark.parametrize("shape", [(0, H), (40, H), (40,), (), (3, 4, 5, 6)])
def test_other_tensors_are_one_matrix(shape: tuple[int, ...]) -> None:
    assert parts_by_suffix({"mlp.up_proj.weight": shape, "attn.c_attn.weight": (H, 3 * H)}, HEADS) == {
        "mlp.up_proj.weight": [],
        "attn.c_attn.weight": [],
    }


def test_parts_are_named_after_the_output() -> None:
    specs = {
        name: TensorSpec(name, DTYPES["BF16"], shape)
        for name, shape in {"layers.7.mlp.gate_up_proj.weight": (6, 4), "layers.7.mlp.down_proj.weight": (4, 3)}.items()
    }
    spec = specs["layers.7.mlp.gate_up_proj.weight"]
    parts = fused_parts(spec, specs, analyse(specs.values(), None), None, "model.layers.9.mlp.gate_up_proj.weight")
    assert parts == (
        SubMatrix("model.layers.9.mlp.gate_proj.weight", 0, (3, 4)),
        SubMatrix("model.layers.9.mlp.up_proj.weight", 12, (3, 4)),
    )


# ---- a merge of fused models is the fused merge


def unfused(seed: int, base: Tensors | None = None) -> Tensors:
    """A small mixture of experts; of a fine-tune the parts have moved by different amounts."""
    rng = np.random.default_rng(seed)
    shapes = {f"self_attn.{x}_proj.{kind}": (rows, H)[: 2 if kind == "weight" else 1] for x, rows in
              (("q", 32), ("k", 16), ("v", 16)) for kind in ("weight", "bias")}  # fmt: skip
    shapes |= {f"mlp.shared.{x}_proj.weight": (INNER, H) for x in ("gate", "up")} | {"mlp.shared.down_proj.weight": (H, INNER)}
    for e in range(E):
        shapes |= {f"mlp.experts.{e}.{x}_proj.weight": (INNER, H) for x in ("gate", "up")}
        shapes[f"mlp.experts.{e}.down_proj.weight"] = (H, INNER)
    shapes["input_layernorm.weight"] = (H,)
    tensors = {}
    for i in (0, 1):
        for k, (suffix, shape) in enumerate(shapes.items()):
            name = LAYER.format(i) + suffix
            if base is None:
                tensors[name] = rng.normal(0, 0.02, shape).astype(BF16)
            else:
                moved = rng.normal(0, 1e-3 * (1 + k % 4), shape)
                tensors[name] = (base[name].astype(np.float64) + moved).astype(BF16)
    return tensors


def fused(tensors: Tensors) -> Tensors:
    """The same model with fused tensors, as Phi-3 and transformers 5 have them in memory."""
    out: Tensors = {}
    for i in (0, 1):
        p = LAYER.format(i)
        for kind in ("weight", "bias"):
            out[f"{p}self_attn.qkv_proj.{kind}"] = np.concatenate([tensors[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"])
        both = [tensors[f"{p}mlp.shared.{x}_proj.weight"] for x in ("gate", "up")]
        out[f"{p}mlp.shared.gate_up_proj.weight"] = np.concatenate(both)
        out[f"{p}mlp.shared.down_proj.weight"] = tensors[f"{p}mlp.shared.down_proj.weight"]
        pairs = [np.concatenate([tensors[f"{p}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in range(E)]
        out[f"{p}mlp.experts.gate_up_proj"] = np.stack(pairs)
        out[f"{p}mlp.experts.down_proj"] = np.stack([tensors[f"{p}mlp.experts.{e}.down_proj.weight"] for e in range(E)])
        out[f"{p}input_layernorm.weight"] = tensors[f"{p}input_layernorm.weight"]
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `whole0` … (unfused) and `fused0` …: a base and its fine-tunes."""
    folder = tmp_path_factory.mktemp("models")
    base = unfused(0)
    for k in range(max(case.inputs for case in CASES.values())):
        tensors = base if k == 0 else unfused(k, base)
        write_checkpoint(folder / f"whole{k}", tensors, HEADS)
        write_checkpoint(folder / f"fused{k}", fused(tensors), HEADS)
    return folder


def recipe(case: Case, folder: Path, kind: str) -> dict[str, Any]:
    """The case's merge of the models of one kind, with its parameters written out."""
    names = [str(folder / f"{kind}{k}") for k in range(case.inputs)]
    listed = [
        {"model": name, "parameters": {p: v for p, v in parameters.items() if v is not None}}
        for name, parameters in zip(names, case.models, strict=True)
    ]
    ignored = {p.name for p in methods.get(case.method).parameters if p.ignored}
    shared = {p: v for p, v in case.shared.items() if v is not None and p not in ignored}
    document: dict[str, Any] = {"merge_method": case.method, "models": listed[case.base :], "parameters": shared}
    return document | {"base_model": names[0]} if case.base else document


def read(path: Path) -> Tensors:
    with weightsmith.open_checkpoint(path) as model:
        return {name: model.read(name) for name in model.specs}


def looks_at_matrices(case: Case) -> bool:
    method = methods.get(case.method)
    return not method.elementwise({p.name: p.default for p in method.parameters} | dict(case.shared))


DEFAULT = "ties della sce tsv_m model_stock localize_and_stitch arcee_fusion cabs geometric_median ramplus_tl".split()
"""Methods of each kind: elementwise, with counts, with products, of whole matrices."""


SAMPLE = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.sweep) for name in MERGED]


@pytest.mark.matrix("model_stock", "ties")
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_merge_of_fused_models_is_the_fused_merge(name: str, models: Path, tmp_path: Path) -> None:
    case = CASES[name]
    for kind in ("whole", "fused"):
        weightsmith.merge(recipe(case, models, kind), tmp_path / kind, fsync=False, seed=5)
    expected, got = fused(read(tmp_path / "whole")), read(tmp_path / "fused")
    assert got.keys() == expected.keys()
    different = [tensor for tensor in got if as_bytes(got[tensor]) != as_bytes(expected[tensor])]
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_only_methods_that_look_at_matrices_take_them_apart(name: str, models: Path) -> None:
    case = CASES[name]
    steps = weightsmith.plan(recipe(case, models, "fused")).steps
    joined = {step.out.name.split(".", 3)[3] for step in steps if step.op == "join"}
    if not looks_at_matrices(case):
        assert joined == set()
    elif any(step.merges for step in steps) or joined:
        kinds = ("self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "mlp.shared.gate_up_proj.weight")
        assert joined == {*kinds, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({case.method for case in MERGED.values()}))
def test_what_is_called_elementwise_gives_the_same_bytes_in_one_piece_and_in_many(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that wrongly says it is elementwise would pass the test above by never being taken apart."""
    from weightsmith._methods.method import Method

    case = next(case for case in CASES.values() if case.method == name)
    method = methods.get(name)
    if looks_at_matrices(case):
        pytest.skip("looks at matrices")
    weightsmith.merge(recipe(case, models, "fused"), tmp_path / "one", fsync=False)

    def never(name: str) -> Method:
        from dataclasses import replace

        return replace(method, elementwise=lambda shared: False)

    monkeypatch.setattr(methods, "find", lambda name, **_: never(name))
    weightsmith.merge(recipe(case, models, "fused"), tmp_path / "many", fsync=False)
    one, many = read(tmp_path / "one"), read(tmp_path / "many")
    assert {n: as_bytes(a) for n, a in one.items()} == {n: as_bytes(a) for n, a in many.items()}


def ties(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    names = [str(folder / f"{kind}{k}") for k in range(3)]
    settings = {"parameters": {"weight": 0.5, "density": 0.3}}
    return {"merge_method": "ties", "base_model": names[0], "models": [{"model": n, **settings} for n in names[1:]], **options}


@pytest.mark.long
def test_steps_after_a_merge_see_each_matrix(models: Path, tmp_path: Path) -> None:
    """task_arithmetic itself is elementwise; with norm_match it is not."""
    steps: dict[str, tuple[Step, ...]] = {}
    for kind in ("whole", "fused"):
        document = ties(models, kind) | {"merge_method": "task_arithmetic", "parameters": {"norm_match": "mean"}}
        document["models"] = [{**m, "parameters": {"weight": 0.5}} for m in document["models"]]
        steps[kind] = weightsmith.merge(document, tmp_path / kind, fsync=False).plan.steps
    assert {step.op for step in steps["fused"]} == {"join", "task_arithmetic"}
    expected, got = fused(read(tmp_path / "whole")), read(tmp_path / "fused")
    assert {n: as_bytes(a) for n, a in got.items()} == {n: as_bytes(a) for n, a in expected.items()}


@pytest.mark.slow
def test_state_dicts_are_taken_apart_where_shapes_alone_say_it(models: Path, tmp_path: Path) -> None:
    weightsmith.merge(ties(models, "fused"), tmp_path / "out", fsync=False)
    held = [read(models / f"fused{k}") for k in range(3)]
    got = weightsmith.merge_state_dicts("ties", held[1:], base=held[0], weight=0.5, density=0.3)
    expected = read(tmp_path / "out")
    different = {name.split(".", 3)[3] for name in got if as_bytes(got[name]) != as_bytes(expected[name])}
    assert different == {"self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias"}, "numbers of heads are in config.json"


@pytest.mark.long
def test_the_distance_of_fused_models_is_that_of_the_unfused(models: Path, tmp_path: Path) -> None:
    moved = [weightsmith.merge(ties(models, kind), tmp_path / kind, fsync=False).distance for kind in ("whole", "fused")]
    assert [m.name for m in moved[0]] == [m.name for m in moved[1]]
    np.testing.assert_allclose([m.delta for m in moved[0]], [m.delta for m in moved[1]], rtol=1e-12)


def test_a_plan_of_pieces_survives_json_and_says_what_they_are(models: Path, capsys: pytest.CaptureFixture[str]) -> None:

    plan = weightsmith.plan(ties(models, "fused"))
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    step = next(s for s in plan.steps if s.out.name == "model.layers.1.self_attn.qkv_proj.weight")
    assert [(p.out.name, p.out.shape, p.op) for p in step.pieces] == [
        (f"model.layers.1.self_attn.{x}_proj.weight", (rows, H), "ties") for x, rows in (("q", 32), ("k", 16), ("v", 16))
    ]


def test_what_is_no_number_in_a_piece_is_named_by_its_place_in_the_tensor(models: Path, tmp_path: Path) -> None:
    held = [read(models / f"fused{k}") for k in range(3)]
    name = "model.layers.1.mlp.experts.gate_up_proj"
    held[2][name] = held[2][name].copy()
    held[2][name][1, INNER + 3, 7] = np.nan
    for k, tensors in enumerate(held):
        write_checkpoint(tmp_path / f"fused{k}", tensors, HEADS)
    with pytest.raises(NonFinite) as caught:
        weightsmith.merge(ties(tmp_path, "fused"), tmp_path / "out", fsync=False)
    assert f"fused2, tensor {name}: element [1, {INNER + 3}, 7] is nan" in str(caught.value)


@pytest.mark.long
def test_experts_are_taken_out_of_fused_tensors_that_are_merged_on_the_way(tmp_path: Path) -> None:
    """A mixture on an inline merge of models like Phi-3 is the mixture on that merge's folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    names = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **heads))
        names.append(str(tmp_path / f"dense{seed}"))
        model.to(torch.bfloat16).save_pretrained(names[-1])
    entry = {"model": names[1], "parameters": {"weight": 1, "density": 0.5}}
    inline = {"merge_method": "ties", "base_model": names[0], "models": [entry]}
    weightsmith.merge(inline, tmp_path / "merged", fsync=False)
    experts = [{"source_model": name} for name in names]
    for out, base in (("one", str(tmp_path / "merged")), ("two", inline)):
        weightsmith._app.api.moe({"base_model": base, "experts": experts, "gate_mode": "random"}, tmp_path / out, fsync=False)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert {n: as_bytes(a) for n, a in one.items()} == {n: as_bytes(a) for n, a in two.items()}
    assert "model.layers.1.self_attn.k_proj.weight" in one
