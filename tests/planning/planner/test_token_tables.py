"""Tables that token ids are keys of, other than embedding and head: they follow a new tokenizer, or the merge is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import decoder, problems
from tests.tokenizer_help import files, trained, write
from weightsmith._base.errors import MismatchError, Unsupported
from weightsmith._plans import plan_from_json

EXPERTS = "model.layers.1.ffn.gate.tid2eid"
Make = Callable[..., dict[str, int]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a model with a tokenizer and further tensors; the ids of its tokens."""
    monkeypatch.chdir(tmp_path)

    def make_model(
        name: str,
        special: tuple[str, ...],
        extra_tensors: Callable[[int], Mapping[str, np.ndarray]],
        *,
        seed: int = 0,
        **config: Any,
    ) -> dict[str, int]:
        tokenizer: Tokenizer = trained(special=special)
        count = tokenizer.get_vocab_size()
        tensors = decoder(seed=seed, vocab=count, dtype=np.float32) | extra_tensors(count)
        write_checkpoint(tmp_path / name, tensors, plan_help.config(vocab_size=count, **config))
        write(tmp_path / name, files(tokenizer))
        return dict(tokenizer.get_vocab())

    return make_model


def numbers(seed: int, name: str = EXPERTS) -> Callable[[int], dict[str, np.ndarray]]:
    """A table of two experts for each token; some experts of each model are its own, so that rows tell where they are from."""
    return lambda n: {name: np.random.default_rng(seed).integers(1000 * seed, 1000 * seed + 999, (n, 2))}


def table(folder: str, name: str = EXPERTS) -> np.ndarray:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        return checkpoint.read(name)


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models], **options}


def merged(recipe: dict[str, Any], out: str = "out") -> weightsmith.Merged:
    return weightsmith.merge(recipe, out, progress=False, fsync=False)


@pytest.mark.parametrize("source", ["base", "union", "b"])
def test_experts_of_a_token_follow_it_and_come_from_the_first_model(make: Make, source: str) -> None:
    a, b = make("a", ("<s>", "<y>"), numbers(1)), make("b", ("<x>", "<s>"), numbers(2), seed=1)
    result = merged(linear("a", "b", tokenizer_source=source))
    out = b if source == "b" else a | ({"<x>": len(a)} if source == "union" else {})
    out_rows, first, second = table("out"), table("a"), table("b")
    assert len(out_rows) == len(out)
    for token, number in out.items():
        expected = first[a[token]] if token in a else second[b[token]]
        assert out_rows[number].tolist() == expected.tolist(), token
    assert any("the models differ in this int64 tensor; taken from a" in str(w) for w in result.warnings)
    assert result.plan.config is not None
    assert result.plan.config["vocab_size"] == len(out)
    weightsmith.run(plan_from_json(json.loads(json.dumps(result.plan.to_json()))), "again", progress=False, fsync=False)
    assert np.array_equal(table("again"), out_rows)


def test_a_token_that_three_models_lack_or_have_gets_the_experts_of_one_of_them(make: Make) -> None:
    a, b = make("a", ("<s>",), numbers(1)), make("b", ("<x>", "<s>"), numbers(2), seed=1)
    c = make("c", ("<s>", "<x>"), numbers(3), seed=2)
    tokens = {"<new>": {"source": {"kind": "zero"}}}
    merged(linear("a", "b", "c", tokenizer={"source": "union", "tokens": tokens}))
    out_rows = table("out")
    assert out_rows[len(a)].tolist() == table("b")[b["<x>"]].tolist()  # no mean of b and c: experts are no quantities
    assert out_rows[len(a) + 1].tolist() == table("a")[max(n for t, n in a.items() if t != "<s>")].tolist()
    assert len(out_rows) == len(a) + 2
    assert c["<x>"] != b["<x>"]


