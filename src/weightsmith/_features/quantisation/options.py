"""The options of quantised formats."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weightsmith._base.options import option, option_record


@option_record("merge", "moe", "plan", "quantize", group="Quantisation", brief=("quantize",))
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """Settings of quantised formats. Each format names those that it reads; any other is an error."""

    bits: float | None = option(None, "--bits BITS", "EXL2, EXL3: average bits per weight", above=0)
    size_bytes: int | None = option(
        None,
        "--size SIZE",
        "EXL2, GGUF: as many bits as fit into weight files of this size, such as 4GB",
        least=1,
        details="See [EXL2](exl2.md#a-target-size) and [GGUF](gguf.md#a-target-size).",
    )
    target: str | None = option(
        None,
        "--target kl=X",
        "EXL2, GGUF: smallest result within this KL divergence on the text of `evaluate`",
        details="In nats per token. See [a target divergence](quantize.md#a-target-divergence).",
    )
    head_bits: int | None = option(
        None,
        "--head-bits BITS",
        "EXL2, EXL3: bits per weight of the output head",
        details="16 is float16.",
        unset="6",
        choices=(2, 3, 4, 5, 6, 8, 16),
    )
    calibration: str | None = option(
        None,
        "--calibration FILE",
        "Calibration text: a file, built-in, own, or none",
        unset="EXL2, EXL3, fp8-static, nvfp4, KV cache: built-in; others: none",
        path=True,
        details="The file is txt, jsonl or parquet; `own` is what the model writes by itself; `none` rounds to nearest. "
        "See [calibration](calibration.md).",
    )
    calibration_rows: int | None = option(
        None,
        "--calibration-rows N",
        "Number of rows of calibration text",
        unset="at most 128; own text: 20",
        least=1,
        brief=(),
    )
    calibration_tokens: int | None = option(
        None,
        "--calibration-tokens N",
        "Tokens in each row of calibration text",
        unset="512; own text: 128",
        least=1,
        brief=(),
    )
    calibration_dtype: str | None = option(
        None,
        "--calibration-dtype DTYPE",
        "Dtype of matrix products during calibration",
        details="`bfloat16` is [faster](calibration.md#faster-forward-passes) on CPUs with bfloat16 instructions.",
        unset="float32",
        choices=("float32", "bfloat16"),
        brief=(),
    )
    awq_scales: bool = option(
        True,
        "--awq-scales/--no-awq-scales",
        "AWQ, w4a16, w8a16: scale input features before calibration",
        details="See [scales of AWQ](calibration.md#scales-of-awq).",
        brief=(),
    )
    measure: str | None = option(
        None,
        "--measure METHOD",
        "EXL2 only: how settings are measured",
        details="`full` is ExLlamaV2's measurement, which is slow.",
        unset="proxy",
        choices=("proxy", "full"),
        brief=(),
    )
    measurement: str | None = option(
        None, "--measurement FILE", "EXL2 only: choose bits from this measurement.json", path=True, brief=()
    )
    uniform: bool = option(
        False,
        "--uniform",
        "EXL2 only: use the same bits for every weight",
        brief=(),
    )
    imatrix: str | None = option(None, "--imatrix FILE", "GGUF only: importance matrix of weightsmith or llama.cpp", path=True)
    tensor_types: tuple[str, ...] = option(
        (),
        "--tensor-type REGEX=TYPE",
        "Store tensors with matching names in another type (repeatable; the last wins)",
        details="GGUF takes names and types of llama.cpp, such as `ffn_down=Q6_K`. Formats of compressed-tensors and ComfyUI "
        "take other formats of theirs: `self_attn=fp8-dynamic`, or `lm_head=w8a16` for the head. GPTQ takes "
        "`lm_head=gptq-4bit`, and AWQ `down_proj=plain`. "
        "See [GGUF](gguf.md#types-of-single-tensors) and [mixed precision](quantize.md#mixed-precision).",
    )
    metadata: tuple[str, ...] = option(
        (),
        "--metadata KEY=VALUE",
        "GGUF only: state a key of the file, such as license=mit (repeatable)",
        details="Without VALUE the key is left out. See [what is in the metadata](gguf.md#what-is-in-the-metadata).",
        brief=(),
    )
    mmproj: bool = option(
        True,
        "--mmproj/--no-mmproj",
        "GGUF only: write the vision part of a model to OUT/mmproj.gguf",
        details="See [models for images](gguf.md#models-for-images).",
        brief=(),
    )
    group_size: int | None = option(
        None, "--group-size N", "Number of weights that share a scale", unset="the format's", least=1
    )
    kv_cache: str | None = option(
        None,
        "--kv-cache DTYPE",
        "compressed-tensors only: scales for a KV cache of this dtype",
        unset="no scales",
        choices=("fp8",),
        details="They need a calibration text. See [the KV cache](quantize.md#the-kv-cache).",
        brief=(),
    )
    engine: str | None = option(
        None,
        "--for ENGINE",
        "Fail unless this program can load the result",
        unset="warn about programs that cannot",
        choices="_models.formats.engines:ENGINE_NAMES",
        details="One of `transformers`, `vllm`, `sglang`, `llama.cpp`, `exllamav2`, `exllamav3` and `mlx-lm`: [which loads "
        "what](quantize.md#programs).",
    )

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the fields that differ from their default."""
        return tuple(option_.name for option_ in fields(self) if getattr(self, option_.name) != option_.default)
