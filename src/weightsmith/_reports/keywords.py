"""The options as keywords, for type checkers. Written by scripts/docs.py: do not edit, run `make docs`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RecipeKeywords(TypedDict, total=False):
    """`RecipeOptions`."""

    out_dtype: Any
    max_shard_bytes: int | str | None
    seed: int
    ignore_quantization_config: bool
    lenient: bool
    allow_code: bool
    routing_report: bool | None
    quantize: str | None
    adapter_rank: int | None
    adapter_space: str
    check_loading: bool
    settings: Mapping[str, Any]


class QuantizeKeywords(TypedDict, total=False):
    """`QuantizeSettings`."""

    bits: float | None
    size_bytes: int | str | None
    target: str | None
    head_bits: int | None
    calibration: str | os.PathLike[str] | None
    calibration_rows: int | None
    calibration_tokens: int | None
    calibration_dtype: str | None
    awq_scales: bool
    measure: str | None
    measurement: str | os.PathLike[str] | None
    uniform: bool
    imatrix: str | os.PathLike[str] | None
    tensor_types: Sequence[str]
    metadata: Sequence[str]
    mmproj: bool
    group_size: int | None
    kv_cache: str | None
    engine: str | None


class RunKeywords(TypedDict, total=False):
    """`RunOptions`."""

    threads: int | None
    processes: int
    max_memory_bytes: int | str | None
    overwrite: bool
    resume: bool
    fsync: bool
    card: bool
    report: str | os.PathLike[str] | None
    allow_nonfinite: bool
    device: str
    keep_stages: bool
    stream: bool
    stream_cache_bytes: int | str
    staging: str | os.PathLike[str] | None
    local_copy: str | os.PathLike[str] | None
    evaluate: str | os.PathLike[str] | None
    push: str | None
    public: bool
    commit_message: str | None
    ray: str | None


class ExtractKeywords(RunKeywords, total=False):
    """`ExtractSettings` and those of runs."""

    max_rank: int
    energy: float | None
    max_parameters: int | None
    sv_epsilon: float
    exact: bool
    embed_lora: bool
    include: Sequence[str]
    exclude: Sequence[str]
    save_modules: Sequence[str]
    distribute_scale: bool
    skip_undecomposable: bool
    layout: str
    intruder_scale: float
    out_dtype: Any


class ConvertKeywords(TypedDict, total=False):
    """`ConvertSettings`."""

    layout: str
    base: str | os.PathLike[str] | None
    out_dtype: Any


class TransplantKeywords(RunKeywords, total=False):
    """`TransplantSettings` and those of runs."""

    approximation: str
    k: int
    weight_scheme: str
    cosine_similarity: bool
    subword_method: str
    prefix_match: str
    byte_match: str
    magikarp: bool
    match_norms: bool
    new_vocab_noise: float | None
    new_vocab_scale: float | None
    seed: int
    max_shard_bytes: int | str | None
    report_text: str | os.PathLike[str] | None


class EvaluateKeywords(RunKeywords, total=False):
    """`EvaluateSettings` and those of runs."""

    rows: int | None
    tokens: int | None
    command: str | None
    metric: str | None
    command_timeout: str | None
    shell: bool
    work: str | os.PathLike[str] | None


class StatisticsKeywords(RunKeywords, total=False):
    """`StatisticsSettings` and those of runs."""

    kind: Sequence[str]
    rows: int | None
    tokens: int | None
    seed: int


class WriteKeywords(RunKeywords, total=False):
    """`WriteSettings` and those of runs."""

    rows: int
    tokens: int
    temperature: float
    start: Sequence[str]
    seed: int


class AutoKeywords(RunKeywords, total=False):
    """`AutoSettings` and those of runs."""

    seed: int
    budget: int
    time: str | None


class TuneKeywords(RecipeKeywords, EvaluateKeywords, total=False):
    """`TuneSettings`, and those of recipes, evaluations and runs."""

    report_command: str | None
    budget: int
    time: str | None
    search: str
    objective: str
    scoring_dtype: str | None


class PlanKeywords(RecipeKeywords, QuantizeKeywords, total=False):
    """Those of a plan."""


class Keywords(PlanKeywords, RunKeywords, total=False):
    """Those of a plan, and of its run."""
