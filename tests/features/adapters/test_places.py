"""Adapters of many families of models: PEFT finds all that they have, and makes the fine-tune of the base."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.features.adapters.places_zoo import FAMILIES, FAST, inputs_of, outputs_of
from tests.features.adapters.test_extract import applied, config_of, extract, refusal, tensors_of, tuned
from tests.models.lora.test_lora import P as PREFIX
from tests.models.lora.test_lora import Q, base, base_tensors, normal
from tests.sampling import sampled
from weightsmith._features.adapters.built import BuiltModel, matched
from weightsmith._features.adapters.factors import FactorTarget
from weightsmith._features.adapters.placing import AdapterPlaces
from weightsmith._planning.planner import loading, transformers_script

pytest.importorskip("torch")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is asked in this process: another one takes seconds to import it."""
    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(loading, "ask_script", lambda question, _began: transformers_script.describe(*json.loads(question)[1:]))


def models(name: str, folder: Path) -> tuple[Path, Path]:
    """A fine-tune of which all differs that is stored, and its base."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class, config_class, arguments = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments))
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in state.items():
            if tensor.is_floating_point():
                tensor.copy_(0.1 * torch.randn_like(tensor).abs() if "running_var" in key else 0.1 * torch.randn_like(tensor))
        model.save_pretrained(folder / "base")
        for tensor in state.values():
            if tensor.is_floating_point():
                tensor += 0.03 * torch.randn_like(tensor)
        model.save_pretrained(folder / "fine")
    return folder / "fine", folder / "base"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(FAMILIES, FAST))
def test_base_and_adapter_are_the_fine_tune(name: str, tmp_path: Path, asked: None) -> None:
    import torch

    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    fine, model = models(name, tmp_path)
    extraction = extract(fine, model, tmp_path / "out", max_rank=10000, out_dtype="float32")
    model_class = getattr(transformers, FAMILIES[name][0])
    want, fresh = (model_class.from_pretrained(folder, dtype=torch.float32).eval() for folder in (fine, model))
    inputs = inputs_of(want)
    before = outputs_of(fresh, inputs)
    loaded = peft.PeftModel.from_pretrained(fresh, extraction.out).eval()
    info = loaded.load_adapter(extraction.out, adapter_name="again")
    assert info.unexpected_keys == []
    assert [key for key in info.missing_keys if ".again." in key] == []
    moved = 0.0
    for actual, expected, old in zip(outputs_of(loaded, inputs), outputs_of(want, inputs), before, strict=True):
        assert float((actual - expected).norm()) <= 1e-5 * float(expected.norm())
        moved = max(moved, float((old - expected).norm() / expected.norm()))
    assert moved > 0.1
    back = applied(model, extraction.out, tmp_path / "back", dtype="float32")
    with weightsmith.open_checkpoint(fine) as checkpoint:
        for tensor in checkpoint.specs:
            np.testing.assert_allclose(back[tensor], checkpoint.read(tensor), atol=2e-5, err_msg=tensor)
    report: Any = extraction.reports["extraction"]
    assert report.left_out == {}
    assert report.to_json()["checked"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(FAMILIES, ("deepseek-v3", "gpt-oss")))
def test_a_merge_of_adapters_is_an_adapter_that_peft_finds_as_it_finds_them(name: str, tmp_path: Path, asked: None) -> None:
    """The mean of two adapters of all that differs is the mean of the fine-tunes."""
    import torch

    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    first, model = models(name, tmp_path)
    model_class = getattr(transformers, FAMILIES[name][0])
    second = tmp_path / "second"
    other = model_class.from_pretrained(first, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    other.save_pretrained(second)
    want, other, fresh = (model_class.from_pretrained(f, dtype=torch.float32).eval() for f in (first, second, model))
    with torch.no_grad():
        for parameter, theirs in zip(want.parameters(), other.parameters(), strict=True):
            parameter += (theirs - parameter) / 2
    adapters = [
        extract(fine_tune, model, tmp_path / f"of {fine_tune.name}", max_rank=10000, out_dtype="float32").out
        for fine_tune in (first, second)
    ]
    recipe = {"merge_method": "linear", "models": [{"model": str(out), "parameters": {"weight": 0.5}} for out in adapters]}
    merged = weightsmith.merge(recipe, tmp_path / "merged", progress=False, fsync=False)
    inputs = inputs_of(want)
    loaded = peft.PeftModel.from_pretrained(fresh, merged.out).eval()
    info = loaded.load_adapter(merged.out, adapter_name="again")
    assert info.unexpected_keys == []
    assert [key for key in info.missing_keys if ".again." in key] == []
    for actual, expected in zip(outputs_of(loaded, inputs), outputs_of(want, inputs), strict=True):
        assert float((actual - expected).norm()) <= 1e-5 * float(expected.norm())


def headers(name: str) -> tuple[dict[str, Any], list[str]]:
    """config.json of a family's model, and the names of its tensors."""
    import torch

    transformers = pytest.importorskip("transformers")
    model_class, config_class, arguments = FAMILIES[name]
    config = getattr(transformers, config_class)(**arguments)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    return json.loads(config.to_json_string(use_diff=False)), [*model.state_dict()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(["llama", "llama-tied", "gpt2", "bert", "t5", "bert-bare"], ("t5", "bert-bare")))
