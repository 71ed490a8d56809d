"""Statistics of any model of a plan on any text are those of transformers' own forward and backward pass."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import weightsmith
from tests.calibration_help import CONFIGS, captured, changed, rows_for, save_model, settings
from tests.plan_help import prepare
from weightsmith._activations import gradients, states, statistics
from weightsmith._activations.model import array_name, input_of, result_of, statistic_products, text_for
from weightsmith._activations.statistics import GRAM, STATISTICS, TILE
from weightsmith._base.errors import CheckpointError, PlanError, UnknownName
from weightsmith._base.installation import install
from weightsmith._engine.products import find_kind
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.staging import Staging
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import COPY, PRODUCTS, PlanDraft, Product, Read, StatisticRequest, Step, plan_from_json
from weightsmith.abc.product import Arrays, ProductContext

Found = dict[str, npt.NDArray[Any]]
KINDS = tuple(STATISTICS.builtin)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of the tiny models have several tiles too."""
    for name in ("GRAM", "FISHER"):
        monkeypatch.setattr(statistics, name, replace(getattr(statistics, name), tile=40))


def models_of(folder: Path, name: str = "llama") -> dict[str, Any]:
    """A recipe of two models whose predictions depend on every layer."""
    for seed, model_name in enumerate("ab"):
        save_model(folder / model_name, name, seed=seed)
        changed(folder / model_name, o_proj=8, down_proj=8, w2=8, lm_head=20, embed_tokens=20)
    return {"merge_method": "linear", "models": [{"model": str(folder / n), "parameters": {"weight": 1}} for n in "ab"]}


def requests_for(
    prepared: Prepared, quantize_settings: QuantizeSettings, kinds: Sequence[str], model: int
) -> list[StatisticRequest]:
    model_input = input_of(prepared.inputs, model)
    text = text_for(
        model_input, quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
    )
    return [StatisticRequest(kind, model, text) for kind in kinds]


def with_statistics(prepared: Prepared, requests: Sequence[StatisticRequest]) -> Prepared:
    products = statistic_products(lambda number: input_of(prepared.inputs, number), requests)
    return prepared.with_plan(replace(prepared.plan, products=products))


def computed(prepared: Prepared, threads: int = 2, memory: int | None = None) -> Found:
    """Every array of the statistics, by name."""
    products = prepared.plan.products
    arrays = captured(prepared, products, memory, threads).arrays
    return {
        out.name: array
        for product in products
        if product.op == "statistic"
        for out, array in zip(product.outs, arrays[product.name], strict=True)
    }


