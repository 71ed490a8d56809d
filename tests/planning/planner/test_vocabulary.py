"""Merges of models with different vocabularies: rows follow tokens, and the files say what the tensors are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import weightsmith
from tests import plan_help
from tests.cli_help import Cli
from tests.mini import write_checkpoint
from tests.plan_help import decoder, problems
from tests.tokenizer_help import OTHER_TEXT, SAMPLES, files, ids, trained, write
from weightsmith._plans import Gather, Plan, plan_from_json

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tokenizer]:
    """Writes a model with a tokenizer into a folder below the working directory."""
    monkeypatch.chdir(tmp_path)

    def make_model(
        name: str,
        tokenizer: Tokenizer | None = None,
        *,
        rows: int = 0,
        seed: int = 0,
        head: bool = True,
        dtype: Any = np.float32,
        extra_files: Mapping[str, bytes] | None = None,
        settings: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Tokenizer:
        chosen = trained() if tokenizer is None else tokenizer
        count = rows or chosen.get_vocab_size()
        tensors = decoder(seed=seed, vocab=count, head=head, dtype=dtype)
        about = plan_help.config(vocab_size=count, tie_word_embeddings=not head, **config)
        write_checkpoint(tmp_path / name, tensors, about)
        write(tmp_path / name, {**files(chosen, **(settings or {})), **(extra_files or {})})
        return chosen

    return make_model


def recipe(*models: str, base: str = "", **keys: Any) -> dict[str, Any]:
    listed = [{"model": name, "parameters": {"weight": i + 1}} for i, name in enumerate(models)]
    return {"merge_method": "linear", "models": listed, **({"base_model": base} if base else {}), **keys}


def merged(document: Any, out: str = "out", **options: Any) -> tuple[dict[str, np.ndarray], weightsmith.Merged]:
    result = weightsmith.merge(document, out, progress=False, fsync=False, **options)
    return tensors(out), result


def tensors(folder: str) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name).astype(np.float64) for name in (EMBED, HEAD) if name in checkpoint.specs}


def expected(
    out: Mapping[str, int], rows: int, vocabularies: Sequence[Mapping[str, int]], matrices: Sequence[np.ndarray], base: int = 0
) -> np.ndarray:
    """A linear merge with weights 1, 2, …: token by token, as the documentation describes it."""
    table = np.zeros((rows, matrices[0].shape[1]))
    weights = np.arange(1, len(matrices) + 1)
    named = {number: token for token, number in out.items()}
    padded = len(matrices[base]) > len(vocabularies[base])
    special = {number for token, number in vocabularies[base].items() if token.startswith("<") and not padded}
    for i in range(rows):
        matching: list[np.ndarray | None] = []
        for vocab, matrix in zip(vocabularies, matrices, strict=True):
            number = vocab.get(named[i]) if i in named else i if i not in vocab.values() else None
            matching.append(matrix[number] if number is not None and number < len(matrix) else None)
        having = [row for row in matching if row is not None]
        last = max(number for number in range(len(matrices[base])) if number not in special)
        default = matrices[base][last]
        if having:
            base_row = having[0] if len(having) == 1 else matching[base]
            default = np.mean(having, 0) if base_row is None else base_row
        table[i] = sum(w * (default if row is None else row) for w, row in zip(weights, matching, strict=True)) / weights.sum()
    return table


def vocab_of(folder: str) -> dict[str, int]:
    return dict(Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab())


@pytest.mark.parametrize("source", ["base", "union", "b", "c"])
@pytest.mark.parametrize("head", [True, False])
def test_rows_follow_tokens(make: Callable[..., Tokenizer], source: str, head: bool) -> None:
    a = make("a", rows=340, head=head)
    b = make("b", trained(special=["<s>", "</s>", "<|im|>", "<x>"], text=OTHER_TEXT), seed=1, head=head)
    c = make("c", trained(special=["</s>", "<s>", "<x>"], text=OTHER_TEXT), seed=2, head=head, rows=330)
    got, result = merged(recipe("a", "b", "c", base="a", tokenizer_source=source))
    rows = {"base": 340, "union": 340, "b": b.get_vocab_size(), "c": 330}[source]
    out = vocab_of("out")
    models = [tensors(name) for name in "abc"]
    for name, matrix in got.items():
        oracle = expected(out, rows, [t.get_vocab() for t in (a, b, c)], [m[name] for m in models])
        assert matrix.shape == (rows, 4)
        np.testing.assert_allclose(matrix, oracle, atol=1e-6)
    assert set(got) == ({EMBED, HEAD} if head else {EMBED})
    config = json.loads(Path("out/config.json").read_text())
    assert config["vocab_size"] == rows
    assert ("<|im|>" in out) == (source in ("union", "b"))
    weightsmith.verify("out")
    assert result.plan.vocabulary is not None
    assert sum(result.plan.vocabulary["sources"].values()) == rows


def test_a_misspelt_source_is_told_from_a_model(make: Callable[..., Tokenizer]) -> None:
    make("a")
    with pytest.raises(weightsmith.PlanError, match=r"unoin: .* \(did you mean 'union'\?\)"):
        weightsmith.plan(recipe("a", tokenizer_source="unoin"))
    with pytest.raises(weightsmith.PlanError, match=r"old form 'model:'.*\n.*Write the model alone: org/name\."):
        weightsmith.plan(recipe("a", tokenizer_source="model:org/name"))


def test_the_tokenizer_of_another_recipes_result(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", trained(special=["<s>", "</s>", "<x>"], text=OTHER_TEXT), seed=1)
    union = recipe("a", "b", base="a", tokenizer_source="union")
    alone, _ = merged(union, "alone")
    last = {"merge_method": "passthrough", "models": [{"model": "one", "parameters": {"scale": 2}}]}
    merged([{"name": "one", **union}, last])
    assert vocab_of("out") == vocab_of("alone")
    np.testing.assert_array_equal(tensors("out")[EMBED], 2 * alone[EMBED])
    assert not list(Path().glob("out.stage*"))


def test_a_head_that_only_some_models_have_is_aligned_with_the_tied_embedding_of_the_others(
    make: Callable[..., Tokenizer],
) -> None:
    a = make("a", head=False)
    b = make("b", trained(special=["<s>", "</s>", "<x>"], text=OTHER_TEXT), seed=1)
    got, result = merged(recipe("a", "b", tokenizer_source="union"))
    ea, eb = tensors("a")[EMBED], tensors("b")
    out, vocabularies = vocab_of("out"), [a.get_vocab(), b.get_vocab()]
    np.testing.assert_allclose(got[HEAD], expected(out, len(out), vocabularies, [ea, eb[HEAD]]), atol=1e-6)
    np.testing.assert_allclose(got[EMBED], expected(out, len(out), vocabularies, [ea, eb[EMBED]]), atol=1e-6)
    assert result.plan.config is not None
    assert result.plan.config["tie_word_embeddings"] is False


@pytest.mark.slow
def test_one_vocabulary_costs_nothing_and_gives_the_same_bytes(make: Callable[..., Tokenizer]) -> None:
    make("a", dtype=plan_help.BF16)
    make("b", seed=1, dtype=plan_help.BF16)
    plain = weightsmith.merge(recipe("a", "b", base="a"), "plain", progress=False, fsync=False)
    for source in ("base", "union", "b"):
        same = weightsmith.merge(
            recipe("a", "b", base="a", tokenizer_source=source), source + "_out", progress=False, fsync=False
        )
        assert same.plan.steps == plain.plan.steps
        assert same.plan.tables == ()
        assert same.plan.vocabulary is not None
        assert same.plan.vocabulary.get("shared", False) == (source != "b")
        assert same.read_bytes == plain.read_bytes
        assert Path(f"{source}_out/model.safetensors").read_bytes() == Path("plain/model.safetensors").read_bytes()
        assert Path(f"{source}_out/tokenizer.json").read_bytes() == Path("a/tokenizer.json").read_bytes()


def gathers(plan: Plan) -> list[Gather]:
    step = next(step for step in plan.steps if step.out.name == EMBED)
    return [read.view for read in step.inputs if isinstance(read.view, Gather)]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties of the model", "dare_ties"])
def test_the_bytes_depend_on_neither_tiles_nor_threads_nor_the_road(make: Callable[..., Tokenizer], method: str) -> None:
    make("a", dtype=plan_help.BF16)
    make("b", trained(special=["<x>", "</s>"], text=OTHER_TEXT), seed=1, dtype=np.float32)
    make("c", trained(special=["<y>", "</s>"], text=OTHER_TEXT), seed=2, dtype=plan_help.BF16)
    names = "ab" if method == "slerp" else "abc"
    document = recipe(*names, base="a", tokenizer_source="union", dtype="bfloat16") | {"merge_method": method.partition(" ")[0]}
    document["models"] = [{"model": name} for name in names]
    parameters: dict[str, Any] = {"linear": {"weight": 1}, "slerp": {"t": 0.4}, "model_stock": {}}
    document["parameters"] = parameters.get(
        method, {"weight": 1, "density": 0.6, **({"scope": "model"} if " " in method else {})}
    )
    first = weightsmith.merge(document, "one", progress=False, fsync=False, threads=1)
    weightsmith.merge(document, "two", progress=False, fsync=False, threads=4, max_memory_bytes=200_000_000)
    again = plan_from_json(json.loads(json.dumps(first.plan.to_json())))
    assert again == first.plan
    assert gathers(again)[0].fallback
    weightsmith.run(again, "three", progress=False, fsync=False)
    for part in (None,) if " " in method else ((1, 2), (2, 2), None):
        weightsmith.run(again, "four", part=part, progress=False, fsync=False)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert len({Path(out, name).read_bytes() for out in ("one", "two", "three", "four")}) == 1


def test_an_explicit_source_replaces_the_choice(make: Callable[..., Tokenizer]) -> None:
    a = make("a")
    b = make("b", trained(special=["<s>", "</s>", "<x>", "<y>"], text=OTHER_TEXT), seed=1)
    c = make("c", trained(special=["<s>", "</s>", "<x>"], text=OTHER_TEXT), seed=2)
    tokens = {
        "<s>": {"source": "b", "force": True},
        "<x>": {"source": "c"},
        "<y>": {"source": {"kind": "model_token", "model": "a", "token": "</s>"}, "force": True},
        "<new>": {"source": {"kind": "model_token", "model": "a", "token_id": 7}},
        "<zero>": {"source": {"kind": "zero"}},
        "b": {"source": {"kind": "zero"}},
        "</s>": {"source": {"kind": "zero"}, "force": True},
    }
    got, result = merged(recipe("a", "b", "c", tokenizer={"source": "union", "tokens": tokens}))
    out, e = vocab_of("out"), [tensors(name)[EMBED] for name in "abc"]
    matrix = got[EMBED]
    np.testing.assert_allclose(matrix[out["<s>"]], e[1][b.token_to_id("<s>")], atol=1e-6)
    b_row, c_row = e[1][b.token_to_id("<x>")], e[2][c.token_to_id("<x>")]
    np.testing.assert_allclose(matrix[out["<x>"]], (c_row + 2 * b_row + 3 * c_row) / 6, atol=1e-6)
    np.testing.assert_allclose(matrix[out["<y>"]], e[0][a.token_to_id("</s>")], atol=1e-6)
    np.testing.assert_allclose(matrix[out["<new>"]], e[0][7], atol=1e-6)
    np.testing.assert_allclose(matrix[[out["<zero>"], out["</s>"]]], 0)
    assert result.plan.vocabulary is not None
    assert result.plan.vocabulary["new"] == ["<x>", "<y>", "<new>", "<zero>"]
    tokenizer = Tokenizer.from_file("out/tokenizer.json")
    assert tokenizer.encode("a<new>b").ids[1] == out["<new>"]


def test_rows_are_padded_and_never_fewer_than_before(make: Callable[..., Tokenizer]) -> None:
    make("a", rows=351)
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    for multiple, rows in ((64, 384), (1, 351)):
        keys = {"tokenizer": {"source": "union", "pad_to_multiple_of": multiple}}
        plan = weightsmith.plan(recipe("a", "b", **keys))
        assert next(step.out.shape for step in plan.steps if step.out.name == EMBED) == (rows, 4)
        assert plan.config is not None
        assert plan.config["vocab_size"] == rows


def test_more_padding_is_like_the_padding_that_exists_or_like_the_last_piece(make: Callable[..., Tokenizer]) -> None:
    make("a", rows=330)
    b = make("b", seed=1)
    for base, last in (("a", 329), ("b", b.token_to_id("<s>") - 1)):
        models = recipe("a", "b", base=base, tokenizer={"source": "base", "pad_to_multiple_of": 64})
        got, _ = merged(models, f"out_{base}")
        row = tensors(base)[EMBED][last]
        assert got[EMBED].shape == (384, 4)
        np.testing.assert_allclose(got[EMBED][350:], np.tile(row, (34, 1)), atol=1e-6)


def test_models_that_differ_in_padding_alone_merge_with_a_note(make: Callable[..., Tokenizer]) -> None:
    a = make("a", rows=350)
    make("b", rows=340, seed=1)
    got, result = merged(recipe("a", "b"))
    e = [tensors(name)[EMBED] for name in "ab"]
    assert got[EMBED].shape == (350, 4)
    n = a.get_vocab_size()
    np.testing.assert_allclose(got[EMBED][:n], (e[0][:n] + 2 * e[1][:n]) / 3, atol=1e-6)
    np.testing.assert_allclose(got[EMBED][340:], e[0][340:], atol=1e-6)
    assert str(result.warnings[0]) == (
        f"vocabulary: the models have the same {n} tokens and different numbers of rows; the output has 350\n"
        "  a: 350 rows\n  b: 340 rows"
    )


def test_different_vocabularies_without_a_key_are_refused_with_the_ways_out(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    messages = [str(problem) for problem in problems(recipe("a", "b"))]
    assert len(messages) == 2
    for text in messages:
        assert "'linear' needs equal shapes" in text
        assert "write tokenizer_source: base (the base's tokenizer), union (with the added tokens of all) or the" in text


def test_the_lists_of_added_tokens_follow(make: Callable[..., Tokenizer]) -> None:
    decoder_of = {"320": {"content": "<s>", "special": True}, "321": {"content": "</s>", "special": True}}
    make("a", extra_files={"tokenizer.model": b"not read"}, settings={"added_tokens_decoder": decoder_of})
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    merged(recipe("a", "b", tokenizer_source="union"))
    assert json.loads(Path("out/added_tokens.json").read_text()) == {"<x>": 322}
    assert Path("out/tokenizer.model").read_bytes() == b"not read"
    listed = json.loads(Path("out/tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert list(listed) == ["320", "321", "322"]
    assert (listed["322"]["content"], listed["322"]["special"]) == ("<x>", True)


def test_a_ghost_token_has_no_row(make: Callable[..., Tokenizer]) -> None:
    ghost = trained(special=["<s>", "</s>", "<ghost>"])
    n = ghost.get_vocab_size()
    make("a", ghost, rows=n - 1)
    make("b", ghost, rows=n - 1, seed=1)
    got, _ = merged(recipe("a", "b", tokenizer_source="base"))
    assert got[EMBED].shape == (n - 1, 4)
    make("c", trained(special=["<s>", "</s>", "<new>"]), seed=2)
    got, result = merged(recipe("a", "c", tokenizer_source="union"), "other")
    assert got[EMBED].shape == (n + 1, 4)
    piece = ghost.token_to_id("<s>") - 1
    np.testing.assert_array_equal(got[EMBED][n - 1], tensors("a")[EMBED][piece])  # no model has a row for the ghost
    np.testing.assert_allclose(got[EMBED][n], tensors("c")[EMBED][n - 1], atol=1e-6)
    assert result.plan.vocabulary is not None
    assert result.plan.vocabulary["sources"]["in no model"] == 1


def test_a_union_keeps_the_row_of_a_token_that_only_the_settings_name(make: Callable[..., Tokenizer]) -> None:
    n = trained().get_vocab_size()
    make("a", rows=n + 1, settings={"pad_token": "[PAD]"}, pad_token_id=n)
    make("b", trained(special=["<s>", "</s>", "<new>"]), seed=1)
    rows, _ = merged(recipe("a", "b", base="a", tokenizer_source="union"))
    assert vocab_of("out")["[PAD]"] == n == json.loads(Path("out/config.json").read_text())["pad_token_id"]
    assert vocab_of("out")["<new>"] == n + 1
    np.testing.assert_allclose(rows[EMBED][n:], [tensors("a")[EMBED][n], tensors("b")[EMBED][n]], atol=1e-6)


def test_added_tokens_that_are_ordinary_text_are_pointed_out(make: Callable[..., Tokenizer]) -> None:
    make("a")
    other = trained()
    other.add_tokens([*(AddedToken(text, normalized=False) for text in ("<dsml:", "Fuchs", "\n\n"))])
    make("b", other, seed=1)
    plan = weightsmith.plan(recipe("a", "b", tokenizer_source="union"))
    (said,) = [str(warning) for warning in plan.warnings if "added tokens" in str(warning)]
    assert said == (
        "tokenizer_source: text is split at added tokens of other models that are ordinary text: 'Fuchs', '\\n\\n'\n"
        "  -> Use tokenizer_source: base to split text as a does; the output then lacks these tokens."
    )
    rules = {"source": "union", "tokens": {"Fuchs": None, "\n\n": None}}
    assert not any("added tokens" in str(warning) for warning in weightsmith.plan(recipe("a", "b", tokenizer=rules)).warnings)


def test_ids_of_special_tokens_follow_the_tokenizer(make: Callable[..., Tokenizer]) -> None:
    a = make(
        "a",
        bos_token_id=320,
        eos_token_id=[321, 320],
        pad_token_id=5,
        image_token_id=320,
        mask_index=320,
        image_patch_id=321,
        vocabulary_map={"<image>": 320},
        codec_eos_token_id=320,
        extra_files={"generation_config.json": b'{"temperature": 0.7, "eos_token_id": 321, "bos_token_id": 320}'},
    )
    b = make("b", trained(special=["<x>", "</s>", "<s>"]), seed=1, eos_token_id=321)
    assert (a.token_to_id("<s>"), b.token_to_id("<s>")) == (320, 322)
    _, result = merged(recipe("a", "b", base="a", tokenizer_source="b"))
    config = result.plan.config
    assert config is not None
    assert (config["bos_token_id"], config["eos_token_id"], config["image_token_id"]) == (322, 321, 322)
    assert (config["mask_index"], config["image_patch_id"], config["vocabulary_map"]) == (322, 321, {"<image>": 322})
    assert config["codec_eos_token_id"] == 320, "of another vocabulary"
    generation = json.loads(Path("out/generation_config.json").read_text())
    assert generation == {"temperature": 0.7, "eos_token_id": 321, "bos_token_id": 322}
    assert Path("out/tokenizer.json").read_bytes() == Path("b/tokenizer.json").read_bytes()


def test_a_token_that_the_new_tokenizer_lacks_leaves_its_id_empty(make: Callable[..., Tokenizer]) -> None:
    make("a", pad_token_id=320)
    make("b", trained(special=["</s>"]), seed=1)
    _, result = merged(recipe("a", "b", tokenizer_source="b"))
    assert result.plan.config is not None
    assert result.plan.config["pad_token_id"] is None
    assert any("pad_token_id is null: the new tokenizer lacks its token" in str(w) for w in result.warnings)


def test_ids_of_generation_settings_follow_the_tokenizer(make: Callable[..., Tokenizer]) -> None:
    settings = {
        "suppress_tokens": [-1, 320, 321],
        "begin_suppress_tokens": [320],
        "bad_words_ids": [[320], [5, 321], [7, 320]],
        "force_words_ids": [[[320, 5], [321]], [[6]]],
        "forced_decoder_ids": [[1, 320], [2, None], [3, 321]],
        "sequence_bias": [[[320, 5], -1.5], [[321], 2.0]],
        "lang_to_id": {"<|en|>": 320, "<|fr|>": 321},
        "forced_bos_token_id": 320,
        "exponential_decay_length_penalty": [15, 1.6],
    }
    make("a", extra_files={"generation_config.json": json.dumps(settings).encode()})
    b = make("b", trained(special=["<x>", "<s>"]), seed=1)  # it lacks </s>, which is 321 in a
    new = b.token_to_id("<s>")
    assert new == 321
    _, result = merged(recipe("a", "b", base="a", tokenizer_source="b"))
    assert json.loads(Path("out/generation_config.json").read_text()) == {
        "suppress_tokens": [-1, new],
        "begin_suppress_tokens": [new],
        "bad_words_ids": [[new], [7, new]],
        "force_words_ids": [[[new, 5]], [[6]]],
        "forced_decoder_ids": [[1, new], [2, None]],
        "sequence_bias": [[[new, 5], -1.5]],
        "lang_to_id": {"<|en|>": new},
        "forced_bos_token_id": new,
        "exponential_decay_length_penalty": [15, 1.6],
    }
    said = {w.what for w in result.warnings if w.where == "generation_config.json"}
    shorter = settings.keys() - {"begin_suppress_tokens", "forced_bos_token_id", "exponential_decay_length_penalty"}
    assert said == {f"{key} is shorter: the new tokenizer lacks its token" for key in shorter}


def test_a_tokenizer_from_outside_the_merge(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", seed=1)
    other = trained(special=["<s>", "</s>", "<t>"])
    write(Path("elsewhere"), files(other))
    got, result = merged(recipe("a", "b", tokenizer_source="elsewhere"))
    n = other.get_vocab_size()
    assert got[EMBED].shape == (n, 4)
    assert got[EMBED][other.token_to_id("<t>")].any()
    assert Path("out/tokenizer.json").read_bytes() == Path("elsewhere/tokenizer.json").read_bytes()
    assert result.plan.vocabulary is not None


def test_a_link_out_of_that_folder_is_not_followed(make: Callable[..., Tokenizer], tmp_path: Path) -> None:
    make("a")
    make("b", seed=1)
    write(Path("elsewhere"), files(trained()))
    Path("secret").write_text("secret")
    Path("elsewhere/merges.txt").symlink_to(tmp_path / "secret")
    (problem,) = problems(recipe("a", "b", tokenizer_source="elsewhere"))
    assert "merges.txt is a symbolic link that leaves the folder" in str(problem)


def test_tokens_only_in_a_model_of_another_slice_or_of_weight_0_keep_their_row(make: Callable[..., Tokenizer]) -> None:
    make("a")
    b = make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    document = recipe("a", "b", base="a", tokenizer_source="union")
    document["models"][1]["parameters"]["weight"] = 0
    got, result = merged(document)
    out = vocab_of("out")
    np.testing.assert_allclose(got[EMBED][out["<x>"]], tensors("b")[EMBED][b.token_to_id("<x>")], atol=1e-6)
    dropped = {(d.model, d.tensor) for d in result.plan.dropped}
    assert (1, EMBED) not in dropped
    assert (1, "model.norm.weight") in dropped
    slices = [{"sources": [{"model": name, "layer_range": [0, 2]}]} for name in "ab"]
    got, _ = merged({"merge_method": "passthrough", "slices": slices, "tokenizer_source": "union"}, "stack")
    np.testing.assert_allclose(got[EMBED][out["<x>"]], tensors("b")[EMBED][b.token_to_id("<x>")], atol=1e-6)
    np.testing.assert_allclose(got[EMBED][:322], tensors("a")[EMBED], atol=1e-6)


def test_every_tensor_with_a_row_for_each_token_is_aligned(tmp_path: Path) -> None:
    tokenizers = []
    for k, special in enumerate((["<s>"], ["<x>", "<s>"])):
        tokenizer = trained(special=special)
        n = tokenizer.get_vocab_size()
        extra = {"lm_head.bias": (n,), "final_logits_bias": (1, n), "model.embed_tokens_per_layer.weight": (n - 40, 6)}
        config = plan_help.config(vocab_size=9, text_config={"vocab_size": n, "vocab_size_per_layer_input": n - 40})
        write_checkpoint(tmp_path / "ab"[k], decoder(seed=k, vocab=n, dtype=np.float32, extra=extra), config)
        write(tmp_path / "ab"[k], files(tokenizer))
        tokenizers.append(tokenizer)
    result = weightsmith.merge(recipe(str(tmp_path / "a"), str(tmp_path / "b"), tokenizer_source="union"), tmp_path / "out")
    shapes = {step.out.name: step.out.shape for step in result.plan.steps}
    n = tokenizers[0].get_vocab_size()
    assert shapes[EMBED] == shapes[HEAD] == (n + 1, 4)
    assert (shapes["lm_head.bias"], shapes["final_logits_bias"]) == ((n + 1,), (1, n + 1))
    assert shapes["model.embed_tokens_per_layer.weight"] == (n - 40, 6)
    assert result.plan.config is not None
    assert result.plan.config["text_config"] == {"vocab_size": n + 1, "vocab_size_per_layer_input": n - 40}
    with weightsmith.open_checkpoint(tmp_path / "out") as out, weightsmith.open_checkpoint(tmp_path / "b") as other:
        for name in ("lm_head.bias", "final_logits_bias"):
            assert out.read(name).reshape(-1)[n] == other.read(name).reshape(-1)[n - 1]  # <x>
        with weightsmith.open_checkpoint(tmp_path / "a") as first:
            mean = (first.read("lm_head.bias")[n - 1] + 2 * other.read("lm_head.bias")[n]) / 3  # <s>
            assert out.read("lm_head.bias")[n - 1] == pytest.approx(mean)
            name = "model.embed_tokens_per_layer.weight"
            mean = (first.read(name) + 2 * other.read(name)[: n - 40]) / 3
            np.testing.assert_allclose(out.read(name), mean, atol=1e-6)


@pytest.mark.long
def test_a_stage_with_a_new_tokenizer_is_a_model_of_the_next(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    make("c", trained(special=["<s>", "</s>", "<y>"]), seed=2)
    first = {**recipe("a", "b", tokenizer_source="union"), "name": "first"}
    stages = [first, recipe("first", "c", tokenizer_source="union")]
    planned = weightsmith.plan(stages).vocabulary
    assert planned is not None
    assert (planned["tokens"], planned["new"]) == (324, ["<y>"])
    got, _ = merged(stages, "stages")
    merged(recipe("a", "b", tokenizer_source="union"), "first_alone")
    apart, _ = merged(recipe("first_alone", "c", tokenizer_source="union"), "apart")
    assert vocab_of("stages") == vocab_of("apart")
    assert {"<x>", "<y>"} <= vocab_of("stages").keys()
    for name, matrix in got.items():
        np.testing.assert_array_equal(matrix, apart[name])


@pytest.mark.slow
def test_a_stage_of_models_that_differ_in_padding_is_computed_on_the_way(make: Callable[..., Tokenizer]) -> None:
    make("a", rows=350)
    make("b", rows=340, seed=1)
    make("c", rows=345, seed=2)
    stages = [{**recipe("b", "a"), "name": "first"}, recipe("first", "c")]
    got, _ = merged(stages, "stages")
    merged(recipe("b", "a"), "first_alone")
    apart, _ = merged(recipe("first_alone", "c"), "apart")
    assert got[EMBED].shape == (340, 4)
    for name, matrix in got.items():
        np.testing.assert_array_equal(matrix, apart[name])


# ---- chat templates

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_the_most_frequent_chat_template_is_taken(make: Callable[..., Tokenizer]) -> None:
    make("a", settings={"chat_template": "{{ first }}"})
    make("b", seed=1, extra_files={"chat_template.jinja": TEMPLATE.encode()})
    make("c", seed=2, settings={"chat_template": [{"name": "default", "template": TEMPLATE}]})
    merged(recipe("a", "b", "c", base="a", chat_template="auto"))
    assert Path("out/chat_template.jinja").read_text() == TEMPLATE + "\n"
    assert "chat_template" not in json.loads(Path("out/tokenizer_config.json").read_text())
    merged(recipe("a", "b", base="a", chat_template="auto"), "two")
    assert Path("two/chat_template.jinja").read_text() == "{{ first }}\n"


@pytest.mark.parametrize("name", ["alpaca", "chatml", "exaone", "llama3", "mistral"])
def test_templates_by_name(make: Callable[..., Tokenizer], name: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    make("a", settings={"chat_template": "{{ first }}"})
    make("b", seed=1)
    merged(recipe("a", "b", chat_template=name))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(Path("out/chat_template.jinja").read_text())
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    shown = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert (
        shown.rstrip("\n")
        == {
            "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Response:",
            "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>assistant",
            "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|assistant|]",
            "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
            "mistral": "<s>[INST] S\n\nU [/INST] A</s>",
        }[name]
    )


@pytest.mark.slow
def test_a_template_from_a_file_or_as_text(make: Callable[..., Tokenizer], tmp_path: Path) -> None:
    make("a")
    make("b", seed=1)
    Path("my.jinja").write_text(TEMPLATE)
    merged(recipe("a", "b", chat_template="my.jinja"))
    merged(recipe("a", "b", chat_template=TEMPLATE), "two")
    assert Path("out/chat_template.jinja").read_text() == Path("two/chat_template.jinja").read_text() == TEMPLATE + "\n"
    (problem,) = problems(recipe("a", "b", chat_template="chatm"))
    assert "there is no chat template 'chatm' (did you mean 'chatml'?), and no such file" in str(problem)
    plan = weightsmith.plan(recipe("a", "b", chat_template="auto"))
    assert [str(warning) for warning in plan.warnings] == [
        "chat_template: no model has a chat template, and neither does the output\n"
        "  -> Name one: alpaca, chatml, exaone, llama3, mistral; or leave the line out."
    ]
    assert "chat_template.jinja" not in plan.files
    os.mkfifo(tmp_path / "pipe")
    assert problems(recipe("a", "b", chat_template="pipe"))


# ---- invalid recipes


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"source": "c"}, "the source of the token '<s>' is not in the merge\n  -> Name one of a, b."),
        ({"source": {"kind": "model_token", "model": "a", "token": "<none>"}}, "a has no row for the token '<none>'"),
        (
            {"source": {"kind": "model_token", "model": "a", "token_id": 322}},
            "a has no row for the token 322: it has 322 rows, and this is number 322",
        ),
    ],
)
def test_rules_for_tokens_are_checked(make: Callable[..., Tokenizer], rule: Any, said: str) -> None:
    make("a")
    make("b", seed=1)
    (problem,) = problems(recipe("a", "b", tokenizer={"source": "base", "tokens": {"<s>": rule}}))
    assert f"tokenizer.tokens.<s>: {said}" in str(problem)


def test_a_base_without_a_tokenizer_is_refused_and_another_model_is_taken_as_alike(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("b", name).unlink()
    result = weightsmith.plan(recipe("a", "b", tokenizer_source="union"))
    assert "b has no tokenizer that can be read: its rows are taken to be those of a" in [str(w) for w in result.warnings]
    (problem,) = problems(recipe("b", "a", tokenizer_source="union"))
    assert "b has no tokenizer that can be read" in str(problem)


@pytest.mark.parametrize("base", ["a", "b"])
def test_a_base_with_older_files_gets_a_tokenizer_json(make: Callable[..., Tokenizer], base: str) -> None:
    base_tokenizer = make("a")
    make("b", trained(special=["<s>", "</s>", "<x>"], text=OTHER_TEXT), seed=1)
    for name in ("a", "b") if base == "b" else ("a",):
        vocab = Tokenizer.from_file(f"{name}/tokenizer.json")
        vocab.model.save(name)
        data = json.loads(Path(name, "tokenizer.json").read_text())
        Path(name, "added_tokens.json").write_text(json.dumps({e["content"]: e["id"] for e in data["added_tokens"]}))
        Path(name, "tokenizer.json").unlink()
        Path(name, "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    if base == "b":
        asked, new = recipe("a", "b", tokenizer={"source": "b", "tokens": {"<new>": None}}), "<new>"
        base_tokenizer = trained(special=["<s>", "</s>", "<x>"], text=OTHER_TEXT)
    else:
        asked, new = recipe("a", "b", tokenizer_source="union"), "<x>"
    said = f"{base} has no tokenizer.json: that of the output is made from vocab.json"
    assert any(said in str(warning) for warning in weightsmith.plan(asked).warnings)
    merged(asked)
    tokenizer = Tokenizer.from_file("out/tokenizer.json")
    for text in SAMPLES:
        assert ids(tokenizer, text) == ids(base_tokenizer, text)
    assert ids(tokenizer, f"fox{new}") == [*ids(base_tokenizer, "fox"), base_tokenizer.get_vocab_size()]
    assert not {"vocab.json", "merges.txt"} & {path.name for path in Path("out").iterdir()}
    assert json.loads(Path("out/tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json.loads(Path("out/added_tokens.json").read_text())[new] == base_tokenizer.get_vocab_size()


@pytest.mark.parametrize(("source", "kept"), [("union", False), ("base", True), ("b", False)])
def test_a_tekken_file_that_lacks_the_new_tokens_is_left_out(make: Callable[..., Tokenizer], source: str, kept: bool) -> None:
    """transformers 5 with mistral_common reads it in place of tokenizer.json."""
    make("a", extra_files={"tekken.json": b"{}"})
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    _, result = merged(recipe("a", "b", base="a", tokenizer_source=source))
    assert Path("out/tekken.json").exists() == kept
    assert any("tekken.json of a is left out" in str(w) for w in result.warnings) == (source == "union")


def test_a_tokenizer_that_cannot_be_made_is_the_only_problem(make: Callable[..., Tokenizer]) -> None:
    make("a")
    make("b", trained("SentencePiece BPE", special=["<x>"]), seed=1)
    (problem,) = problems(recipe("a", "b", tokenizer_source="union"))
    assert "tokenizers of different families cannot be united" in str(problem)
    result = weightsmith.plan(recipe("a", "b", tokenizer_source="base"))
    assert any("of different families: rows are matched by the bytes of their tokens" in str(w) for w in result.warnings)


def test_a_merge_inside_a_mixture_cannot_change_the_vocabulary(make: Callable[..., Tokenizer]) -> None:
    make("a", rows=350)
    make("b", rows=340, seed=1)
    document = {
        "base_model": recipe("a", "b"),
        "experts": [{"source_model": "a"}, {"source_model": "a"}],
        "gate_mode": "random",
    }
    with pytest.raises(weightsmith.PlanError, match="problem") as caught:
        weightsmith.plan(document)
    assert "a merge inside a mixture cannot change the vocabulary or the chat template" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data["other_files"].update({"evil.py": ""}), "that no loader reads: 'evil.py'"),
        (lambda data: data["other_files"].update({"../x.json": ""}), "is not a file name"),
        (lambda data: data["other_files"].update({"tokenizer.json": "%"}), "it is not base64"),
        (lambda data: view_of(data)["fallback"][0][2]["block"].__setitem__(slice(1, 4), [4, 2, 2]), "cannot replace those of"),
        (lambda data: view_of(data)["fallback"][0].__setitem__(1, "nothing"), "has no tensor 'nothing'"),
        (lambda data: view_of(data)["fallback"][0].__setitem__(1, "model.norm.weight"), "ends at element"),
        (lambda data: data["tables"].__setitem__(0, ""), "cannot replace those of"),
    ],
)
def test_a_plan_from_anyone_is_checked(make: Callable[..., Tokenizer], edit: Callable[[Any], object], said: str) -> None:
    make("a")
    make("b", trained(special=["<x>"]), seed=1)
    data = json.loads(json.dumps(weightsmith.plan(recipe("a", "b", tokenizer_source="union")).to_json()))
    edit(data)
    with pytest.raises(weightsmith.WeightsmithError) as caught:
        weightsmith.run(plan_from_json(data), "out", progress=False, fsync=False)
    assert said in str(caught.value)
    assert not Path("out").exists()


def view_of(data: Any) -> Any:
    """The first gather of the embedding's step."""
    step = next(step for step in data["steps"] if step["name"] == EMBED)
    return next(read[2] for read in step["inputs"] if len(read) == 3 and "fallback" in read[2])


