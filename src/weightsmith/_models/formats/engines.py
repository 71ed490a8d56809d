"""Which formats the programs that run models load, and which matrices their kernels take: read in their sources.

Each row names the file that says so, in the release whose version is in `ENGINES`. A program that has no row for a format does
not load it. Of all this, ExLlamaV2 and exllamav3 were run on a GPU (an NVIDIA H100): see docs/exl2.md and docs/exl3.md.

**Joined matrices.** vLLM and SGLang join query, key and value, and gate and up: a rule on outputs is about the joined matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import FORMATS, formats_for
from weightsmith._models.formats.mlx import JOINED, STACKED
from weightsmith._models.structure.projections import joined_sets, projection_role


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that runs models.

    name      as users write it: `vllm`
    title     for messages: `vLLM`
    version   the release whose source was read
    families  the values of `model_type` in config.json that it loads; empty if it falls back to other implementations, or the
              format's writer checks them
    float16   whether it computes in float16 alone
    """

    name: str
    title: str
    version: str
    families: frozenset[str] = frozenset()
    float16: bool = False

    @property
    def release(self) -> str:
        """Name and version, for messages."""
        return f"{self.title} {self.version}"


_MLX_FAMILIES = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
    cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 deepseek_v41_text dots1 ernie4_5
    ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n gemma4
    gemma4_text gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2 internlm3 iquestcoder iquestloopcoder
    jamba joyai_llm_flash kimi_k2 kimi_k25 kimi_k3 kimi_linear kimi_vl laguna lfm2 lfm2-vl lfm2_moe lille-130m llama
    llama4 llama4_text llava longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3
    minimax minimax_m2 minimax_m3_vl ministral3 mistral mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige
    nanochat nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi-msft phi3 phi3small
    phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3
    qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open
    spark2_5 stablelm starcoder2 step3p5 talkie telechat3 xverse youtu_llm
    """.split()
)
"""The modules of mlx_lm.models, and what MODEL_REMAPPING of mlx_lm/utils.py maps to them."""

_MLX_EXPERTS = JOINED | STACKED
"""Values of `model_type` whose quantised experts it loads, joined or stacked."""

ENGINES = (
    Engine("transformers", "transformers", "5.24.0"),
    Engine("vllm", "vLLM", "0.33.0"),
    Engine("sglang", "SGLang", "0.5.23"),
    Engine("llama.cpp", "llama.cpp", "(node-llama-cpp 3.22.1)"),
    Engine("exllamav2", "ExLlamaV2", "0.3.2", float16=True),
    Engine("exllamav3", "exllamav3 (TabbyAPI)", "1.6.5", float16=True),
    Engine("mlx-lm", "mlx-lm", "0.32.2", _MLX_FAMILIES),
)

ENGINE_NAMES = tuple(engine.name for engine in ENGINES)


@dataclass(frozen=True, slots=True)
class Support:
    """Limits of one program for one format.

    formats  names of formats, or of a stored format for all that it writes: `gguf`
    source   the file that says so
    note     further conditions, for the docs; Markdown
    tiles    (outputs, inputs): one of the pairs must divide a (joined) matrix. Empty: any matrix
    parts    a multiple of it are the outputs of each part of a joined matrix but the last
    hidden   a multiple of it is the hidden size of experts, and `inner` of their intermediate size
    mlps     (`hidden` or `intermediate`, multiple, what the program does otherwise): of the sizes of MLPs; the hidden size of
             experts is not meant
    experts  why experts in the format are not run: "" if they are
    mixtures  values of `model_type` whose experts are run in the format; empty: all
    alike    whether the projections of an expert must all be stored in the format, or none
    plain_experts  why experts that are stored as they are, beside weights in the format, are not run: "" if they are
    mambas   why the projections of Mamba 1 (`in_proj`, `out_proj`) in the format are not run: "" if they are
    """

    engine: str
    formats: tuple[str, ...]
    source: str
    note: str = ""
    tiles: tuple[tuple[int, int], ...] = ()
    parts: int = 1
    hidden: int = 1
    inner: int = 1
    mlps: tuple[tuple[str, int, str], ...] = ()
    experts: str = ""
    mixtures: frozenset[str] = frozenset()
    alike: bool = False
    plain_experts: str = ""
    mambas: str = ""


_VLLM = "vllm/model_executor/layers/quantization"
_SGLANG = "sglang/srt/layers/quantization"
_COMPRESSED = "transformers/quantizers/quantizer_compressed_tensors.py"
_EXLLAMAV2 = "exllamav2/exllamav2_ext/cuda/q_mlp.cu"
_UNREAD = "does not load experts stored as"
_MAMBAS = "builds the layers of Mamba 1 without quantisation, and does not load their projections stored as"
_vllm = partial(Support, "vllm", alike=True, mambas=_MAMBAS)
_sglang = partial(Support, "sglang", alike=True)
_MARLIN = ((64, 128), (128, 64))
"""Outputs and inputs of the tiles of Marlin's kernel."""

