"""Losses of the tokens of a text, and divergences from another model, are those of transformers' own model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from tests.calibration_help import TEXT, TINY, changed, save_model
from tests.plan_help import prepare
from weightsmith._activations import losses as module
from weightsmith._activations.losses import Known, logs_of, own_losses, scored, token_losses
from weightsmith._activations.model import input_of
from weightsmith._activations.running import decoder_of
from weightsmith._activations.scored_rows import UNSCORED, ScoredRows
from weightsmith._base.errors import CheckpointError, NonFinite
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.products import find_kind
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.results import Results
from weightsmith._plans import PlanDraft

Found = dict[str, npt.NDArray[Any]]


def tiny_rows() -> ScoredRows:
    """Four rows of a text; the last is shorter, and of another one only a part is scored."""
    ids = np.frombuffer(TEXT.encode(), np.uint8)[: 4 * 16].astype(np.int32).reshape(4, 16) % 256
    nbytes = np.ones_like(ids)
    nbytes[:, 0] = UNSCORED
    nbytes[1, 1:7] = UNSCORED
    ids[3, 9:], nbytes[3, 9:] = 0, UNSCORED
    return ScoredRows(ids.copy(), nbytes)


def computed(
    folder: Path, rows: ScoredRows, reference: Known | None = None, *, keep: bool = False, threads: int = 2
) -> tuple[Found, Known | None]:
    """The arrays of the losses, and the model as a reference if it is kept."""
    with prepare({"merge_method": "passthrough", "models": [{"model": str(folder)}]}) as prepared:
        model = input_of(prepared.inputs, 0)
        weights = tuple(decoder_of(scored(model, rows).run.base).head_weights.values()) if keep else ()
        scoring = scored(model, rows, reference, keep=weights)
        draft = PlanDraft.of(prepared.plan)
        draft.steps = []
        scoring.run.add_to(draft, scoring.products)
        plan = draft.finish()
        results = Results(plan)
        for product in plan.products:
            if product.name in scoring.known:
                results.put(product, scoring.known[product.name])
        workload = Workload(folders=[model.checkpoint.folder], results=results)
        run(plan, prepared.inputs, DiscardedOutput(), Resources(threads), workload)
        arrays = {
            product.name: results.arrays(product.name) for product in (scoring.losses, *([scoring.states] if keep else []))
        }
        losses = {out.name: array for out, array in zip(scoring.losses.outs, arrays["losses"], strict=True)}
        return losses, scoring.reference(arrays, plan.hash) if keep else None


def expected_logs(folder: Path, rows: ScoredRows) -> torch.Tensor:
    """log p of every token after each: float64 [rows, tokens, vocabulary]."""
    how = {"dtype": torch.float64, "experts_implementation": "eager"}  # others have no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    with torch.inference_mode():
        return model(torch.from_numpy(rows.ids.astype(np.int64))).logits.log_softmax(-1)


def check_losses(losses: Found, logs: torch.Tensor, rows: ScoredRows) -> None:
    targets = torch.from_numpy(rows.ids.astype(np.int64))[:, 1:, None]
    expected = -logs[:, :-1].gather(2, targets)[..., 0].numpy()
    scored_places = rows.nbytes[:, 1:] >= 0
    np.testing.assert_allclose(losses["losses"][:, 1:][scored_places], expected[scored_places], rtol=1e-5, atol=1e-5)
    assert not losses["losses"][rows.nbytes < 0].any()
    assert expected[scored_places].std() > 0.05


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "phi3", "qwen3 moe"])
def test_losses_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """qwen2 and both gemmas have tied embeddings, and gemma2 caps its logits."""
    folder, rows = save_model(tmp_path / "m", name), tiny_rows()
    changed(folder, o_proj=20, down_proj=20, w2=20, lm_head=20, embed_tokens=20)
    losses, _ = computed(folder, rows)
    check_losses(losses, expected_logs(folder, rows), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.GraniteConfig(**TINY, logits_scaling=4.0),
        transformers.CohereConfig(**TINY, logit_scale=0.25),
        transformers.Gemma3TextConfig(**TINY, head_dim=16, final_logit_softcapping=2.0),
        transformers.PhiConfig(**TINY),
    ],
    ids=lambda config: config.model_type,
)
def test_scales_caps_and_biases_of_logits_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    folder, rows = save_model(tmp_path / "m"), tiny_rows()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    changed(folder, lm_head=20, embed_tokens=20)
    losses, _ = computed(folder, rows)
    check_losses(losses, expected_logs(folder, rows), rows)


@pytest.mark.long
def test_divergence_and_agreement_are_those_of_whole_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of three tokens."""
    a, b, rows = save_model(tmp_path / "a"), save_model(tmp_path / "b"), tiny_rows()
    changed(a, o_proj=20, down_proj=20, lm_head=20, embed_tokens=20)
    changed(b, o_proj=25, down_proj=15, lm_head=20, embed_tokens=20)
    monkeypatch.setattr("weightsmith._activations.losses.LOGITS_AT_ONCE", 3 * 256 + 1)
    _, known = computed(a, rows, keep=True)
    losses, _ = computed(b, rows, known)
    logs, others = expected_logs(a, rows), expected_logs(b, rows)
    check_losses(losses, others, rows)
    places = rows.nbytes >= 0
    expected = (logs.exp() * (logs - others)).sum(-1)[:, :-1].numpy()
    np.testing.assert_allclose(losses["divergences"][:, 1:][places[:, 1:]], expected[places[:, 1:]], rtol=1e-4, atol=1e-6)
    agree = (logs.argmax(-1) == others.argmax(-1))[:, :-1].numpy()
    assert (losses["agreement"][:, 1:] == (agree & places[:, 1:])).all()
    assert 0 < losses["agreement"].sum() < rows.tokens
    itself, _ = computed(a, rows, known)
    assert abs(itself["divergences"]).max() < 1e-6
    assert itself["agreement"].sum() == rows.tokens


