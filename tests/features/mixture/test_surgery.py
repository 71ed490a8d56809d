"""Experts left out and experts merged: bytes, numbers, config.json, and what transformers makes of the result."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import moe_zoo
from tests.cli_help import Cli
from tests.mini import write_checkpoint
from tests.moe_zoo import BF16, BLOCK, HIDDEN, MODELS, STORED, E
from tests.plan_help import prepare_moe
from tests.sampling import sampled
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.reader import Reader
from weightsmith._engine.results import Results
from weightsmith._features.mixture import experts as mixture_experts
from weightsmith._features.mixture.experts import NeuronTensor, find_blocks, places_of, read_matched
from weightsmith._features.mixture.surgery import with_experts
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._plans import Plan, Product, Provenance

KINDS = ("mixtral", "deepseek-v3", "granitemoe", "gpt-oss")
"""Experts one by one, with groups and corrections, fused, transposed and interleaved."""

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models is not our concern


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of the zoo."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return moe_zoo.Saved(tmp_path_factory.mktemp("moe"), 1)


def surgery(model: Path, out: Path, key: str, value: dict[str, Any], **overrides: Any) -> weightsmith.Merged:
    options = {k: overrides.pop(k) for k in ("threads",) if k in overrides}
    return weightsmith.moe({"model": str(model), key: value, **overrides}, out, fsync=False, **options)


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.arange(12)[None] % 60).logits.numpy()


def of_experts(name: str) -> bool:
    """transformers' own names, in which the experts of every architecture are one tensor."""
    return bool(re.search(r"\.(experts|gate|router|moe_statics|expert_bias)\b", name)) and "shared" not in name


# ---- whole models


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, KINDS))
def test_a_pruned_model_holds_the_kept_experts_and_generates(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    keep = [2, 0, 3]
    done = surgery(models[name], tmp_path / "out", "prune_experts", {"keep": keep})
    assert done.warnings == ()
    before, after = moe_zoo.load(name, models[name]).state_dict(), moe_zoo.load(name, tmp_path / "out")
    chosen = 0
    for key, value in after.state_dict().items():
        expected = before[key]
        if of_experts(key) and E in expected.shape[:2] and value.shape != expected.shape:
            expected = expected.index_select(expected.shape.index(E), expected.new_tensor(keep).long())
            chosen += 1
        assert expected.shape == value.shape, key
        assert bool((expected == value).all()), key
    assert chosen >= 3
    stored, source = moe_zoo.read(tmp_path / "out"), moe_zoo.read(models[name])
    assert {k: v.dtype for k, v in stored.items()} == {k: source[k].dtype for k in stored}
    import torch

    assert after.generate(torch.arange(3)[None], max_new_tokens=2, do_sample=False).shape == (1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, KINDS))
def test_experts_in_another_order_give_the_same_logits(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    surgery(models[name], tmp_path / "out", "prune_experts", {"keep": [3, 1, 0, 2]})
    before, after = logits(moe_zoo.load(name, models[name])), logits(moe_zoo.load(name, tmp_path / "out"))
    np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, KINDS))