class Whole:
    """transformers' own model in float64, and what passes through it on a text."""

    def __init__(self, folder: Path, quantize_settings: QuantizeSettings) -> None:
        how = {"dtype": torch.float64, "experts_implementation": "eager"}  # others have no float64
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        self.ids = rows_for(quantize_settings, folder)

    def entering(self, module: str) -> torch.Tensor:
        """What enters a module: [tokens, features]."""
        inputs: list[torch.Tensor] = []
        hook = self.model.get_submodule(module).register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
        with torch.no_grad():
            self.model(self.ids)
        hook.remove()
        return inputs[0].flatten(0, -2)

    def fisher(self) -> dict[str, torch.Tensor]:
        """The mean square of the gradients of each parameter, for labels drawn from the model's own predictions."""
        sums: dict[str, torch.Tensor] = {}
        for number, ids in enumerate(self.ids):
            self.model.zero_grad()
            logs = self.model(ids[None]).logits[0].log_softmax(1)
            below = logs.detach().exp().cumsum(1)
            draws = torch.from_numpy(np.random.default_rng([0, number]).random(len(ids), np.float32))
            labels = (below < draws[:, None] * below[:, -1:]).sum(1)
            logs.gather(1, labels[:, None]).sum().backward()
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums.get(name, 0) + parameter.grad.square()
        return {name: total / self.ids.numel() for name, total in sums.items()}

    def slopes(self) -> dict[str, torch.Tensor]:
        """The gradient of the sum of log p of the next tokens of each row, for each token of the text."""
        self.model.zero_grad()
        self._likelihood().backward()
        return {
            name: parameter.grad / self.ids.numel()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def slope_moments(self, module: str) -> torch.Tensor:
        """The mean of ggᵀ, with g the gradients of the same at the outputs of a module."""
        outputs: list[torch.Tensor] = []
        hook = self.model.get_submodule(module).register_forward_hook(lambda _module, _args, out: outputs.append(out))
        likelihood = self._likelihood()
        hook.remove()
        g = torch.autograd.grad(likelihood, outputs)[0].flatten(0, -2)
        return g.T @ g / self.ids.numel()

    def _likelihood(self) -> torch.Tensor:
        return self.model(self.ids).logits[:, :-1].log_softmax(2).gather(2, self.ids[:, 1:, None]).sum()


def assert_near(actual: npt.NDArray[Any], expected: torch.Tensor) -> None:
    assert actual.dtype == np.float32
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(torch.from_numpy(actual).double(), expected, rtol=2e-3, atol=2e-4 * scale)


@pytest.mark.slow
def test_statistics_of_each_model_are_those_of_transformers(tmp_path: Path) -> None:
    """Models of one plan, each with its own statistics, on texts of their own."""
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    shorter = replace(quantize_settings, calibration_rows=3, calibration_tokens=8)
    with prepare(recipe) as prepared:
        requests = [*requests_for(prepared, quantize_settings, KINDS, 0), *requests_for(prepared, shorter, KINDS, 1)]
        arrays = computed(with_statistics(prepared, requests))
    assert len(arrays) == 2 * 2 * (5 * 4 + 2 * 7)  # four inputs of linear layers, seven weights
    for number, (name, model_settings) in enumerate((("a", quantize_settings), ("b", shorter))):
        whole = Whole(tmp_path / name, model_settings)
        fisher, slopes = whole.fisher(), whole.slopes()
        count = len(KINDS)
        grams, _, moments, _, maxima, squares, sloping = requests[count * number : count * (number + 1)]
        for i in range(2):
            for module in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
                weight = f"model.layers.{i}.{module}.weight"
                x = whole.entering(weight.removesuffix(".weight"))
                assert_near(arrays[array_name(grams, weight)], x.T @ x)
                assert_near(arrays[array_name(moments, weight)], x.square().mean(0))
                assert_near(arrays[array_name(maxima, weight)], x.abs().amax(0))
                assert_near(arrays[array_name(squares, weight)], fisher[weight])
                both = arrays[array_name(sloping, weight)]
                assert_near(both[:, : x.shape[1]], slopes[weight])
                assert_near(both[:, x.shape[1] :], whole.slope_moments(weight.removesuffix(".weight")))


@pytest.mark.matrix("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "biased"])
def test_statistics_of_every_family_are_those_of_float64(family: str, tmp_path: Path) -> None:
    """To 1e-5 of their norm: of every linear layer that is a module of transformers' own model."""
    save_model(tmp_path / "a", family)
    quantize_settings = settings(tmp_path)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "a")}]}
    with prepare(recipe) as prepared:
        requests = requests_for(prepared, quantize_settings, KINDS, 0)
        arrays = computed(with_statistics(prepared, requests))
    whole = Whole(tmp_path / "a", quantize_settings)
    information, slopes, modules = whole.fisher(), whole.slopes(), dict(whole.model.named_modules())
    inside = [step.out.name for step in prepared.plan.steps if ".layers." in step.out.name]
    weights = [w for w in inside if isinstance(modules.get(w.removesuffix(".weight")), torch.nn.Linear)]
    assert len(weights) >= 8
    for weight in weights:
        x = whole.entering(weight.removesuffix(".weight"))
        expected = {
            "gram": x.T @ x,
            "second_moments": x.T @ x / len(x),
            "moments": x.square().mean(0),
            "magnitudes": x.abs().mean(0),
            "maxima": x.abs().amax(0),
            "fisher": information[weight],
            "slopes": torch.cat([slopes[weight], whole.slope_moments(weight.removesuffix(".weight"))], 1),
        }
        assert set(expected) == set(KINDS)
        for request in requests:
            actual = torch.from_numpy(arrays[array_name(request, weight)]).double()
            error = float((actual - expected[request.kind]).norm() / expected[request.kind].norm())
            assert error < 1e-5, (weight, request.kind, error)


