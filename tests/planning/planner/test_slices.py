"""Stacks of layers: numbering, which slice gives what is outside the layers, config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import config, decoder, only, plan, problems, sources, warnings
from weightsmith._base.errors import LayerError, ShapeError

UP = "mlp.up_proj.weight"


def cut(model: str, start: int, end: int, **keys: Any) -> dict[str, Any]:
    return {"model": model, "layer_range": [start, end], **keys}


def stack(*cuts: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "slices": [{"sources": [c]} for c in cuts], **options}


def layer_sources(p: Any, n: int) -> list[list[tuple[int, str]]]:
    return [sources(p)[f"model.layers.{i}.{UP}"] for i in range(n)]


def up(model: int, layer: int) -> list[tuple[int, str]]:
    return [(model, f"model.layers.{layer}.{UP}")]


def test_layers_are_numbered_anew_in_the_order_of_the_slices(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 4)
    p = plan(stack(cut(a, 0, 3), cut(a, 1, 4), cut(a, 0, 1)))
    assert layer_sources(p, 7) == [up(0, i) for i in (0, 1, 2, 1, 2, 3, 0)]
    assert p.config is not None
    assert p.config["num_hidden_layers"] == 7
    assert p.dropped == ()


def test_embedding_is_the_first_slices_and_norm_and_head_the_lasts(tmp_path: Path) -> None:
    a, b, c = (plan_help.model(tmp_path / n, 4, seed=i) for i, n in enumerate("abc"))
    p = plan(stack(cut(b, 0, 2), cut(a, 1, 2), cut(c, 2, 4)))
    assert [m.ref for m in p.models] == [b, a, c]
    origins = sources(p)
    assert origins["model.embed_tokens.weight"] == [(0, "model.embed_tokens.weight")]
    assert origins["model.norm.weight"] == [(2, "model.norm.weight")]
    assert origins["lm_head.weight"] == [(2, "lm_head.weight")]
    reasons = {(d.model, d.tensor): d.reason for d in p.dropped}
    assert reasons[0, "lm_head.weight"] == "it is taken from the last slice, which has another model"
    assert reasons[2, "model.embed_tokens.weight"] == "it is taken from the first slice, which has another model"
    assert reasons[1, f"model.layers.0.{UP}"] == "its layer is in no slice"


def test_a_head_called_embed_out_is_the_last_slices(tmp_path: Path) -> None:
    extra = {"embed_out.weight": (8, 4)}
    a, b = (plan_help.model(tmp_path / n, 4, seed=i, head=False, extra=extra) for i, n in enumerate("ab"))
    p = plan(stack(cut(a, 0, 2), cut(b, 2, 4)))
    assert sources(p)["embed_out.weight"] == [(1, "embed_out.weight")]


def test_each_slice_is_merged_by_itself(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / n, 4, seed=i) for i, n in enumerate("ab"))
    slices = [
        {"sources": [cut(a, 0, 2), cut(b, 0, 2)], "parameters": {"t": [0, 1]}},
        {"sources": [cut(b, 1, 4), cut(a, 0, 3)], "parameters": {"t": 0.25}},
    ]
    p = plan({"merge_method": "slerp", "base_model": a, "slices": slices})
    assert layer_sources(p, 5) == [up(0, i) + up(1, j) for i, j in ((0, 0), (1, 1), (0, 1), (1, 2), (2, 3))]
    t = {s.out.name: p.settings[s.settings].shared["t"] for s in p.steps}
    assert [t[f"model.layers.{i}.{UP}"] for i in range(5)] == [0, 1, 0.25, 0.25, 0.25]
    assert (t["model.embed_tokens.weight"], t["lm_head.weight"]) == (0, 0.25)


def test_per_layer_lists_of_the_config_follow(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    a = plan_help.model(tmp_path / "a", 4, settings={"layer_types": kinds})
    p = plan(stack(cut(a, 1, 4), cut(a, 0, 2)))
    assert p.config is not None
    assert p.config["layer_types"] == [kinds[i] for i in (1, 2, 3, 0, 1)]
    assert warnings(p) == []  # what follows the layers is no warning: the plan lists the changes of config.json


def test_layers_of_a_deeper_model_take_the_kind_they_had_there(tmp_path: Path) -> None:
    """Layers 4 and 5 of b are numbers that a, whose config is taken, does not have."""
    short = ["sliding_attention", "full_attention"]
    a = plan_help.model(tmp_path / "a", 2, settings={"layer_types": short})
    b = plan_help.model(tmp_path / "b", 6, seed=1, settings={"layer_types": [short[i] for i in (0, 0, 1, 0, 1, 0)]})
    p = plan(stack(cut(a, 0, 2), cut(b, 3, 6)))
    assert layer_sources(p, 5) == [up(0, 0), up(0, 1), up(1, 3), up(1, 4), up(1, 5)]
    assert p.config is not None
    assert p.config["layer_types"] == [short[i] for i in (0, 1, 0, 1, 0)]
    assert p.config["num_hidden_layers"] == 5


def test_a_layer_of_a_kind_that_the_donor_has_not_is_refused(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 2, settings={"layer_types": ["full_attention"] * 2})
    b = plan_help.model(tmp_path / "b", 2, seed=1, settings={"layer_types": ["linear_attention"] * 2})
    problem = only(stack(cut(a, 0, 2), cut(b, 1, 2)))
    assert isinstance(problem, LayerError)
    assert str(problem).startswith(f"slices[1]: layer 1 of {b} is of a kind that no layer of {a} has")
    assert "layer_types = 'linear_attention'" in str(problem)


def test_kinds_are_those_of_the_stack_that_is_cut(tmp_path: Path) -> None:
    """A vision tower whose layers are all of one kind says nothing of the decoder's."""
    tower = {f"vision_tower.layers.{i}.{name}": (4,) for i in range(2) for name in ("norm1.weight", "norm2.weight")}
    vision = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}

    def write(name: str, kind: str) -> str:
        text = {"num_hidden_layers": 2, "vocab_size": 8, "layer_types": [kind] * 2}
        tensors = decoder(2, prefix="language_model.", extra=tower)
        settings = {"model_type": "llava", "text_config": text, "vision_config": vision}
        return str(write_checkpoint(tmp_path / name, tensors, {"architectures": ["LlavaX"], **settings}))

    a, b = write("a", "full_attention"), write("b", "linear_attention")
    problem = only(stack(cut(a, 0, 2), cut(b, 1, 2)))
    assert isinstance(problem, LayerError)
    assert "layer_types = 'linear_attention'" in str(problem)


