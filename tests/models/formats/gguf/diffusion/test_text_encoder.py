"""T5's encoder in GGUF files for ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import sentencepiece
import transformers
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.comfyui_gguf import module, needs_comfyui_gguf
from tests.diffusion_zoo import Arrays
from tests.llama_cpp import Judge, needs_llama_cpp
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

COPY = "encoder.embed_tokens.weight"
SIZES = {"vocab_size": 64, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}


def t5(*, gated: bool = True, kind: str = "T5") -> Arrays:
    """A tiny encoder, with a copy of its embedding."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, feed_forward_proj="gated-gelu" if gated else "relu")
    state = getattr(transformers, f"{kind}EncoderModel")(config).state_dict()
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(tuple(tensor.shape)).astype(ml_dtypes.bfloat16) for name, tensor in state.items()}
    return arrays | {COPY: arrays["shared.weight"]}


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path / "model.gguf").tensors}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_an_encoder_is_written_and_read_back(kind: str, tmp_path: Path) -> None:
    arrays = t5(kind=kind)
    save_file(arrays, tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 2)
    listed = {str(names.get_name(name, try_suffixes=(".weight",))) for name in arrays if name != COPY}
    assert kinds(tmp_path / "out").keys() == listed
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    output = load_file(tmp_path / "plain" / "model.safetensors")
    assert output.keys() == arrays.keys() - {COPY}
    for name, values in output.items():
        np.testing.assert_array_equal(values, arrays[name])