_HEAD_ROWS = 64
"""vLLM and SGLang give a head a multiple of this many rows (`pad_vocab_size`)."""
_EXLLAMAV2_MLPS = (("intermediate", 64, "leaves the last features of MLPs without activation"),)
"""Its grid for the activation has half as many blocks of 32 pairs as there are blocks of 32 features, rounded down."""
_EXLLAMAV3_MLPS = (("hidden", 128, "does not run MLPs with padded outputs"),)
"""`GatedMLP` does not cut what the padding adds, as its other modules do, and the next norm refuses the width."""

SUPPORT = (
    Support("transformers", ("fp8-dynamic", "w8a16", "w4a16", "mxfp4"), _COMPRESSED),
    Support("transformers", ("fp8-block", "int8", "mxfp8"), _COMPRESSED, experts=_UNREAD),
    Support("transformers", ("fp8-static",), _COMPRESSED, "does not quantise what enters experts"),
    Support(
        "transformers",
        ("nvfp4a16", "nvfp4"),
        _COMPRESSED,
        experts="ignores the global scales of experts, and computes garbage from those stored as",
    ),
    Support(
        "transformers",
        ("gptq-8bit", "gptq-4bit"),
        "optimum/gptq/quantizer.py",
        "with optimum 2.3.0 and GPTQModel",
        experts=_UNREAD,
    ),
    Support("transformers", ("awq-4bit",), "transformers/integrations/awq.py", "with GPTQModel", experts=_UNREAD),
    Support("transformers", ("gguf",), "transformers/modeling_gguf_pytorch_utils.py", "with `gguf_file`; dequantised"),
    _vllm(
        ("fp8-dynamic", "fp8-static"),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py",
        "multiplies FP8 from compute capability 8.9, weights only on older GPUs",
    ),
    _vllm(
        ("fp8-block",), f"{_VLLM}/utils/fp8_utils.py", "no part of a joined matrix may end inside a block", parts=128, inner=128
    ),
    _vllm(("int8",), f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py"),
    _vllm(
        ("w8a16", "w4a16"),
        f"{_VLLM}/utils/marlin_utils.py",
        "from compute capability 7.5; other shapes than 64 by 128 are padded",
    ),
    _vllm(("gptq-8bit", "gptq-4bit"), f"{_VLLM}/auto_gptq.py", "from compute capability 7.5; padded, as `w4a16`"),
    _vllm(("awq-4bit",), f"{_VLLM}/auto_awq.py", "from compute capability 7.5; padded, as `w4a16`"),
    _vllm(("nvfp4a16",), f"{_VLLM}/utils/marlin_utils_fp4.py", "padded, as `w4a16`", hidden=64),
    _vllm(
        ("nvfp4",),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
        "multiplies FP4 from compute capability 10.0, weights only on older GPUs; padded, as `w4a16`",
        hidden=64,
    ),
    _vllm(
        ("mxfp4",),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py",
        "from compute capability 8.0; padded, as `w4a16`",
    ),
    _vllm(
        ("mxfp8",),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w8a8_mxfp8.py",
        "from compute capability 7.5; its kernel depends on the GPU",
    ),
    _sglang(("fp8-dynamic", "fp8-static"), f"{_SGLANG}/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py"),
    _sglang(
        ("fp8-block",), f"{_SGLANG}/fp8_utils.py", "no part of a joined matrix may end inside a block", parts=128, inner=128
    ),
    _sglang(
        ("int8",),
        "sgl-kernel/csrc/gemm/int8_gemm_kernel.cu",
        "up to compute capability 9.0 (in commit 1f2840c)",
        tiles=((8, 16),),
        experts="runs experts on NPUs only, not on GPUs, if they are stored as",
    ),
    _sglang(
        ("w8a16", "w4a16"),
        "sglang/kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh",
        "from compute capability 8.0; no padding",
        tiles=_MARLIN,
    ),
    _sglang(
        ("gptq-8bit", "gptq-4bit"),
        f"{_SGLANG}/gptq/schemes/gptq_marlin.py",
        "from compute capability 8.0; no padding",
        tiles=_MARLIN,
        plain_experts="loads all experts as quantised, and cannot load plain ones beside weights stored as",
    ),
    _sglang(
        ("awq-4bit",),
        f"{_SGLANG}/awq/awq.py",
        "from compute capability 8.0; slow for matrices that are not a multiple of 64 by 128",
    ),
    _sglang(
        ("nvfp4a16",),
        f"{_SGLANG}/compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4_moe.py",
        "from compute capability 8.0",
        hidden=128,
        inner=64,
    ),
    _sglang(
        ("nvfp4",),
        f"{_SGLANG}/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
        "multiplies FP4 from compute capability 10.0, weights only on older GPUs",
        hidden=128,
        inner=64,
    ),
    Support("sglang", ("gguf",), f"{_SGLANG}/gguf.py", "on NVIDIA and Moore Threads GPUs"),
    Support("llama.cpp", ("gguf",), "llama_model_quantize", "was run; also Ollama and LM Studio, which contain it"),
    Support("exllamav2", ("exl2",), _EXLLAMAV2, "see [EXL2](exl2.md)", mlps=_EXLLAMAV2_MLPS),
    Support(
        "exllamav2",
        ("gptq-4bit",),
        _EXLLAMAV2,
        "in float16; the models that it computes as transformers does: see [EXL2](exl2.md)",
        mlps=_EXLLAMAV2_MLPS,
    ),
    Support("exllamav3", ("exl3",), "exllamav3/modules/mlp.py", "on NVIDIA GPUs; see [EXL3](exl3.md)", mlps=_EXLLAMAV3_MLPS),
    Support(
        "mlx-lm",
        ("mlx-8bit", "mlx-4bit"),
        "mlx_lm/utils.py",
        "experts of " + ", ".join(f"`{family}`" for family in sorted(_MLX_EXPERTS)) + "; also LM Studio, which contains it",
        mixtures=_MLX_EXPERTS,
    ),
    Support("mlx-lm", ("awq-4bit",), "mlx_lm/utils.py", "in float16; also LM Studio, which contains it", experts=_UNREAD),
)


def find_engine(name: str) -> Engine:
    """The program of this name, one of `ENGINE_NAMES`."""
    return next(engine for engine in ENGINES if engine.name == name)


def find_support(engine: str, format: str) -> Support | None:
    """Limits of a program for a format; None if it does not load the format.

    >>> find_support("sglang", "mxfp4") is None, find_support("llama.cpp", "gguf-q4_k_m").formats
    (True, ('gguf',))
    """
    names = {format, _stored_format(format)}
    return next((support for support in SUPPORT if support.engine == engine and not names.isdisjoint(support.formats)), None)


@cache
def _stored_format(format: str) -> str:
    """The stored format that writes models in a format: `gguf` for `gguf-q4_k_m`; the format itself if none lists it."""
    if format in FORMATS:
        return format
    for stored in formats_for(format):
        if any(writing.name == format for writing in stored.writes):
            break
        if any(model.name == format for model in stored.models()):
            return stored.name
    return format


def engines_of(format: str) -> tuple[Engine, ...]:
    """Programs that load a format; empty for formats of installed packages, which the table does not cover.

    >>> [each.name for each in engines_of("mxfp4")]
    ['transformers', 'vllm']
    """
    return tuple(engine for engine in ENGINES if find_support(engine.name, format) is not None)


def formats_of(engine: str) -> tuple[str, ...]:
    """The formats that a program loads, as in `Support.formats`.

    >>> formats_of("exllamav2")
    ('exl2', 'gptq-4bit')
    """
    return tuple(name for support in SUPPORT if support.engine == engine for name in support.formats)


def objections(
    support: Support, format: str, stored: Sequence[TensorSpec], plain: Iterable[TensorSpec], family: object = None
) -> Mapping[str, list[str]]:
    """Why a program does not run weights, and which: their names, by reason. {} if it takes all.

    format  of the weights, for the reasons
    stored  the weights in the format, with their plain shapes
    plain   all other tensors
    family  `model_type` of config.json
    """
    by_reason: dict[str, list[str]] = {}
    plain = list(plain)
    experts = [spec for spec in stored if _is_expert(spec.name)]
    if support.experts and experts:
        return {f"{support.experts} {format}": [spec.name for spec in experts]}
    if experts and support.mixtures and family is not None and family not in support.mixtures:
        return {f"does not load experts of {family} stored as {format}": [spec.name for spec in experts]}
    if support.alike and (mixed := _partly(experts, plain)):
        what = f"needs all projections of an expert in one format, and some are not stored as {format}"
        by_reason[what] = mixed
    for spec in experts:
        outputs, inputs = spec.shape
        hidden, inner = (outputs, inputs) if _is_down(spec.name) else (inputs, outputs)
        for size, name, multiple in ((hidden, "hidden", support.hidden), (inner, "intermediate", support.inner)):
            if size % multiple:
                what = f"needs experts whose {name} size is a multiple of {multiple}, not {size:,}"
                by_reason.setdefault(what, []).append(spec.name)
    if support.plain_experts and (unquantised := [spec.name for spec in plain if _is_expert(spec.name) or _is_stack(spec)]):
        by_reason[f"{support.plain_experts} {format}"] = unquantised
    if support.mambas and (mambas := _of_mamba(stored, plain)):
        by_reason[f"{support.mambas} {format}"] = mambas
    for reason, spec in _unfit_mlps(support, stored):
        by_reason.setdefault(reason, []).append(spec.name)
    shapes = {spec.name: spec.shape for spec in stored}
    for names in joined_sets(shapes):
        rows, width = [shapes[name][0] for name in names], shapes[names[0]][1]
        if len(names) > 1 and not _is_expert(names[0]) and any(outputs % support.parts for outputs in rows[:-1]):
            sizes = ", ".join(f"{outputs:,}" for outputs in rows)
            what = f"joins weights, and needs parts with a multiple of {support.parts} outputs, not {sizes}"
            by_reason.setdefault(what, []).extend(names)
        tiles = support.tiles
        if tiles and not any(sum(rows) % high == 0 and width % wide == 0 for high, wide in tiles):
            sizes_of_tiles = " or ".join(f"{high} by {wide}" for high, wide in tiles)
            what = f"needs matrices that are a multiple of {sizes_of_tiles} (outputs by inputs)"
            by_reason.setdefault(what, []).extend(names)
    return by_reason


def _of_mamba(stored: Sequence[TensorSpec], plain: Iterable[TensorSpec]) -> list[str]:
    """Projections of Mamba 1 among the stored weights: those of modules that also have an `x_proj`."""
    suffix = ".x_proj.weight"
    modules = {spec.name.removesuffix(suffix) for spec in (*stored, *plain) if spec.name.endswith(suffix)}
    return [spec.name for spec in stored if spec.name.rpartition(".")[0].rpartition(".")[0] in modules]


def head_objections(format: str, head: TensorSpec) -> Iterator[tuple[str, str]]:
    """Programs that load a format, but not a head stored in it: the name of each, and why.

    vLLM and SGLang cut a head by its rows (`weight_loader` of `VocabParallelEmbedding`). Scales of blocks have fewer rows. GPTQ
    stores the rows as columns, which are not filled up to `_HEAD_ROWS`. optimum replaces only layers inside blocks.
    """
    for engine in engines_of(format):
        joins, rows = engine.name in ("vllm", "sglang"), head.shape[0]
        if joins and format == "fp8-block":
            yield engine.name, f"{engine.title} does not load a head stored as {format}"
        elif joins and format.startswith("gptq-") and rows % _HEAD_ROWS:
            what = f"{engine.title} loads a head stored as {format} if it has a multiple of {_HEAD_ROWS} outputs, not {rows:,}"
            yield engine.name, what
        elif not joins and format.startswith("gptq-"):
            yield engine.name, f"{engine.title} is not known to load a head stored as {format}"


def _unfit_mlps(support: Support, stored: Sequence[TensorSpec]) -> Iterator[tuple[str, TensorSpec]]:
    """Projections out of MLPs whose sizes a program does not run, each after the reason."""
    for spec in filter(lambda spec: _is_down(spec.name), stored):
        sizes = dict(zip(("hidden", "intermediate"), spec.shape, strict=True))
        for name, multiple, otherwise in support.mlps:
            if sizes[name] % multiple and not (name == "hidden" and _is_expert(spec.name)):
                yield f"{otherwise}: their {name} size must be a multiple of {multiple}, not {sizes[name]:,}", spec


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _is_stack(spec: TensorSpec) -> bool:
    """The experts of GraniteMoE, in one tensor."""
    return len(spec.shape) == 3 and "block_sparse_moe" in spec.name.split(".")


def _is_down(name: str) -> bool:
    return projection_role(name.removesuffix(".weight")) == "down"


def _partly(experts: Sequence[TensorSpec], plain: Iterable[TensorSpec]) -> list[str]:
    """Expert weights stored unquantised beside quantised ones."""
    inside = {spec.name.rpartition(".")[0].rpartition(".")[0] for spec in experts}
    return [
        spec.name
        for spec in plain
        if len(spec.shape) == 2 and _is_expert(spec.name) and spec.name.rpartition(".")[0].rpartition(".")[0] in inside
    ]
