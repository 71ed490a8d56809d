"""Models that use their embedding as head, beside models that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import config, decoder, plan, problems, sources, warnings
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.planner import tensor_data

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}


def pair(*models: str | dict[str, Any], method: str = "linear", **keys: Any) -> dict[str, Any]:
    return {"merge_method": method, "models": [{"model": m} for m in models], "parameters": {"weight": 1}, **keys}


def tied(folder: Path, *, stores: bool = False, copied: bool = False, flag: bool | None = True, **keys: Any) -> str:
    settings = {**config(), **TIED}
    if flag is None:
        del settings["tie_word_embeddings"]
    tensors = decoder(head=stores or copied, **keys)
    write_checkpoint(folder, {**tensors, **({HEAD: tensors[EMBED]} if copied else {})}, settings)
    return str(folder)


def test_models_that_tie_stay_tied(tmp_path: Path) -> None:
    p = plan(pair(tied(tmp_path / "a"), tied(tmp_path / "b", seed=1)))
    assert HEAD not in sources(p)
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is True
    assert warnings(p) == []


@pytest.mark.parametrize("flag", [True, None])
def test_a_tied_donor_and_an_untied_model_give_an_untied_one(tmp_path: Path, flag: bool | None) -> None:
    a, b = tied(tmp_path / "a", flag=flag), plan_help.model(tmp_path / "b", seed=1)
    for method, base in (("linear", {}), ("task_arithmetic", {"base_model": a})):
        p = plan(pair(a, b, method=method, **base))
        assert sources(p)[HEAD] == [(0, EMBED), (1, HEAD)]
        assert sources(p)[EMBED] == [(0, EMBED), (1, EMBED)]
        assert p.config is not None
        assert p.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("flag", [True, None])
def test_an_untied_donor_and_a_tied_model_give_an_untied_one(tmp_path: Path, flag: bool | None) -> None:
    a, b = plan_help.model(tmp_path / "a", seed=1), tied(tmp_path / "b", flag=flag)
    p = plan(pair(a, b))
    assert sources(p)[HEAD] == [(0, HEAD), (1, EMBED)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_tied_head_of_t5_is_not_the_head_of_an_untied_model(tmp_path: Path, first: str) -> None:
    """T5 divides what a tied head reads by the root of the width."""
    for name, flag in (("a", True), ("b", False)):
        settings = {**config(), "model_type": "t5", "tie_word_embeddings": flag}
        write_checkpoint(tmp_path / name, decoder(head=not flag), settings)
    paths = [str(tmp_path / name) for name in sorted("ab", key=first.__ne__)]
    (error,) = problems(pair(*paths))
    assert "scale what a tied head reads" in str(error)


@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_that_one_of_the_tied_models_stores_is_left_out(tmp_path: Path, which: int) -> None:
    a, b = (tied(tmp_path / n, copied=i == which, seed=i) for i, n in enumerate("ab"))
    p = plan(pair(a, b))
    assert HEAD not in sources(p)
    assert [(d.model, d.tensor) for d in p.dropped] == [(which, HEAD)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is True
    assert "tied tensors are written once" in warnings(p)[0]


@pytest.mark.parametrize("which", [0, 1])
def test_a_head_that_is_no_copy_of_the_embedding_is_not_left_out(tmp_path: Path, which: int) -> None:
    """PEFT merges adapters of both into a tied model, and leaves config.json as it was."""
    models = [tied(tmp_path / n, stores=i == which, seed=i) for i, n in enumerate("ab")]
    (error,) = problems(pair(*models))
    assert str(error).startswith(f"{models[which]}: its head {HEAD} is stored and differs from {EMBED}")
    (tmp_path / "ab"[which] / "config.json").write_text(json.dumps({**config(), **UNTIED}))
    p = plan(pair(*models))
    assert sources(p)[HEAD] == [(i, HEAD if i == which else EMBED) for i in range(2)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is False


def test_copies_that_all_tied_models_store_are_merged(tmp_path: Path) -> None:
    p = plan(pair(*(tied(tmp_path / n, stores=True, seed=i) for i, n in enumerate("ab"))))
    assert sources(p)[HEAD] == [(0, HEAD), (1, HEAD)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is True


def test_a_tied_donor_that_stores_its_head_is_untied_by_an_untied_model(tmp_path: Path) -> None:
    a, b = tied(tmp_path / "a", stores=True), plan_help.model(tmp_path / "b", seed=1)
    p = plan(pair(a, b))
    assert sources(p)[HEAD] == [(0, HEAD), (1, HEAD)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is False


def test_a_model_that_stores_only_the_head_of_the_two_is_merged_with_it(tmp_path: Path) -> None:
    """Some writers keep `lm_head.weight` of the two names."""
    write_checkpoint(tmp_path / "a", decoder(without=[EMBED]), config(tie_word_embeddings=True))
    p = plan(pair(str(tmp_path / "a"), tied(tmp_path / "b", seed=1)))
    assert sources(p)[EMBED] == [(0, HEAD), (1, EMBED)]
    assert HEAD not in sources(p)
    assert p.dropped == ()


def test_a_bare_model_without_a_head_does_not_lend_its_embedding(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    b = plan_help.model(tmp_path / "b", seed=1, head=False)
    p = plan(pair(a, b))
    assert sources(p)[HEAD] == [(0, HEAD)]
    assert any("1 tensor that only" in w for w in warnings(p))


def test_a_flag_in_the_text_part_counts_and_is_changed_there(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "tie_word_embeddings": True, "vocab_size": 8}
    write_checkpoint(tmp_path / "a", decoder(head=False), {"text_config": text})
    write_checkpoint(tmp_path / "b", decoder(seed=1), {"text_config": {**text, "tie_word_embeddings": False}})
    p = plan(pair(str(tmp_path / "a"), str(tmp_path / "b")))
    assert p.config is not None
    assert (p.config["tie_word_embeddings"], p.config["text_config"]["tie_word_embeddings"]) == (False, False)


def stacked(a: str, b: str) -> dict[str, Any]:
    slices = [{"sources": [{"model": m, "layer_range": [0, 1]}]} for m in (a, b)]
    return {"merge_method": "passthrough", "slices": slices}


def test_a_stack_that_ends_in_an_untied_model_has_its_head(tmp_path: Path) -> None:
    p = plan(stacked(tied(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)))
    assert sources(p)[HEAD] == [(1, HEAD)]
    assert sources(p)[EMBED] == [(0, EMBED)]
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is False


def test_a_stack_that_ends_in_a_tied_model_has_its_embedding_as_head(tmp_path: Path) -> None:
    p = plan(stacked(plan_help.model(tmp_path / "a"), tied(tmp_path / "b", seed=1)))
    assert sources(p)[HEAD] == [(1, EMBED)]
    assert sources(p)[EMBED] == [(0, EMBED)]


def test_a_stack_of_tied_models_has_one_embedding_and_says_so(tmp_path: Path) -> None:
    a, b = tied(tmp_path / "a"), tied(tmp_path / "b", seed=1)
    p = plan(stacked(a, b))
    assert sources(p)[EMBED] == [(0, EMBED)]
    assert HEAD not in sources(p)
    assert any(f"the head is tied to the embedding, so it comes from {a} too" in w for w in warnings(p))


def seq2seq(folder: Path, names: list[str], seed: int) -> str:
    layers = {n.removeprefix("model."): t for n, t in decoder(2, seed=seed, head=False).items() if "layers" in n}
    tensors = {f"{side}.block.{n.removeprefix('layers.')}": t for side in ("encoder", "decoder") for n, t in layers.items()}
    matrix = decoder(seed=seed)[HEAD]
    write_checkpoint(folder, {**tensors, **dict.fromkeys(names, matrix)}, {"num_layers": 2, "num_decoder_layers": 2})
    return str(folder)


def test_copies_of_a_shared_embedding_of_an_encoder_decoder_are_written_once(tmp_path: Path) -> None:
    a = seq2seq(tmp_path / "a", ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD], 0)
    b = seq2seq(tmp_path / "b", ["shared.weight"], 1)
    for models in ((a, b), (b, a)):
        p = plan(pair(*models))
        assert sources(p)["shared.weight"] == [(0, "shared.weight"), (1, "shared.weight")]
        assert not any("embed_tokens" in name for name in sources(p))


def test_a_shared_embedding_stored_under_one_copys_name_is_found(tmp_path: Path) -> None:
    a = seq2seq(tmp_path / "a", ["encoder.embed_tokens.weight"], 0)
    b = seq2seq(tmp_path / "b", ["shared.weight"], 1)
    p = plan(pair(a, b))
    assert sources(p)["shared.weight"] == [(0, "encoder.embed_tokens.weight"), (1, "shared.weight")]


ENCODER, DECODER = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))


def marian(folder: Path, seed: int, *, tied: bool, shared: bool = False) -> str:
    """With an embedding for each side, or a shared one; a tied head is the decoder's."""
    layers = {n.removeprefix("model."): t for n, t in decoder(2, seed=seed, head=False).items() if "layers" in n}
    tensors = {f"model.{side}.{n}": t for side in ("encoder", "decoder") for n, t in layers.items()}
    names = ["model.shared.weight"] if shared else [ENCODER, DECODER, *([] if tied else [HEAD])]
    tensors |= {name: decoder(seed=seed + 10 * i)[HEAD] for i, name in enumerate(names)}
    sides = {"encoder_layers": 2, "decoder_layers": 2, "share_encoder_decoder_embeddings": shared}
    write_checkpoint(folder, tensors, {"model_type": "marian", "vocab_size": 8, **sides, "tie_word_embeddings": tied})
    return str(folder)


