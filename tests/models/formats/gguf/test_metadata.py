"""What a GGUF file says of where a model comes from: what llama.cpp's gguf-py derives from the same card and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

import weightsmith
from tests.models.formats.gguf.test_gguf_files import llama, tokenizers, with_tokenizer  # noqa: F401
from weightsmith._base.errors import PlanError
from weightsmith._files.hf_folder import read_card
from weightsmith._models.formats.gguf.about import origin_keys, sampling_keys
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._plans import plan_from_json
from weightsmith.abc.stored import ModelOrigin

CARDS = {
    "none": "",
    "base": "license: apache-2.0\nbase_model: meta-llama/Llama-3.1-8B\nlanguage:\n- en\n- no\ntags: [merge]\n"
    "pipeline_tag: text-generation\n",
    "several": "license: other\nlicense_name: somebodys\nlicense_link: LICENSE\nbase_model:\n- org/my-model-7b\n"
    "- https://huggingface.co/other-org/Thing-v2\n- https://example.com/weights\n- a local model\n",
    "named": "model_name: My Model\nmodel_creator: Jo Doe\nlicense: [mit, apache-2.0]\ndescription: A model.\n"
    "organization: acme\nversion: v1.2\nurl: https://example.com\n",
    "entry": "base_model:\n- name: Thing\n  organization: Org\n  repo_url: https://example.com/thing\n",
}
COMPARED = ("general.name", "general.author", "general.organization", "general.license", "general.description", "general.tags")
COMPARED += ("general.languages", "general.source", "general.base_model")


def written_by_gguf_py(folder: Path) -> dict[str, Any]:
    """The keys that gguf-py writes, without what it guesses from names."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    metadata = gguf.Metadata.load(None, folder)
    metadata.set_gguf_meta_model(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith(COMPARED)}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", ["Phi-3-mini-4k-instruct", "my_model-v2.0-7b", "Qwen3-0.6B"])
def test_the_keys_are_those_of_gguf_py(name: str, card: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "README.md").write_text(f"---\n{CARDS[card]}---\n# A model\n" if CARDS[card] else "# A model\n")
    expected = written_by_gguf_py(folder)
    for key in [key for key in expected if key.startswith("general.base_model.") and key.endswith(".version")]:
        del expected[key]
    keys = {key: value.value for key, value in origin_keys([ModelOrigin(name, read_card(folder))]).items()}
    keys.pop("general.version", None)
    assert keys == expected


def test_a_hub_model_has_its_organization() -> None:
    keys = origin_keys([ModelOrigin("microsoft/Phi-3-mini-4k-instruct")])
    assert keys["general.name"].value == "Phi 3 Mini 4k Instruct"
    assert keys["general.organization"].value == "Microsoft"


def test_a_merge_is_made_from_its_models_and_has_the_licence_of_all() -> None:
    a, b = ModelOrigin("org/a-model", {"license": "mit", "author": "A"}), ModelOrigin("b", {"license": "mit"})
    keys = {key: value.value for key, value in origin_keys([a, b]).items()}
    assert keys == {
        "general.name": "A Model + B",
        "general.license": "mit",
        "general.base_model.count": 2,
        "general.base_model.0.name": "A Model",
        "general.base_model.0.organization": "Org",
        "general.base_model.0.repo_url": "https://huggingface.co/org/a-model",
        "general.base_model.1.name": "B",
    }
    assert "general.license" not in origin_keys([a, ModelOrigin("c", {"license": "gpl-3.0"})])


def test_what_is_no_text_is_replaced() -> None:
    card = {"author": "a\ud800", "tags": ["\udcff", "x"], "base_model": "b\udcff"}
    keys = {key: value.value for key, value in origin_keys([ModelOrigin("m\udcff", card)]).items()}
    assert (keys["general.name"], keys["general.author"]) == ("M?", "a?")
    assert (keys["general.tags"], keys["general.base_model.0.name"]) == (["?", "x"], "B?")


def test_settings_of_generation_are_llama_cpps() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 1, "do_sample": True, "min_p": "x", "penalty_repeat": float("nan")}
    assert sampling_keys({**generation, "mirostat": 1 << 40}) == {
        "general.sampling.temp": Value("f32", 0.6),
        "general.sampling.top_k": Value("i32", 20),
        "general.sampling.top_p": Value("f32", 1.0),
    }