def test_layers_of_another_size_are_refused(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 2)
    tensors = decoder(2, seed=1)
    tensors = {n: (t if "mlp" not in n else t.repeat(2, axis=1 if "down" in n else 0)) for n, t in tensors.items()}
    b = str(write_checkpoint(tmp_path / "b", tensors, config()))
    problem = only(stack(cut(a, 0, 2), cut(b, 0, 1)))
    assert isinstance(problem, LayerError)
    text = str(problem)
    assert text.startswith("slices[1]: model.layers.0.mlp.down_proj.weight: the config.json of")
    assert f"{a}: [4, 6]" in text
    assert f"{b}: [4, 12]" in text


def test_embedding_and_head_with_unequal_rows_are_refused(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 2)
    b = plan_help.model(tmp_path / "b", 2, vocab=10, settings={"vocab_size": 10})
    problem = only(stack(cut(a, 0, 1), cut(b, 0, 1)))
    assert isinstance(problem, ShapeError)
    assert "lm_head.weight: tables of the vocabulary would have different numbers of rows" in str(problem)


def test_a_bias_of_the_head_has_the_rows_of_the_embedding(tmp_path: Path) -> None:
    def with_bias(name: str, rows: int) -> str:
        settings = {"vocab_size": rows, "tie_word_embeddings": True}
        extra = {"cls.predictions.bias": (rows,)}
        return plan_help.model(tmp_path / name, 2, vocab=rows, head=False, extra=extra, settings=settings)

    a, b = with_bias("a", 8), with_bias("b", 10)
    problem = only(stack(cut(b, 0, 1), cut(a, 0, 1)))
    assert isinstance(problem, ShapeError)
    assert "tables of the vocabulary would have different numbers of rows" in str(problem)
    assert "cls.predictions.bias: 8 rows" in str(problem)
    p = plan(stack(cut(b, 0, 1), cut(b, 0, 1), base_model=a))
    assert p.config is not None
    assert p.config["vocab_size"] == 10