@pytest.mark.long
def test_experts_of_layers_that_one_model_gives(make: Make) -> None:
    other = EXPERTS.replace("layers.1", "layers.0")
    a = make("a", ("<s>",), lambda n: numbers(1)(n) | numbers(4, other)(n))
    b = make("b", ("<x>", "<s>"), lambda n: numbers(2)(n) | numbers(5, other)(n), seed=1)
    slices = [{"sources": [{"model": name, "layer_range": layers}]} for name, layers in (("a", [0, 1]), ("b", [1, 2]))]
    merged({"merge_method": "passthrough", "slices": slices, "tokenizer_source": "union"})
    low, high = table("out", other), table("out")
    assert all(low[number].tolist() == table("a", other)[number].tolist() for number in a.values())
    assert all(high[a[t] if t in a else len(a)].tolist() == table("b")[number].tolist() for t, number in b.items())
    unused = max(number for token, number in a.items() if token != "<s>")  # a lacks <x>, and no other model is in its layer
    assert low[len(a)].tolist() == table("a", other)[unused].tolist()


def test_a_mean_of_values_of_tokens_in_a_layer(make: Make) -> None:
    name = "model.layers.0.value_embeddings.weight"
    values = [lambda n, k=k: {name: np.random.default_rng(k).standard_normal((n, 3)).astype(np.float32)} for k in (1, 2)]
    a, b = make("a", ("<s>", "<y>"), values[0]), make("b", ("<x>", "<s>"), values[1], seed=1)
    merged(linear("a", "b", tokenizer_source="union"))
    out_rows, first, second = table("out", name), table("a", name), table("b", name)
    for token, number in {**a, "<x>": len(a)}.items():
        rows = [m[v[token]] for m, v in ((first, a), (second, b)) if token in v]
        np.testing.assert_allclose(out_rows[number], np.mean(rows, 0), atol=1e-6)


HASHED = {
    "model.layers.0.ple.ple_embedding.ngram_embedding.weight": (51, 4),
    "model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight": (51, 4),
    "model.ngram_embeddings.embedders.0.weight": (51, 4),
    "oe_embed_tokens.0.weight": (51, 4),
    "encoder_hash_tok_embedding.weight": (51, 4),
    "model.layers.0.engram.multi_head_embedding.embedding.weight": (51, 4),
}


@pytest.mark.parametrize("name", HASHED)
def test_hashes_of_ids_are_refused_by_name(make: Make, name: str) -> None:
    def extra_tensors(n: int) -> dict[str, np.ndarray]:
        return {name: np.ones(HASHED[name], np.float32)}

    make("a", ("<s>",), extra_tensors)
    make("b", ("<x>", "<s>"), extra_tensors, seed=1)
    make("c", ("<s>",), extra_tensors, seed=2)
    for source in ("base", "union", "b"):
        (error,) = problems(linear("a", "b", tokenizer_source=source))
        assert isinstance(error, Unsupported)
        assert error.finding.where == name
        assert "its rows belong to hashes of token ids" in error.finding.what
    assert not Path("out").exists()
    merged(linear("a", "c", tokenizer_source="union"))  # nothing moves
    assert np.array_equal(table("out", name), np.ones((51, 4)))


def test_alike_tensors_of_all_models_are_one_error(make: Make) -> None:
    def extra_tensors(n: int) -> dict[str, np.ndarray]:
        return {f"layers.0.ple_embedding.ngram_embedding.shard_{i}.weight": np.ones((5, 4), np.float32) for i in range(9)}

    a, b = make("a", ("<s>",), extra_tensors), make("b", ("<x>", "<s>"), extra_tensors, seed=1)
    (error,) = problems(linear("a", "b", tokenizer_source="union"))
    assert "so for 8 more like it" in error.finding.what
    assert error.finding.details == (
        f"a: 0 of {len(a)} ids change; the output has {len(a) + 1}",
        f"b: 2 of {len(b)} ids change; the output has {len(a) + 1}",
    )


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("d2t", lambda n: np.arange(9), "it holds token ids"),
        ("t2d", lambda n: np.arange(n) < 9, "it holds token ids"),
        ("model.hashes", lambda n: np.arange(n), "it has the size of the vocabulary, and is no known table"),
        ("model.token_biases.weight", lambda n: np.ones((4, n), np.float32), "it has the size of the vocabulary"),
        ("model.draft.lm_head.weight", lambda n: np.ones((9, 4), np.float32), "it has 9 rows, and the vocabulary 321"),
    ],
)
def test_tables_that_cannot_follow_are_refused(make: Make, name: str, value: Callable[[int], Any], why: str) -> None:
    make("a", ("<s>",), lambda n: {name: value(n)})
    make("b", ("<t>",), lambda n: {name: value(n)}, seed=1)
    make("c", ("<s>",), lambda n: {name: value(n)}, seed=2)
    (error,) = problems(linear("a", "b", tokenizer_source="b"))
    assert (error.finding.where, why in error.finding.what) == (name, True)
    assert name in {step.out.name for step in merged(linear("a", "c", tokenizer_source="union")).plan.steps}


