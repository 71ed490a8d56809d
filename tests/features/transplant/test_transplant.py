"""`weightsmith transplant-tokenizer`: rows, files and ids of the output, read back by weightsmith and by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from tests.plugin_help import installed
from tests.tokenizer_help import OTHER_TEXT, files, trained, write
from weightsmith._base.errors import FormatError, PlanError, PluginError, WeightsmithError
from weightsmith._features.transplant.approximations import find_approximation
from weightsmith._features.transplant.options import APPROXIMATIONS
from weightsmith._plans import plan_from_json

BF16 = np.dtype(ml_dtypes.bfloat16)
__all__ = ["cli"]

WIDTH, INNER = 32, 48


def config(rows: int, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": rows,
        "tie_word_embeddings": True,
        "bos_token_id": rows - 2,
        "eos_token_id": rows - 1,
        "dtype": "bfloat16",
        **keys,
    }


def model(
    folder: Path, tokenizer: Any, *, rows: int = 0, width: int = WIDTH, seed: int = 0, head: bool = False, **overrides: Any
) -> Path:
    """A model with random weights and a tokenizer."""
    rng = np.random.default_rng(seed)
    size = tokenizer.get_vocab_size()
    rows = rows or size
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (rows, width),
        "model.norm.weight": (width,),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        **{f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"},
        **{f"{layer}.mlp.{name}_proj.weight": (INNER, width) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (width, INNER),
        **({"lm_head.weight": (rows, width)} if head else {}),
    }
    tensors = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    ids = {"bos_token_id": size - 2, "eos_token_id": size - 1}
    settings = {**config(rows, hidden_size=width, tie_word_embeddings=not head), **ids, **overrides}
    write_checkpoint(folder, tensors, settings)
    names = tokenizer.get_added_tokens_decoder()
    bos, eos = (names[i].content for i in (size - 2, size - 1))
    write(folder, files(tokenizer, bos_token=bos, eos_token=eos))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return folder


def pair(folder: Path, **keys: Any) -> tuple[Path, Path]:
    """A model, and a donor whose tokenizer has other pieces and other names of the special tokens."""
    tokenizer = trained(special=("<s>", "</s>"))
    theirs = trained("byte-level BPE", ("<|begin|>", "<|end|>"), text=OTHER_TEXT, size=340)
    return model(folder / "model", tokenizer, **keys), model(folder / "donor", theirs, width=24, seed=1)


def transplant(*args: Any, **options: Any) -> weightsmith.Merged:
    return weightsmith.transplant_tokenizer(*args, progress=False, fsync=False, **options)


def refusal(*args: Any, **options: Any) -> WeightsmithError:
    with pytest.raises(PlanError) as caught:
        transplant(*args, **options)
    (problem,) = caught.value.problems
    return problem


def table(folder: Path, name: str = "model.embed_tokens.weight") -> np.ndarray:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        return checkpoint.read(name)


def vocabulary(folder: Path) -> Mapping[str, int]:
    from tokenizers import Tokenizer

    ids: Mapping[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    return ids


# ---- rows and files


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 384])
def test_a_transplant_to_itself_is_the_identity(tmp_path: Path, rows: int) -> None:
    receiver = model(tmp_path / "model", trained(), rows=rows, head=True)
    twin = model(tmp_path / "twin", trained(), rows=rows, seed=5)
    for donor in (receiver, twin):  # the twin has the same tokenizer, and other weights
        transplanted = transplant(receiver, donor, tmp_path / f"out {donor.name}", approximation="mean")
        with weightsmith.open_checkpoint(receiver) as checkpoint:
            for name in checkpoint.specs:
                assert table(transplanted.out, name).tobytes() == checkpoint.read(name).tobytes(), name
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (transplanted.out / name).read_bytes() == (receiver / name).read_bytes(), name
        for name in ("config.json", "generation_config.json"):
            assert json.loads((transplanted.out / name).read_text()) == json.loads((receiver / name).read_text()), name


def test_shared_tokens_keep_their_rows_and_special_tokens_take_those_of_the_same_role(tmp_path: Path) -> None:
    receiver, donor = pair(tmp_path)
    transplanted = transplant(receiver, donor, tmp_path / "out", approximation="mean", report=tmp_path / "out/report.html")
    rows, before, ids, old = table(transplanted.out), table(receiver), vocabulary(donor), vocabulary(receiver)
    assert rows.shape == (len(ids), WIDTH)
    special = {"<|begin|>": "<s>", "<|end|>": "</s>"}
    average = before.astype(np.float64).mean(0).astype(np.float32).astype(before.dtype)
    missing = 0
    for token, number in ids.items():
        source = old.get(special.get(token, token))
        assert rows[number].tobytes() == (average if source is None else before[source]).tobytes(), token
        missing += source is None
    assert missing > 20
    summary = transplanted.plan.vocabulary
    assert summary is not None
    assert summary["sources"] == {"approximated": missing, "same token": len(ids) - missing - 2, "same role": 2}
    written_config = json.loads((transplanted.out / "config.json").read_text())
    size = len(ids)
    assert (written_config["vocab_size"], written_config["bos_token_id"], written_config["eos_token_id"]) == (
        size,
        size - 2,
        size - 1,
    )
    assert json.loads((transplanted.out / "generation_config.json").read_text())["eos_token_id"] == size - 1
    assert (transplanted.out / "tokenizer.json").read_bytes() == (donor / "tokenizer.json").read_bytes()
    report: Any = transplanted.reports["rows of missing tokens"]
    assert len(report.rows) == missing
    content = (transplanted.out / "report.html").read_text().partition('id="content">')[2].partition("</script>")[0]
    (shown,) = (shown_table for shown_table in json.loads(content)["tables"] if shown_table["title"] == "Missing tokens")
    assert (shown["rows"], shown["data"][2]) == (missing, {"same": "approximated"})
    assert json.loads((transplanted.out / "transplant.json").read_text())["how"] == {"approximated": missing}


@pytest.mark.parametrize("name", ["base", "union"])
def test_a_donor_may_have_the_name_of_a_word_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    receiver, donor = pair(tmp_path)
    donor.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    transplanted = transplant(receiver, name, tmp_path / "out", approximation="mean")
    assert (transplanted.out / "tokenizer.json").read_bytes() == (tmp_path / name / "tokenizer.json").read_bytes()
    assert table(transplanted.out).shape[0] == len(vocabulary(tmp_path / name))


@pytest.mark.slow
def test_transformers_loads_the_result_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    receiver, donor = pair(tmp_path, head=True)
    out = transplant(receiver, donor, tmp_path / "out", k=8).out
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == loaded.config.vocab_size == loaded.get_input_embeddings().weight.shape[0]
    text = tokenizer("Der Fuchs", return_tensors="pt")
    assert loaded.generate(input_ids=text["input_ids"], max_new_tokens=3, do_sample=False).shape[1] > text["input_ids"].shape[1]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_every_approximation_makes_finite_rows_of_both_tables(tmp_path: Path, name: str) -> None:
    if find_approximation(name).torch:
        pytest.importorskip("torch")
    receiver, donor = pair(tmp_path, head=True)
    transplanted = transplant(receiver, donor, tmp_path / "out", approximation=name, k=6)
    for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.isfinite(table(transplanted.out, tensor).astype(np.float32)).all()
    again = transplant(receiver, donor, tmp_path / "again", approximation=name, k=6, threads=1, max_memory_bytes=300_000_000)
    assert (again.out / "model.safetensors").read_bytes() == (transplanted.out / "model.safetensors").read_bytes()
    report: Any = transplanted.reports["rows of missing tokens"]
    assert (report.error is not None) == find_approximation(name).donor


HALVES = """
from dataclasses import replace
import numpy as np
from weightsmith.abc.approximation import Approximated, Approximation

