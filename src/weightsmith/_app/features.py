"""The Python API of features beside merges: `extract_lora`, `convert_lora`, `transplant_tokenizer` and `statistics`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from weightsmith._activations.options import StatisticsSettings
from weightsmith._app.api import make
from weightsmith._base.options import lists_options, read_options
from weightsmith._execution.options import RunOptions
from weightsmith._features.adapters.options import ConvertSettings, ExtractSettings
from weightsmith._features.transplant.options import TransplantSettings

if TYPE_CHECKING:
    from weightsmith._engine.local import Progress
    from weightsmith._execution.run import Merged
    from weightsmith._plans import Plan
    from weightsmith._reports.keywords import ConvertKeywords, ExtractKeywords, StatisticsKeywords, TransplantKeywords


@lists_options("extract_lora", ExtractSettings, RunOptions)
def extract_lora(
    finetuned: str | os.PathLike[str],
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[ExtractKeywords],
) -> Merged:
    """Extract a LoRA adapter from a fine-tune and its base into a new folder, as PEFT reads it.

    finetuned, base  folders or Hub ids, stored in any format that weightsmith reads; the fine-tune may be `base+adapter`

    `Merged.reports["extraction"]` has the share of each matrix's change that the adapter keeps. Everything else is as for
    `merge`. Raises PlanError for models that do not belong together, and if nothing differs.

    >>> weightsmith.extract_lora("tuned", "base", "adapter", energy=0.9).reports["extraction"].parameters  # doctest: +SKIP
    4884480
    """
    from weightsmith._features.adapters.extract import prepare_extraction

    settings, running = read_options("extract_lora", options, ExtractSettings, RunOptions)
    return make(lambda: prepare_extraction(finetuned, base, settings), "storing", out, running, progress, rechecking)


@lists_options("extract_lora", ExtractSettings)
def plan_extract_lora(
    finetuned: str | os.PathLike[str], base: str | os.PathLike[str], **options: Unpack[ExtractKeywords]
) -> Plan:
    """Plan what `extract_lora` decomposes and compares. Reads only headers and writes nothing. Raises PlanError as it does."""
    from weightsmith._features.adapters.extract import prepare_extraction

    (settings,) = read_options("extract_lora", options, ExtractSettings, planner="plan_extract_lora")
    with prepare_extraction(finetuned, base, settings) as prepared:
        return prepared.plan


@lists_options("convert_lora", ConvertSettings, RunOptions)
def convert_lora(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[ConvertKeywords],
) -> Merged:
    """Write an adapter as another program reads it, into a new folder.

    adapter  folder or Hub id of an adapter, or a file of factors: safetensors, or GGUF as llama.cpp has it

    Everything else is as for `merge`. Raises PlanError for what the program does not read, such as DoRA in llama.cpp.

    >>> weightsmith.convert_lora("adapter", "for-llama", layout="llama.cpp", base="base").plan.container  # doctest: +SKIP
    'gguf-adapter'
    """
    from weightsmith._features.adapters.convert import prepare_conversion

    settings, running = read_options("convert_lora", options, ConvertSettings, RunOptions)
    return make(lambda: prepare_conversion(adapter, settings), "converting", out, running, progress, rechecking)


@lists_options("convert_lora", ConvertSettings)
def plan_convert_lora(adapter: str | os.PathLike[str], **options: Unpack[ConvertKeywords]) -> Plan:
    """Plan what `convert_lora` writes. Reads only headers and writes nothing. Raises PlanError as `convert_lora` does."""
    from weightsmith._features.adapters.convert import prepare_conversion

    (settings,) = read_options("convert_lora", options, ConvertSettings, planner="plan_convert_lora")
    with prepare_conversion(adapter, settings) as prepared:
        return prepared.plan


@lists_options("transplant_tokenizer", TransplantSettings, RunOptions)
def transplant_tokenizer(
    model: str | os.PathLike[str],
    donor: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[TransplantKeywords],
) -> Merged:
    """Replace a model's tokenizer with another model's, in a new folder.

    model    folder, Hub id or `base+adapter`, stored in any format that weightsmith reads
    donor    the same; or, for approximations that do not need its embeddings, a folder with a tokenizer alone

    Shared tokens keep the model's rows; the others are approximated. `Merged.reports["rows of missing tokens"]` describes the
    approximation and its error; without missing tokens there is no such report. Everything else is as for `merge`. Raises
    PlanError for a donor without embeddings where they are needed, and for a model without a tokenizer.

    >>> weightsmith.transplant_tokenizer("model", "donor", "out").plan.vocabulary["rows"]  # doctest: +SKIP
    49152
    """
    from weightsmith._features.transplant.plan import prepare_transplant

    settings, running = read_options("transplant_tokenizer", options, TransplantSettings, RunOptions)
    return make(lambda: prepare_transplant(model, donor, settings), "copying", out, running, progress, rechecking)


@lists_options("transplant_tokenizer", TransplantSettings)
def plan_transplant_tokenizer(
    model: str | os.PathLike[str], donor: str | os.PathLike[str], **options: Unpack[TransplantKeywords]
) -> Plan:
    """Plan what `transplant_tokenizer` writes: `Plan.vocabulary` tells where token rows come from.

    Reads headers and tokenizers, and writes nothing. Raises PlanError as `transplant_tokenizer` does.
    """
    from weightsmith._features.transplant.plan import prepare_transplant

    (settings,) = read_options("transplant_tokenizer", options, TransplantSettings, planner="plan_transplant_tokenizer")
    with prepare_transplant(model, donor, settings) as prepared:
        return prepared.plan


@lists_options("statistics", StatisticsSettings, RunOptions)
def statistics(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[StatisticsKeywords],
) -> Merged:
    """Write the statistics of a model on a text into a new folder, which recipes name in place of the text.

    model    folder, Hub id or `base+adapter`, stored in any format that weightsmith reads
    text     a .txt, .jsonl or .parquet file; `built-in`; or `own`: what the model writes by itself
    options  see `weightsmith._base.options`: `StatisticsSettings` and `RunOptions`

    The folder has one float32 array for each kind and linear layer, and `statistics.json` with the hashes of weights, text and
    tokenizer. Everything else is as for `merge`. Raises PlanError for an unknown kind, a text that is too short, and a model
    that is not a decoder with a tokenizer.

    Cost: a forward pass over the text, `fisher` also one back; memory of one layer and its statistics.

    >>> weightsmith.statistics("fr", "fr.txt", "fr-stats", rows=32, tokens=512).out.name  # doctest: +SKIP
    'fr-stats'
    """
    from weightsmith._features.statistics import prepare_statistics

    settings, running = read_options("statistics", options, StatisticsSettings, RunOptions)
    running = replace(running, card=False)
    return make(lambda: prepare_statistics(model, text, settings), "measuring", out, running, progress, rechecking)
