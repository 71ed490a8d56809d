"""No tensor is lost: used, or left out for a stated reason; and which tensors may come from one model alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import LAYER, config, decoder, only, plan, problems, sources, warnings
from weightsmith._base.errors import MismatchError, PlanError, ShapeError, TensorLost
from weightsmith._planning.planner.outputs import StepMaker

TOWER = {f"model.vision_tower.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
PROJECTOR = {"model.multi_modal_projector.weight": (4, 4)}


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m} for m in models], "parameters": {"weight": 1}, **options}


def vlm(folder: Path, *, seed: int = 0, prefix: str = "model.language_model.", **arguments: Any) -> str:
    text = {k: v for k, v in config().items() if k not in ("model_type", "architectures")}
    settings = {"text_config": text, "vision_config": {"num_hidden_layers": 2}, "model_type": "llava"}
    write_checkpoint(folder, decoder(seed=seed, prefix=prefix, extra=TOWER | PROJECTOR, **arguments), settings)
    return str(folder)


def test_a_vision_tower_that_only_one_model_has_is_copied_with_a_warning(tmp_path: Path) -> None:
    a, b = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)
    p = plan(linear(a, b))
    origins = sources(p)
    assert all(origins[name] == [(0, name)] for name in (*TOWER, *PROJECTOR))
    assert origins["model.language_model.layers.1.mlp.up_proj.weight"] == [
        (0, "model.language_model.layers.1.mlp.up_proj.weight"),
        (1, "model.layers.1.mlp.up_proj.weight"),
    ]
    assert origins["model.language_model.norm.weight"] == [(0, "model.language_model.norm.weight"), (1, "model.norm.weight")]
    assert origins["lm_head.weight"] == [(0, "lm_head.weight"), (1, "lm_head.weight")]
    assert p.donor == 0
    first = next(iter(TOWER))
    assert warnings(p) == [f"{first}: 9 tensors that only {a} has are copied from it"]


@pytest.mark.parametrize("base", [True, False])
def test_the_model_with_the_vision_tower_is_the_donor_wherever_it_stands(tmp_path: Path, base: bool) -> None:
    a, b = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)
    recipe = linear(b, a)
    if base:
        recipe |= {"merge_method": "task_arithmetic", "base_model": b}
    p = plan(recipe)
    assert p.models[p.donor].ref == a
    assert p.config is not None
    assert "vision_config" in p.config
    assert sources(p)["model.language_model.norm.weight"] == [(0, "model.norm.weight"), (1, "model.language_model.norm.weight")]
    assert f"config.json, tokenizer and other files are {a}'s, not {b}'s: only it has vision layers" in warnings(p)[0]


def test_a_plain_language_model_is_merged_into_one_module(tmp_path: Path) -> None:
    a, b = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)
    for name in ("model.language_model", "text_decoder", "language_model"):
        modules = {name: {"models": [{"model": a}, {"model": b}]}}
        p = plan({"merge_method": "linear", "modules": modules, "parameters": {"weight": 1}})
        assert len(sources(p)["model.language_model.norm.weight"]) == 2
        assert all(sources(p)[name] == [(0, name)] for name in (*TOWER, *PROJECTOR))
        assert p.dropped == ()
    assert any("not mentioned, and copied from" in w for w in warnings(p))


def test_modules_may_come_from_different_models(tmp_path: Path) -> None:
    a, b, c = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1), vlm(tmp_path / "c", seed=2)
    modules = {"text_decoder": {"models": [{"model": b}]}, "vision_tower": {"models": [{"model": c}]}}
    p = plan({"merge_method": "passthrough", "modules": modules})
    assert p.models[p.donor].ref == c
    assert sources(p)["model.language_model.norm.weight"] == [(0, "model.norm.weight")]
    reasons = {d.reason for d in p.dropped if d.model == 1}
    assert reasons == {f"module model.language_model is taken from {b}"}
    modules["projector"] = {"models": [{"model": a}]}
    assert "no module 'projector'" in str(only({"merge_method": "passthrough", "modules": modules}))


def test_a_module_whose_model_has_other_layers_is_not_cut_short(tmp_path: Path) -> None:
    a, b = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", 3, seed=1)
    modules = {"text_decoder": {"models": [{"model": b}]}, "vision_tower": {"models": [{"model": a}]}}
    p = plan({"merge_method": "passthrough", "modules": modules})
    assert sources(p)["model.language_model.layers.2.mlp.up_proj.weight"] == [(0, "model.layers.2.mlp.up_proj.weight")]
    assert p.config is not None
    assert p.config["text_config"]["num_hidden_layers"] == 3


def test_a_module_given_under_two_names_is_refused(tmp_path: Path) -> None:
    a = vlm(tmp_path / "a")
    both = {name: {"models": [{"model": a}]} for name in ("model.language_model", "text_decoder")}
    problem = only({"merge_method": "passthrough", "modules": both})
    assert str(problem) == "modules.text_decoder: module 'model.language_model' is given twice"


def test_slices_of_a_tower_leave_its_small_stacks_whole(tmp_path: Path) -> None:
    """A pooling head inside the tower is a list of layers too, but not one that slices could mean; nor is a merger."""
    places = [f"model.vision_tower.{part}.layers.{i}" for part in ("head", "merger") for i in range(3)]
    merger = {f"{place}.{name}": shape for place in places for name, shape in LAYER.items()}
    text = {k: v for k, v in config().items() if k not in ("model_type", "architectures")}
    settings = {"text_config": text, "vision_config": {"num_hidden_layers": 2}}
    a = str(write_checkpoint(tmp_path / "a", decoder(prefix="model.language_model.", extra=TOWER | merger), settings))
    slices = [{"sources": [{"model": a, "layer_range": r}]} for r in ([0, 2], [1, 2])]
    p = plan({"merge_method": "passthrough", "modules": {"vision_tower": {"slices": slices}}})
    assert "model.vision_tower.layers.2.mlp.up_proj.weight" in sources(p)
    assert merger.keys() <= sources(p).keys()
    assert p.config is not None
    assert (p.config["vision_config"]["num_hidden_layers"], p.config["text_config"]["num_hidden_layers"]) == (3, 2)


def test_a_module_that_the_named_models_do_not_have_is_refused(tmp_path: Path) -> None:
    a, b = vlm(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)
    modules = {"text_decoder": {"models": [{"model": a}]}, "vision_tower": {"models": [{"model": b}]}}
    problem = only({"merge_method": "passthrough", "modules": modules})
    assert str(problem).startswith("modules.vision_tower: none of the models given for module model.vision_tower has layers")


def test_slices_of_a_vision_language_model_cut_its_decoder(tmp_path: Path) -> None:
    a, b = vlm(tmp_path / "a"), vlm(tmp_path / "b", seed=1)
    slices = [{"sources": [{"model": m, "layer_range": [0, 2]}]} for m in (a, b)]
    p = plan({"merge_method": "passthrough", "slices": slices})
    up = "model.language_model.layers.{}.mlp.up_proj.weight"
    assert sources(p)[up.format(3)] == [(1, up.format(1))]
    assert all(sources(p)[name] == [(0, name)] for name in (*TOWER, *PROJECTOR))
    assert p.config is not None
    assert (p.config["text_config"]["num_hidden_layers"], p.config["vision_config"]["num_hidden_layers"]) == (4, 2)
    assert {d.reason for d in p.dropped if d.tensor in TOWER} == {f"module model.vision_tower is copied from {a}"}
    assert any("copied from" in w and "'slices' is about the layers of one module" in w for w in warnings(p))


def test_a_classification_head_that_only_one_model_has_is_copied_with_a_warning(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    b = plan_help.model(tmp_path / "b", seed=1, extra={"score.weight": (3, 4), "score.bias": (3,)})
    for models, owner in (((a, b), 1), ((b, a), 0)):
        p = plan(linear(*models))
        assert sources(p)["score.weight"] == [(owner, "score.weight")]
        assert [w.split(": ")[1] for w in warnings(p)] == [f"2 tensors that only {b} has are copied from it"]


def test_a_bias_that_only_one_model_has_is_an_error_that_names_both(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": (4,) for i in range(2)}
    b = plan_help.model(tmp_path / "b", seed=1, extra=extra)
    problem = only(linear(a, b))
    assert str(problem) == (
        "model.layers.0.self_attn.q_proj.bias: not all the models have this tensor; so for 1 more like it\n"
        f"  {a}: missing\n  {b}: [4] BF16\n"
        "  -> Merge models that have the same tensors; only a whole module that one model has is copied from it."
    )


def test_a_bias_of_a_module_outside_the_layers_that_only_one_model_has_is_an_error(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    b = plan_help.model(tmp_path / "b", seed=1, extra={"lm_head.bias": (8,), "model.norm.bias": (4,)})
    assert [str(x).split(":")[0] for x in problems(linear(a, b))] == ["lm_head.bias", "model.norm.bias"]
    tied = plan_help.model(tmp_path / "c", head=False, settings={"tie_word_embeddings": True})
    assert [str(x).split(":")[0] for x in problems(linear(tied, b))] == ["lm_head.bias", "model.norm.bias"]


def test_a_module_that_two_of_three_models_have_is_an_error(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    b, c = (plan_help.model(tmp_path / n, seed=1, extra={"score.weight": (3, 4)}) for n in "bc")
    problem = only(linear(a, b, c))
    assert isinstance(problem, MismatchError)
    assert problem.finding.where == "score.weight"


def test_unequal_shapes_are_told_once_for_all_layers_and_with_their_files(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    tensors = {n: t.repeat(2, axis=0) if "q_proj" in n else t for n, t in decoder(seed=1).items()}
    b = str(write_checkpoint(tmp_path / "b", tensors, config()))
    problem = only(linear(a, b))
    assert isinstance(problem, ShapeError)
    assert str(problem) == (
        "model.layers.0.self_attn.q_proj.weight: 'linear' needs equal shapes; so for 1 more like it\n"
        f"  {a}: [4, 4] BF16\n  {b}: [8, 4] BF16\n"
        "  -> Merge models of one size; 'passthrough' takes tensors of one model each."
    )


def test_vocabularies_of_different_size_are_refused_with_the_reason(tmp_path: Path) -> None:
    a, b = plan_help.model(tmp_path / "a"), plan_help.model(tmp_path / "b", vocab=10)
    errors = problems(linear(a, b))
    assert sorted(f.finding.where for f in errors) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert all("The vocabularies differ: write tokenizer_source" in str(f) for f in errors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.{}.self_attn.rotary_emb.inv_freq", (2,)), ("model.layers.{}.self_attn.attention.bias", (1, 1, 4, 4))],
)
def test_buffers_that_not_all_models_store_are_left_out(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    extra = {name.format(i): shape for i in range(2)} | {"model.rotary_emb.inv_freq": (2,)}
    a, b = plan_help.model(tmp_path / "a", extra=extra), plan_help.model(tmp_path / "b", seed=1)
    p = plan(linear(a, b))
    assert {d.tensor for d in p.dropped} == extra.keys()
    assert all("a buffer that the model computes for itself" in d.reason for d in p.dropped)
    assert not extra.keys() & sources(p).keys()
    assert plan(linear(a, a.removesuffix("a") + "./a/../b")).dropped == p.dropped


def test_buffers_that_all_models_store_are_kept(tmp_path: Path) -> None:
    extra = {"model.rotary_emb.inv_freq": (2,)}
    p = plan(linear(*(plan_help.model(tmp_path / n, extra=extra) for n in "ab")))
    assert "model.rotary_emb.inv_freq" in sources(p)


def test_extra_prediction_layers_are_merged_or_copied_from_their_owner(tmp_path: Path) -> None:
    mtp = {"model.layers.2.eh_proj.weight": (4, 8), "model.layers.2.self_attn.q_proj.weight": (4, 4)}
    settings = {"num_nextn_predict_layers": 1}
    a, b = (plan_help.model(tmp_path / n, seed=i, extra=mtp, settings=settings) for i, n in enumerate("ab"))
    assert len(sources(plan(linear(a, b)))["model.layers.2.eh_proj.weight"]) == 2
    c = plan_help.model(tmp_path / "c", seed=2, settings=settings)
    p = plan(linear(a, c))
    assert sources(p)["model.layers.2.eh_proj.weight"] == [(0, "model.layers.2.eh_proj.weight")]
    assert "2 tensors that only" in warnings(p)[0]


@pytest.mark.parametrize("tied", [None, False, True])
def test_embedding_and_head_of_a_prediction_layer_are_tensors_of_their_own(tied: bool | None, tmp_path: Path) -> None:
    shapes = {f"model.layers.2.{name}.weight": (8, 4) for name in ("embed_tokens", "shared_head.head")}
    settings = {"num_nextn_predict_layers": 1, "tie_word_embeddings": tied}
    a = plan_help.model(
        tmp_path / "a", extra={**shapes, "model.layers.2.eh_proj.weight": (4, 8)}, settings=settings, head=not tied
    )
    b = plan_help.model(tmp_path / "b", seed=1, settings=settings, head=not tied)
    for k, models in enumerate(((a, b), (b, a))):
        p = plan(linear(*models))
        assert {name: sources(p)[name] for name in shapes} == {name: [(k, name)] for name in shapes}, "as they are"
        assert len(sources(p)["model.embed_tokens.weight"]) == 2
        assert not p.config or p.config.get("tie_word_embeddings") == tied
    extra = {**shapes, "model.layers.2.eh_proj.weight": (4, 8)}
    c = plan_help.model(tmp_path / "c", seed=2, extra=extra, settings=settings, head=not tied)
    merged = sources(plan(linear(a, c)))
    assert merged["model.layers.2.shared_head.head.weight"] == [(k, "model.layers.2.shared_head.head.weight") for k in (0, 1)]


def test_a_model_without_the_usual_prefix_matches(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    b = plan_help.model(tmp_path / "b", prefix="", head=False, seed=1)
    p = plan(linear(a, b))
    assert sources(p)["model.layers.1.mlp.up_proj.weight"] == [
        (0, "model.layers.1.mlp.up_proj.weight"),
        (1, "layers.1.mlp.up_proj.weight"),
    ]
    assert sources(p)["model.embed_tokens.weight"] == [(0, "model.embed_tokens.weight"), (1, "embed_tokens.weight")]
    assert sources(plan(linear(b, a)))["norm.weight"] == [(0, "norm.weight"), (1, "model.norm.weight")]


def test_an_old_vision_language_file_matches_a_new_one(tmp_path: Path) -> None:
    """transformers has renamed them: language_model.model.x is model.language_model.x now."""
    a = vlm(tmp_path / "a")
    old = {
        n.replace("model.language_model.", "language_model.model.")
        .replace("lm_head", "language_model.lm_head")
        .replace("model.vision_tower", "vision_tower")
        .replace("model.multi_modal", "multi_modal"): t
        for n, t in decoder(seed=1, prefix="model.language_model.", extra=TOWER | PROJECTOR).items()
    }
    b = str(write_checkpoint(tmp_path / "b", old, {"text_config": config(), "vision_config": {"num_hidden_layers": 2}}))
    for models in ((a, b), (b, a)):
        p = plan(linear(*models))
        assert all(len(s.inputs) == 2 for s in p.steps)
        assert p.dropped == ()
        assert warnings(p) == []


RELEASES = {
    "hub": ("language_model.model.", "language_model.lm_head.", "vision_tower.", "multi_modal"),
    "new": ("model.language_model.", "lm_head.", "model.vision_tower.", "model.multi_modal"),
    "5.10": ("language_model.model.model.", "language_model.lm_head.", "vision_tower.", "multi_modal"),
    "5.10, moved": ("model.language_model.model.", "lm_head.", "model.vision_tower.", "model.multi_modal"),
}
"""How names of composed models begin, by who saved them: transformers 5.10 to 5.23 doubled a module of audio models."""


def saved_by(release: str, folder: Path, seed: int) -> str:
    begins = dict(
        zip(("model.language_model.", "lm_head.", "model.vision_tower.", "model.multi_modal"), RELEASES[release], strict=True)
    )
    tensors = decoder(seed=seed, prefix="model.language_model.", extra=TOWER | PROJECTOR)
    named = {
        theirs + n.removeprefix(ours): t for n, t in tensors.items() for ours, theirs in begins.items() if n.startswith(ours)
    }
    assert len(named) == len(tensors)
    return str(write_checkpoint(folder, named, {"text_config": config(), "vision_config": {"num_hidden_layers": 2}}))


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(RELEASES, 2)])
def test_a_composed_model_matches_itself_whatever_release_saved_it(first: str, second: str, tmp_path: Path) -> None:
    models = saved_by(first, tmp_path / "a", 0), saved_by(second, tmp_path / "b", 1)
    p = plan(linear(*models))
    assert all(len(s.inputs) == 2 for s in p.steps)
    assert p.dropped == ()
    assert warnings(p) == []


def clip(folder: Path, seed: int) -> str:
    """Both towers, of equal sizes."""
    towers = {
        n.replace("model.layers.", f"{part}.encoder.layers."): t
        for part in ("text_model", "vision_model")
        for n, t in decoder(seed=seed).items()
        if ".layers." in n
    }
    settings = {"model_type": "clip", "text_config": config(), "vision_config": {"num_hidden_layers": 2}}
    return str(write_checkpoint(folder, towers, settings))


@pytest.mark.parametrize("begin", ["", "vision_model."])
@pytest.mark.parametrize("first", ["tower", "whole"])
def test_a_tower_saved_alone_is_merged_with_that_of_a_whole_model(first: str, begin: str, tmp_path: Path) -> None:
    layers = {n.replace("model.", f"{begin}encoder."): t for n, t in decoder(seed=1).items() if ".layers." in n}
    settings = {"model_type": "clip_vision_model", "num_hidden_layers": 2}
    models = {"tower": str(write_checkpoint(tmp_path / "a", layers, settings)), "whole": clip(tmp_path / "b", 0)}
    p = plan(linear(models[first], *(model for name, model in models.items() if name != first)))
    merged = [names for _, names in sorted(sources(p).items()) if len(names) == 2]
    assert len(merged) == len(layers)
    for names in merged:
        tower, whole = sorted((name for _, name in names), key=lambda name: name.startswith("vision_model.encoder"))
        assert whole == "vision_model." + tower.removeprefix("vision_model.")


def test_models_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    bert = {f"encoder.layer.{i}.attention.query.weight": decoder()["lm_head.weight"] for i in range(2)}
    b = str(write_checkpoint(tmp_path / "b", bert, {"num_hidden_layers": 2}))
    problem = only(linear(a, b))
    assert str(problem) == (
        "models: the models have no tensor in common\n"
        f"  {a}: model.layers.0.input_layernorm.weight\n  {b}: encoder.layer.0.attention.query.weight\n"
        "  -> Merge models of one architecture."
    )


def test_layers_of_other_names_are_refused_although_embeddings_match(tmp_path: Path) -> None:
    """transformers has other names while it trains a ViT than on the Hub: both stacks would be copied side by side."""
    hub = {n.replace("model.layers.", "encoder.layer."): t for n, t in decoder().items()}
    a = str(write_checkpoint(tmp_path / "a", hub, config()))
    b = plan_help.model(tmp_path / "b", seed=1)
    for first, second in ((a, b), (b, a)):
        problem = str(only(linear(first, second)))
        assert problem.startswith("models: the layers of the models have different names, so that none of them would be merged")
        assert f"  {a}: encoder.layer.0.input_layernorm.weight\n" in problem
        assert f"  {b}: model.layers.0.input_layernorm.weight\n" in problem


PROJECTION = {"linear_1.bias": (4,), "linear_1.weight": (4, 6), "norm.weight": (6,)}


def renamed(folder: Path, modules: dict[str, dict[str, tuple[int, ...]]], seed: int = 0, **options: Any) -> str:
    """A decoder beside modules of these names."""
    tensors = {f"{module}.{name}": shape for module, shapes in modules.items() for name, shape in shapes.items()}
    return plan_help.model(folder, seed=seed, extra=tensors, **options)


@pytest.mark.parametrize(
    ("hub", "trained", "shapes"),
    [
        ("mlp_AR", "model.projector", PROJECTION),
        ("model.vision_projector", "model.projector", {"weight": (4, 6), "bias": (4,)}),
        ("codec.upsample", "codec.decoder.upsample", {"conv.weight": (4, 6)}),
        ("", "tracker_model", {"no_memory_embedding": (1, 1, 4)}),
    ],
)
def test_a_module_that_is_called_otherwise_while_it_trains_is_merged(
    hub: str, trained: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """PaddleOCR-VL, HyperCLOVA X, CSM and SAM 3 in transformers."""
    names = hub, trained
    a, b = (plan_help.model(tmp_path / x, seed=i, extra=under(names[i], shapes)) for i, x in enumerate("ab"))
    for first, second in ((0, 1), (1, 0)):
        p = plan(linear(*((a, b)[i] for i in (first, second))))
        assert all(len(s.inputs) == 2 for s in p.steps)
        last = next(iter(shapes))
        both = [next(iter(under(names[i], {last: ()}))) for i in (first, second)]
        assert sources(p)[both[0]] == [(0, both[0]), (1, both[1])]
        assert p.dropped == ()
        assert all("modules with other names hold the same tensors" in warning for warning in warnings(p))


def under(module: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{module}.{name}".removeprefix("."): shape for name, shape in shapes.items()}


def two_decoders(folder: Path, text: str, action: str, seed: int, *, width: int) -> str:
    """Two decoders beside each other, as in π0. width: of the second."""
    tensors = decoder(seed=seed, prefix=text, head=False, extra={"action_out_proj.weight": (4, 4)})
    narrow = decoder(seed=seed + 5, prefix=action, head=False)
    tensors |= {n: np.resize(t, [width if size == 4 else size for size in t.shape]) for n, t in narrow.items()}
    return str(write_checkpoint(folder, tensors, {"model_type": "pi0", "vocab_size": 8}))


HUB = "expert.paligemma.language_model.model.", "expert.gemma.model."
TRAINED = "model.vlm.language_model.", "model.dit."


def test_two_decoders_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    a = two_decoders(tmp_path / "a", *HUB, 0, width=2)
    b = two_decoders(tmp_path / "b", *TRAINED, 1, width=2)
    for models, names in (((a, b), (HUB, TRAINED)), ((b, a), (TRAINED, HUB))):
        p = plan(linear(*models))
        assert all(len(s.inputs) == 2 for s in p.steps)
        for first, second in zip(*names, strict=True):
            assert sources(p)[f"{first}norm.weight"] == [(0, f"{first}norm.weight"), (1, f"{second}norm.weight")]


def test_decoders_of_equal_sizes_that_no_word_tells_apart_are_refused(tmp_path: Path) -> None:
    a = two_decoders(tmp_path / "a", "one.", "two.", 0, width=4)
    b = two_decoders(tmp_path / "b", "first.", "second.", 1, width=4)
    for models in ((a, b), (b, a)):
        problem = str(only(linear(*models)))
        assert "parts of the models are alike except for their names, and both would be copied side by side" in problem


def test_an_embedding_is_no_other_one_because_their_sizes_are_equal(tmp_path: Path) -> None:
    """π0 stores the embedding of its second decoder as a head."""
    a = two_decoders(tmp_path / "a", *TRAINED, 0, width=4)
    tensors = decoder(seed=1, prefix=TRAINED[0], head=False, extra={"action_out_proj.weight": (4, 4)})
    tensors |= decoder(seed=6, prefix=TRAINED[1], head=False, without=[f"{TRAINED[1]}embed_tokens.weight"])
    b = str(write_checkpoint(tmp_path / "b", tensors, {"model_type": "pi0", "vocab_size": 8}))
    for models in ((a, b), (b, a)):
        assert str(only(linear(*models))).startswith(f"{a}: its {TRAINED[1]}embed_tokens.weight differs from {TRAINED[0]}embed")


def test_a_part_with_two_names_is_refused_where_more_is_unlike(tmp_path: Path) -> None:
    """A merge would copy it twice; which tensor is which is not certain enough to merge them."""
    a = renamed(tmp_path / "a", {"mlp_AR": PROJECTION, "model.mask": {"weight": (3, 4)}})
    b = renamed(tmp_path / "b", {"model.projector": PROJECTION, "model.gate": {"weight": (5, 4)}}, 1)
    assert str(only(linear(a, b))) == (
        "models: parts of the models are alike except for their names, and both would be copied side by side\n"
        f"  {a}: mlp_AR\n  {b}: model.projector\n"
        "  -> Merge models of one architecture; load a checkpoint of a training run with transformers, and save it, first."
    )


def test_many_matrices_of_equal_sizes_under_other_names_are_refused(tmp_path: Path) -> None:
    shapes = {f"{i}.{name}.weight": (4, 5 + i) for i in range(3) for name in ("q", "k")}
    a = renamed(tmp_path / "a", {"audio": shapes, "x": {"weight": (7, 4)}})
    b = renamed(tmp_path / "b", {"perception": {n.replace("q", "query"): s for n, s in shapes.items()}}, 1)
    for models in ((a, b), (b, a)):
        assert "parts of the models are alike except for their names" in str(only(linear(*models)))


@pytest.mark.parametrize(
    ("one", "other", "shapes"),
    [
        ("model.image_proj", "model.speech_proj", {"weight": (4, 6)}),
        ("reward_linear", "cost_linear", {"weight": (1, 4)}),
        ("vision_tower", "audio_tower", {f"{i}.fc{k}.weight": (4, 4) for i in range(3) for k in (1, 2)}),
    ],
)
def test_modules_of_different_use_stay_two(one: str, other: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    a, b = renamed(tmp_path / "a", {one: shapes}), renamed(tmp_path / "b", {other: shapes}, 1)
    origins = sources(plan(linear(a, b)))
    for name in shapes:
        assert origins[f"{one}.{name}"] == [(0, f"{one}.{name}")]
        assert origins[f"{other}.{name}"] == [(1, f"{other}.{name}")]


def test_only_models_of_one_class_have_parts_of_other_names(tmp_path: Path) -> None:
    a, b = renamed(tmp_path / "a", {"mlp_AR": PROJECTION}), renamed(tmp_path / "b", {"model.projector": PROJECTION}, 1)
    merged = plan(linear(a, b))
    name = next(iter(PROJECTION))
    assert sources(merged)[f"mlp_AR.{name}"] == [(0, f"mlp_AR.{name}"), (1, f"model.projector.{name}")]
    assert [w for w in merged.warnings if w.details == (f"model.projector: mlp_AR in {a}",)]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config() | {"model_type": "another"}))
    assert sources(plan(linear(a, b)))[f"mlp_AR.{name}"] == [(0, f"mlp_AR.{name}")]


@pytest.mark.parametrize(
    ("one", "other"),
    [("qa_outputs", "classifier"), ("score", "v_head"), ("classifier.dense", "lm_head.dense"), ("model.gate", "model.scorer")],
)
def test_two_heads_of_one_size_stay_two(one: str, other: str, tmp_path: Path) -> None:
    shapes = {"weight": (2, 4), "bias": (2,)}
    models = renamed(tmp_path / "a", {one: shapes}, head=False), renamed(tmp_path / "b", {other: shapes}, 1, head=False)
    origins = sources(plan(linear(*models)))
    assert origins[f"{one}.weight"] == [(0, f"{one}.weight")]
    assert origins[f"{other}.weight"] == [(1, f"{other}.weight")]


def test_a_head_that_another_release_calls_otherwise_is_merged(tmp_path: Path) -> None:
    """GPT-NeoX has `embed_out.weight` on the Hub, and `lm_head.weight` in checkpoints of training runs."""
    hub = {n.replace("lm_head", "embed_out"): t for n, t in decoder().items()}
    a = str(write_checkpoint(tmp_path / "a", hub, config()))
    b = plan_help.model(tmp_path / "b", seed=1)
    assert sources(plan(linear(a, b)))["embed_out.weight"] == [(0, "embed_out.weight"), (1, "lm_head.weight")]
    p = plan(linear(b, a))
    assert sources(p)["lm_head.weight"] == [(0, "lm_head.weight"), (1, "embed_out.weight")]
    assert p.dropped == ()
    assert warnings(p) == []


@pytest.mark.parametrize("third", [True, False])
def test_bytes_of_a_file_are_taken_from_the_model_that_stores_them(tmp_path: Path, third: bool) -> None:
    """ComfyUI's UMT5 has its tokenizer as a tensor: what is made of the keys of a GGUF file is shorter."""
    whole, part = np.arange(9, dtype=np.uint8), np.arange(7, dtype=np.uint8)
    a, b = (str(write_checkpoint(tmp_path / n, {**decoder(), "spiece": d}, config())) for n, d in (("a", part), ("b", whole)))
    with_plain = [plan_help.model(tmp_path / "c", seed=1)] if third else []
    p = plan(linear(a, b, *with_plain))
    assert sources(p)["spiece"] == [(0, "spiece")]
    assert [(d.model, d.tensor, d.reason) for d in p.dropped] == [(1, "spiece", f"bytes of a file, taken from {a}")]
    assert warnings(p)[0] == f"spiece: bytes of a file are not merged; taken from {a}\n  {a}: 7 bytes\n  {b}: 9 bytes"