def test_a_size_that_the_config_states_for_something_else_is_none_of_tokens(make: Make) -> None:
    name = "model.position_table.weight"
    for k, special in enumerate((("<s>",), ("<t>",))):
        make("ab"[k], special, lambda n: {name: np.ones((n, 4), np.float32)}, seed=k, max_position_embeddings=321)
    assert merged(linear("a", "b", tokenizer_source="b")).plan.steps


@pytest.mark.parametrize("name", ["d2t", "t2d", "model.layers.0.ple.ple_embedding.layer_multipliers"])
def test_models_that_differ_in_what_rows_stand_for_are_refused(make: Make, name: str) -> None:
    make("a", ("<s>",), lambda n: {name: np.arange(9)})
    make("b", ("<s>",), lambda n: {name: np.arange(9)}, seed=1)
    make("c", ("<s>",), lambda n: {name: np.arange(9) + 1}, seed=2)
    merged(linear("a", "b"), "alike")
    with pytest.raises(MismatchError) as caught:
        merged(linear("a", "c"))
    assert caught.value.finding.where == name
    assert [line.split(":")[0] for line in caught.value.finding.details] == ["a", "c"]
    assert "Nothing was published" in str(caught.value)
    assert not Path("out").exists()


@pytest.mark.long
@pytest.mark.parametrize("approximation", ["mean", "subword"])
def test_a_transplant_moves_experts_and_gives_missing_tokens_those_of_their_first_piece(make: Make, approximation: str) -> None:
    a = make("a", ("<s>",), numbers(1))
    b = make("b", ("<x>", "<s>"), numbers(2), seed=1)
    longer = trained(special=("<s>",), size=420)
    write(Path("longer"), files(longer))
    weightsmith.transplant_tokenizer("a", "longer", "out", approximation=approximation)
    out_rows, original, out = table("out"), table("a"), dict(longer.get_vocab())
    assert all(out_rows[out[token]].tolist() == original[number].tolist() for token, number in a.items())
    missing = [token for token in out if token not in a]
    assert missing
    for token in missing:
        starts = [t for t in a if token.startswith(t) and t != token and t != "<s>"]
        assert out_rows[out[token]].tolist() in [original[a[start]].tolist() for start in starts], token
    weightsmith.transplant_tokenizer("b", "a", "back", approximation=approximation)
    assert all(table("back")[a[t]].tolist() == table("b")[b[t]].tolist() for t in a)


def test_a_transplant_refuses_hashes(make: Make) -> None:
    name = "model.ngram_embeddings.embedders.0.weight"
    make("a", ("<s>",), lambda n: {name: np.ones((5, 4), np.float32)})
    make("b", ("<x>", "<s>"), lambda n: {}, seed=1)
    with pytest.raises(weightsmith.PlanError, match="its rows belong to hashes of token ids"):
        weightsmith.transplant_tokenizer("a", "b", "out", approximation="mean")
    weightsmith.transplant_tokenizer("a", "a", "same", approximation="mean")


# ---- embeddings for each layer

PER_LAYER = "model.embed_tokens_per_layer.weight"