# ---- what a user states


def keys_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.fixture
def source(tmp_path: Path, tokenizers: dict[str, Path]) -> Path:  # noqa: F811
    return with_tokenizer(llama(tmp_path / "m", width=64), tokenizers["llama"])


def test_a_user_states_keys(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nlicense: mit\nauthor: Jo Doe\ntags: [merge]\n---\n# A model\n")
    stated = [
        "license=apache-2.0",
        "general.name=Acme: 8B = new",
        "author=",
        "tags=code,,math",
        "acme.ticket=7",
        "license.name=x",
    ]
    weightsmith.quantize(source, tmp_path / "q", "gguf-q8_0", metadata=stated, progress=False, fsync=False)
    weightsmith.quantize(source, tmp_path / "plain", "gguf-q8_0", progress=False, fsync=False)
    keys, plain = keys_of(tmp_path / "q" / "model.gguf"), keys_of(tmp_path / "plain" / "model.gguf")
    expected = {"general.license": "apache-2.0", "general.name": "Acme: 8B = new", "general.tags": ["code", "math"]}
    expected |= {"acme.ticket": "7", "general.license.name": "x"}
    assert {key: keys[key] for key in expected} == expected
    assert plain["general.author"] == "Jo Doe"
    assert "general.author" not in keys
    ours = ("GGUF.kv_count", *expected, "general.author")
    assert {k: v for k, v in keys.items() if k not in ours} == {k: v for k, v in plain.items() if k not in ours}


def test_the_last_of_two_counts_and_a_plan_keeps_it(source: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(source)}]}
    plan = weightsmith.plan(recipe, quantize="gguf-q8_0", metadata=["author=a", "author=b"])
    weightsmith.run(plan_from_json(plan.to_json()), tmp_path / "q", progress=False, fsync=False)
    assert keys_of(tmp_path / "q" / "model.gguf")["general.author"] == "b"


def test_a_stated_name_does_not_change_how_text_is_split(source: Path, tmp_path: Path) -> None:
    """llama.cpp strips spaces in models whose name contains `phi-3`: only Phi-3's tokenizer may have it."""
    weightsmith.quantize(source, tmp_path / "q", "gguf-q8_0", metadata=["name=Like Phi-3"], progress=False, fsync=False)
    assert keys_of(tmp_path / "q" / "model.gguf")["general.name"] == "Like Phi 3"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("license", "'license' is not KEY=VALUE, such as license=mit"),
        ("=mit", "'=mit' is not KEY=VALUE"),
        ("Licence Name=x", "'Licence Name=x' is not KEY=VALUE"),
        ("a..b=x", "'a..b=x' is not KEY=VALUE"),
        ("a" * 70_000 + "=x", "is not KEY=VALUE"),
        ("licence=mit", r"'licence' is no key .* \(did you mean 'license'\?\)"),
        ("general.architecture=phi3", "'general.architecture' is no key of GGUF that says where a model comes from"),
        ("general.file_type=3", "'general.file_type' is no key"),
        ("general.alignment=64", "'general.alignment' is no key"),
        ("general.sampling.top_k=1", "'general.sampling.top_k' is no key"),
        ("llama.block_count=1", r"'llama.block_count' is a key by which llama.cpp reads the file \(llama\)"),
        ("tokenizer.ggml.model=gpt2", r"'tokenizer.ggml.model' is a key by which llama.cpp reads the file \(tokenizer\)"),
        ("split.count=2", "'split.count' is a key by which"),
        ("acme.note=" + "x" * (1 << 20) + "y", "'acme.note' has a value of more than 1,048,576 bytes"),
    ],
)
def test_keys_that_describe_the_file_are_not_stated(stated: str, message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        weightsmith.quantize(source, tmp_path / "q", "gguf-q8_0", metadata=[stated], progress=False)
    assert "--metadata" in str(caught.value)
    assert not (tmp_path / "q").exists()


def test_other_formats_have_no_keys(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--metadata \(metadata\): not a setting of w4a16"):
        weightsmith.quantize(source, tmp_path / "q", "w4a16", metadata=["license=mit"], progress=False)