def test_a_merged_model_loads_and_generates(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    groups = {"groups": [[0, 3], [1], [2]], "match": True}
    surgery(models[name], tmp_path / "out", "merge_experts", groups)
    model = moe_zoo.load(name, tmp_path / "out")
    import torch

    assert model.generate(torch.arange(3)[None], max_new_tokens=2, do_sample=False).shape == (1, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bias"), [("deepseek-v3", "gate.e_score_correction_bias"), ("gpt-oss", "router.bias"), ("lfm2-moe", "expert_bias")]
)
def test_experts_that_are_never_chosen_are_not_missed(name: str, bias: str, models: dict[str, Path], tmp_path: Path) -> None:
    tensors = moe_zoo.read(models[name])
    for key in tensors:
        if key.endswith(bias):
            tensors[key][[1, 3]] = -1e4
    config = json.loads((models[name] / "config.json").read_text())
    model = write_checkpoint(tmp_path / "model", tensors, config)
    surgery(model, tmp_path / "out", "prune_experts", {"keep": [0, 2]})
    surgery(model, tmp_path / "other", "prune_experts", {"keep": [0, 1]})
    before, after, other = (logits(moe_zoo.load(name, tmp_path / k)) for k in ("model", "out", "other"))
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert np.abs(other - before).max() > 1e-4


def test_a_router_that_chooses_among_groups_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = moe_zoo.save("deepseek-v3", tmp_path / "model", 1, n_routed_experts=8, n_group=2)
    kept = surgery(model, tmp_path / "kept", "prune_experts", {"keep": [0, 3, 5, 6]})
    assert kept.warnings == ()
    assert moe_zoo.load("deepseek-v3", tmp_path / "kept").config.n_routed_experts == 4
    mixed = surgery(model, tmp_path / "mixed", "prune_experts", {"keep": [0, 1, 2, 5]})
    assert "some experts change groups" in str(mixed.warnings[0])
    with pytest.raises(PlanError, match="3 experts cannot be divided into 2 equal groups"):
        surgery(model, tmp_path / "out", "prune_experts", {"keep": [0, 1, 4]})
    with pytest.raises(PlanError, match="2 groups of 1 are too small: a token is routed to 2 experts of 1 groups"):
        surgery(model, tmp_path / "out", "prune_experts", {"keep": [0, 4]})


# ---- numbers


@pytest.mark.parametrize("how", STORED)
def test_an_expert_merged_with_itself_in_another_order_is_itself(how: str, tmp_path: Path) -> None:
    listed = moe_zoo.experts()
    listed[3], listed[2] = moe_zoo.shuffled(listed[0], 5), moe_zoo.shuffled(listed[1], 6)
    model = moe_zoo.store(tmp_path / "model", how, listed)
    groups = {"groups": [[0, 3], [1, 2]], "weights": [[0.7, 0.3], [1, 1]]}
    surgery(model, tmp_path / "matched", "merge_experts", {**groups, "match": True})
    surgery(model, tmp_path / "plain", "merge_experts", groups)
    matched, plain = moe_zoo.stored(tmp_path / "matched", how), moe_zoo.stored(tmp_path / "plain", how)
    assert len(matched) == 2
    assert moe_zoo.same(matched[0], listed[0])
    assert moe_zoo.same(matched[1], listed[1])
    assert not moe_zoo.same(plain[0], listed[0])


@pytest.mark.long
@pytest.mark.parametrize("match", [True, False])
def test_every_way_of_storing_experts_gives_the_same_numbers(match: bool, tmp_path: Path) -> None:
    groups = {"groups": [[2, 0], [3], [1, 4]], "weights": [[3, 1], [1], [1, 7]], "match": match}
    experts = {}
    for how in STORED:
        listed = moe_zoo.experts(5, dtype=np.float32)
        for expert in (
            listed if how == "paired" else ()
        ):  # the others store no biases, and biases count when neurons are matched
            expert |= {part: np.zeros_like(value) for part, value in expert.items() if part.endswith("bias")}
        model = moe_zoo.store(tmp_path / how, how, listed)
        surgery(model, tmp_path / f"{how}-out", "merge_experts", groups)
        experts[how] = moe_zoo.stored(tmp_path / f"{how}-out", how)
    for how in STORED:
        assert all(moe_zoo.same(a, b) for a, b in zip(experts[how], experts["own"], strict=True))
    source = moe_zoo.experts(5, dtype=np.float32)
    assert moe_zoo.same(experts["own"][1], source[3])
    for new, a, b, share in ((0, source[2], source[0], 0.25), (2, source[1], source[4], 0.875)):
        order = best_order(a, b) if match else np.arange(moe_zoo.NEURONS)
        for part, columns in (("gate", False), ("up", False), ("down", True)):
            other = b[part][:, order] if columns else b[part][order]
            exact = (1 - share) * a[part].astype(np.float64) + share * other.astype(np.float64)
            assert np.array_equal(experts["own"][new][part], exact.astype(np.float32))


def best_order(a: moe_zoo.Expert, b: moe_zoo.Expert) -> np.ndarray:
    """The order of b's neurons that is nearest to a, of all that there are."""

    def distance(order: tuple[int, ...]) -> float:
        moved = {"gate": b["gate"][list(order)], "up": b["up"][list(order)], "down": b["down"][:, order]}
        return sum(float(((a[part] - moved[part]) ** 2).sum()) for part in moved)

    return np.array(min(itertools.permutations(range(moe_zoo.NEURONS)), key=distance))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("pattern", ["plain", "halves", "pairs"])
def test_any_part_of_a_reordered_tensor_can_be_read(pattern: Any, axis: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    neurons, across = 7, 5
    along = neurons * (1 if pattern == "plain" else 2)
    shape = (along, across) if axis == 0 else (across, along)
    stored = random.standard_normal((3, *shape)).astype(np.float32)
    order = random.permutation(neurons)
    places = {
        "plain": order,
        "halves": np.array([*order, *(order + neurons)]),
        "pairs": np.array([k for i in order for k in (2 * i, 2 * i + 1)]),
    }[pattern]
    assert np.array_equal(places_of(pattern, order), places)
    expected = np.take(stored[2], places, axis)
    if pattern == "halves" and axis == 0:
        assert np.array_equal(expected.reshape(2, neurons, across), stored[2].reshape(2, neurons, across)[:, order])
    with open_checkpoint(write_checkpoint(tmp_path / "model", {"w": stored})) as source:
        carrier = NeuronTensor(source.specs["w"], 2 * along * across, shape, axis, pattern, neurons)
        matched = read_matched("expert", carrier)
        product = Product("p", "x", (TensorSpec(matched.table, DTYPES["I32"], (along,)),), {})
        plan = Plan(Provenance("test"), (), (), (), (product,))
        results = Results(plan)
        results.put(product, [places.astype(np.int32)])
        reader, flat = Reader(plan, [source], results), expected.reshape(-1)
        for first in range(0, flat.size, 3):
            for n in (1, 4, 11, flat.size - first):
                part = np.empty(min(n, flat.size - first), np.float32)
                reader.fill(matched, first, part.view(np.uint8))
                assert np.array_equal(part, flat[first : first + n])
                assert stored.reshape(-1)[reader.flat(matched, first)] == flat[first]


@pytest.mark.parametrize(("router", "row"), [("first", [1.0, 0.0]), ("mean", [0.75, 0.25]), (None, [1.0, 0.0])])
def test_the_router_row_of_a_merged_expert(router: str | None, row: list[float], tmp_path: Path) -> None:
    bias = {f"{BLOCK}gate.e_score_correction_bias": np.float32([1, 2, 3, 5])}
    model = moe_zoo.store(tmp_path / "model", "own", moe_zoo.experts(), **bias)
    groups = {"groups": [[3, 1], [0], [2]], "weights": [[3, 1], [1], [1]], **({"router": router} if router else {})}
    surgery(model, tmp_path / "out", "merge_experts", groups, dtype="bfloat16")
    before, after = moe_zoo.read(model), moe_zoo.read(tmp_path / "out")
    for name in (f"{BLOCK}gate.weight", *bias):
        old = before[name].astype(np.float64)
        expected = np.stack([row[0] * old[3] + row[1] * old[1], old[0], old[2]]).astype(before[name].dtype)
        assert after[name].dtype == before[name].dtype
        assert np.array_equal(after[name], expected), name


@pytest.mark.parametrize("how", STORED)
def test_layers_of_their_own_and_saliency(how: str, tmp_path: Path) -> None:
    listed = moe_zoo.experts()
    model = moe_zoo.store(tmp_path / "model", how, listed)
    surgery(model, tmp_path / "a", "prune_experts", {"keep_by_layer": {0: [3, 1]}})
    (tmp_path / "saliency.json").write_text('{"0": [0.5, 2, -1, 2]}')
    saliency = {"saliency": str(tmp_path / "saliency.json"), "experts": 2}
    surgery(model, tmp_path / "b", "prune_experts", saliency)
    surgery(model, tmp_path / "c", "prune_experts", {**saliency, "experts": 3})
    surgery(model, tmp_path / "d", "prune_experts", {**saliency, "experts": 1})
    for out, kept in (("a", [3, 1]), ("b", [1, 3]), ("c", [0, 1, 3]), ("d", [1])):
        experts = moe_zoo.stored(tmp_path / out, how)
        assert len(experts) == len(kept)
        assert all(moe_zoo.same(expert, listed[e]) for expert, e in zip(experts, kept, strict=True))
        gate = moe_zoo.read(tmp_path / out)[f"{BLOCK}gate.weight"]
        assert np.array_equal(gate, moe_zoo.read(model)[f"{BLOCK}gate.weight"][kept])


def test_a_saliency_file_is_looked_for_beside_the_recipe(tmp_path: Path) -> None:
    model = moe_zoo.store(tmp_path / "model", "own", moe_zoo.experts())
    (tmp_path / "s.json").write_text('{"0": [1, 2, 3, 4]}')
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"model: {model}\nprune_experts:\n  saliency: s.json\n  experts: 1\n")
    plan = weightsmith.moe(recipe, tmp_path / "out", fsync=False).plan
    assert plan.config == moe_zoo.config(1, model_type="qwen3_moe", dtype="bfloat16")


@pytest.mark.parametrize("how", ["own", "paired"])
def test_the_bytes_do_not_depend_on_threads(how: str, tmp_path: Path) -> None:
    model = moe_zoo.store(tmp_path / "model", how, moe_zoo.experts())
    value = {"groups": [[0, 3, 1], [2]], "match": True}
    for threads in (1, 4):
        surgery(model, tmp_path / f"out{threads}", "merge_experts", value, threads=threads)
    one, four = ((tmp_path / f"out{n}" / "model.safetensors").read_bytes() for n in (1, 4))
    assert one == four


def test_quantised_experts_move_with_their_scales_and_are_not_averaged(tmp_path: Path) -> None:
    listed = moe_zoo.experts()
    random = np.random.default_rng(0)
    codes = {f"{BLOCK}experts.{e}.gate_proj.weight": random.integers(0, 99, (10, 6)).astype(np.uint8) for e in range(E)}
    scales = {f"{name}_scale_inv": random.random((1, 1)).astype(np.float32) for name in codes}
    model = moe_zoo.store(tmp_path / "model", "own", listed)
    config = {**moe_zoo.config(), "quantization_config": {"quant_method": "fp8", "ignored_layers": ["lm_head"]}}
    write_checkpoint(model, {**moe_zoo.read(model), **codes, **scales}, config)
    done = surgery(model, tmp_path / "out", "prune_experts", {"keep": [2, 1]})
    before, after = moe_zoo.read(model), moe_zoo.read(tmp_path / "out")
    for new, old in enumerate([2, 1]):
        for part in ("gate_proj.weight", "gate_proj.weight_scale_inv", "down_proj.weight"):
            assert np.array_equal(after[f"{BLOCK}experts.{new}.{part}"], before[f"{BLOCK}experts.{old}.{part}"])
    assert done.plan.config == {**config, "num_experts": 2}
    for key, value, options in (
        ("merge_experts", {"groups": [[0, 1], [2, 3]]}, {}),
        ("prune_experts", {"keep": [0]}, {"dtype": "float32"}),
    ):
        with pytest.raises(PlanError, match="is quantised"):
            surgery(model, tmp_path / "no", key, value, **options)
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"ignore": ["layers.0.mlp.experts.3"]}}))
    with pytest.raises(PlanError, match="names experts by number"):
        surgery(model, tmp_path / "no", "prune_experts", {"keep": [0]})