@pytest.mark.long
def test_each_expert_has_the_statistics_of_the_tokens_that_reach_it(tmp_path: Path) -> None:
    recipe, quantize_settings = models_of(tmp_path, "mixtral"), settings(tmp_path, calibration_rows=2, calibration_tokens=8)
    with prepare(recipe) as prepared:
        requests = requests_for(prepared, quantize_settings, KINDS, 0)
        arrays = computed(with_statistics(prepared, requests))
    whole, owner = Whole(tmp_path / "a", quantize_settings), "model.layers.0.mlp"
    fisher = whole.fisher()
    x = whole.entering(owner)
    chosen = (x @ whole.model.get_submodule(f"{owner}.gate").weight.T).topk(2, dim=1).indices
    reached = []
    for expert in range(4):
        tokens = x[(chosen == expert).any(1)]
        weights = {part: f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")}
        gate, up = fisher[f"{owner}.experts.gate_up_proj"][expert].chunk(2)
        expected = {"w1": gate, "w3": up, "w2": fisher[f"{owner}.experts.down_proj"][expert]}
        reached.append(len(tokens))
        if not len(tokens):
            assert not any(arrays[array_name(request, weights["w1"])].any() for request in requests)
            continue
        assert_near(arrays[array_name(requests[0], weights["w3"])], tokens.T @ tokens)
        assert_near(arrays[array_name(requests[KINDS.index("moments")], weights["w1"])], tokens.square().mean(0))
        for part, weight in weights.items():
            assert_near(arrays[array_name(requests[KINDS.index("fisher")], weight)], expected[part])
    assert min(reached) < max(reached)


@pytest.mark.matrix
@pytest.mark.slow
def test_statistics_are_the_same_for_any_threads_and_memory(tmp_path: Path) -> None:
    recipe, quantize_settings = models_of(tmp_path, "mixtral"), settings(tmp_path)
    with prepare(recipe) as prepared:
        asked = with_statistics(prepared, requests_for(prepared, quantize_settings, KINDS, 1))
        first = computed(asked, threads=1)
        for threads, memory in ((4, None), (3, 100_000)):  # of which half is for sums: several passes over the rows
            again = computed(asked, threads, memory)
            assert {name: array.tobytes() for name, array in again.items()} == {n: a.tobytes() for n, a in first.items()}


@pytest.mark.long
@pytest.mark.parametrize("memory", [None, 20_000])
@pytest.mark.parametrize(("kinds", "alone"), [(["gram", "moments"], []), (["fisher"], ["states 1", "states 2"])])
def test_what_is_made_with_a_statistic_is_as_if_computed_alone(
    kinds: list[str], alone: list[str], memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer runs once for a statistic and the next states or gradients, also where sums take several passes over the rows."""
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    product_names: list[str] = []

    def noted(module: Any, name: str) -> None:
        compute = getattr(module, name)

        def run(context: ProductContext, *args: Any) -> Arrays:
            product_names.append(context.product.name.partition(": ")[2])
            return compute(context, *args)

        monkeypatch.setattr(module, name, run)

    noted(states, "run")
    noted(gradients, "_of_layer")
    with prepare(recipe) as prepared:
        asked = with_statistics(prepared, requests_for(prepared, quantize_settings, kinds, 0))
        actual = captured(asked, asked.plan.products, memory).arrays
        assert product_names == alone
        product_names.clear()
        for module in (states, gradients):
            monkeypatch.setattr(module, "made_beside", lambda *_: None)
        expected = captured(asked, asked.plan.products, memory).arrays
    assert len(product_names) == len(alone) + 1
    assert {name: [a.tobytes() for a in arrays] for name, arrays in actual.items()} == {
        name: [a.tobytes() for a in arrays] for name, arrays in expected.items()
    }


def test_a_gram_matrix_is_symmetric_whatever_is_above_its_diagonal() -> None:
    x = torch.randn(30, 1200, generator=torch.Generator().manual_seed(0))
    total = torch.full((1200, 1200), 7.0).triu(1)
    for first in range(0, 1200, TILE):
        GRAM.add(total, slice(first, min(first + TILE, 1200)), x)
    torch.testing.assert_close(GRAM.finish(total, 30, 30), x.T @ x)


@pytest.mark.long
def test_a_merge_that_is_not_written_has_statistics(tmp_path: Path) -> None:
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    recipe["dtype"] = "float32"
    with prepare(recipe) as prepared:
        merged = result_of(PlanDraft.of(prepared.plan), prepared.inputs, prepared.plan.steps)
        text = text_for(
            merged, quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
        )
        request = StatisticRequest("moments", 0, text)
        products = statistic_products(lambda number: merged, [request])
        arrays = computed(prepared.with_plan(replace(prepared.plan, products=products)))
    whole = Whole(tmp_path / "a", quantize_settings)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float64)
    for mine, theirs in zip(whole.model.parameters(), other.parameters(), strict=True):
        mine.data = ((mine + theirs) / 2).float().double()
    module = "model.layers.1.mlp.down_proj"
    assert_near(arrays[array_name(request, f"{module}.weight")], whole.entering(module).square().mean(0))


@pytest.mark.long
def test_products_are_computed_layer_by_layer_and_what_nothing_needs_is_left_out(tmp_path: Path) -> None:
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    with prepare(recipe) as prepared:
        requests = requests_for(prepared, quantize_settings, ("moments", "fisher", "moments"), 0)  # one of them twice
        asked = with_statistics(prepared, requests)
        log = captured(asked, asked.plan.products).log
        product_names = [name.partition(": ")[2] for name in log if not name.startswith("-")]
        forward = with_statistics(prepared, requests[:1]).plan.products
        other = with_statistics(
            prepared, requests_for(prepared, replace(quantize_settings, calibration_rows=5), ("moments",), 0)
        ).plan
    assert {product.name for product in other.products}.isdisjoint(product.name for product in forward)
    assert product_names == [
        *("rows", "states 0", "moments 0", "states 1", "moments 1", "states 2"),
        *("gradients 2", "fisher 1", "gradients 1", "fisher 0"),
    ]
    ahead = ["rows", "states 0", "moments 0", "states 1", "moments 1"]
    assert [product.name.partition(": ")[2] for product in forward] == ahead


def arrays_as_output(prepared: Prepared) -> Prepared:
    """The plan whose output is the arrays of its statistics."""
    outs = [out for product in prepared.plan.products if product.op == "statistic" for out in product.outs]
    steps = tuple(Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in outs)
    return prepared.with_plan(replace(prepared.plan, steps=steps))


@pytest.mark.long
def test_a_run_is_resumed_with_the_statistics_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    keep, product_names = Staging.keep, list[str]()

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if product.name.endswith("fisher 0"):
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    def note(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        product_names.append(product.name.partition(": ")[2])
        return keep(staging, product, arrays)

    with prepare(recipe) as prepared:
        asked = arrays_as_output(with_statistics(prepared, requests_for(prepared, quantize_settings, KINDS, 1)))
        monkeypatch.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(asked, tmp_path / "out", RunOptions(threads=2, card=False))
        monkeypatch.setattr(Staging, "keep", note)
        out = execute(asked, tmp_path / "out", RunOptions(threads=1, card=False)).out
        monkeypatch.undo()
        assert "fisher 0" in product_names
        assert not {"gram 0", "gram 1", "moments 0", "moments 1", "fisher 1"} & set(product_names)
        (tmp_path / "plan.json").write_text(json.dumps(asked.plan.to_json()))
    weightsmith.run(tmp_path / "plan.json", tmp_path / "again", progress=False)
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (tmp_path / "again" / weights).read_bytes()
    assert len(load_file(out / weights)) == 2 * (5 * 4 + 2 * 7)


@pytest.mark.long
def test_a_text_or_a_tokenizer_that_has_changed_is_an_error(tmp_path: Path) -> None:
    recipe, quantize_settings = models_of(tmp_path), settings(tmp_path)
    text, tokenizer = tmp_path / "text.txt", tmp_path / "a/tokenizer.json"
    with prepare(recipe) as prepared:
        asked = arrays_as_output(with_statistics(prepared, requests_for(prepared, quantize_settings, ("moments",), 0)))
        for file, what in ((text, "the text has changed"), (tokenizer, "the file has changed since")):
            before = file.read_bytes()
            file.write_bytes(before + b" ")
            with pytest.raises(CheckpointError, match=what):
                execute(asked, tmp_path / "out", RunOptions(card=False))
            file.write_bytes(before)
        execute(asked, tmp_path / "out", RunOptions(card=False))


@pytest.mark.parametrize("packages", [("torch",), ("tokenizers", "transformers")])
def test_packages_that_are_missing_are_those_of_a_calibration(
    packages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepare(models_of(tmp_path)) as prepared:
        monkeypatch.setattr("weightsmith._base.installation.find_spec", lambda name: None if name in packages else name)
        with pytest.raises(PlanError, match=rf"Run {re.escape(install('calibration'))}\.") as caught:
            requests_for(prepared, settings(tmp_path), ("gram",), 0)
    assert all(name in str(caught.value) for name in packages)


def test_a_model_that_is_no_decoder_is_one_error(tmp_path: Path) -> None:
    recipe = models_of(tmp_path)
    for name in "ab":
        (tmp_path / name / "config.json").unlink()
    with prepare(recipe) as prepared, pytest.raises(PlanError, match=r"it is not a decoder with a config\.json"):
        requests_for(prepared, settings(tmp_path), ("gram",), 1)


def test_an_unknown_statistic_is_one_error(tmp_path: Path) -> None:
    with prepare(models_of(tmp_path)) as prepared, pytest.raises(UnknownName, match="there is no statistic 'moment'"):
        with_statistics(prepared, requests_for(prepared, settings(tmp_path), ("moment",), 0))


def _settings(plan: dict[str, Any], name: str) -> dict[str, Any]:
    product_settings: dict[str, Any] = next(product for product in plan["products"] if product["name"].endswith(name))[
        "settings"
    ]
    return product_settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: _settings(plan, "fisher 1").update(layer=2), "there is no layer 2"),
        (lambda plan: _settings(plan, "fisher 1").update(kind="fish"), "there is no statistic fish"),
        (lambda plan: _settings(plan, "fisher 1").update(gradients=""), "it has gradients, or has none, unlike its statistic"),
        (lambda plan: _settings(plan, "moments 1").update(states="states 9"), "it does not need what its settings name"),
        (lambda plan: _settings(plan, "moments 1").update(weights=["model.norm.weight"]), "it has no step for a weight"),
        (lambda plan: _settings(plan, "moments 1")["weights"].clear(), "its arrays are not those of its weights"),
        (lambda plan: _settings(plan, "moments 1").update(more=1), "its settings are not those of a statistic product"),
        (lambda plan: _settings(plan, "rows")["text"].update(tokenizer="0"), "it does not name the tokenizer's file"),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str, tmp_path: Path) -> None:
    with prepare(models_of(tmp_path)) as prepared:
        asked = with_statistics(prepared, requests_for(prepared, settings(tmp_path), ("moments", "fisher"), 0))
        plan = json.loads(json.dumps(asked.plan.to_json()))
    for product in plan_from_json(plan).products:
        assert find_kind(product.op).check(product) == ""
    change(plan)
    reasons = [find_kind(product.op).check(product) for product in plan_from_json(plan).products]
    assert [why for why in reasons if words in why] == [why for why in reasons if why] != []
