"""`weightsmith statistics`: the plan whose output is the statistics of one model on one text."""

from __future__ import annotations

import os
from dataclasses import replace

from weightsmith._activations.model import input_of, own_text_problems, prefix_of, statistic_products, text_for
from weightsmith._activations.options import StatisticsSettings
from weightsmith._activations.statistics import STATISTICS
from weightsmith._activations.stored import RECORD, ModelRecord, record_of
from weightsmith._base.errors import PlanError, WeightsmithError, nearest, undoing
from weightsmith._base.options import option_error
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.recipe import copy_of
from weightsmith._plans import COPY, PRODUCTS, Product, Provenance, Read, Settings, StatisticRequest, Step
from weightsmith._version import __version__


def prepare_statistics(model: str | os.PathLike[str], text: str | os.PathLike[str], settings: StatisticsSettings) -> Prepared:
    """Plan a folder of the statistics of a model on a text.

    model  as in a recipe: a folder, a hub id, `base+adapter`
    text   a .txt, .jsonl or .parquet file, `built-in`, or `own`: what the model writes by itself

    Raises PlanError with all problems. Cost: hashes the weights, and tokenizes the text.
    """
    kinds, problems = _kinds(settings)
    try:
        assembled = assemble(copy_of(model), RecipeOptions())
    except PlanError as error:
        raise PlanError([*error.problems, *problems]) from error
    with undoing(assembled.close):
        if problems:
            raise PlanError(problems)
        _fill(assembled, os.fspath(text), kinds, settings)
    return assembled.finish()


def _kinds(settings: StatisticsSettings) -> tuple[tuple[str, ...], list[WeightsmithError]]:
    """The kinds asked for, each once."""
    kinds = tuple(dict.fromkeys(name.strip() for listed in settings.kind for name in listed.split(",")))
    known = STATISTICS.names
    unknown = [name for name in kinds if name not in known]
    return kinds, [
        option_error("kind", f"must be one of {', '.join(known)}{nearest(name, known)}, not '{name}'") for name in unknown
    ]


def _fill(assembled: Prepared, text: str, kinds: tuple[str, ...], settings: StatisticsSettings) -> None:
    draft, opened = assembled.draft, input_of(assembled.inputs, 0)
    source = text_for(opened, text, settings.rows, settings.tokens, settings.seed, option="")
    if problems := own_text_problems(source.source, kinds):
        raise PlanError(problems)
    requests = [StatisticRequest(kind, 0, source) for kind in kinds]
    draft.products = list(statistic_products(lambda number: opened, requests))
    prefix = prefix_of(0, source)
    draft.settings = [Settings({}, ({},))]
    copied = [product for product in draft.products if product.op in ("own_text", "statistic")]
    draft.steps = [step for product in copied for step in _steps(product, prefix)]
    packages = draft.products[0].settings["packages"]
    draft.files = {RECORD: record_of(ModelRecord.of(opened.checkpoint), source, kinds, packages)}
    draft.config, draft.carried, draft.dropped, draft.lacking, draft.vocabulary = None, [], [], {}, None
    draft.recipe, draft.follows_recipe, draft.seed = "", False, settings.seed
    title = f"Statistics of {opened.label} on {source.source}, made with weightsmith {__version__}."
    draft.provenance = Provenance("statistics", title, relation="")
    assembled.origins, assembled.resolver, assembled.request, assembled.loading = {}, None, None, None


def _steps(product: Product, prefix: str) -> list[Step]:
    """A copy of each array, under its own name."""
    return [Step(replace(out, name=out.name.removeprefix(prefix)), COPY, (Read(PRODUCTS, out.name),)) for out in product.outs]