def test_a_tensor_that_would_be_lost_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known that loses one, so a bug is made on purpose."""
    a, b = (plan_help.model(tmp_path / n, seed=i) for i, n in enumerate("ab"))
    real = StepMaker._layer

    def forgetful(self: StepMaker, prefix: str, segment: Any, layer: int, i: int, t: float) -> None:
        if layer != 1:
            real(self, prefix, segment, layer, i, t)

    monkeypatch.setattr(StepMaker, "_layer", forgetful)
    errors = problems(linear(a, b))
    assert [type(f) for f in errors] == [TensorLost, TensorLost]
    assert str(errors[0]) == (
        f"model.layers.1.input_layernorm.weight: 4 tensors of {a} would not be in the output\n"
        "  -> Report this recipe: every tensor must be used, or be left out for a stated reason."
    )


NAMES = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.norm.bias",
        "lm_head.weight",
        "lm_head.bias",
        "score.weight",
        "model.vision_tower.patch_embed.weight",
        "model.rotary_emb.inv_freq",
        "embeddings.position_ids",
        "shared.weight",
        *(f"model.layers.{i}.{s}" for i in range(4) for s in ("mlp.w.weight", "attn.q.weight", "attn.q.bias")),
        *(f"model.layers.{i}.attn.rotary_emb.inv_freq" for i in range(4)),
        *(f"model.layers.{i}.mlp.experts.{e}.w.weight" for i in range(3) for e in range(2)),
        *(f"model.vision_tower.layers.{i}.w.weight" for i in range(2)),
        *(f"encoder.layers.{i}.w.weight" for i in range(2)),
        *(f"language_model.model.layers.{i}.mlp.w.weight" for i in range(2)),
        "language_model.lm_head.weight",
    ]
)
CONFIGS = st.sampled_from(
    [
        None,
        {},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 3, "tie_word_embeddings": True},
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ]
)


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_models_hold_every_tensor_is_used_or_dropped_or_the_recipe_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("random")
    common = data.draw(st.sets(NAMES, min_size=1, max_size=16))
    models = []
    for n in range(data.draw(st.integers(2, 3))):
        names = common ^ data.draw(st.sets(NAMES, max_size=data.draw(st.sampled_from([0, 0, 1, 4]))))
        names = names or common
        tensors = {
            name: np.zeros(2, np.int64) if "position_ids" in name else np.zeros((3, 2) if "weight" in name else 3, np.float32)
            for name in sorted(names)
        }
        models.append(str(write_checkpoint(folder / f"m{n}", tensors, data.draw(CONFIGS))))
    method = data.draw(st.sampled_from(["linear", "task_arithmetic", "passthrough"]))
    recipe: dict[str, Any] = {"merge_method": method, "parameters": {} if method == "passthrough" else {"weight": 1}}
    if method == "task_arithmetic" or data.draw(st.booleans()):
        recipe["base_model"] = models[0]
    listed = [{"model": m} for m in models]
    ranges = data.draw(st.lists(st.sampled_from([[0, 1], [0, 2], [1, 2]]), min_size=1, max_size=2))
    cuts = [[{**m, "layer_range": r} for m in listed] for r in ranges]
    form = data.draw(st.sampled_from(["models", "slices", "modules"]))
    if method == "passthrough":
        listed, cuts = listed[:1], [[source] for group in cuts for source in group]
    recipe["models" if form == "models" else form] = {
        "models": listed,
        "slices": [{"sources": sources} for sources in cuts],
        "modules": {"model": {"models": listed}},
    }[form]
    outcome: Any = None
    try:
        outcome = plan(recipe)  # checks the account
    except PlanError as error:
        outcome = error
    lost = [x for x in getattr(outcome, "problems", ()) if isinstance(x, TensorLost)]
    assert lost == [], str(outcome)


def test_layers_that_a_models_own_config_does_not_count_still_match(tmp_path: Path) -> None:
    """Without a config, layers 0 and 2 are no stack: there is a hole. The donor's config says that they are layers."""
    pruned = [f"model.layers.1.{name}" for name in LAYER]
    a = str(write_checkpoint(tmp_path / "a", decoder(3, without=pruned), config(3)))
    b = str(write_checkpoint(tmp_path / "b", decoder(3, seed=1, without=pruned)))
    p = plan(linear(a, b))
    assert all(len(s.inputs) == 2 for s in p.steps)
    c = str(write_checkpoint(tmp_path / "c", decoder(3, seed=1)))
    assert len(problems(linear(a, c))) == 4