# ---- config.json


def test_every_count_of_the_experts_follows() -> None:
    nested = {"text_config": {"num_experts": 8, "moe_topk": [2, 2]}, "num_experts": [8, 8], "vision_config": {"num_experts": 3}}
    changed, problems = with_experts(nested, 8, 5, "here")
    assert problems == []
    assert changed == {
        "text_config": {"num_experts": 5, "moe_topk": [2, 2]},
        "num_experts": [5, 5],
        "vision_config": {"num_experts": 3},
    }
    assert nested["num_experts"] == [8, 8]
    _, problems = with_experts({"num_experts": 6}, 8, 5, "here")
    assert [p.finding.what for p in problems] == ["the tensors have 8 experts, but config.json does not say so"]


# ---- what is refused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four experts in each of two layers."""
    folder = moe_zoo.store(tmp_path / "model", "own", moe_zoo.experts())
    first = moe_zoo.read(folder)
    second = {name.replace("layers.0.", "layers.1."): value for name, value in first.items()}
    return write_checkpoint(folder, {**first, **second}, {**moe_zoo.config(), "num_hidden_layers": 2, "num_experts_per_tok": 2})


WRONG: list[tuple[str, str]] = [
    ("prune_experts: {keep: [0, 4]}", "r.yml:2:23: there is no expert 4: there are 4 experts, 0 to 3"),
    ("prune_experts: {keep: [0, 1, 0]}", "r.yml:2:23: expert 0 is listed twice\n  -> Write each expert once."),
    ("prune_experts: {keep: []}", "r.yml:2:23: 'keep' is empty\n  -> Write [0, 2, 5]."),
    (
        "prune_experts: {keep: [0, -1]}",
        "r.yml:2:27: 'keep' takes whole numbers from 0 on, not the number -1\n  -> Write numbers from 0 on.",
    ),
    (
        "prune_experts: {keep: [3]}",
        "r.yml:2:23: each token is routed to 2 experts (num_experts_per_tok in config.json), but only 1 expert is left\n"
        "  -> Keep at least 2 in each layer.",
    ),
    (
        "prune_experts: {keep_by_layer: {0: [0, 1], 1: [1, 2, 3]}}",
        "r.yml:2:32: layer 0 would have 2 experts, but layer 1 3\n"
        "  -> Keep the same number in each layer, because config.json has one for all.",
    ),
    (
        "prune_experts: {keep_by_layer: {0: [0, 1]}}",
        "r.yml:2:32: layer 1 has experts and is not in 'keep_by_layer'\n  -> Write an entry for every layer that has experts.",
    ),
    (
        "prune_experts: {keep_by_layer: {0: [0, 1], 1: [0, 1], 2: [0, 1]}}",
        "r.yml:2:32: layer 2 has no experts, or does not exist\n  -> Write layers that have experts: 0, 1.",
    ),
    (
        "prune_experts: {keep: [0, 1], experts: 2}",
        "r.yml:2:40: 'experts' has no effect without 'saliency'\n  -> Remove it.",
    ),
    (
        "prune_experts: {saliency: good.json}",
        "r.yml:2:27: 'saliency' requires 'experts', the number of experts to keep in each layer\n  -> Write experts: 32.",
    ),
    (
        "prune_experts: {saliency: good.json, experts: 5}",
        "r.yml:2:47: cannot keep 5 experts in each layer: there are 4\n  -> Write at most 4.",
    ),
    ("prune_experts: {saliency: none.json, experts: 2}", "r.yml:2:27: FOLDER/none.json: no such saliency file"),
    (
        "prune_experts: {saliency: short.json, experts: 2}",
        "FOLDER/short.json: layer 1 needs one finite number for each of its 4 experts, not 3 values\n"
        '  -> Write {"0": [one number for each expert of layer 0], "1": ...}.',
    ),
    (
        "prune_experts: {saliency: text.json, experts: 2}",
        "FOLDER/text.json: layer 0 needs one finite number for each of its 4 experts, not '3' for expert 2\n"
        '  -> Write {"0": [one number for each expert of layer 0], "1": ...}.',
    ),
    (
        "prune_experts: {saliency: one.json, experts: 2}",
        "FOLDER/one.json: layer 1 has experts and is not in 'saliency'\n  -> Write an entry for every layer that has experts.",
    ),
    (
        "merge_experts: {groups: [[0, 1], [2], [1, 3]]}",
        "r.yml:2:25: expert 1 is in two groups, or twice in one\n  -> Write each expert once.",
    ),
    ("merge_experts: {groups: [[0, 1, 2, 3], []]}", "r.yml:2:40: a group in 'groups' is empty\n  -> Write [[0, 3], [1, 2]]."),
    (
        "merge_experts: {groups: [[0, 1], [2]]}",
        "r.yml:2:25: expert 3 is in no group\n  -> Write [3] to keep it unchanged; to remove experts, use prune_experts.",
    ),
    ("merge_experts: {groups: [[0, 1], [2, 7]]}", "r.yml:2:25: there is no expert 7: there are 4 experts, 0 to 3"),
    (
        "merge_experts: {groups: [[0, 1], [2, 3]], weights: [[1, 1], [1]]}",
        "r.yml:2:52: groups of [2, 2] experts have [2, 1] weights\n  -> Write one weight for each expert of each group.",
    ),
    (
        "merge_experts: {groups: [[0, 1], [2, 3]], weights: [[1, 1], [2, -1]]}",
        "r.yml:2:52: invalid weights [2.0, -1.0]: they must be non-negative, and not all 0",
    ),
    (
        "merge_experts: {groups: [[0, 1], [2, 3]], weights_by_layer: {0: [[1, 1], [1, 1]]}}",
        "r.yml:2:61: 'weights_by_layer' cannot be combined with 'groups'\n  -> Write weights.",
    ),
    (
        "merge_experts: {groups: [[0, 1], [2, 3]], router: last}",
        "r.yml:2:51: 'router' is the text 'last'\n  -> Write one of first, mean.",
    ),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[value for value, _ in WRONG])