@pytest.mark.parametrize("which", [0, 1])
def test_a_model_without_a_head_lends_the_embedding_of_its_decoder(tmp_path: Path, which: int) -> None:
    p = plan(pair(*(marian(tmp_path / n, i, tied=i == which) for i, n in enumerate("ab"))))
    assert sources(p)[HEAD] == [(i, DECODER if i == which else HEAD) for i in range(2)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_embedding_for_each_side_is_no_copy_of_a_shared_one(tmp_path: Path, which: int) -> None:
    """One of the two would be left out, with a warning that calls it a copy."""
    models = [marian(tmp_path / n, i, tied=True, shared=bool(i)) for i, n in enumerate("ab")]
    (error,) = problems(pair(*(models if which else models[::-1])))
    assert str(error).startswith(
        f"{models[0]}: its {ENCODER} differs from {DECODER}, and the other models have one tensor for both"
    )


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_embeddings_of_a_result_differ_as_those_of_its_models_do(method: str, tmp_path: Path) -> None:
    """Of the result that another recipe reads nothing is stored."""
    a, b = (marian(tmp_path / n, i, tied=True) for i, n in enumerate("ab"))
    shared = marian(tmp_path / "c", 2, tied=True, shared=True)
    parts = [{"model": a}] if method == "passthrough" else [{"model": a}, {"model": b}]
    inner = {"merge_method": method, "models": parts, **({} if method == "passthrough" else {"parameters": {"weight": 1}})}
    (error,) = problems(pair(inner, shared))
    assert f"its {ENCODER} differs from {DECODER}" in str(error)
    for folder in "ab":  # copies are none
        tensors = load_file(tmp_path / folder / "model.safetensors")
        save_file({**tensors, ENCODER: tensors[DECODER]}, tmp_path / folder / "model.safetensors")
    assert len(sources(plan(pair(inner, shared)))["model.shared.weight"]) == 2


def with_copies(folder: Path, seed: int) -> str:
    """An embedding for each side, the one a copy of the other."""
    path = marian(folder, seed, tied=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, ENCODER: tensors[DECODER]}, folder / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("linear", {"weight": [{"filter": "encoder.embed_tokens", "value": 0.9}, {"value": 0.3}]}),
        ("dare_linear", {"weight": 0.5, "density": 0.3}),
        ("wudi", {"weight": [{"filter": "encoder.embed_tokens", "value": 0.9}, {"value": 0.3}]}),
    ],
)
def test_copies_that_a_recipe_merges_in_two_ways_are_none_in_its_result(
    method: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """By weights of their own, or by random numbers, which depend on the name."""
    a, b = (with_copies(tmp_path / n, i) for i, n in enumerate("ab"))
    inner: dict[str, Any] = {"merge_method": method, "models": [{"model": b, "parameters": parameters}]}
    if method == "linear":
        inner["models"] += [{"model": a, "parameters": {"weight": 0.5}}]
    else:
        inner["base_model"] = a
    (error,) = problems(pair(inner, marian(tmp_path / "c", 2, tied=True, shared=True)))
    assert f"its {ENCODER} differs from {DECODER}" in str(error)


def test_weights_of_their_own_that_give_equal_numbers_leave_copies(tmp_path: Path) -> None:
    """The sum of the two weights scales both."""
    a = with_copies(tmp_path / "a", 0)
    weight = [{"filter": "encoder.embed_tokens", "value": 2}, {"value": 1}]
    inner = {"merge_method": "linear", "models": [{"model": a, "parameters": {"weight": weight}}]}
    shared = marian(tmp_path / "c", 2, tied=True, shared=True)
    assert len(sources(plan(pair(inner, shared)))["model.shared.weight"]) == 2


@pytest.mark.long
def test_results_that_use_each_other_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ways from the last to the first doubles with each."""
    calls = list[str]()
    compare = tensor_data._samples_differ

    def counting(checkpoint: Checkpoint, *pair: Any) -> bool:
        calls.append(checkpoint.ref)
        return compare(checkpoint, *pair)

    monkeypatch.setattr(tensor_data, "_samples_differ", counting)
    a = with_copies(tmp_path / "a", 0)
    results = [{**pair(a, *(f"s{j}" for j in range(i))), "name": f"s{i}"} for i in range(11)]
    last = pair("s10", marian(tmp_path / "c", 1, tied=True, shared=True))
    (tmp_path / "recipe.yml").write_text("---\n".join(map(yaml.safe_dump, [*results, last])))
    weightsmith.plan(tmp_path / "recipe.yml", check_loading=False)
    assert len(calls) <= 12


def test_an_embedding_of_another_dtype_is_no_copy(tmp_path: Path) -> None:
    models = [marian(tmp_path / n, i, tied=True, shared=bool(i)) for i, n in enumerate("ab")]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors[ENCODER] = tensors[ENCODER].astype(np.float16)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert f"its {ENCODER} differs from {DECODER}" in str(problems(pair(*models)))


def test_the_bias_of_a_bert_head_is_one_tensor_under_two_names(tmp_path: Path) -> None:
    def bert(folder: Path, copies: bool, seed: int) -> str:
        bias = np.arange(8, dtype=np.float32)
        tensors = {f"bert.encoder.layer.{i}.attention.q.weight": decoder(seed=seed)[HEAD] for i in range(2)}
        tensors |= {"bert.embeddings.word_embeddings.weight": decoder(seed=seed)[HEAD], "cls.predictions.bias": bias}
        if copies:
            tensors |= {"cls.predictions.decoder.bias": bias, "cls.predictions.decoder.weight": decoder(seed=seed)[HEAD]}
        write_checkpoint(folder, tensors, {"num_hidden_layers": 2, "tie_word_embeddings": True})
        return str(folder)

    p = plan(pair(bert(tmp_path / "a", True, 0), bert(tmp_path / "b", False, 1)))
    assert sources(p)["cls.predictions.bias"] == [(0, "cls.predictions.bias"), (1, "cls.predictions.bias")]
    assert not any("decoder" in name for name in sources(p))
    assert {d.tensor for d in p.dropped} == {"cls.predictions.decoder.bias", "cls.predictions.decoder.weight"}