def test_vocab_size_follows_the_embedding(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 2)
    b = plan_help.model(tmp_path / "b", 2, vocab=10, settings={"vocab_size": 10})
    p = plan(stack(cut(b, 0, 1), cut(b, 0, 2), base_model=a))
    assert p.config is not None
    assert p.config["vocab_size"] == 10


def test_sources_of_unequal_length_and_layers_out_of_range_are_all_reported(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / n, 4, seed=i) for i, n in enumerate("ab"))
    errors = problems(f"""merge_method: linear
slices:
  - sources:
      - {{model: {a}, layer_range: [0, 2]}}
      - {{model: {b}, layer_range: [0, 3]}}
  - sources:
      - {{model: {a}, layer_range: [2, 5]}}
      - {{model: {b}, layer_range: [1, 4]}}
parameters: {{weight: 1}}
""")
    assert [str(f) for f in errors] == [
        "<text>:3:5: the sources of a slice have different numbers of layers\n"
        f"  {a} [0, 2]: 2 layers\n  {b} [0, 3]: 3 layers\n  -> Give ranges of equal length.",
        f"<text>:7:{32 + len(a)}: layer_range [2, 5] of {a}, which has 4 layers\n"
        "  -> Write at most [0, 4]: layers count from 0, and the end is not included.",
    ]


