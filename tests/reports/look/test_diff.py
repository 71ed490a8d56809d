"""`diff`: the numbers are torch's in float64, and the words are right for known cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.reports.look.models import LAYERS, TOKENS, changed, is_linear, low_rank, save, trained, weights
from weightsmith._base.errors import PlanError, UnknownName
from weightsmith._base.report.blocks import Mark
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import COPY, Product, Read, Step
from weightsmith._reports.look.differences import KIND, VALUES, differences


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("look") / "base", weights())


def diff(a: Path, b: Path, **options: object) -> weightsmith.Difference:
    return weightsmith.diff(a, b, progress=False, **options)  # type: ignore[arg-type]


def stored(folder: Path, name: str) -> np.ndarray:
    with weightsmith.open_checkpoint(folder) as model:
        return model.read(name).astype(np.float64)


# ---- numbers


@pytest.mark.long
@pytest.mark.parametrize("change", [low_rank(8, 0), trained], ids=["low rank", "full rank"])
def test_numbers_are_torchs_in_float64(base: Path, tmp_path: Path, change: object) -> None:
    torch = pytest.importorskip("torch")
    difference = diff(base, changed(tmp_path / "b", change))  # type: ignore[arg-type]
    assert [tensor.name for tensor in difference.tensors] == list(weightsmith.open_checkpoint(base).specs)
    for tensor in difference.tensors:
        a, b = (torch.from_numpy(stored(folder, tensor.name)) for folder in (base, tmp_path / "b"))
        delta = b - a
        assert tensor.delta == pytest.approx(float(delta.norm()), rel=1e-9)
        assert tensor.a == pytest.approx(float(a.norm()), rel=1e-9)
        assert tensor.b == pytest.approx(float(b.norm()), rel=1e-9)
        assert tensor.changed == int((delta != 0).sum())
        assert tensor.largest == pytest.approx(float(delta.abs().max()), rel=1e-6)
        angle = torch.nn.functional.cosine_similarity(a.reshape(-1), b.reshape(-1), 0, 0)
        assert tensor.cosine == pytest.approx(float(angle), abs=1e-12)
        if tensor.leading is None:
            assert not is_linear(tensor.name) or not tensor.changed
            continue
        true = torch.linalg.svdvals(delta)[:VALUES].numpy()
        values, upper = np.array(tensor.leading.values), np.array(tensor.leading.upper)
        assert (values <= true * (1 + 1e-5)).all()
        assert (true <= upper * (1 + 1e-5)).all()
        strong = true > 0.3 * true[0]
        np.testing.assert_allclose(values[strong], true[strong], rtol=0.25)
        np.testing.assert_allclose(values[0], true[0], rtol=0.05)


@pytest.mark.slow
def test_layers_parts_and_the_total_are_sums_of_tensors(base: Path, tmp_path: Path) -> None:
    difference = diff(base, changed(tmp_path / "b", trained))
    tensors = difference.tensors
    for groups in (difference.layers, difference.parts, [difference.total]):
        assert sum(group.tensors for group in groups) == len(tensors)
        assert math.sqrt(sum(group.delta**2 for group in groups)) == pytest.approx(math.sqrt(sum(t.delta**2 for t in tensors)))
    assert [group.name for group in difference.layers] == ["outside the layers", *(f"model.layers.{i}" for i in range(LAYERS))]
    a, b = (np.concatenate([stored(f, t.name).reshape(-1) for t in tensors]) for f in (base, tmp_path / "b"))
    assert difference.total.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-9)
    assert difference.total.changed_share == pytest.approx((a != b).mean())


@pytest.mark.matrix
@pytest.mark.slow
def test_the_result_does_not_depend_on_threads(base: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "b", trained)
    one, three = (json.dumps(diff(base, other, threads=n).to_json()) for n in (1, 3))
    assert one == three


@pytest.mark.long
def test_rows_of_the_embedding_that_moved_most_have_their_tokens(base: Path, tmp_path: Path) -> None:
    tensors = weights()
    moved = {7: 0.5, 123: 0.25, TOKENS - 1: 1.0}
    for row, share in moved.items():
        tensors["model.embed_tokens.weight"][row] *= 1 + share
    difference = diff(base, save(tmp_path / "b", tensors, np.float32))
    assert [(row.row, row.token) for row in difference.moved] == [(TOKENS - 1, f"t{TOKENS - 1}"), (7, "t7"), (123, "t123")]
    assert [row.share for row in difference.moved] == pytest.approx([1.0, 0.5, 0.25], rel=1e-5)


def test_nan_is_reported_and_not_an_error(base: Path, tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    difference = diff(base, save(tmp_path / "b", tensors))
    assert difference.reading[0] == "B has NaN in 1 element of 1 tensor, the first model.layers.1.mlp.up_proj.weight."
    assert json.loads(json.dumps(difference.to_json(), allow_nan=False))["tensors"]


# ---- words


@pytest.mark.long
def test_a_low_rank_adapter(base: Path, tmp_path: Path) -> None:
    difference = diff(base, changed(tmp_path / "b", low_rank(8, 0)))
    assert difference.reading[0].startswith("A change of low rank, as LoRA makes it, or a merge of such models: rank ")
    assert {t.leading.rank for t in difference.tensors if t.leading} <= {8, 9}
    assert "in all linear layers of all layers" in difference.reading[0]
    assert "The embedding is frozen: not one of its elements differs." in difference.reading


@pytest.mark.long
def test_a_low_rank_adapter_of_some_layers(base: Path, tmp_path: Path) -> None:
    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        adapted = any(f"layers.{i}.self_attn.{p}_proj" in name for i in (2, 3) for p in "qv")
        return low_rank(4, 0)(name, tensor) * adapted

    (kind, *_) = diff(base, changed(tmp_path / "b", change, np.float32)).reading
    assert kind.endswith("rank 4 in self_attn.q_proj and self_attn.v_proj of layers 2 to 3.")


def test_some_experts_are_counted(tmp_path: Path) -> None:
    experts = {f"model.layers.{i}.mlp.experts.down_proj": np.ones((3, 40, 32), np.float32) for i in range(2)}
    tuned = {name: tensor + 0.5 * (np.arange(3) == 1)[:, None, None] for name, tensor in experts.items()}
    config = {"num_hidden_layers": 2, "num_local_experts": 3}
    a = write_checkpoint(tmp_path / "a", experts, config)
    b = write_checkpoint(tmp_path / "b", {name: tensor.astype(np.float32) for name, tensor in tuned.items()}, config)
    (kind, *_) = diff(a, b).reading
    assert kind.endswith("rank 1 in 2 of the 6 tensors of all linear layers of all layers.")


@pytest.mark.long
def test_a_full_fine_tune(base: Path, tmp_path: Path) -> None:
    difference = diff(base, changed(tmp_path / "b", trained))
    assert difference.reading[0].startswith(
        "A change of full rank, or of a rank above 64, as full fine-tuning makes it: all tensors of all layers;"
    )
    assert not any("frozen" in sentence for sentence in difference.reading)


@pytest.mark.long
def test_a_full_fine_tune_with_frozen_embeddings(base: Path, tmp_path: Path) -> None:
    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        return trained(name, tensor) * ("embed" not in name)

    difference = diff(base, changed(tmp_path / "b", change))
    assert difference.reading[0].startswith("A change of full rank")
    assert "The embedding is frozen: not one of its elements differs." in difference.reading
    assert not any("head is frozen" in sentence for sentence in difference.reading)


@pytest.mark.long
def test_a_merge_of_adapters_says_so_by_rank_and_by_its_card(base: Path, tmp_path: Path) -> None:
    for k in (1, 2):
        changed(tmp_path / f"m{k}", low_rank(6, k), np.float32)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(base),
        "models": [{"model": str(tmp_path / f"m{k}"), "parameters": {"weight": 0.5}} for k in (1, 2)],
        "dtype": "float32",
    }
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    difference = diff(base, tmp_path / "merged")
    assert "rank 12 in all linear layers" in difference.reading[0]
    assert any(sentence.startswith("The card of B says that it is a merge") for sentence in difference.reading)


def test_the_same_model_under_another_name(base: Path, tmp_path: Path) -> None:
    difference = diff(base, save(tmp_path / "other", weights()))
    assert difference.reading == ("The same weights: every tensor that both have is equal in every element.",)
    assert difference.total.cosine == 1
    assert difference.total.share == 0


@pytest.mark.long
@pytest.mark.parametrize("format", ["int8", "fp8-dynamic", "mxfp4"])
def test_a_model_that_was_quantised_and_dequantised(base: Path, tmp_path: Path, format: str) -> None:
    weightsmith.quantize(base, tmp_path / "q", format, progress=False)
    weightsmith.dequantize(tmp_path / "q", tmp_path / "plain", progress=False)
    (kind, *_) = diff(base, tmp_path / "plain").reading
    assert kind.startswith("White noise, as rounding makes it: about ")
    assert "in all linear layers of all layers, and no norm differs." in kind
    (kind, *_) = diff(base, tmp_path / "q").reading
    assert kind.startswith("B is quantised (")


def test_files_that_differ(base: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "b", weights())
    config = json.loads((other / "config.json").read_text()) | {"rope_theta": 1e6, "_name_or_path": "b"}
    (other / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["t1"], vocabulary["t2"] = 2, 1
    vocabulary["new"] = vocabulary.pop("t299")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "chat_template.jinja").write_text("{{ messages }}")
    difference = diff(base, other)
    assert difference.reading[1:] == (
        "config.json differs in rope_theta.",
        "The tokenizers differ: 1 token that only B has, 1 token that only A has, 2 tokens with another id.",
        "Only B has a chat template.",
    )


def test_tensors_that_cannot_be_compared_are_named(base: Path, tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1]
    tensors["model.extra.weight"] = np.ones(3, np.float32)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-20]
    difference = diff(base, save(tmp_path / "b", tensors))
    assert difference.only_a == ("model.layers.0.mlp.up_proj.weight",)
    assert difference.only_b == ("model.extra.weight",)
    assert difference.different == (("model.layers.1.mlp.up_proj.weight", ("[320, 160] BF16", "[319, 160] BF16")),)
    (embedding,) = (tensor for tensor in difference.tensors if tensor.place.part == "embed_tokens")
    assert (embedding.shape, embedding.changed) == ((TOKENS - 20, 160), 0)


def test_integers_are_compared_element_by_element(tmp_path: Path) -> None:
    a = {"steps": np.arange(101, dtype=np.int32), "small": np.arange(3, dtype=np.uint8)}
    b = {"steps": np.where(a["steps"] % 10 == 3, -1, a["steps"]).astype(np.int32), "small": a["small"]}
    difference = diff(write_checkpoint(tmp_path / "a", a), write_checkpoint(tmp_path / "b", b))
    assert {tensor.name: tensor.changed for tensor in difference.tensors} == {"steps": 10, "small": 0}


@pytest.mark.long
def test_pickled_weights_and_adapters_are_read_like_any_others(base: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "bin").mkdir()
    state = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in weights().items()}
    torch.save(state, tmp_path / "bin/pytorch_model.bin")
    assert diff(base, tmp_path / "bin").reading[0].startswith("The same weights")
    tuned = changed(tmp_path / "tuned", low_rank(8, 0), np.float32)
    weightsmith.extract_lora(tuned, base, tmp_path / "adapter", max_rank=8, out_dtype="float32", progress=False)
    difference = diff(base, f"{base}+{tmp_path / 'adapter'}")  # type: ignore[arg-type]
    assert {t.leading.rank for t in difference.tensors if t.leading} == {8}
    assert difference.total.delta == pytest.approx(diff(base, tuned).total.delta, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("where", [np.s_[:2, 5], np.s_[::2]], ids=["in the projection", "in the sketch"])
def test_sums_that_overflow_leave_the_spectrum_unknown(base: Path, tmp_path: Path, where: object) -> None:
    tensors = weights()
    tensors["model.layers.1.mlp.up_proj.weight"][where] = 3e38
    difference = diff(base, save(tmp_path / "b", tensors, np.float32), tensors=["*layers.1.mlp.up*"])
    (tensor,) = difference.tensors
    assert tensor.delta > 1e38
    assert tensor.leading is not None
    assert (tensor.leading.rank, tuple(tensor.leading.values), tensor.rank) == (None, (), Mark.UNDEFINED)
    json.dumps(difference.to_json(), allow_nan=False)


@pytest.mark.long
def test_globs_choose_tensors(base: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "b", trained)
    difference = diff(base, other, tensors=["*.mlp.up*", "model.norm.weight"])
    assert [t.name for t in difference.tensors] == [
        *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)),
        "model.norm.weight",
    ]
    with pytest.raises(UnknownName, match=r"no tensor matches '\*\.mpl\.\*'"):
        diff(base, other, tensors=["*.mpl.*"])


def test_a_model_that_is_not_there(base: Path) -> None:
    with pytest.raises(PlanError, match="no such folder or file"):
        diff(base, base / "nowhere")


# ---- plans from elsewhere


def test_a_product_that_does_not_fit_its_steps_is_rejected() -> None:
    spec = TensorSpec("w", DTYPES["BF16"], (8, 8))
    good = differences("d", [Step(spec, COPY, (Read(0, "w"), Read(1, "w")), role="linear")])
    assert KIND.check(good) == ""
    one = differences("d", [Step(spec, COPY, (Read(0, "w"),))])
    assert "two inputs" in KIND.check(one)
    flat = differences("d", [Step(TensorSpec("w", DTYPES["BF16"], (8,)), COPY, (Read(0, "w"), Read(1, "w")), role="linear")])
    assert "two dimensions" in KIND.check(flat)
    short = Product("d", "differences", good.outs[:2], {}, good.steps)
    assert "its arrays" in KIND.check(short)