def test_a_wrong_recipe_gets_one_clear_error(value: str, message: str, model: Path, tmp_path: Path) -> None:
    for name, text in {
        "good": '{"0": [1, 2, 3, 4], "1": [1, 2, 3, 4]}',
        "short": '{"0": [1, 2, 3, 4], "1": [1, 2, 3]}',
        "text": '{"0": [1, 2, "3", 4], "1": [1, 2, 3, 4]}',
        "one": '{"0": [1, 2, 3, 4]}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    recipe = tmp_path / "r.yml"
    recipe.write_text(f"model: {model}\n{value}\n")
    with pytest.raises(PlanError) as refused:
        weightsmith.moe(recipe, tmp_path / "out")
    told = [
        str(problem.finding).replace(f"{recipe}:", "r.yml:").replace(str(tmp_path), "FOLDER")
        for problem in refused.value.problems
    ]
    assert told == [message]
    assert not (tmp_path / "out").exists()


def refusals(tensors: dict[str, tuple[int, ...]], dtype: str = "BF16") -> list[str]:
    _, problems = find_blocks([TensorSpec(name, DTYPES[dtype], shape) for name, shape in tensors.items()], "m")
    return [problem.finding.what for problem in problems]


OWN = {f"layers.0.mlp.experts.{e}.w1.weight": (8, 4) for e in range(3)}
GATE = {"layers.0.mlp.gate.weight": (3, 4)}


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"layers.0.mlp.up_proj.weight": (8, 4)}, "no experts were found in m"),
        (OWN, "the experts need one router, but 0 were found"),
        ({**OWN, "layers.0.mlp.gate.weight": (5, 4)}, "there are 3 experts, but this tensor is [5, 4]"),
        ({**OWN, **GATE, "layers.0.mlp.experts.4.w1.weight": (8, 4)}, "expert 3 is missing"),
        ({**OWN, **GATE, "layers.0.mlp.experts.2.w1.weight": (8, 5)}, "experts have different tensors"),
        ({**OWN, **GATE, "layers.0.mlp.experts.2.w2.weight": (4, 8)}, "experts have different tensors"),
        (
            {**OWN, **GATE, "layers.0.mlp.gate.tid2eid": (64, 2)},
            "unknown tensor gate.tid2eid next to the experts: not an expert's, a router's or a shared expert's",
        ),
        (
            {**GATE, "layers.0.mlp.experts.gate_up_proj": (3, 8, 4), "layers.0.mlp.experts.b": (4, 3)},
            "there are 3 experts, but this tensor is [4, 3]",
        ),
        (
            {
                **OWN,
                **GATE,
                **{
                    k.replace("rs.0", "rs.1").replace("s.2.w", "s.0.w"): v
                    for k, v in {**OWN, "layers.0.mlp.gate.weight": (2, 4)}.items()
                },
            },
            "layers have different numbers of experts",
        ),
        (
            {"mlp.experts.0.w1.weight": (8, 4), "mlp.gate.weight": (1, 4)},
            "experts outside numbered layers, or in numbered parts of a layer, are not supported",
        ),
    ],
)
def test_what_is_not_understood_is_refused(tensors: dict[str, tuple[int, ...]], what: str) -> None:
    assert refusals(tensors) == [what]


