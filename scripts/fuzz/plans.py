"""Plans, with every kind of product."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.adapters import make_adapters
from scripts.fuzz.kind import LINEAR, Kind, Rng
from scripts.fuzz.measured import make_statistics
from scripts.fuzz.mutators import mutate_json
from scripts.fuzz.tokenizers import make_tokenizers


def _use_plan(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    yield lambda: weightsmith.run(file, "out", threads=1, fsync=False)


def _use_products(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations.states import GIVEN

    object.__setattr__(GIVEN, "compute", lambda context: context.create())  # as if whoever runs the plan had the arrays
    yield from _use_plan(file, rng)


def _make_plan() -> None:
    import weightsmith

    make_tokenizers()
    with contextlib.suppress(FileExistsError):
        Path("plans").mkdir()
    recipes = {
        "linear": LINEAR,
        "stack": {"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}]}]},
        "union": {**LINEAR, "tokenizer_source": "union"},
        "stages": {"merge_method": "slerp", "base_model": "a", "models": [{"model": LINEAR}], "parameters": {"t": 0.5}},
    }
    for name, recipe in recipes.items():
        Path(f"plans/{name}.json").write_text(json.dumps(weightsmith.plan(recipe).to_json()))
    weightsmith.quantize("a", "codes", "int8", fsync=False)
    copies = {"merge_method": "passthrough", "models": [{"model": "codes"}]}
    Path("plans/copies.json").write_text(json.dumps(weightsmith.plan(copies, quantize="int8").to_json()))
    from tests.plan_help import prepare_moe
    from weightsmith._planning.options import RecipeOptions

    with prepare_moe(
        {"base_model": "a", "experts": [{"source_model": n} for n in "ab"], "gate_mode": "random"}, RecipeOptions()
    ) as prepared:
        Path("plans/moe.json").write_text(json.dumps(prepared.plan.to_json()))


PRODUCTS = {
    "scope": ("thresholds",),
    "active": ("activity",),
    "largest": ("magnitudes",),
    "routed": ("router",),
    "matched": ("neuron_order",),
    "extracted": ("factors", "changes"),
    "adapters": ("cores", "merged_factors"),
    "combined": ("combination",),
    "transplanted": ("transplanted_rows",),
    "looks": ("differences", "statistics", "alignments", "survival"),
    "calibrated": ("text_rows", "quantised_layer", "quantised_states", "largest_state", "largest_states"),
    "written": ("own_text",),
    "scaled": ("activation_scales",),
    "losses": ("states", "gradients", "measured_layer"),
    "sized": ("scored_layer", "scored_vocabulary"),
    "errors": ("measured_blocks",),
    "importances": ("statistic",),
    "evaluated": ("given", "embedded_rows", "losses", "sampled_states"),
    "stored": ("stored_statistic",),
    "images": ("token_row",),
}
"""The plans that are mutated, and the kinds of products that each of them is there for; together all of `products.KINDS`."""


def _make_products() -> None:
    """`products/NAME.json` for each of `PRODUCTS`; `m`, a model that transformers builds."""
    import weightsmith
    from tests import vision_zoo
    from tests.calibration_help import save_model, settings
    from tests.plan_help import prepare, prepare_moe
    from weightsmith._activations.losses import scored
    from weightsmith._activations.model import input_of
    from weightsmith._activations.scored_rows import ScoredRows
    from weightsmith._features.adapters.extract import prepare_extraction
    from weightsmith._features.adapters.options import ExtractSettings
    from weightsmith._features.transplant.options import TransplantSettings
    from weightsmith._features.transplant.plan import prepare_transplant
    from weightsmith._planning.options import RecipeOptions
    from weightsmith._planning.planner.prepared import Prepared
    from weightsmith._plans import COPY, Plan, Read, Step
    from weightsmith._reports.evaluate.measure import with_samples
    from weightsmith._reports.look.diff import alignments
    from weightsmith._reports.look.differences import differences
    from weightsmith._reports.look.inspect import statistics_product
    from weightsmith._reports.look.preview import survivals

    make_tokenizers()
    save_model(Path("m"))
    make_adapters(fresh=False)
    merge = {"base_model": "a", "models": [{"model": "b", "parameters": {"weight": 1}}]}
    ties = {"merge_method": "ties", **merge, "parameters": {"density": 0.5, "scope": "model"}}
    copy = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    lora = [{"model": name, "parameters": {"weight": 0.5}} for name in ("lora", "lora2")]
    experts = [{"source_model": "m", "positive_prompts": [text]} for text in ("a b", "c d")]
    calibration = {"calibration": "text.txt", "calibration_rows": 2, "calibration_tokens": 8}
    settings(Path())

    def plan_of(prepared: Prepared) -> Plan:
        with prepared:
            return prepared.plan

    def looks() -> Plan:
        """Products of looks, which have no plans with steps otherwise."""
        shutil.copytree("a", "c")
        with_third = [*LINEAR["models"], {"model": "c", "parameters": {"weight": 0.5}}]
        two, three = (weightsmith.plan({**LINEAR, "models": models}) for models in (LINEAR["models"], with_third))
        copies = [Step(step.out, COPY, (Read(0, step.out.name),)) for step in two.steps]
        pairs = [dataclasses.replace(step, settings=step.settings + len(three.settings)) for step in two.steps]
        plan = dataclasses.replace(three, settings=(*three.settings, *two.settings))
        makers = {"d": differences, "s": statistics_product, "a": alignments, "v": survivals}
        steps = {"d": pairs, "s": copies, "a": three.steps, "v": three.steps}
        products = tuple(make(name, steps[name]) for name, make in makers.items())
        return dataclasses.replace(plan, products=products)

    def evaluated() -> Plan:
        """An evaluation, which is part of no plan that is written."""
        import numpy as np

        with prepare(copy) as prepared:
            rows = ScoredRows(*np.ones((2, 2, 8), np.int32))
            products = with_samples(scored(input_of(prepared.inputs, 0), rows))
            return dataclasses.replace(prepared.plan, products=products)

    def stored() -> Plan:
        """A merge that reads statistics from a folder."""
        make_statistics()
        text = {"model": "m", "text": "m-stats"}
        return weightsmith.plan({"merge_method": "regmean", "base_model": "m2", "models": [text]})

    def images() -> Plan:
        """A vision half that has a row of the embedding."""
        vision_zoo.save("pixtral", Path("pixtral"))
        return weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "pixtral"}]}, quantize="gguf-q8_0")

    makers: dict[str, Callable[[], Plan]] = {
        "scope": lambda: weightsmith.plan(ties),
        "active": lambda: weightsmith.plan({"merge_method": "ramplus", "base_model": "a", "models": [{"model": "b"}]}),
        "largest": lambda: weightsmith.plan(copy, quantize="nvfp4a16"),
        "routed": lambda: plan_of(prepare_moe({"base_model": "m", "gate_mode": "hidden", "experts": experts}, RecipeOptions())),
        "matched": lambda: plan_of(
            prepare_moe({"model": "x", "merge_experts": {"groups": [[0, 1], [2, 3]], "match": True}}, RecipeOptions())
        ),
        "extracted": lambda: plan_of(prepare_extraction("b", "a", ExtractSettings(max_rank=2))),
        "adapters": lambda: weightsmith.plan({"merge_method": "linear", "models": lora}, adapter_rank=2),
        "combined": lambda: weightsmith.plan({"merge_method": "peft_ties_svd", "models": lora, "parameters": {"density": 0.5}}),
        "transplanted": lambda: plan_of(prepare_transplant("b", "a", TransplantSettings(k=2))),
        "looks": looks,
        "calibrated": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, uniform=True, **calibration),
        "written": lambda: weightsmith.plan(
            copy, quantize="gptq-4bit", calibration="own", calibration_rows=2, calibration_tokens=8
        ),
        "scaled": lambda: weightsmith.plan(copy, quantize="fp8-static", **calibration),
        "losses": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, **calibration),
        "sized": lambda: weightsmith.plan(copy, quantize="gguf-q4_k_m", size_bytes=10**9, **calibration),
        "errors": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, measure="full", **calibration),
        "importances": lambda: weightsmith.plan(copy, quantize="gguf-q4_k_m", **calibration),
        "evaluated": evaluated,
        "stored": stored,
        "images": images,
    }
    Path("products").mkdir()
    for name, ops in PRODUCTS.items():
        plan = makers[name]()
        if missing := set(ops).difference(product.op for product in plan.products):
            raise RuntimeError(f"the plan {name} has no product {missing}")
        Path(f"products/{name}.json").write_text(json.dumps(plan.to_json()))


def mutate_products(rng: Rng, data: bytes) -> bytes:
    """A plan in which its products are mutated, what follows from them, or anything."""
    plan = json.loads(data)
    choice = rng.random()
    if choice < 0.15:
        return mutate_json(rng, data, _PRODUCT_WORDS)
    part = {"then": plan.pop("then")} if "then" in plan and choice < 0.3 else {"products": plan.pop("products")}
    if "products" in part and choice < 0.8:  # one of them, whose steps are most of it, and for all that is shorter
        i = rng.randrange(len(part["products"]))
        product = part["products"][i]
        keys = rng.choice(
            (["settings"], ["settings"], ["outs", "needs", "models", "files", "transient"], ["steps"], [*product])
        )
        fields = {key: product.pop(key, False) for key in keys}
        changed = mutate_json(rng, json.dumps(fields).encode(), _PRODUCT_WORDS)
        head, tail = json.dumps(part["products"][:i])[:-1], json.dumps(part["products"][i + 1 :])[1:]
        between = json.dumps(product)[:-1].encode() + (b", " if product else b"") + changed[1:]
        text = (
            b'{"products": ' + head.encode() + (b", " if i else b"") + between + (b", " if tail != "]" else b"") + tail.encode()
        )
        return json.dumps(plan)[:-1].encode() + b", " + text[1:] + b"}"
    return json.dumps(plan)[:-1].encode() + b", " + mutate_json(rng, json.dumps(part).encode(), _PRODUCT_WORDS)[1:]


_PRODUCT_WORDS = ("transient", "needs", "files", "models", "format", "settings", "encoding", "layer", "candidates", "targets")


KINDS = {
    "plan": Kind(
        _make_plan,
        tuple(f"plans/{name}.json" for name in ("linear", "stack", "union", "moe", "stages", "copies")),
        lambda rng, data: mutate_json(rng, data, ("pieces", "needs", "stored", "encoding", "layer", "role", "op", "shape")),
        _use_plan,
    ),
    "products": Kind(
        _make_products, tuple(f"products/{name}.json" for name in PRODUCTS), mutate_products, _use_products, ways=1
    ),
}