def test_a_config_without_architectures_is_that_of_the_class_that_fits(name: str) -> None:
    config, names = headers(name)
    stated = transformers_script.describe({**config, "architectures": [FAMILIES[name][0]]}, names)
    assert transformers_script.describe({**config, "architectures": None}, names) == stated
    assert {name: key for name, (key, _) in stated["names"].items()} == {name: name for name in names}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_names_are_known_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    config, names = headers("llama")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        patch.setattr(transformers_script, "find_spec", lambda _name: None)
        description = transformers_script.describe({**config, "architectures": ["LlamaForCausalLM"]}, names)
    assert (description["peft"], set(description["names"])) == (False, set(names))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.loading
def test_transformers_is_asked_beside_the_run(tmp_path: Path) -> None:
    """In a process of its own. Tensors that it does not have are an error that names them."""
    pytest.importorskip("peft")
    fine, model = (tmp_path / n for n in ("fine", "base"))
    base(model)
    tuned(fine, {f"{Q}.weight": normal(24, 24)})
    extraction = extract(fine, model, tmp_path / "out")
    assert extraction.warnings == () or "not checked" not in extraction.warnings[0].what
    assert config_of(extraction.out)["target_modules"] == [Q]


# ---- places


def built(**options: Any) -> BuiltModel:
    """Two layers of a model with experts, a norm, and a head that is the embedding."""
    tensors = {"emb.weight": (8, 4), "head.weight": (8, 4), "norm.weight": (4,), "cls": (4,)}
    for i in (0, 1):
        tensors |= {f"l.{i}.q.weight": (4, 4), f"l.{i}.q.bias": (4,)}
        tensors |= {f"l.{i}.experts.gate_up_proj": (2, 6, 4), f"l.{i}.experts.down_proj": (2, 4, 3)}
    modules = {"": "other", "emb": "embedding", "head": "linear", "norm": "other", "l": "other"}
    for i in (0, 1):
        modules |= {f"l.{i}": "other", f"l.{i}.q": "linear", f"l.{i}.experts": "other"}
    fields: dict[str, Any] = {
        "modules": modules,
        "tensors": tensors,
        "names": {name: name for name in tensors if name != "head.weight"},
        "operations": {},
        "tied": (("emb.weight", "head.weight"),),
        "redirected": frozenset(),
        "refused": frozenset(),
        "rows": frozenset(),
    }
    return BuiltModel(**fields | options)


def places(model: BuiltModel, *names: str) -> AdapterPlaces:
    adapter_places = AdapterPlaces(model)
    assert adapter_places.add_factors(FactorTarget("l.0.q", "linear", 2, True))
    for name in ("down_proj", "gate_up_proj"):
        assert adapter_places.add_factors(FactorTarget(f"l.1.experts.{name}", "linear", 2, True, 2))
    adapter_places.add_whole(names, model.tensors)
    return adapter_places