def test_models_of_different_depth_are_refused_without_slices(tmp_path: Path) -> None:
    a, b = plan_help.model(tmp_path / "a", 2), plan_help.model(tmp_path / "b", 3)
    problem = only({"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 1}})
    assert str(problem) == (
        "models: the models have different numbers of layers under model.layers.\n"
        f"  {a}: 2 layers\n  {b}: 3 layers\n  -> Choose layers of each with 'slices'."
    )


def test_output_tensors_are_in_the_order_of_a_checkpoint(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 11)
    with weightsmith.open_checkpoint(a) as checkpoint:
        order = list(checkpoint.specs)
    assert [s.out.name for s in plan({"merge_method": "passthrough", "models": [{"model": a}]}).steps] == order
    b = plan_help.model(tmp_path / "b", 12)
    with weightsmith.open_checkpoint(b) as checkpoint:
        order = list(checkpoint.specs)
    assert [s.out.name for s in plan(stack(cut(a, 0, 11), cut(a, 3, 4))).steps] == order


def test_buffers_do_not_make_layers_unlike(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (2,) for i in range(2)}
    a, b = plan_help.model(tmp_path / "a", 2), plan_help.model(tmp_path / "b", 2, extra=extra)
    assert layer_sources(plan(stack(cut(a, 0, 2), cut(b, 1, 2))), 3) == [up(0, 0), up(0, 1), up(1, 1)]


def moe(folder: Path, seed: int = 0) -> str:
    """One dense layer, then two with experts, as config.json says."""
    tensors = decoder(3, seed=seed)
    for i in (1, 2):
        for part in ("down", "up"):
            del tensors[f"model.layers.{i}.mlp.{part}_proj.weight"]
        tensors |= {f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": decoder()["model.norm.weight"] for e in range(2)}
    settings = {"first_k_dense_replace": 1, "n_routed_experts": 2, "model_type": "deepseek_v3"}
    write_checkpoint(folder, tensors, config(3, **settings))
    return str(folder)


def test_a_stack_that_the_config_cannot_express_is_refused_with_its_place(tmp_path: Path) -> None:
    a = moe(tmp_path / "a")
    p = plan(stack(cut(a, 0, 3), cut(a, 1, 3)))
    assert p.config is not None
    assert (p.config["num_hidden_layers"], p.config["first_k_dense_replace"]) == (5, 1)
    p = plan(stack(cut(a, 0, 1), cut(a, 0, 3)))
    assert p.config is not None
    assert (p.config["num_hidden_layers"], p.config["first_k_dense_replace"]) == (4, 2)
    problem = only(
        f"merge_method: passthrough\nslices:\n  - sources: [{{model: {a}, layer_range: [1, 3]}}]\n"
        f"  - sources: [{{model: {a}, layer_range: [0, 2]}}]\n"
    )
    assert isinstance(problem, LayerError)
    assert str(problem).startswith("<text>:2:1: first_k_dense_replace = 1 of config.json cannot express this stack")


def test_a_refused_stack_names_what_its_models_lack(tmp_path: Path) -> None:
    """A tensor is missing in one layer of a model, so that no config.json seems to describe its layers."""
    hole = plan_help.model(tmp_path / "hole", 6, without=["model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
    whole = plan_help.model(tmp_path / "whole", 6, seed=1)
    lacks = [
        f"{hole} has no model.layers.3.mlp.up_proj.weight, which 5 other layers have",
        f"{hole} has no norm behind its last layer",
    ]
    for recipe in (stack(cut(hole, 0, 4), cut(hole, 2, 6)), stack(cut(whole, 0, 4), cut(hole, 2, 6))):
        finding = only(recipe).finding
        assert list(finding.details[-2:]) == lacks
        assert finding.fix.endswith(" Download or save a model again, if it should have what it lacks.")
    short = plan_help.model(tmp_path / "short", 5, settings={"num_hidden_layers": 6})
    assert only(stack(cut(short, 0, 6))).finding.details == (
        f"{short} has no layer 5 under model.layers.: config.json counts 6 layers",
    )


def test_extra_layers_stand_after_the_new_last_layer(tmp_path: Path) -> None:
    """A multi-token-prediction layer has the number after the last: it must move with it."""
    mtp = {"model.layers.3.eh_proj.weight": (4, 8), "model.layers.3.self_attn.q_proj.weight": (4, 4)}
    a = plan_help.model(tmp_path / "a", 3, extra=mtp, settings={"num_nextn_predict_layers": 1})
    p = plan(stack(cut(a, 0, 3), cut(a, 1, 3)))
    assert sources(p)["model.layers.5.eh_proj.weight"] == [(0, "model.layers.3.eh_proj.weight")]
    assert sources(p)["model.layers.5.self_attn.q_proj.weight"] == [(0, "model.layers.3.self_attn.q_proj.weight")]
    assert p.dropped == ()
    whole = plan({"merge_method": "passthrough", "models": [{"model": a}]})
    assert sources(whole)["model.layers.3.eh_proj.weight"] == [(0, "model.layers.3.eh_proj.weight")]


def test_prediction_layers_beside_the_stack_stay_whole(tmp_path: Path) -> None:
    mtp = {f"mtp.layers.0.{name}": shape for name, shape in plan_help.LAYER.items()} | {"mtp.norm.weight": (4,)}
    a = plan_help.model(tmp_path / "a", 3, extra=mtp)
    p = plan(stack(cut(a, 0, 2), cut(a, 1, 3)))
    assert sources(p)[f"mtp.layers.0.{UP}"] == [(0, f"mtp.layers.0.{UP}")]
    assert sources(p)["mtp.norm.weight"] == [(0, "mtp.norm.weight")]
    assert len(layer_sources(p, 4)) == 4


def encoder_decoder(folder: Path, seed: int = 0) -> str:
    part = {n.removeprefix("model."): t for n, t in decoder(2, seed=seed, head=False).items() if "layers" in n}
    tensors = {f"{side}.block.{n.removeprefix('layers.')}": t for side in ("encoder", "decoder") for n, t in part.items()}
    tensors["shared.weight"] = decoder(seed=seed)["lm_head.weight"]
    settings = {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 8}
    write_checkpoint(folder, tensors, settings)
    return str(folder)


def with_positions(folder: Path, rows: int) -> str:
    sides = ("encoder", "decoder")
    parts = {
        s: decoder(2, head=False, prefix=f"model.{s}.", extra={f"model.{s}.embed_positions.weight": (rows, 4)}) for s in sides
    }
    tensors = {n: t for part in parts.values() for n, t in part.items() if "embed_tokens" not in n}
    tensors["model.shared.weight"] = decoder()["lm_head.weight"]
    counts = {f"{side}_layers": 2 for side in sides}
    settings = {"model_type": "plbart", **counts, "max_position_embeddings": rows, "vocab_size": 8}
    return str(write_checkpoint(folder, tensors, settings))


def test_positions_of_another_size_than_config_json_says_are_refused(tmp_path: Path) -> None:
    a, b = with_positions(tmp_path / "a", 6), with_positions(tmp_path / "b", 12)
    sides = {side: {"slices": [{"sources": [cut(m, 0, 1)]}]} for side, m in (("model.encoder", a), ("model.decoder", b))}
    problem = only({"merge_method": "passthrough", "modules": sides})
    assert isinstance(problem, ShapeError)
    assert str(problem) == (
        f"model.decoder.embed_positions.weight: the config.json of {a} builds this tensor with another shape\n"
        f"  {b}: [12, 4] BF16\n"
        f"  {a}: [6, 4] BF16\n"
        f"  -> Choose models of one size, or take what surrounds the layers from {a}: embeddings and positions come from the "
        "first slice, norms and heads from the last."
    )
    sides["model.decoder"]["slices"] = [{"sources": [cut(a, 0, 2)]}, {"sources": [cut(b, 0, 2)]}]  # layers alone may be b's
    assert plan({"merge_method": "passthrough", "modules": sides}).config is not None


def test_slices_of_an_encoder_decoder_say_how_to_write_modules(tmp_path: Path) -> None:
    a = encoder_decoder(tmp_path / "a")
    problem = only(f"merge_method: passthrough\nslices:\n  - sources: [{{model: {a}, layer_range: [0, 2]}}]\n")
    assert str(problem) == (
        "<text>:2:1: the model has several stacks of layers, and 'slices' does not say which is meant\n"
        "  decoder: 2 layers (decoder.block.N)\n  encoder: 2 layers (encoder.block.N)\n"
        "  -> Write modules: {decoder: {slices: [...]}, encoder: {slices: [...]}}."
    )
    slices = stack(cut(a, 0, 2), cut(a, 1, 2))["slices"]
    p = plan({"merge_method": "passthrough", "modules": {"decoder": {"slices": slices}}})
    assert p.config is not None
    assert (p.config["num_layers"], p.config["num_decoder_layers"]) == (2, 3)
    assert warnings(p)[-1].startswith("modules: modules encoder, shared are not mentioned, and copied from ")


def test_wrong_modules_are_reported_at_once(tmp_path: Path) -> None:
    a = encoder_decoder(tmp_path / "a")
    errors = problems(f"""merge_method: passthrough
modules:
  decodr: {{models: [{{model: {a}}}]}}
  shared: {{slices: [{{sources: [{{model: {a}, layer_range: [0, 1]}}]}}]}}
  encoder: {{slices: [{{sources: [{{model: {a}, layer_range: [0, 9]}}]}}]}}
""")
    assert [str(f).split("\n")[0] for f in errors] == [
        "<text>:3:3: the model has no module 'decodr' (did you mean 'decoder'?)",
        "<text>:4:3: module 'shared' has no stacks of layers, and 'slices' needs one",
        f"<text>:5:{56 + len(a)}: layer_range [0, 9] of {a}, which has 2 layers",
    ]


def test_a_model_without_layers_cannot_be_sliced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {"w.weight": decoder()["lm_head.weight"]}, {})
    problem = only(stack(cut(str(tmp_path / "a"), 0, 1)))
    assert str(problem) == "slices: the model has no stack of layers that 'slices' could cut\n  -> Use 'models'."


def test_alignment_heads_of_whisper_follow_the_layers(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 4)
    generation = {"alignment_heads": [[1, 0], [3, 5], [3, 6]], "max_length": 9}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(generation))

    def moved(*cuts: dict[str, Any]) -> Any:
        data = plan(stack(*cuts)).files.get("generation_config.json")
        return None if data is None else json.loads(data)

    assert moved(cut(a, 0, 2), cut(a, 1, 4)) == {"alignment_heads": [[2, 0], [4, 5], [4, 6]], "max_length": 9}
    assert moved(cut(a, 0, 2)) == {"alignment_heads": [[1, 0]], "max_length": 9}
    assert moved(cut(a, 0, 1)) == {"max_length": 9}
    assert moved(cut(a, 0, 4)) is None
