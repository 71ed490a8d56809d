"""GGUF files as inputs: tensors, config.json and tokenizer, and damaged files."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, LETTERS, PIECES, SENTENCEPIECE, SIZES, decoded, llama, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import CheckpointError, FormatError, Unsupported
from weightsmith._base.installation import install
from weightsmith._base.tensors import DType
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.gguf.architectures import architectures
from weightsmith._models.formats.gguf.architectures.llama import Llama
from weightsmith._models.formats.gguf.base.encoder import Encoder
from weightsmith._models.formats.gguf.base.rope import llama3_quotients
from weightsmith._models.formats.gguf.layout import TYPE_IDS, TYPES
from weightsmith._models.formats.gguf.reading import choose, open_files
from weightsmith._models.formats.gguf.tokenizer.files import tokenizer_keys
from weightsmith._models.formats.gguf.writing import from_llama_order
from weightsmith.testing import SourceCase, SourceTests

KEYS = {**SIZES, **SENTENCEPIECE}
HEADS = {"attn_q": 4, "attn_k": 2}


def expected(tensors: dict[str, tuple[np.ndarray, str]]) -> dict[str, np.ndarray]:
    """What the Hub's checkpoint of these tensors has, in model order."""
    by_name = {}
    for name, (values, kind) in tensors.items():
        array, heads = decoded(values, kind), HEADS.get(name.split(".")[-2])
        if heads:  # each head: neighbours there are half a head apart here
            head = np.arange(len(array)).reshape(heads, -1)
            array = array[np.concatenate([head[:, 0::2], head[:, 1::2]], 1).reshape(-1)]
        by_name[str(Llama().hub_name(name))] = array
    return {name: by_name[name] for name in sorted(by_name, key=natural_key)}


