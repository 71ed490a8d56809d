"""A calibrated plan by its weights, for what is shown and counted. It needs no package of a calibration."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from weightsmith._engine.products import OWN
from weightsmith._models.formats import find_encoding
from weightsmith._plans import PLAIN, Plan, PlanDraft, Product, Step

CALIBRATED = "calibrated: quantised for what enters the layer"
RESCALED = "it changes with the scales of calibrated weights"


def by_weight(plan: Plan) -> Plan:
    """The plan with a step for each calibrated weight, instead of those that copy its arrays: to be shown, not to be run.

    Scales of activations belong to their weights, and are not in it.
    """
    by_array: dict[str, Step] = {}
    scales = {out.name for product in plan.products if product.op == "activation_scales" for out in product.outs}
    for product in plan.products:
        if product.op != "quantised_layer":
            continue
        steps, arrays = {step.out.name: step for step in product.steps}, iter(product.outs)
        for name, encoding in product.settings["weights"].items():
            step = steps[name]
            outs = find_encoding(encoding).outs(step.out)
            stored = tuple(islice(arrays, len(outs)))
            out = replace(step.out, name=stored[0].name.removesuffix(outs[0].name) + name)
            if encoding == PLAIN:
                weight = replace(step, out=out, needs=(*step.needs, product.name))
            else:
                weight = replace(step, out=out, encoding=encoding, stored=stored, needs=(*step.needs, product.name))
            by_array |= dict.fromkeys((array.name for array in stored), weight)
    if not by_array and not scales:
        return plan
    shown = [by_array.get(step.out.name, step) for step in plan.steps if step.out.name not in scales]
    draft = PlanDraft.of(plan)
    draft.steps = list({step.out.name: step for step in shown}.values())
    return draft.finish(stored=False)


def calibrated_tensors(plan: Plan) -> dict[str, str]:
    """The tensors of a plan by weight that a calibration makes: why they are stored as they are, by name."""
    makers = {product.name for product in plan.products if product.op == "quantised_layer"}
    made = [step for step in plan.steps if not makers.isdisjoint(step.needs)]
    return {step.out.name: RESCALED if step.encoding == PLAIN else CALIBRATED for step in made}


_CALIBRATION = "weightsmith._features.quantisation.calibration.", "weightsmith._activations."


def of_calibration(product: Product) -> bool:
    """Whether a product belongs to a calibration, or to a measurement with a calibration text."""
    return OWN.get(product.op, "").startswith(_CALIBRATION)


def steps_read(product: Product) -> list[Step]:
    """The steps that a product of a calibration reads at most: of a quantised layer, its weights are those of a product."""
    known = product.settings.get({"quantised_states": "weights", "activation_scales": "quantised"}.get(product.op, ""), ())
    return [step for step in product.steps if step.out.name not in known]