@pytest.mark.long
def test_keys_and_types_are_those_of_llama_cpp(tmp_path: Path) -> None:
    save_file(t5(), tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q4_k_s", fsync=False)
    keys = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields.items()}
    assert {name: value for name, value in keys.items() if not name.startswith("GGUF.")} == {
        "general.architecture": "t5encoder",
        "general.quantization_version": 2,
        "general.file_type": 14,
        "t5encoder.context_length": 512,
        "t5encoder.embedding_length": 256,
        "t5encoder.feed_forward_length": 512,
        "t5encoder.block_count": 2,
        "t5encoder.attention.head_count": 4,
        "t5encoder.attention.key_length": 64,
        "t5encoder.attention.value_length": 64,
        "t5encoder.attention.relative_buckets_count": 32,
        "t5encoder.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    }
    types = kinds(tmp_path / "out")
    assert types["token_embd.weight"] == "Q6_K"
    assert types["enc.blk.0.attn_rel_b.weight"] == types["enc.blk.1.ffn_norm.weight"] == "F32"
    assert (types["enc.blk.0.attn_v.weight"], types["enc.blk.0.attn_q.weight"]) == ("Q5_K", "Q4_K")
    assert "CLIPLoader (GGUF)" in (tmp_path / "out" / "README.md").read_text()


def test_the_folder_of_a_pipeline_is_written_as_a_single_file_is(tmp_path: Path) -> None:
    arrays = t5()
    save_file(arrays, tmp_path / "t5.safetensors")
    (tmp_path / "text_encoder_2").mkdir()
    save_file(arrays, tmp_path / "text_encoder_2" / "model.safetensors", {"format": "pt"})
    transformers.T5Config(**SIZES).save_pretrained(tmp_path / "text_encoder_2")
    for name in ("t5.safetensors", "text_encoder_2"):
        weightsmith.quantize(tmp_path / name, tmp_path / f"out-{Path(name).stem}", format="gguf-q8_0", fsync=False)
    files = [(tmp_path / f"out-{name}" / "model.gguf").read_bytes() for name in ("t5", "text_encoder_2")]
    assert files[0] == files[1]


@pytest.mark.long
def test_other_t5_models_are_refused(tmp_path: Path) -> None:
    arrays = t5()
    save_file(arrays | {"decoder.final_layer_norm.weight": np.ones(256, np.float32)}, tmp_path / "whole.safetensors")
    with pytest.raises(PlanError, match=r"'decoder.final_layer_norm.weight' does not belong to the encoder of T5"):
        weightsmith.quantize(tmp_path / "whole.safetensors", tmp_path / "out", format="gguf-q8_0")
    small = {name: values for name, values in arrays.items() if name != COPY}
    save_file(t5(gated=False), tmp_path / "first.safetensors")
    with pytest.raises(PlanError, match="its feed-forward layers have no gate"):
        weightsmith.quantize(tmp_path / "first.safetensors", tmp_path / "out", format="gguf-q8_0")
    assert not (tmp_path / "out").exists()
    del small["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    save_file(small, tmp_path / "damaged.safetensors")
    with pytest.raises(PlanError, match=r"there is no matrix enc.blk.0.attn_rel_b.weight"):
        weightsmith.quantize(tmp_path / "damaged.safetensors", tmp_path / "out", format="gguf-q8_0")


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A SentencePiece model as UMT5 has it: unigrams, a fallback to bytes, and the ids of its special tokens."""
    folder = tmp_path_factory.mktemp("spiece")
    words = [f"word{number} other{number * 7 % 31} und{number % 13}" for number in range(400)]
    (folder / "text.txt").write_text("\n".join(words))
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=400,
        model_type="unigram",
        byte_fallback=True,
        hard_vocab_limit=False,
        **ids,
    )
    return (folder / "spiece.model").read_bytes()


def umt5(spiece: bytes | None) -> Arrays:
    rows = {"shared.weight": np.zeros((256_384, 32), ml_dtypes.bfloat16)}
    tokenizer = {} if spiece is None else {"spiece_model": np.frombuffer(spiece, np.uint8)}
    return {name: values for name, values in t5(kind="UMT5").items() if name != COPY} | rows | tokenizer


def keys_of(path: Path) -> dict[str, Any]:
    """The tokenizer's keys. Only the first thousand items of a list: reading all 256,384 tokens takes seconds."""
    fields = gguf.GGUFReader(path / "model.gguf").fields.items()
    prefix = "tokenizer.ggml."
    return {name.removeprefix(prefix): field.contents(slice(1000)) for name, field in fields if name.startswith(prefix)}


def pieces_of(data: bytes) -> list[tuple[str, float, int]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    numbers = range(len(processor))
    return [(processor.IdToPiece(i), processor.GetScore(i), kind_of(processor, i)) for i in numbers]


def kind_of(processor: sentencepiece.SentencePieceProcessor, i: int) -> int:
    """As llama.cpp's converter tells the types of pieces."""
    kinds = {2: processor.IsUnknown(i), 3: processor.IsControl(i), 5: processor.IsUnused(i), 6: processor.IsByte(i)}
    return next((kind for kind, is_kind in kinds.items() if is_kind), 1)


@pytest.mark.reader
def test_the_tokenizer_of_umt5_is_in_the_file(spiece: bytes, tmp_path: Path) -> None:
    save_file(umt5(spiece), tmp_path / "umt5.safetensors")
    weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-q8_0", fsync=False)
    keys, pieces = keys_of(tmp_path / "out"), pieces_of(spiece)
    used = len(pieces)
    assert [keys[name][used] for name in ("tokens", "scores", "token_type")] == [f"[PAD{used}]", -10_000, 5]
    assert list(zip(*(keys.pop(name)[:used] for name in ("tokens", "scores", "token_type")), strict=True)) == pieces
    assert keys.pop("precompiled_charsmap")
    assert keys == {
        "model": "t5",
        "pre": "default",
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "add_bos_token": False,
        "add_eos_token": True,
        "padding_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
    }


@pytest.mark.long
def test_the_tokenizer_of_umt5_is_read_back_and_written_again(spiece: bytes, tmp_path: Path) -> None:
    save_file(umt5(spiece), tmp_path / "umt5.safetensors")
    weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    read_back = load_file(tmp_path / "plain" / "model.safetensors")["spiece_model"].tobytes()
    ours, theirs = (sentencepiece.SentencePieceProcessor(model_proto=data) for data in (read_back, spiece))
    assert pieces_of(read_back) == pieces_of(spiece)
    for text in ("word17 und5", "  two   spaces ", "ﬁne ½ Ⅷ", "Grüße 你好", ""):
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.pad_id(), ours.eos_id(), ours.unk_id(), ours.bos_id()) == (0, 1, 3, 2)
    weightsmith.quantize(tmp_path / "out" / "model.gguf", tmp_path / "again", format="gguf-bf16", fsync=False)
    assert (tmp_path / "again" / "model.gguf").read_bytes() == (tmp_path / "out" / "model.gguf").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("first", ["umt5.safetensors", "out/model.gguf"])
def test_a_merge_of_umt5_with_its_gguf_file_has_the_tokenizer_as_it_was_stored(
    first: str, spiece: bytes, tmp_path: Path
) -> None:
    """What the keys of the GGUF file give is shorter, so the two could not be merged as numbers either."""
    save_file(umt5(spiece), tmp_path / "umt5.safetensors")
    weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    models = sorted(
        (str(tmp_path / name) for name in ("umt5.safetensors", "out/model.gguf")), key=lambda m: not m.endswith(first)
    )
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}
    weightsmith.merge(recipe, tmp_path / "merged", fsync=False)
    assert load_file(tmp_path / "merged" / "model.safetensors")["spiece_model"].tobytes() == spiece


@pytest.mark.long
def test_the_tokenizer_of_umt5_is_found_beside_the_weights(spiece: bytes, tmp_path: Path) -> None:
    (tmp_path / "umt5").mkdir()
    save_file(umt5(None), tmp_path / "umt5" / "model.safetensors", {"format": "pt"})
    transformers.UMT5Config(**SIZES).save_pretrained(tmp_path / "umt5")
    with pytest.raises(PlanError, match=r"ComfyUI reads the tokenizer of UMT5 .* the model has no spiece\.model"):
        weightsmith.quantize(tmp_path / "umt5", tmp_path / "out", format="gguf-q8_0")
    (tmp_path / "umt5" / "spiece.model").write_bytes(spiece)
    weightsmith.quantize(tmp_path / "umt5", tmp_path / "out", format="gguf-q8_0", fsync=False)
    keys = dict(read_gguf_header(tmp_path / "out" / "model.gguf").keys)
    assert list(keys["tokenizer.ggml.tokens"])[:2] == ["<pad>", "</s>"]
    assert {file.name for file in (tmp_path / "out").iterdir()}.isdisjoint({"spiece.model", "config.json"})


@pytest.mark.long
def test_another_tokenizer_is_not_umt5s(tmp_path: Path) -> None:
    for data, words in ((b"\xff" * 9, "cannot be read"), (b"\x0a\x03\x0a\x01a", "no piece for eos")):
        save_file(umt5(data), tmp_path / "umt5.safetensors")
        with pytest.raises(PlanError, match=words):
            weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-q8_0")


@pytest.mark.long
@needs_llama_cpp
def test_llama_cpp_computes_what_transformers_does_of_umt5(spiece: bytes, tmp_path: Path) -> None:
    """Its unigram tokenizer has no fallback to bytes, so the text has no characters that need one."""
    import torch

    sizes = {**SIZES, "vocab_size": 256_384, "d_model": 64, "d_kv": 16, "d_ff": 128}
    torch.manual_seed(0)
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, feed_forward_proj="gated-gelu")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != COPY}
    save_file(arrays | {"spiece_model": np.frombuffer(spiece, np.uint8)}, tmp_path / "umt5.safetensors")
    weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-f32", fsync=False)
    tokens = [*sentencepiece.SentencePieceProcessor(model_proto=spiece).encode("word17 other5 und3"), 1]
    with Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens("word17 other5 und3", around=True) == tokens
        vectors = judge.vectors(tokens, encodes=True)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    assert np.abs(vectors - expected).max() < 1e-3 * np.abs(expected).max()


