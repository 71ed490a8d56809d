"""The evaluation of a result that is not published yet: `--evaluate` of merge and quantize."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._activations.model import PACKAGES
from weightsmith._activations.rows import TOKENS, text_source
from weightsmith._base.errors import Finding, PlanError, as_plan_error
from weightsmith._base.installation import absent_packages
from weightsmith._base.report.blocks import Block
from weightsmith._base.text import markdown, markdown_table
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options, sibling
from weightsmith._planning.planner import Prepared
from weightsmith._plans import Plan
from weightsmith._reports.evaluate.measure import evaluation
from weightsmith._reports.evaluate.opening import Asked
from weightsmith._reports.evaluate.values import Evaluation, layer_blocks, of_change, perplexity, score_table, worst_layers
from weightsmith._reports.look.surveys import Watching
from weightsmith._reports.options import EvaluateSettings

RESULT = "the result"


@dataclass(frozen=True, slots=True)
class ResultEvaluation:
    """How well a result predicts a text, beside its source: a report of the run that made it."""

    evaluation: Evaluation

    @property
    def lines(self) -> tuple[str, ...]:
        """For the summary."""
        [text], score = self.evaluation.texts, self.evaluation.totals[-1]
        facts = [f"perplexity {perplexity(score.perplexity)}"]
        if len(self.evaluation.models) > 1:
            facts[0] += f" ({perplexity(self.evaluation.totals[0].perplexity)} for {self.evaluation.models[0]})"
        facts += [of_change(score.change)] if score.change is not None else []
        if score.divergence is not None and score.agreement is not None:
            facts += [f"KL {score.divergence.value:.5f}", f"same top token {score.agreement:.2%}"]
        return (f"on {text}: {'; '.join(facts)}", *self._layers, *self.evaluation.notes)

    @property
    def divergence(self) -> float | None:
        """From the model that it is compared with, in nats per token."""
        divergence = self.evaluation.totals[-1].divergence
        return None if divergence is None else divergence.value

    @property
    def _layers(self) -> list[str]:
        """Layers where the error grows most."""
        errors = self.evaluation.layers[-1] if self.evaluation.layers else None
        if not errors:
            return []
        listed = ", ".join(f"{layer} ({grown:+.2%})" for layer, _, grown in worst_layers(errors))
        return [f"error of the last layer's output {errors[-1]:.2%}; it grows most in layers {listed}"]

    def to_json(self) -> dict[str, Any]:
        """For the manifest and `--json`."""
        return self.evaluation.to_json()

    def files(self) -> Mapping[str, bytes]:
        """None besides the manifest."""
        return {}

    def section(self) -> str:
        """For the model card."""
        head = ["model", "perplexity", "bits per byte", "KL", "same top token", "against the source"]
        rows = []
        for name, score in zip(self.evaluation.models, self.evaluation.totals, strict=True):
            kl = "" if score.divergence is None else f"{score.divergence.value:.5f}"
            same = "" if score.agreement is None else f"{score.agreement:.2%}"
            change = "" if score.change is None else of_change(score.change)
            rows.append((name, perplexity(score.perplexity), f"{score.bits_per_byte:.4f}", kl, same, change))
        text, tokens = Path(self.evaluation.texts[0]).name, self.evaluation.totals[-1].tokens
        layers = "".join(f"\n{line[0].upper()}{line[1:]}.\n" for line in self._layers)
        about = f"On {tokens:,} tokens of {markdown(text)}, in rows of {self.evaluation.row_tokens:,}."
        return f"\n## Evaluation\n\n{about}\n\n{markdown_table(head, rows, right=range(1, 6))}\n{layers}"

    def blocks(self) -> Sequence[Block]:
        """For the page of the run."""
        return [
            score_table(f"Evaluation on {self.evaluation.texts[0]}", self.evaluation, self.evaluation.totals),
            *layer_blocks(self.evaluation),
        ]

    def warnings(self, where: str) -> list[Finding]:
        """None."""
        return []


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a result in its staging folder. progress: as for `evaluate`."""

    settings: EvaluateSettings
    running: RunOptions
    progress: Watching = True

    def __call__(self, plan: Plan, folder: Path, compared: Prepared | None = None) -> ResultEvaluation:
        """Evaluate the folder of a plan's result, beside the model that it was made from, or the result of another plan."""
        source = next((model.ref for model in (plan.models[plan.donor], *plan.models) if model.plan is None), None)
        asked: dict[str, Asked] = {} if source is None else {source: source}
        if compared is not None:
            source = source if len(plan.models) == 1 and source is not None else "before it was quantised"
            asked = {source: compared}
        asked[RESULT] = folder
        return ResultEvaluation(evaluation(asked, source is not None, self.settings, self.running, self.progress))


def evaluator(options: RunOptions, out: str | os.PathLike[str]) -> Evaluator | None:
    """The evaluator that the options ask for; None if they ask for none.

    Raises PlanError for missing packages and for a text that cannot be used, ParameterError for an output that is not a folder.
    """
    if options.evaluate is None:
        return None
    check_options(out, options)
    if problems := absent_packages(PACKAGES, "evaluations", "calibration"):
        raise PlanError(problems)
    with as_plan_error():
        text_source(options.evaluate, None, TOKENS, 0, "evaluate")
    running = replace(
        options, evaluate=None, push=None, commit_message=None, ray=None, processes=1, keep_stages=False, overwrite=False
    )
    return Evaluator(EvaluateSettings(text=(options.evaluate,), work=str(sibling(out, "").parent)), running)