@pytest.mark.parametrize("source", ["base", "union", "b"])
def test_per_layer_embeddings_have_as_many_rows_as_the_embedding(make: Make, source: str) -> None:
    """Gemma 4's: a token without a row there would stop the model. Gemma 3n's have fewer, see test_vocabulary.py."""
    vocabularies = []
    for k, special in enumerate((("<s>",), ("<x>", "<y>", "<s>"))):
        n = 320 + len(special)
        values = np.random.default_rng(k).standard_normal((n, 6)).astype(np.float32)
        config = {"vocab_size_per_layer_input": n, "model_type": "gemma4_text"}
        vocabularies.append(make("ab"[k], special, lambda n, values=values: {PER_LAYER: values}, seed=k, **config))
    a, b = vocabularies
    result = merged(linear("a", "b", tokenizer_source=source))
    out = {"base": a, "b": b, "union": a | {"<x>": len(a), "<y>": len(a) + 1}}[source]
    assert result.plan.config is not None
    assert {result.plan.config[key] for key in ("vocab_size", "vocab_size_per_layer_input")} == {len(out)}
    out_rows, first, second = (table(folder, PER_LAYER) for folder in ("out", "a", "b"))
    for token, number in out.items():
        rows = [m[v[token]] for m, v in ((first, a), (second, b)) if token in v]
        np.testing.assert_allclose(out_rows[number], np.mean(rows, 0), atol=1e-6)


def test_a_transplant_of_per_layer_embeddings_with_fewer_rows(make: Make) -> None:
    values = np.random.default_rng(0).standard_normal((300, 6)).astype(np.float32)
    a = make("a", ("<s>",), lambda n: {PER_LAYER: values}, vocab_size_per_layer_input=300)
    write(Path("b"), files(trained(special=("<x>", "<s>"))))
    weightsmith.transplant_tokenizer("a", "b", "out", approximation="mean")
    assert np.array_equal(table("out", PER_LAYER)[:300], values)
    assert len(a) == 321


def test_vocabularies_of_per_layer_embeddings_are_not_blamed_on_the_head(make: Make) -> None:
    for k, special in enumerate((("<s>",), ("<x>", "<s>"))):
        make("ab"[k], special, lambda n: {PER_LAYER: np.ones((n, 6), np.float32)}, seed=k)
    for error in problems(linear("a", "b")):
        assert "The vocabularies differ" in error.finding.fix


OFFSETS = {"vision_config": {"vocab_offset": 321}, "audio_config": {"vocab_offset": 323}}


@pytest.mark.parametrize(
    ("others", "source", "count"),
    [
        (("<s>", "<image>", "<audio>", "<x>"), "union", 1),  # would be read as audio
        (("<s>", "<x>", "<image>", "<audio>"), "b", 3),  # moves the others by one
        (("<s>",), "b", 2),
        (("<s>", "<audio>", "<image>"), "base", 0),
        (("<image>", "<s>"), "union", 0),
    ],
)
def test_ids_that_a_model_takes_for_images_keep_their_tokens(
    make: Make, others: tuple[str, ...], source: str, count: int
) -> None:
    """Gemma 3n looks up ids from vocab_offset on in tables of its own, whatever the embedding holds."""
    make("a", ("<s>", "<image>", "<audio>"), lambda n: {}, **OFFSETS)
    make("b", others, lambda n: {}, seed=1)
    recipe = linear("a", "b", tokenizer_source=source)
    if not count:
        assert merged(recipe).plan.vocabulary is not None
        return
    (error,) = problems(recipe)
    assert isinstance(error, Unsupported)
    assert f"a takes ids from 321 on for images or audio (vision_config.vocab_offset of config.json), and {count} " in str(
        error
    )


def test_a_transplant_keeps_the_ids_that_a_model_takes_for_images(make: Make) -> None:
    make("a", ("<s>", "<image>", "<audio>"), lambda n: {}, **OFFSETS)
    make("b", ("<s>", "<audio>"), lambda n: {}, seed=1)
    with pytest.raises(weightsmith.PlanError, match="takes ids from 321 on for images or audio"):
        weightsmith.transplant_tokenizer("a", "b", "out", approximation="mean")