def test_names_in_the_file() -> None:
    adapter_places = places(built(), "l.0.q.bias", "l.1.q.bias", "norm.weight", "cls")
    assert adapter_places.target_modules() == ["l.0.q"]
    assert adapter_places.factors("l.0.q")[0] == f"{PREFIX}l.0.q.lora_A.weight"
    assert adapter_places.factors("l.1.experts.gate_up_proj")[0] == f"{PREFIX}l.1.experts.base_layer.lora_A.weight"
    assert adapter_places.factors("l.1.experts.down_proj")[0] == f"{PREFIX}l.1.experts.lora_A.weight"
    assert adapter_places.whole == {"l.1.q": ("l.1.q.weight", "l.1.q.bias"), "norm": ("norm.weight",)}
    assert adapter_places.in_place == ["l.0.q.bias", "cls"]
    assert [adapter_places.saved(key) for key in adapter_places.in_place] == [f"{PREFIX}l.0.q.base_layer.bias", f"{PREFIX}cls"]
    assert adapter_places.saved("norm.weight") == f"{PREFIX}norm.weight"


def test_modules_that_peft_does_not_take() -> None:
    redirected = AdapterPlaces(built(redirected=frozenset({"q"})))
    assert redirected.add_factors(FactorTarget("l.0.q", "linear", 2, True))
    assert (redirected.modules, list(redirected.parameters)) == ({}, ["l.0.q.weight"])
    assert redirected.factors("l.0.q.weight")[0] == f"{PREFIX}l.0.q.lora_A.weight"
    assert not AdapterPlaces(built(refused=frozenset({"q"}))).add_factors(FactorTarget("l.0.q", "linear", 2, True))
    assert not AdapterPlaces(built()).add_factors(FactorTarget("l.9.q", "linear", 2, True))
    assert not AdapterPlaces(built()).add_factors(FactorTarget("l.0.q", "transposed", 2, True))
    three = built(tied=(("emb.weight", "head.weight", "l.0.q.weight"),))
    assert not AdapterPlaces(three).add_factors(FactorTarget("l.0.q", "linear", 2, True))
    assert AdapterPlaces(built()).add_factors(FactorTarget("lm_head", "linear", 2, True))  # the head has another name here


def test_modules_whose_names_end_alike_are_saved_in_place() -> None:
    model = built()
    model = built(modules={**model.modules, "l.post_norm": "other"})
    assert places(model, "norm.weight").in_place == ["norm.weight"]
    assert matched(["a.q", "b.q", "q"], ["q"]) == {"a.q", "b.q", "q"}


def test_what_is_not_checked_is_said(tmp_path: Path) -> None:
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", {f"{Q}.weight": normal(24, 24)})
    extraction = extract(fine, model, tmp_path / "out")
    assert any("not checked: transformers is not installed" in w.what for w in extraction.warnings)
    assert not json.loads((extraction.out / "extraction.json").read_text())["checked"]
    assert tensors_of(extraction.out)


def test_a_model_that_transformers_does_not_know_is_not_checked() -> None:
    pytest.importorskip("transformers")
    assert transformers_script.describe({"model_type": "no such"}, []) == {
        "unknown": "transformers has no model_type 'no such'"
    }
    description = transformers_script.describe({"model_type": "llama", "architectures": ["X"]}, [])
    assert description == {"unknown": "transformers has no model class 'X'"}


@pytest.mark.slow
def test_what_differs_and_has_no_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: str, _began: object) -> dict[str, Any]:
        _, config, names = json.loads(question)
        assert config["model_type"] == "llama"
        shapes = {name: list(array.shape) for name, array in base_tensors().items() if name != "model.norm.weight"}
        modules = {name.rpartition(".")[0]: "linear" for name in shapes}
        known = {name: [name, []] for name in names if name in shapes}
        return {
            "modules": modules,
            "tensors": shapes,
            "names": known,
            "tied": [],
            "redirected": [],
            "experts": [],
            "refused": [],
            "rows": [],
            "peft": True,
        }

    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(loading, "ask_script", answer)
    changes = {f"{Q}.weight": normal(24, 24), "model.norm.weight": normal(24)}
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", changes)
    text = str(refusal(fine, model, tmp_path / "out"))
    assert "PEFT's adapters have no place for 1 tensors that differ from" in text
    assert "model.norm.weight: the model that transformers builds has no such tensor" in text
    assert not (tmp_path / "out").exists()
    assert extract(fine, model, tmp_path / "out", exclude=("model.norm",)).warnings == ()