@pytest.mark.slow
def test_the_plan_on_the_screen_says_where_rows_come_from(
    make: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("a")
    make("b", trained(special=["<s>", "</s>", "<x>"]), seed=1)
    Path("r.yml").write_text(json.dumps(recipe("a", "b", tokenizer_source="union")))
    shown = Cli(monkeypatch, capsys)("plan", "r.yml").out
    cli = Cli(monkeypatch, capsys)
    Path("plan.json").write_text(cli("plan", "r.yml", "--json").out)
    assert cli("run", "plan.json", "from_json").code == 0
    assert cli("merge", "r.yml", "direct").code == 0
    for name in ("tokenizer.json", "model.safetensors"):
        assert Path("from_json", name).read_bytes() == Path("direct", name).read_bytes()
    part = shown[shown.index("vocabulary\n") : shown.index("copied from")]
    assert part == (
        "vocabulary\ntokens   323, of a, and 1 token added: <x>\nrows     323 instead of 322\n"
        "rows come from  tokens\nin all models      322\nonly in b            1\n\nwritten\ntokenizer.json\n\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("again", ["union", "base", ""])
@pytest.mark.parametrize("how", ["one plan", "json", "kept"])
def test_a_result_with_a_tokenizer_of_its_own_is_a_model_of_the_next(
    make: Callable[..., Tokenizer], again: str, how: str
) -> None:
    make("a")
    make("b", trained(special=["<s>", "</s>", "<|im|>"], text=OTHER_TEXT), seed=1)
    make("c", trained(special=["</s>", "<x>"], text=OTHER_TEXT), seed=2)
    one = {**recipe("a", "b", base="a", tokenizer_source="union"), "name": "one"}
    models = ["one", "c"] if again else ["one"]
    last = recipe(*models, base="one", **({"tokenizer_source": again} if again else {}))
    weightsmith.merge(one, "by-hand-one", progress=False, fsync=False)
    merged(json.loads(json.dumps(last).replace('"one"', '"by-hand-one"')), "by-hand")
    if how == "json":
        weightsmith.run(plan_from_json(json.loads(json.dumps(weightsmith.plan([one, last]).to_json()))), "out", fsync=False)
    else:
        merged([one, last], keep_stages=how == "kept")  # type: ignore[arg-type]
    names = ["model.safetensors", "config.json", *(p.name for p in Path("by-hand").glob("*tok*"))]
    for name in names:
        assert Path("out", name).read_bytes() == Path("by-hand", name).read_bytes(), name
    assert Path("out.stage-one").is_dir() == (how == "kept")