def test_what_is_told_of_sixty_layers_is_told_once() -> None:
    many = {name.replace("layers.0", f"layers.{i}"): shape for i in range(60) for name, shape in {**OWN, **GATE}.items()}
    assert refusals(many) == []
    strange = {f"layers.{i}.mlp.gate.table": (9, 2) for i in range(60)}
    assert len(refusals({**many, **strange})) == 1


def test_layers_of_a_stack_beside_the_main_one_are_named_in_full(tmp_path: Path) -> None:
    folder = moe_zoo.store(tmp_path / "model", "own", moe_zoo.experts())
    tensors = moe_zoo.read(folder)
    for i in (1, 2):
        tensors |= {n.replace("layers.0.", f"layers.{i}."): v for n, v in tensors.items() if "layers.0." in n}
    tensors |= {n.replace("model.layers.0.", "mtp.layers.0."): v for n, v in tensors.items() if "model.layers.0." in n}
    write_checkpoint(folder, tensors, {**moe_zoo.config(), "num_hidden_layers": 3})
    kept = {"0": [0, 1], "1": [1, 2], "2": [2, 3], "mtp.layers.0": [3, 0]}
    surgery(folder, tmp_path / "out", "prune_experts", {"keep_by_layer": kept})
    gate = moe_zoo.read(tmp_path / "out")["mtp.layers.0.mlp.gate.weight"]
    assert np.array_equal(gate, tensors["mtp.layers.0.mlp.gate.weight"][[3, 0]])
    kept.pop("mtp.layers.0")
    with pytest.raises(PlanError, match=r"layer mtp\.layers\.0 has experts and is not in 'keep_by_layer'"):
        surgery(folder, tmp_path / "no", "prune_experts", {"keep_by_layer": kept})