def test_a_stack_is_not_taken_for_one_whose_name_the_model_uses_itself(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 1)
    tensors = decoder(1, seed=1) | {f"language_model.{n}": t for n, t in decoder(1, seed=2).items() if "layers" in n}
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    b = str(write_checkpoint(tmp_path / "b", tensors))
    assert {type(x) for x in problems(linear(a, b))} == {MismatchError}


def test_extra_layers_match_by_their_rank_though_their_numbers_differ(tmp_path: Path) -> None:
    """Stacking a deeper and a shallower model: both call their prediction layer by the number after their last."""
    mtp = [{f"model.layers.{n}.eh_proj.weight": (4, 8)} for n in (2, 4)]
    settings = {"num_nextn_predict_layers": 1}
    a, b = (
        plan_help.model(tmp_path / x, n, seed=n, extra=extra, settings=settings)
        for x, n, extra in zip("ab", (2, 4), mtp, strict=True)
    )
    sources_ = [{"model": m, "layer_range": [0, 2]} for m in (a, b)]
    p = plan({"merge_method": "linear", "slices": [{"sources": sources_}], "parameters": {"weight": 1}})
    assert sources(p)["model.layers.2.eh_proj.weight"] == [
        (0, "model.layers.2.eh_proj.weight"),
        (1, "model.layers.4.eh_proj.weight"),
    ]