@pytest.mark.long
def test_the_arrays_are_the_same_for_any_number_of_threads(tmp_path: Path) -> None:
    folder, rows = save_model(tmp_path / "m"), tiny_rows()
    _, known = computed(folder, rows, keep=True, threads=1)
    first, again = (computed(folder, rows, known, threads=threads)[0] for threads in (1, 3))
    assert {name: array.tobytes() for name, array in first.items()} == {name: array.tobytes() for name, array in again.items()}


def test_a_plan_whose_given_arrays_nobody_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only the command that made it has"):
        find_kind("given").compute(type("Bench", (), {"product": type("Product", (), {"name": "rows"})})())  # type: ignore[misc,arg-type]


@pytest.mark.slow
def test_a_prediction_that_is_nan_is_one_error(tmp_path: Path) -> None:
    folder, rows = save_model(tmp_path / "m"), tiny_rows()
    changed(folder, norm=float("inf"))
    with pytest.raises(NonFinite, match="NaN"):
        computed(folder, rows)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 18])
def test_losses_do_not_depend_on_how_many_logits_are_looked_at_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, expected = (torch.randn(7, 50, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    targets = torch.arange(7)
    monkeypatch.setattr(module, "SMALL_LOGITS", at_once)
    nats, divergences = token_losses(logits.float(), targets, logs_of(expected.float()))
    p, q = expected.softmax(1), logits.softmax(1)
    np.testing.assert_allclose(nats, -q[torch.arange(7), targets].log(), rtol=1e-5)
    assert divergences is not None
    np.testing.assert_allclose(divergences, (p * (p / q).log()).sum(1), rtol=1e-5)
    assert token_losses(logits.float(), targets)[1] is None
    assert torch.equal(own_losses(logs_of(logits.float()), targets, 50), nats)