class TestGguf(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        a, b = llama(), llama(vocabulary=270)
        one, other = (write_gguf(tmp_path / f"{n}.gguf", "llama", t, KEYS) for n, t in (("a", a), ("b", b)))
        return SourceCase(
            lambda: open_files([one], None, "a").source, expected(a), lambda: open_files([other], None, "b").source
        )

    def test_only_numbers_in_the_hubs_order_have_a_place(self, case: SourceCase) -> None:
        source = case.open()
        placed = {name for name in source.specs if source.location(name) is not None}
        assert placed == {name for name in source.specs if "norm" in name or "v_proj" in name}
        assert source.preferred_rows("model.layers.0.self_attn.k_proj.weight") == 16
        assert source.preferred_rows("model.layers.0.mlp.up_proj.weight") == 1
        assert source.natural_dtype("model.norm.weight").name == "BF16"
        source.close()


def test_tiles_of_a_rotated_matrix_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one head, so that a read crosses several."""
    monkeypatch.setattr("weightsmith._models.formats.gguf.reading.CHUNK_ELEMENTS", 100)
    tensors = llama()
    source = open_files([write_gguf(tmp_path / "a.gguf", "llama", tensors, KEYS)], None, "a").source
    name = "model.layers.0.self_attn.q_proj.weight"
    out = np.empty(4 * (64 * 64 - 7), np.uint8)
    source.read_into(name, 4 * 5, out)
    assert out.tobytes() == expected(tensors)[name].tobytes()[20:-8]
    source.close()


def test_a_head_may_be_smaller_than_a_block(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(64)
    plain = {f"blk.0.attn_{part}.bias": (np.ones(n), "F32") for part, n in (("k", 32), ("v", 32), ("output", 64))}
    tensors = {**llama(), **plain, "blk.0.attn_q.bias": (values.astype(np.float32), "Q8_0")}
    with open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, KEYS)) as model:
        name = "model.layers.0.self_attn.q_proj.bias"
        whole, part = model.read(name), np.empty(16, np.float32)
        model.read_into(name, 64, part.view(np.uint8))
    assert part.tolist() == whole[16:32].tolist()


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES.values() if dtype.block > 1], ids=str)
def test_every_type_of_blocks_is_read_as_by_another_reader(dtype: DType, tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (6, 512 // dtype.block * dtype.itemsize), np.uint8)
    tensors = {"token_embd.weight": (blocks, dtype.name), "output_norm.weight": (np.ones(512), "F32")}
    path = write_gguf(tmp_path / "a.gguf", "qwen2", tensors, {**KEYS, "embedding_length": 512})
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(TYPE_IDS[dtype.name]))
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.read("model.embed_tokens.weight", slice(2, 5)), theirs[2:5], equal_nan=True)


def test_norms_of_gemma_and_experts_of_mixtral(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ends = {"token_embd.weight": (rng.standard_normal((len(SENTENCEPIECE["tokenizer.ggml.tokens"]), 64)), "Q8_0")}
    norm = rng.standard_normal(64).astype(np.float32)
    keys = {**KEYS, "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 32}
    gemma = write_gguf(tmp_path / "g.gguf", "gemma2", {**ends, "blk.0.post_ffw_norm.weight": (norm + 1, "F32")}, keys)
    with open_checkpoint(gemma) as checkpoint:
        read = checkpoint.read("model.layers.0.post_feedforward_layernorm.weight")
        assert np.array_equal(read, (norm + np.float32(1)) - np.float32(1))
        assert checkpoint.config is not None
        assert (checkpoint.config["query_pre_attn_scalar"], checkpoint.config["sliding_window"]) == (16, 32)
    experts = rng.standard_normal((4, 96, 64)).astype(np.float32)
    tensors = {**ends, "blk.0.ffn_up_exps.weight": (experts, "Q4_0"), "blk.0.ffn_gate_inp.weight": (experts[:, 0], "F32")}
    mixtral = write_gguf(tmp_path / "m.gguf", "llama", tensors, {**KEYS, "expert_count": 4, "expert_used_count": 2})
    with open_checkpoint(mixtral) as checkpoint:
        third = checkpoint.read("model.layers.0.block_sparse_moe.experts.3.w3.weight")
        assert np.array_equal(third, decoded(experts[3], "Q4_0"))
        assert checkpoint.config is not None
        assert checkpoint.config["architectures"] == ["MixtralForCausalLM"]
        assert np.array_equal(checkpoint.read("model.layers.0.block_sparse_moe.gate.weight"), experts[:, 0])


def nvfp4(values: np.ndarray) -> np.ndarray:
    """Blocks of NVFP4 of some rows: uint8 [..., columns / 64 * 36]."""
    rows = np.ascontiguousarray(libgguf.quantize_rows(values.reshape(-1, values.shape[-1]), TYPE_IDS["NVFP4"])).view(np.uint8)
    return rows.reshape(*values.shape[:-1], -1)


def test_weights_are_multiplied_by_their_factors(tmp_path: Path) -> None:
    """NVFP4 has a factor for a matrix, or one for each expert; those of what enters a layer are left out."""
    rng = np.random.default_rng(0)
    factors, experts = np.float32([0.5, 0.01, 3, 7]), nvfp4(rng.standard_normal((4, 128, 64)).astype(np.float32))
    query, plain = nvfp4(rng.standard_normal((64, 64)).astype(np.float32)), rng.standard_normal((64, 64)).astype(np.float32)
    tensors = {
        "token_embd.weight": (rng.standard_normal((len(PIECES), 64)), "Q8_0"),
        "blk.0.attn_q.weight": (query, "NVFP4"),
        "blk.0.attn_q.scale": (np.float32([0.02]), "F32"),
        "blk.0.attn_q.input_scale": (np.float32([0.1]), "F32"),
        "blk.0.attn_output.weight": (plain, "F32"),
        "blk.0.attn_output.scale": (np.float32([0.25]), "F32"),
        "blk.0.ffn_up_exps.weight": (experts, "NVFP4"),
        "blk.0.ffn_up_exps.scale": (factors, "F32"),
        "blk.0.ffn_down_exps.weight": (nvfp4(rng.standard_normal((4, 64, 128)).astype(np.float32)), "NVFP4"),
        "blk.0.ffn_down_exps.scale": (np.float32([2]), "F32"),
    }
    keys = {**KEYS, "expert_count": 4, "expert_used_count": 2}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, keys)
    kind = gguf.GGMLQuantizationType.NVFP4
    with open_checkpoint(path) as checkpoint:
        up = gguf.quants.dequantize(experts, kind).astype(np.float32) * factors[:, None, None]
        for expert in range(4):
            assert np.array_equal(checkpoint.read(f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"), up[expert])
        rows = from_llama_order(gguf.quants.dequantize(query, kind).reshape(-1) * np.float32(0.02), 16, 64).reshape(64, 64)
        assert np.array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), rows)
        assert np.array_equal(checkpoint.read("model.layers.0.self_attn.o_proj.weight"), plain * np.float32(0.25))
        down = gguf.quants.dequantize(tensors["blk.0.ffn_down_exps.weight"][0], kind)
        assert np.array_equal(checkpoint.read("model.layers.0.block_sparse_moe.experts.3.w2.weight"), down[3] * np.float32(2))
        assert not any("scale" in name for name in checkpoint.specs)
    tensors["blk.0.ffn_up_exps.scale"] = np.float32([1, 2]), "F32"
    with pytest.raises(FormatError, match=r"ffn_up_exps\.scale' is F32 \[2\], not F32 of 1 or 4 numbers"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", tensors, keys))


@needs_llama_cpp
def test_nvfp4_is_computed_as_llama_cpp_does(tmp_path: Path) -> None:
    source = zoo.save("llama", tmp_path / "m", 1, dtype="float32", hidden_size=64, intermediate_size=128, vocab_size=262)
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (source / name).write_bytes(content)
    weightsmith.quantize(source, tmp_path / "plain", "gguf-f32", progress=False)
    reader = gguf.GGUFReader(tmp_path / "plain/model.gguf")
    keys = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    del keys["general.architecture"]
    tensors = dict[str, tuple[np.ndarray, str]]()
    for tensor in reader.tensors:
        tensors[tensor.name] = np.array(tensor.data), "F32"
        if tensor.name.startswith("blk.") and tensor.data.ndim == 2:
            factor = np.float32(np.abs(tensor.data).max() / 2688)
            tensors[tensor.name] = nvfp4(tensor.data / factor), "NVFP4"
            tensors[tensor.name.replace(".weight", ".scale")] = np.array([factor]), "F32"
    (tmp_path / "small").mkdir()
    small = write_gguf(tmp_path / "small/model.gguf", "llama", tensors, keys)
    weightsmith.quantize(small, tmp_path / "again", "gguf-f32", progress=False)
    tokens = list(range(40))
    logits = []
    for path in (tmp_path / "plain/model.gguf", small, tmp_path / "again/model.gguf"):
        with llama_cpp.Judge(path) as judge:
            logits.append(judge.logits(tokens))
    plain, theirs, ours = logits
    top = np.abs(theirs).max()
    assert np.abs(theirs - ours).max() < 0.02 * top  # llama.cpp rounds what enters a layer to 8 bits
    assert np.abs(theirs - plain).max() > 0.05 * top


def test_names_are_the_same_in_both_directions() -> None:
    for architecture in architectures():
        for module, hub in architecture.layer.items():
            there = f"blk.12.{module}.weight"
            here = architecture.hub_name(there)
            assert here is not None
            place = architecture.place(here.format(7))
            assert place is not None
            assert (place.name, place.expert) == (there, 7 if "{}" in hub else -1)
    assert Llama().hub_name("blk.0.ssm_a.weight") is None
    assert Llama().place("model.layers.0.mlp.gate.weight") is None


def test_what_an_architecture_does_is_in_two_classes() -> None:
    """Its own, and `GgufArchitecture`, or of encoders `Encoder`; or one between them."""
    depths = {
        type(architecture).__name__: len(type(architecture).__mro__) - isinstance(architecture, Encoder)
        for architecture in architectures()
    }
    assert [name for name, depth in depths.items() if depth > 4] == []


def test_a_split_file_is_one_model_whichever_part_is_named(tmp_path: Path) -> None:
    tensors = llama()
    paths = [tmp_path / f"m-0000{k}-of-00002.gguf" for k in (1, 2)]
    write_gguf(paths[0], "llama", dict(list(tensors.items())[:4]), KEYS, (0, 2))
    write_gguf(paths[1], "llama", dict(list(tensors.items())[4:]), {}, (1, 2))
    for place in (tmp_path, *paths):
        with open_checkpoint(place) as checkpoint:
            assert set(checkpoint.specs) == set(expected(tensors))
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"1 of 2 parts are missing: m-00002-of-00002\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(paths[0])


def test_no_file_is_split_into_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00000.gguf", "llama", llama(), KEYS)
    with pytest.raises(FormatError, match="part of a file that is split into 0"):
        open_checkpoint(tmp_path)


def test_which_file_of_a_folder() -> None:
    assert choose(["config.json", "model.safetensors"], "here") is None
    chosen = choose(["a.Q4_K_M.gguf", "mmproj-a.gguf", "imatrix.gguf", "sub/b.gguf"], "here")
    assert chosen is not None
    assert (chosen.files, chosen.ignored) == (("a.Q4_K_M.gguf",), ("mmproj-a.gguf", "imatrix.gguf"))
    with pytest.raises(FormatError, match=r"2 GGUF models in one folder: 'a\.Q4_K_M\.gguf', 'a\.Q8_0\.gguf'") as caught:
        choose(["a.Q8_0.gguf", "a.Q4_K_M.gguf"], "here")
    assert "Name one of the files: here/a.Q4_K_M.gguf" in str(caught.value)


# ---- config.json and tokenizer


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "llama", llama(), KEYS)


@pytest.mark.slow
def test_the_model_and_the_tokenizer_are_those_that_transformers_makes(tiny: Path) -> None:
    import torch

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.parent, gguf_file=tiny.name, quantization_config=transformers.GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    with open_checkpoint(tiny) as checkpoint:
        state = theirs.state_dict()
        assert set(state) - {"lm_head.weight"} == set(checkpoint.specs)
        for name in checkpoint.specs:
            rounded = checkpoint.read(name).astype(checkpoint.natural_dtype(name).numpy)
            assert rounded.tobytes() == state[name].view(torch.int16).numpy().tobytes(), name
        ours = transformers.AutoConfig.from_pretrained(checkpoint.folder).to_dict()
    unlike = ("architectures", "dtype", "_model_name_or_path", "_name_or_path", "quantization_config", "unk_token_id")
    for key, value in theirs.config.to_dict().items():
        expected_value = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert key in unlike or ours.get(key) == expected_value, key


GEMMA = {
    **SENTENCEPIECE,
    "tokenizer.ggml.tokens": [token.replace("\u2581\u2581", "  ") for token in SENTENCEPIECE["tokenizer.ggml.tokens"]],
    "tokenizer.ggml.token_type": [*SENTENCEPIECE["tokenizer.ggml.token_type"][:-3], 4, 3, 4],
}
TEXTS = ["ab a b  c\n", " abab  ab", "12 a1212 ab<|x|>a<think>b<|im_end|>", "\u00fc\u0120 ab", ""]


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", SENTENCEPIECE),
        ("gemma3", GEMMA),
        ("phi3", SENTENCEPIECE),
        ("qwen2", {**BYTE_LEVEL, "tokenizer.ggml.pre": "qwen2"}),
        ("llama", BYTE_LEVEL),
        ("llama", {**BYTE_LEVEL, "tokenizer.ggml.pre": "gpt-2"}),
    ],
)
def test_tokens_are_those_that_transformers_makes(architecture: str, keys: dict[str, Any], tmp_path: Path) -> None:
    sizes = {**SIZES, "attention.sliding_window": 32, "attention.key_length": 16, "attention.value_length": 16}
    tensors = {"token_embd.weight": (np.ones((len(keys["tokenizer.ggml.tokens"]), 64)), "F32")}
    path = write_gguf(tmp_path / "a.gguf", architecture, tensors, {**sizes, **keys})
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    with open_checkpoint(path) as checkpoint:
        ours = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
        config = json.loads((checkpoint.folder / "tokenizer_config.json").read_text())
        for text in TEXTS:
            # transformers leaves out the space before a text that begins with one; llama.cpp and SentencePiece do not.
            lost = text.startswith(" ") and (architecture, keys) == ("llama", SENTENCEPIECE)
            ids = theirs.encode(f" {text}" if lost else text, add_special_tokens=False).ids
            assert ours.encode(text, add_special_tokens=False).ids == ids, text
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        assert config.get("chat_template") == keys.get("tokenizer.chat_template")
        adds_first = "tokenizer.ggml.scores" in keys
        assert (ours.encode("ab").ids[0] == 1) == adds_first == config["add_bos_token"]
        loaded = transformers.AutoTokenizer.from_pretrained(checkpoint.folder)
        assert loaded("ab a b").input_ids == ours.encode("ab a b").ids


@pytest.mark.parametrize("prefix", [True, False])
def test_spaces_at_the_start_of_a_text_are_kept(prefix: bool, tmp_path: Path) -> None:
    keys = {**SIZES, **SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": prefix}
    tensors = {"token_embd.weight": (np.ones((len(SENTENCEPIECE["tokenizer.ggml.tokens"]), 64)), "F32")}
    with open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, keys)) as checkpoint:
        tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
        for text in ("ab", " ab", "   ab", "ab a", ""):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
            first = tokenizer.encode(text, add_special_tokens=False).tokens[:1]
            assert [token[:1] == "\u2581" for token in first] == [prefix or text.startswith(" ")][: len(first)]
        written, _ = tokenizer_keys(
            {"tokenizer.json": (checkpoint.folder / "tokenizer.json").read_bytes()},
            {},
            Llama(),
            len(tokenizer.get_vocab()),
            "m",
        )
        assert written["tokenizer.ggml.add_space_prefix"].value is prefix


def test_digits_are_split_as_the_file_says(tmp_path: Path) -> None:
    for pre, ids in (("smollm", 2), ("gpt-2", 1)):
        keys = {**BYTE_LEVEL, "tokenizer.ggml.pre": pre}
        tensors = {"token_embd.weight": (np.ones((262, 64)), "F32")}
        with open_checkpoint(write_gguf(tmp_path / f"{pre}.gguf", "llama", tensors, {**SIZES, **keys})) as checkpoint:
            assert len(Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json")).encode("12").ids) == ids
            assert not checkpoint.notes


def test_a_tokenizer_that_is_not_known(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (np.ones((262, 64)), "F32")}
    keys = {**SIZES, **BYTE_LEVEL, "tokenizer.ggml.pre": "somebodys"}
    with open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, keys)) as checkpoint:
        assert "the way called 'somebodys' (tokenizer.ggml.pre) is not known" in str(checkpoint.notes[0])
    with open_checkpoint(write_gguf(tmp_path / "b.gguf", "llama", tensors, SIZES)) as checkpoint:
        assert checkpoint.files == ("config.json",)
        assert "no tokenizer that can be read" in str(checkpoint.notes[0])


def test_scaled_frequencies(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    keys = {**KEYS, "rope.dimension_count": 16}
    quotients = llama3_quotients(16, 50000.0, scaling)
    config = transformers.LlamaConfig(head_dim=16, rope_parameters={"rope_theta": 50000.0, "rope_type": "llama3", **scaling})
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert quotients.tolist() == pytest.approx((50000.0 ** (-np.arange(8) / 8) / theirs.numpy()).tolist(), rel=1e-5)
    assert len(set(quotients.tolist())) == 3
    tensors = {**llama(), "rope_freqs.weight": (quotients, "F32")}
    with open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, keys)) as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["rope_scaling"] == {"rope_type": "llama3", **scaling}
        identity = checkpoint.identity
    tensors["rope_freqs.weight"] = quotients * np.float32(0.5), "F32"
    with pytest.raises(Unsupported, match="not scaled as Llama 3's"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, keys))
    with pytest.raises(FormatError, match=r"rope_freqs\.weight has 8 numbers"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors, {**keys, "rope.dimension_count": 1 << 30}))
    factors = {f"rope_factors_{k}.weight": (np.arange(1, 9) * x, "F32") for k, x in (("long", 2.5), ("short", 1.1))}
    keys = {**KEYS, "rope.scaling.original_context_length": 16}
    tensors = {"token_embd.weight": llama()["token_embd.weight"], **factors}
    with open_checkpoint(write_gguf(tmp_path / "a.gguf", "phi3", tensors, keys)) as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["rope_scaling"]["long_factor"][:2] == [2.5, 5.0]
        assert checkpoint.config["rope_scaling"]["short_factor"][:2] == [1.1, 2.2]
        assert checkpoint.config["original_max_position_embeddings"] == 16
        assert checkpoint.identity != identity


@pytest.mark.long
def test_keys_that_a_family_may_leave_out(tmp_path: Path) -> None:
    def config(architecture: str, **overrides: Any) -> dict[str, Any]:
        tensors = {"token_embd.weight": llama()["token_embd.weight"]}
        keys = {**KEYS, **{name.replace("__", "."): value for name, value in overrides.items()}}
        with open_checkpoint(write_gguf(tmp_path / "a.gguf", architecture, tensors, keys)) as checkpoint:
            assert checkpoint.config is not None
            return checkpoint.config

    assert config("phi3")["sliding_window"] is None
    assert config("phi3", attention__sliding_window=0)["sliding_window"] is None
    assert config("phi3", attention__sliding_window=32)["sliding_window"] == 32
    with pytest.raises(FormatError, match="sliding_window is array"):
        config("phi3", attention__sliding_window=[32, 0])
    assert config("gemma2")["sliding_window"] == 4096
    assert "rope_scaling" not in config("qwen2")
    linear = {"rope_type": "linear", "factor": 4.0}
    assert config("qwen2", rope__scaling__factor=4.0)["rope_scaling"] == linear
    assert config("qwen2", rope__scale_linear=4.0)["rope_scaling"] == linear
    wide = {"attention__key_length": 32, "attention__value_length": 32}
    assert config("glm4", **wide, rope__dimension_count=8)["partial_rotary_factor"] == 0.25
    assert config("glm4", **wide)["partial_rotary_factor"] == 1
    with pytest.raises(FormatError, match="logit_scale is missing"):
        config("command-r", attention__layer_norm_epsilon=1e-5)
    with pytest.raises(FormatError, match=r"attention\.scale is missing"):
        config("granite", logit_scale=8.0)
    window = {"attention__sliding_window": 32}
    assert "final_logit_softcapping" not in config("gemma3", **window)
    assert config("gemma3", **window, final_logit_softcapping=30.0)["final_logit_softcapping"] == 30


# ---- what is refused


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


NORM = key("blk.0.ffn_norm.weight")
DAMAGE = [
    (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", Unsupported, "GGUF version 1"),
    (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", Unsupported, "big-endian"),
    (b"GGUF\3\0\0\0", b"GGUG\3\0\0\0", FormatError, "not a GGUF file"),
    (struct.pack("<IQ", 3, 11), struct.pack("<IQ", 3, 1 << 60), FormatError, "tensors do not fit into the file"),
    (struct.pack("<QQ", 11, 16), struct.pack("<QQ", 11, 1 << 40), FormatError, "keys, and at most 65,536"),
    (key("llama.block_count"), struct.pack("<Q", 1 << 62) + b"llama.block_count", FormatError, "a key has 4,611,686"),
    (key("llama.block_count"), key("llama.contxt_lenx"), FormatError, "llama.block_count is missing"),
    (key("llama.context_length") + b"\4\0\0\0", key("llama.context_length") + b"\x0d\0\0\0", FormatError, "the type 13"),
    (key("blk.0.attn_norm.weight"), key("blk.0.attn_norm.weighs"), Unsupported, "belong to a model of the family llama"),
    (b"blk.0.ffn_up.weight", b"blk.0.ffn_up.weigh\xff", FormatError, "UTF-8"),
    (NORM + b"\1\0\0\0", NORM + b"\0\0\0\0", FormatError, "0 dimensions"),
    (NORM + struct.pack("<IQ", 1, 64), NORM + struct.pack("<IQ", 1, 0), FormatError, "has the shape [0]"),
    (struct.pack("<QQI", 64, 96, 8), struct.pack("<QQI", 64, 96, 99), Unsupported, "type 99"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "error", "words"), DAMAGE)
def test_damage(old: bytes, new: bytes, error: type[Exception], words: str, tiny: Path) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data.replace(old, new, 1))
    assert tiny.read_bytes() != data
    with pytest.raises(error) as caught:
        open_checkpoint(tiny)
    assert words in str(caught.value)


def test_a_file_that_is_cut_off_anywhere(tiny: Path) -> None:
    data = tiny.read_bytes()
    for nbytes in [*range(0, 200, 29), *range(200, len(data) - 40, 4999), len(data) - 33]:
        tiny.write_bytes(data[:nbytes])
        with pytest.raises(FormatError):
            open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"general.alignment": 24}, FormatError, "general.alignment is 24"),
        ({"block_count": 2**31 - 1}, FormatError, "2,147,483,647 layers"),
        ({"attention.head_count": 0}, FormatError, "llama.attention.head_count is 0"),
        ({"attention.head_count": 5}, FormatError, "has 64 rows for 5 heads"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, FormatError, "layer_norm_rms_epsilon is nan"),
        ({"tokenizer.ggml.bos_token_id": 9999}, FormatError, "bos_token_id is 9999, and there are 269 tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, FormatError, "2 numbers for 269 tokens"),
        ({"rope.scaling.type": "su"}, Unsupported, "RoPE scaling of the type 'su'"),
        ({"tokenizer.ggml.pre": [1, 2]}, FormatError, "tokenizer.ggml.pre is array([1, 2]"),
        ({"tokenizer.ggml.add_bos_token": [1, 2]}, FormatError, "add_bos_token is array([1, 2]"),
        ({"tokenizer.ggml.add_space_prefix": "no"}, FormatError, "add_space_prefix is 'no', not true or false"),
        ({"expert_count": [1, 2]}, FormatError, "expert_count is array([1, 2]"),
        ({"split.count": [1, 2]}, FormatError, "split into array([1, 2]"),
        ({"tokenizer.ggml.tokens": ["x" * 5_000_000]}, FormatError, "more than 4,000,000 characters"),
    ],
)
def test_wrong_keys(change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", llama(), {**KEYS, **change}))
    assert words in str(caught.value)


def test_merges_that_give_no_token(tmp_path: Path) -> None:
    for merge in ("a", "a b c", "a c", "a \u1234"):
        keys = {**SIZES, **BYTE_LEVEL, "tokenizer.ggml.merges": [merge]}
        with pytest.raises(FormatError, match="not two tokens that give a third"):
            open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", {"token_embd.weight": (np.ones((262, 64)), "F32")}, keys))
    assert len(LETTERS) == 256


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="a GGUF file of the architecture 'rwkv6'"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", "rwkv6", llama(), KEYS))


def test_without_libgguf_plain_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libgguf", None)
    plain = {name: (values, "F32") for name, (values, _) in llama().items()}
    with open_checkpoint(write_gguf(tmp_path / "f32.gguf", "llama", plain, KEYS)) as checkpoint:
        assert checkpoint.read("model.norm.weight").dtype == np.float32
        assert checkpoint.natural_dtype("model.norm.weight").name == "F32"
    monkeypatch.undo()
    path = write_gguf(tmp_path / "q.gguf", "llama", llama(), KEYS)
    monkeypatch.setitem(sys.modules, "libgguf", None)
    with pytest.raises(Unsupported, match="the package libgguf") as caught:
        open_checkpoint(path)
    assert install("gguf") in str(caught.value)


def test_the_temporary_folder_is_removed(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert (checkpoint.folder / "config.json").exists()
    checkpoint.close()
    assert not checkpoint.folder.exists()