def make(problem):
    width = problem.tables.rows("model", [0]).shape[1]
    return Approximated.without_errors(np.full((len(problem.missing), width), 0.5, np.float32))

HALVES = Approximation("halves", "Every number is a half.", "a test", make)
"""


@pytest.mark.slow
def test_an_approximation_of_an_installed_package(tmp_path: Path) -> None:
    receiver, donor = pair(tmp_path)
    points = "halves = halves_package:HALVES\nlost = halves_package:LOST"
    with installed(tmp_path / "site", points, group="approximations", halves_package=HALVES):
        transplanted = transplant(receiver, donor, tmp_path / "out", approximation="halves")
        report: Any = transplanted.reports["rows of missing tokens"]
        assert report.approximation == "halves"
        with pytest.raises(PluginError, match="the approximation lost cannot be loaded: AttributeError"):
            transplant(receiver, donor, tmp_path / "other", approximation="lost")
    assert (table(transplanted.out, "model.embed_tokens.weight").astype(np.float32) == 0.5).all(1).any()
    with pytest.raises(PlanError, match=r"must be one of omp, .*not 'halves'"):
        transplant(receiver, donor, tmp_path / "third", approximation="halves")


@pytest.mark.slow
def test_a_plan_runs_from_its_json_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    receiver, donor = pair(tmp_path)
    transplanted = transplant(receiver, donor, tmp_path / "out", k=4)
    again = weightsmith.run(plan_from_json(transplanted.plan.to_json()), tmp_path / "again", progress=False, fsync=False)
    assert again is not None
    assert (again.out / "model.safetensors").read_bytes() == (transplanted.out / "model.safetensors").read_bytes()
    assert not (again.out / "recipe.yml").exists()  # the command's settings are no recipe
    for change in ({"missing": [10**6]}, {"model_rows": [10**6]}, {"kind": "other"}, {"cols": [7, 24]}, {"cols": [WIDTH, 0]}):
        data = json.loads(json.dumps(transplanted.plan.to_json()))
        data["products"][0]["settings"]["tables"][0].update(change)
        with pytest.raises((PlanError, FormatError)):
            weightsmith.run(plan_from_json(data), tmp_path / "wrong", progress=False)


# ---- donors and options


def test_a_tokenizer_alone_is_enough_where_no_embeddings_are_needed(tmp_path: Path) -> None:
    receiver = model(tmp_path / "model", trained())
    special = ["<unk>", "<|begin|>", "<|end|>"]
    alone = trained(text=OTHER_TEXT, size=340, special=special)
    write(tmp_path / "alone", files(alone, bos_token="<|begin|>", eos_token={"content": "<|end|>"}))
    transplanted = transplant(receiver, tmp_path / "alone", tmp_path / "out", approximation="subword")
    assert len(transplanted.plan.models) == 1
    for name in ("config.json", "generation_config.json"):  # nothing but the tokenizer's files says which they are
        written = json.loads((transplanted.out / name).read_text())
        assert [written[f"{role}_token_id"] for role in ("bos", "eos")] == [alone.token_to_id(s) for s in special[1:]]
    assert table(transplanted.out).shape[0] == len(vocabulary(tmp_path / "alone"))
    problem = refusal(receiver, tmp_path / "alone", tmp_path / "no", approximation="omp")
    assert problem.finding.what == "the approximation omp needs the donor's embeddings, and this is a tokenizer alone"
    assert problem.finding.fix.startswith("Name a model as donor, or use one of ")
    assert "subword" in problem.finding.fix
    assert (
        "magikarp needs"
        in refusal(receiver, tmp_path / "alone", tmp_path / "no", approximation="mean", magikarp=True).finding.what
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"approximation": "opm"}, "(did you mean 'omp'?), not 'opm'"),
        ({"approximation": "stb"}, "must be one of omp, hybrid, common_interpolation, subword, landmark_pca, mp_rope, mean, "),
        ({"approximation": "stb"}, "not 'stb': use landmark_pca or omp"),
        ({"weight_scheme": "best"}, "must be one of distance_proportional, barycentric, least_squares, not 'best'"),
        ({"k": 0}, "must be at least 1, not 0"),
        ({"prefix_match": "embedding"}, "must be one of no, yes, embed, lm_head"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    receiver, donor = pair(tmp_path)
    assert said in refusal(receiver, donor, tmp_path / "out", **options).finding.what


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    receiver, donor = pair(tmp_path)
    for path in receiver.glob("tokenizer*"):
        path.unlink()
    assert (
        "it has no tokenizer that can be read" in refusal(receiver, donor, tmp_path / "out", approximation="mean").finding.what
    )


def test_prefixes_serve_where_they_are_allowed(tmp_path: Path) -> None:
    receiver, donor = pair(tmp_path, head=True)
    transplanted = transplant(receiver, donor, tmp_path / "out", approximation="mean", prefix_match="embed")
    rows, heads, ids, old = (
        table(transplanted.out),
        table(transplanted.out, "lm_head.weight"),
        vocabulary(donor),
        vocabulary(receiver),
    )
    before, head = table(receiver), table(receiver, "lm_head.weight")
    average = head.astype(np.float64).mean(0).astype(np.float32).astype(head.dtype)
    missing = [token for token in ids if token not in old and token.isascii() and token[0] in old and token[:2] != "<|"]
    assert len(missing) > 20
    for token in missing:
        prefix = next(token[:n] for n in range(len(token) - 1, 0, -1) if token[:n] in old)
        assert rows[ids[token]].tobytes() == before[old[prefix]].tobytes()
        assert heads[ids[token]].tobytes() == average.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
def test_the_report_counts_the_missing_tokens_of_a_text(tmp_path: Path, cli: Cli, older: bool) -> None:
    receiver, donor = pair(tmp_path)
    if older:
        Tokenizer.from_file(str(donor / "tokenizer.json")).model.save(str(donor))
        (donor / "tokenizer.json").unlink()
        (donor / "tokenizer_config.json").unlink()
    (tmp_path / "text.txt").write_text(OTHER_TEXT)
    ran = cli("transplant-tokenizer", receiver, donor, tmp_path / "out", "-a", "mean", "--report-text", tmp_path / "text.txt")
    assert ran.code == 0, ran.err
    assert "of these tokens occur in the text" in ran.out
    report = json.loads((tmp_path / "out/transplant.json").read_text())
    counts = {row["token"]: row["count"] for row in report["rows"]}
    assert counts[" Deich"] == 1
    assert sum(counts.values()) > 10


@pytest.mark.long
def test_noise_scale_and_norms_change_new_rows_only(tmp_path: Path) -> None:
    receiver, donor = pair(tmp_path)

    def rows(name: str, **options: Any) -> np.ndarray:
        transplanted = transplant(receiver, donor, tmp_path / name, approximation="mean", **options)
        return table(transplanted.out).astype(np.float32)

    plain, twice = rows("a"), rows("b", new_vocab_scale=2.0)
    noisy, equal = rows("c", new_vocab_noise=0.1, seed=3), rows("d", match_norms=True)
    old = vocabulary(receiver)
    new = np.array([n for t, n in vocabulary(donor).items() if t not in old and not t.startswith("<|")])
    rest = np.setdiff1d(np.arange(len(plain)), new)
    for changed in (twice, noisy, equal):
        assert (changed[rest] == plain[rest]).all()
    np.testing.assert_array_equal(twice[new], 2 * plain[new])
    assert 0.05 < np.abs(noisy[new] - plain[new]).std() < 0.2
    lengths = np.linalg.norm(table(receiver).astype(np.float32), axis=1)
    np.testing.assert_allclose(np.linalg.norm(equal[new], axis=1), np.median(lengths), rtol=0.1)


@pytest.mark.slow
def test_poorly_trained_tokens_are_approximated(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    receiver, donor = pair(tmp_path, rows=400)
    tensors = {}
    with weightsmith.open_checkpoint(receiver) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
    rows = tensors["model.embed_tokens.weight"]
    old, ids = vocabulary(receiver), vocabulary(donor)
    rows[len(old) :] = 1  # padding: surely not trained
    shared = sorted(set(old) & set(ids), key=lambda token: old[token])
    rows[old[shared[-1]]] = 1
    write_checkpoint(receiver, tensors, json.loads((receiver / "config.json").read_text()))
    kept = table(transplant(receiver, donor, tmp_path / "a", k=4).out).astype(np.float32)
    approximated = table(transplant(receiver, donor, tmp_path / "b", k=4, magikarp=True).out).astype(np.float32)
    assert (kept[ids[shared[-1]]] == 1).all()
    assert not (approximated[ids[shared[-1]]] == 1).all()
    assert (approximated[ids[shared[0]]] == kept[ids[shared[0]]]).all()


@pytest.mark.slow
def test_plan_shows_how_tokens_would_be_found(tmp_path: Path, cli: Cli) -> None:
    receiver, donor = pair(tmp_path)
    ran = cli("transplant-tokenizer", receiver, donor, "--plan", "-a", "mean")
    assert ran.code == 0, ran.err
    assert "same role" in ran.out
    assert not (tmp_path / "out").exists()
    assert cli("transplant-tokenizer", receiver, donor).code == 2


@pytest.mark.long
@pytest.mark.matrix("stated0-*", "stated1-*")
@pytest.mark.parametrize(
    ("stated", "same_as"),
    [
        ({"model_type": "smollm3"}, {"rope_theta": 2e6}),  # the default of its class in transformers
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "rope_theta": 2e5}}, {"rope_theta": 2e5}),
        ({}, {"rope_theta": 1e4}),
    ],
)
def test_mp_rope_takes_the_base_of_rope_that_transformers_takes(
    stated: dict[str, Any], same_as: dict[str, Any], tmp_path: Path
) -> None:
    receiver, theirs = pair(tmp_path)
    tables = []
    plain = json.loads((receiver / "config.json").read_text())
    for settings in (stated, same_as):
        (receiver / "config.json").write_text(json.dumps({**plain, **settings}))
        transplant(receiver, theirs, tmp_path / "out", approximation="mp_rope", overwrite=True)
        tables.append(table(tmp_path / "out").tobytes())
    assert tables[0] == tables[1]


def test_mp_rope_refuses_a_model_whose_base_of_rope_is_not_known(tmp_path: Path) -> None:
    receiver, theirs = pair(tmp_path)
    stated = json.loads((receiver / "config.json").read_text())
    (receiver / "config.json").write_text(json.dumps({**stated, "model_type": "unheard_of"}))
    assert "rope_theta of config.json is missing" in str(refusal(receiver, theirs, tmp_path / "out", approximation="mp_rope"))
