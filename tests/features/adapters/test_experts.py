"""Adapters of mixtures of experts, extracted; and intruder dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import moe_zoo
from tests.features.adapters.test_extract import applied, config_of, extract, tensors_of
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_experts import CONFIG, MLP, E, W, apart, fused
from tests.models.lora.test_lora import H, P, Q, normal
from tests.sampling import sampled
from weightsmith._features.adapters.factors import scale_intruders

pytest.importorskip("torch")

GATED = ("gate_proj", "up_proj", "down_proj")
EXPERTS = f"{MLP}.experts"


def changed(tensors: dict[str, np.ndarray], ranks: tuple[int, ...] = (1, 2, 2)) -> dict[str, np.ndarray]:
    """The experts with differences of some ranks, one for each expert."""
    weights = {}
    for name, weight in tensors.items():
        _, rows, cols = weight.shape
        pieces = [normal(rows, r, seed=e) @ normal(r, cols, seed=e + 9) for e, r in enumerate(ranks)]
        weights[name] = weight + np.stack(pieces)
    return weights


def pair(folder: Path, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """The fine-tune and its base, which also differ in one matrix of the attention."""
    attention = {f"{Q}.weight": normal(H, H)}, {f"{Q}.weight": normal(H, H) + normal(H, 3) @ normal(3, H)}
    fine, model = (
        write_checkpoint(folder / name, tensors | rest, CONFIG)
        for name, tensors, rest in (("fine", after, attention[1]), ("base", before, attention[0]))
    )
    return fine, model


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, out, in]", "[E, in, out]"])
@pytest.mark.parametrize("options", [{"energy": 0.999999}, {"max_rank": 4}, {"energy": 0.999999, "exact": True}])
def test_a_parameter_of_experts_has_factors_of_each(transposed: bool, options: dict[str, Any], tmp_path: Path) -> None:
    before = fused(transposed=transposed)
    fine, model = pair(tmp_path, before, changed(before))
    extraction = extract(fine, model, tmp_path / "out", out_dtype="float32", **options)
    config, rank = config_of(extraction.out), 2
    assert config["target_parameters"] == [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    assert (config["r"], config["target_modules"], config["rank_pattern"]) == (rank, ["q_proj"], {f"^{Q}": 3})
    inputs = 2 * W if transposed else H
    assert tensors_of(extraction.out)[f"{P}{EXPERTS}.base_layer.lora_A.weight"].shape == (E * rank, H if transposed else inputs)
    weights = applied(model, extraction.out, tmp_path / "in")
    for name, want in changed(before).items():
        np.testing.assert_allclose(weights[name], want, atol=2e-5, err_msg=name)
    report: Any = extraction.reports["extraction"]
    assert {f"{EXPERTS}.down_proj[{e}]" for e in range(E)} < {m["module"] for m in report.to_json()["modules"]}


@pytest.mark.parametrize("layout", ["peft", "vllm"])
@pytest.mark.parametrize("stored", ["apart", "fused"])
def test_experts_that_are_apart_have_one_rank(layout: str, stored: str, tmp_path: Path) -> None:
    """As PEFT and vLLM stack them. vLLM gets them apart however the model has them."""
    before = fused()
    after = changed(before, (1, 0, 2))
    want = apart(after, GATED)
    if stored == "apart":
        fine, model = pair(tmp_path, apart(before, GATED), want)
    elif layout == "vllm":
        fine, model = pair(tmp_path, before, after)
    else:
        return
    extraction = extract(fine, model, tmp_path / "out", out_dtype="float32", energy=0.999999, layout=layout)
    assert {m["rank"] for m in extraction.reports["extraction"].to_json()["modules"] if "experts" in m["module"]} == {2}  # type: ignore[attr-defined]
    tensors = tensors_of(extraction.out)
    for name in want:
        assert tensors[f"{P}{name.removesuffix('.weight')}.lora_A.weight"].shape[0] == 2, name
    config = config_of(extraction.out)
    assert (config["r"], config["rank_pattern"]) == (2, {f"^{Q}": 3})
    assert set(config["target_modules"]) == {"q_proj", *GATED}
    weights = applied(model, extraction.out, tmp_path / "in")
    if stored == "fused":
        weights = apart({name: weights[name] for name in before}, GATED)
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, atol=2e-5, err_msg=name)


def test_experts_that_have_no_place_are_named(tmp_path: Path) -> None:
    before = fused(transposed=True)
    fine, model = pair(tmp_path, before, changed(before))
    extraction = extract(fine, model, tmp_path / "out", layout="vllm")
    assert [w.what for w in extraction.warnings] == ["2 tensors differ and are not in the adapter: vLLM reads factors only"]
    odd = {f"{EXPERTS}.w": normal(E, 8, H)}
    fine, model = pair(tmp_path / "odd", odd, changed(odd))
    extraction = extract(fine, model, tmp_path / "out2")
    assert config_of(extraction.out)["modules_to_save"] == [EXPERTS]
    np.testing.assert_array_equal(tensors_of(extraction.out)[f"{P}{EXPERTS}.w"], changed(odd)[f"{EXPERTS}.w"])


@pytest.mark.matrix
@pytest.mark.slow
def test_bytes_of_experts_do_not_depend_on_threads(tmp_path: Path) -> None:
    before = fused()
    fine, model = pair(tmp_path, before, changed(before))
    one, two = (extract(fine, model, tmp_path / str(n), max_rank=3, threads=n).out for n in (1, 3))
    assert {n: as_bytes(a) for n, a in tensors_of(one).items()} == {n: as_bytes(a) for n, a in tensors_of(two).items()}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(["mixtral", "qwen3-moe", "granitemoe", "gpt-oss", "llama4"], ("mixtral", "gpt-oss")))
def test_peft_loads_the_experts_and_makes_the_fine_tune(name: str, tmp_path: Path) -> None:
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model_class, config_class, arguments = moe_zoo.MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments)).eval()
    model.save_pretrained(tmp_path / "base")
    for parameter_name, parameter in model.named_parameters():
        if ("experts" in parameter_name and "bias" not in parameter_name) or "q_proj.weight" in parameter_name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "fine")
    extraction = extract(tmp_path / "fine", tmp_path / "base", tmp_path / "out", max_rank=1000, out_dtype="float32")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(fresh, extraction.out)
    loaded = tuned.load_adapter(extraction.out, adapter_name="again")
    assert loaded.unexpected_keys == []
    assert not [key for key in loaded.missing_keys if "lora_" in key and ".again." in key]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(tuned.eval()(tokens).logits, model(tokens).logits, atol=2e-5, rtol=2e-4)


# ---- intruder dimensions


@pytest.mark.parametrize("by_rows", [True, False])
def test_intruder_dimensions_are_scaled(by_rows: bool) -> None:
    """A direction of outputs that is no singular vector of the base, and one that is."""
    u, v = (np.linalg.qr(normal(n, n, seed=n))[0] for n in (30, 20))
    base = (u[:, :20] * np.linspace(2, 1, 20)) @ v.T
    new = np.linalg.qr(normal(30, 30, seed=3))[0][:, :1]
    delta = 50 * new @ v[:, 3:4].T + 4 * u[:, 5:6] @ v[:, 5:6].T
    _, s, vt = np.linalg.svd(base + delta)
    first = np.linalg.svd(base + delta)[0][:, :1]
    want = delta - 0.75 * s[0] * first @ vt[:1]
    matrices = (delta, base + delta) if by_rows else (delta.T, (base + delta).T)
    scaled, count = scale_intruders(*(matrix.astype(np.float32) for matrix in matrices), 0.25, by_rows=by_rows)
    assert count == 1
    np.testing.assert_allclose(scaled if by_rows else scaled.T, want, atol=1e-4)


@pytest.mark.slow
def test_intruders_are_in_the_report_and_their_share_in_the_adapter(tmp_path: Path) -> None:
    before = {f"{Q}.weight": normal(H, H)}
    u, _, vt = np.linalg.svd(before[f"{Q}.weight"])
    after = {f"{Q}.weight": before[f"{Q}.weight"] + 40 * u.sum(1, keepdims=True) @ vt[:1]}  # like no one of them
    fine, model = (write_checkpoint(tmp_path / n, t, CONFIG) for n, t in (("fine", after), ("base", before)))
    energies = []
    for scale in (1.0, 0.5):
        extraction = extract(fine, model, tmp_path / f"{scale}", max_rank=8, intruder_scale=scale)
        (module,) = extraction.reports["extraction"].to_json()["modules"]  # type: ignore[attr-defined]
        energies.append(module["energy"])
        assert module.get("intruders", 0) == (scale != 1)
    assert energies[1] == pytest.approx(energies[0] / 4, rel=0.05)