def test_neurons_are_not_matched_where_it_is_not_known_where_they_are(tmp_path: Path) -> None:
    folder = moe_zoo.store(tmp_path / "model", "transposed", moe_zoo.experts())
    (folder / "config.json").write_text(json.dumps(moe_zoo.config(model_type="stranger")))
    value = {"groups": [[0, 1], [2, 3]]}
    surgery(folder, tmp_path / "out", "merge_experts", value)
    with pytest.raises(PlanError, match="this tensor interleaves gate and up is not known for stranger models"):
        surgery(folder, tmp_path / "no", "merge_experts", {**value, "match": True})


def test_experts_with_a_nan_are_not_matched(tmp_path: Path) -> None:
    listed = moe_zoo.experts()
    listed[1]["up"][0, 0] = np.nan
    folder = moe_zoo.store(tmp_path / "model", "own", listed)
    with pytest.raises(WeightsmithError, match="cannot be matched: their weights contain NaN"):
        surgery(folder, tmp_path / "out", "merge_experts", {"groups": [[0, 1], [2, 3]], "match": True})
    assert {f.name for f in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("lost", [False, True])
def test_work_is_resumed_with_the_order_that_it_began_with(lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal neurons may be matched otherwise another time, and all tensors of an expert must have one order."""
    folder = moe_zoo.store(tmp_path / "model", "own", moe_zoo.experts())
    recipe = {"model": str(folder), "merge_experts": {"groups": [[0, 1], [2, 3]], "match": True}}
    begun = 0

    def interrupt(now: Any) -> None:
        nonlocal begun
        begun = now.tensors
        if now.tensors == now.total_tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.moe(recipe, tmp_path / "out", progress=interrupt)
    plain = mixture_experts.best_order
    monkeypatch.setattr(mixture_experts, "best_order", lambda *args: plain(*args)[::-1].copy())
    weightsmith.moe(recipe, tmp_path / "other")
    staging = next(tmp_path.glob(".out.*"))
    if lost:
        for file in (staging / "products").iterdir():
            file.write_bytes(b"")
    resumed = weightsmith.moe(recipe, tmp_path / "out").resumed
    assert 0 < resumed < begun if lost else resumed == begun  # what was made from a lost order is made again
    same = moe_zoo.read(tmp_path / "out"), moe_zoo.read(tmp_path / "other")
    assert all(np.array_equal(same[0][name], same[1][name]) for name in same[0]) == lost


def test_experts_with_factors_are_pruned_and_not_merged(tmp_path: Path) -> None:
    scale = {
        "model.layers.0.router.per_expert_scale": np.ones(E, np.float32),
        "model.layers.0.mlp.up_proj.weight": np.ones((8, 6), BF16),
    }
    scale |= {
        "model.layers.0.router.scale": np.ones(HIDDEN, BF16),
        "model.layers.0.router.proj.weight": np.ones((E, HIDDEN), BF16),
    }
    listed = {
        f"model.layers.0.experts.{name}": np.ones((E, *shape), BF16)
        for name, shape in (("gate_up_proj", (20, 6)), ("down_proj", (6, 10)))
    }
    folder = write_checkpoint(tmp_path / "model", {**scale, **listed}, moe_zoo.config())
    surgery(folder, tmp_path / "out", "prune_experts", {"keep": [0, 2]})
    assert {n.rpartition("0.")[2]: v.shape for n, v in moe_zoo.read(tmp_path / "out").items()} == {
        "experts.down_proj": (2, 6, 10),
        "experts.gate_up_proj": (2, 20, 6),
        "mlp.up_proj.weight": (8, 6),
        "router.per_expert_scale": (2,),
        "router.proj.weight": (2, 6),
        "router.scale": (6,),
    }
    with pytest.raises(PlanError, match="each expert has its own output factor"):
        surgery(folder, tmp_path / "no", "merge_experts", {"groups": [[0, 1], [2, 3]]})


# ---- what the docs say


ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples" / "recipes" / "moe_surgery").glob("*.yml"))


def eight(folder: Path) -> Path:
    """Two layers of eight experts."""
    model = moe_zoo.store(folder, "own", moe_zoo.experts(8))
    first = moe_zoo.read(model)
    second = {name.replace("layers.0.", "layers.1."): value for name, value in first.items()}
    return write_checkpoint(model, {**first, **second}, {**moe_zoo.config(8), "num_hidden_layers": 2})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_examples_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight(tmp_path / "moe")
    monkeypatch.chdir(tmp_path)
    done = weightsmith.moe(recipe, "out", fsync=False)
    assert (done.warnings, (done.plan.config or {})["num_experts"]) == ((), 4)
    assert len(RECIPES) == 3


def test_no_router_weights_are_made_and_so_none_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yml").write_text(f"model: {eight(tmp_path / 'moe')}\nprune_experts: {{keep: [0, 2, 5]}}\n")
    ran = Cli(monkeypatch, capsys)("moe", tmp_path / "r.yml", "--routing")
    assert ran.code == 2
    assert "this recipe makes no router weights" in ran.err


def test_the_recipes_in_the_docs_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight(tmp_path / "moe")
    monkeypatch.chdir(tmp_path)
    Path("saliency.json").write_text((ROOT / "examples" / "recipes" / "moe_surgery" / "saliency.json").read_text())
    page = (ROOT / "docs" / "moe-surgery.md").read_text()
    blocks = re.findall(r"^```text\n(model:.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        with prepare_moe(block) as prepared:
            assert prepared.plan.warnings == ()


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = Cli(monkeypatch, capsys)
    model = moe_zoo.store(tmp_path / "model", "paired", moe_zoo.experts())
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"model: {model}\nmerge_experts:\n  groups: [[0, 3], [1, 2]]\n  match: true\n")
    done = run("moe", str(recipe), str(tmp_path / "out"), "--no-fsync")
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Mixture of experts, some of which were averaged" in card
    recipe.write_text(f"model: {model}\nprune_experts:\n  keep: [0, 3, 9]\n")
    done = run("moe", str(recipe), str(tmp_path / "no"))
    assert done.code != 0
    assert "there is no expert 9" in done.err