@needs_comfyui_gguf
def test_comfyui_gguf_makes_the_same_tokenizer(spiece: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # its own get_field calls int() on arrays of one element, which numpy refuses since 2.4
    monkeypatch.setattr(module("loader"), "get_field", lambda reader, name, kind: kind(reader.get_field(name).contents()))
    save_file(umt5(spiece), tmp_path / "umt5.safetensors")
    weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-q8_0", fsync=False)
    rebuilt = bytes(module("loader").gguf_tokenizer_loader(str(tmp_path / "out" / "model.gguf"), (256_384, 4096)).tolist())
    assert pieces_of(rebuilt)[: len(pieces_of(spiece))] == pieces_of(spiece)
    ours, theirs = (sentencepiece.SentencePieceProcessor(model_proto=data) for data in (rebuilt, spiece))
    for text in ("word17 und5", "Grüße 你好", ""):  # its loader leaves the table of characters out
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("3", "there is no layer 2, and there is one 3"),
        (str(2**40), f"'encoder.block.{2**40}.layer.1.DenseReluDense.wo.weight' does not belong to the encoder"),
        ("\u0661", "does not belong to the encoder"),  # another digit 1
        ("01", "does not belong to the encoder"),
        ("1" * 5000, "does not belong to the encoder"),
    ],
    ids=["gap", "huge", "arabic", "zero", "digits"],
)
def test_layers_are_counted_by_numbers_that_follow_each_other(number: str, words: str, tmp_path: Path) -> None:
    other = {f"encoder.block.{number}.layer.1.DenseReluDense.wo.weight": np.ones((256, 512), np.float32)}
    save_file(t5() | other, tmp_path / "t5.safetensors")
    with pytest.raises(PlanError, match=words):
        weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q8_0")


@pytest.mark.parametrize("settings", [{"calibration": "built-in"}, {"size_bytes": 1000}])
def test_a_folder_of_t5_has_no_importances(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    save_file(t5(), tmp_path / "t5" / "model.safetensors", {"format": "pt"})
    transformers.T5Config(**SIZES).save_pretrained(tmp_path / "t5")
    with pytest.raises(PlanError, match="importances are measured by running a language model on a text, and this is not one"):
        weightsmith.quantize(tmp_path / "t5", tmp_path / "out", format="gguf-q4_k_m", **settings)


def test_keys_that_follow_from_the_shapes_cannot_be_stated(tmp_path: Path) -> None:
    save_file(t5(), tmp_path / "t5.safetensors")
    with pytest.raises(PlanError, match=r"'t5encoder\.block_count' is a key by which llama.cpp reads the file"):
        weightsmith.quantize(
            tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q8_0", metadata=["t5encoder.block_count=9"]
        )


@needs_comfyui_gguf
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "bf16"])
def test_comfyui_gguf_loads_the_same_numbers(kind: str, tmp_path: Path) -> None:
    import torch

    arrays = t5()
    save_file(arrays, tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format=f"gguf-{kind}", fsync=False)
    state = module("loader").gguf_clip_loader(str(tmp_path / "out" / "model.gguf"))
    assert state.keys() == arrays.keys() - {COPY}
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", out_dtype="float32", fsync=False)
    ours = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in state.items():
        theirs = torch.Tensor(module("dequant").dequantize_tensor(tensor, torch.float32, torch.float32)).numpy()
        np.testing.assert_allclose(theirs, ours[name], rtol=1e-3, atol=1e-3)
