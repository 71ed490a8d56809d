"""The model card: front matter from the inputs' own cards, how to load the model, and the citation."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

import weightsmith
from tests.mini import write_checkpoint
from tests.plan_help import prepare
from weightsmith import _methods as methods
from weightsmith._execution import cards
from weightsmith._execution.cards import cite, entries, model_card
from weightsmith._files.containers import GGUF, GGUF_ADAPTER, MLX_ADAPTER, PEFT
from weightsmith._files.hf_folder import read_card

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
RECIPE: dict[str, Any] = {
    "merge_method": "dare_ties",
    "base_model": "base",
    "models": [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("a", "b")],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "a", "b")):
        array = np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)
        write_checkpoint(tmp_path / name, {"model.layers.0.mlp.up_proj.weight": array}, CONFIG)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path


def write_card(folder: str, front: str) -> None:
    Path(folder, "README.md").write_text(f"---\n{front}\n---\n\n# card\n")


def card(name: str = "merged", **changes: Any) -> tuple[dict[str, Any], str]:
    """Front matter and body of a merge's card."""
    with prepare(RECIPE) as prepared:
        text = model_card(replace(prepared.plan, **changes), name, inputs=prepared.inputs)
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return yaml.safe_load(front), body


def blocks(body: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", body, re.DOTALL)


def test_a_licence_that_all_inputs_have_is_the_output_s(here: Path) -> None:
    for name in ("base", "a", "b"):
        write_card(name, "license: other\nlicense_name: llama3.1\nlicense_link: https://example.org/LICENSE")
    front, body = card()
    assert (front["license"], front["license_name"], front["license_link"]) == (
        "other",
        "llama3.1",
        "https://example.org/LICENSE",
    )
    assert "* `a`: `other` `llama3.1` `https://example.org/LICENSE`" in body


def test_of_different_licences_none_is_chosen(here: Path) -> None:
    write_card("base", "license: apache-2.0")
    write_card("a", "license: cc-by-nc-4.0")
    front, body = card()
    assert "license" not in front
    expected = "## Licences of the inputs\n\n* `base`: `apache-2.0`\n* `a`: `cc-by-nc-4.0`\n* `b`: its card names none\n"
    assert expected in body
    write_card("b", "license: apache-2.0")
    write_card("a", "license: apache-2.0")
    assert card()[0]["license"] == "apache-2.0"


def test_without_cards_nothing_is_said_of_licences(here: Path) -> None:
    front, body = card()
    assert "license" not in front
    assert "Licence" not in body
    assert "base_model" not in front


def test_the_tensors_that_are_quantised_are_counted(here: Path) -> None:
    for name in ("base", "a", "b"):
        plain = {"model.norm.weight": np.ones(8, np.float32), "lm_head.weight": np.ones((8, 8), np.float32)}
        write_checkpoint(here / name, {**plain, "model.layers.0.mlp.up_proj.weight": np.ones((8, 8), np.float32)}, CONFIG)
    text = model_card(weightsmith.plan(RECIPE, quantize="fp8-dynamic"), "merged")
    assert "\nQuantised: fp8-dynamic (1 of 3 tensors).\n" in text


def test_base_models_are_the_inputs_on_the_hub_or_those_that_their_cards_name(here: Path) -> None:
    write_card("a", "base_model: meta/llama")
    write_card("b", "base_model:\n- org/one\n- ../two\n- meta/llama")
    front, _ = card()
    assert front["base_model"] == ["meta/llama", "org/one"]
    assert front["base_model_relation"] == "merge"
    with prepare(RECIPE) as prepared:
        base, a, b = prepared.plan.models
    on_hub = (
        replace(base, ref="org/base@v1", revision="c" * 40),
        a,
        replace(b, ref="/x/models--org--b--c/snapshots/" + "0" * 40),
    )
    front, body = card(models=on_hub)
    assert front["base_model"] == ["org/base", "meta/llama", "org/b--c"]
    assert f"* [org/base@v1](https://huggingface.co/org/base) at {'c' * 40}" in body


def test_a_folder_that_is_named_like_a_hub_model_is_no_hub_model(here: Path) -> None:
    with prepare(RECIPE) as prepared:
        models = tuple(replace(model, ref=f"zoo/{model.ref}") for model in prepared.plan.models)
    front, body = card(models=models)
    assert "base_model" not in front
    assert "* `zoo/base`" in body


def test_tags_and_how_to_load_it(here: Path) -> None:
    front, body = card('a "model"')
    assert front["tags"] == ["merge", "weightsmith", "dare_ties"]
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    (code,) = blocks(body, "python")
    ast.parse(code)
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer\n" in code
    assert r'AutoModelForCausalLM.from_pretrained("a \"model\"", dtype="auto", device_map="auto")' in code


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (MLX_ADAPTER, ["mlx_lm.generate", "--model", "BASE", "--adapter-path", "{name}", "--prompt", "Hello"]),
        (GGUF_ADAPTER, ["llama-cli", "-m", "base.gguf", "--lora", "{name}/adapter.gguf"]),
        (GGUF, ["llama-cli", "-m", "{name}/model.gguf"]),
    ],
)
@pytest.mark.parametrize("name", ["merged", "my model", "a; b $(c) 'd'"])
def test_commands_that_load_it_are_quoted_for_the_shell(here: Path, container: str, words: list[str], name: str) -> None:
    _, body = card(name, container=container)
    (command,) = blocks(body, "bash")
    assert shlex.split(command) == [word.format(name=name) for word in words]
    assert ("'" in command) == (name != "merged")


def test_a_name_does_not_end_the_block_of_a_command(here: Path) -> None:
    _, body = card("a\n```\nb", container=MLX_ADAPTER)
    (command,) = blocks(body, "bash")
    assert command.endswith("--prompt Hello")
    assert "\n" not in command


@pytest.mark.parametrize(
    ("config", "carried", "expected"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, (), 'T5ForConditionalGeneration.from_pretrained("merged", dtype'),
        (
            {"architectures": ["XModel"], "auto_map": {}},
            (),
            'AutoModel.from_pretrained("merged", dtype="auto", device_map="auto", trust',
        ),
        ({"architectures": ["x; import os"]}, (), None),
        ({"architectures": "Llama"}, (), None),
        ({}, ("tokenizer.json",), None),
        (None, (), None),
    ],
)
def test_how_other_models_are_loaded(here: Path, config: Any, carried: tuple[str, ...], expected: str | None) -> None:
    front, body = card(config=config, carried=carried)
    assert ("library_name" in front) == (config is not None)
    assert "pipeline_tag" not in front
    code = blocks(body, "python")
    assert len(code) == (expected is not None)
    if expected is not None:
        ast.parse(code[0])
        assert expected in code[0]
        assert "Tokenizer" not in code[0]


POOLED = ("1_Pooling/config.json", "modules.json", "tokenizer.json")
DIFFUSERS_CLASS = {"_class_name": "UNet2DConditionModel"}
VISION: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("changes", "library", "expected"),
    [
        ({"carried": POOLED}, "sentence-transformers", 'model = SentenceTransformer("merged")'),
        ({"carried": (), "files": {"modules.json": b"[]"}}, "sentence-transformers", 'model = SentenceTransformer("merged")'),
        (
            {"files": {"modules.json": b"[]", "config_sentence_transformers.json": b'{"model_type": "SparseEncoder"}'}},
            "sentence-transformers",
            'model = SparseEncoder("merged")',
        ),
        (
            {"files": {"config_sentence_transformers.json": b'{"model_type": "os.system"}'}},
            "sentence-transformers",
            'model = SentenceTransformer("merged")',
        ),
        (
            {"config": None, "carried": ("model_index.json",)},
            "diffusers",
            'DiffusionPipeline.from_pretrained("merged", torch_dtype=torch.float32)',
        ),
        ({"config": DIFFUSERS_CLASS}, "diffusers", 'UNet2DConditionModel.from_pretrained("merged", torch_dtype=torch.float32)'),
        ({"config": {"_class_name": "x; import os"}}, "diffusers", None),
        (
            {"config": VISION, "carried": ("preprocessor_config.json", "tokenizer.json")},
            "transformers",
            'processor = AutoProcessor.from_pretrained("merged")',
        ),
    ],
)
def test_the_library_that_loads_it_is_named(here: Path, changes: dict[str, Any], library: str, expected: str | None) -> None:
    """Pooling, and the other parts of a pipeline, would be lost by a loader of the weights alone."""
    front, body = card(**changes)
    assert front["library_name"] == library
    code = blocks(body, "python")
    assert len(code) == (expected is not None)
    if expected is not None:
        ast.parse(code[0])
        assert expected in code[0]
        assert "AutoTokenizer" not in code[0]
        assert ("AutoModel" in code[0]) is False


def test_the_class_of_an_encoder_is_that_of_the_file_that_is_copied(here: Path) -> None:
    Path("base/config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    weightsmith.merge(RECIPE, "out", progress=False, fsync=False)
    assert 'model = CrossEncoder("out")' in Path("out/README.md").read_text()


@pytest.mark.parametrize(
    ("format", "library", "words"),
    [
        ("mlx-4bit", "mlx", "mlx_lm.generate --model merged --prompt Hello"),
        ("exl3", None, "Programs that load it: exllamav3 (TabbyAPI)."),
        ("exl2", None, "Programs that load it: ExLlamaV2."),
        ("fp8-dynamic", "transformers", "AutoModelForCausalLM.from_pretrained"),
    ],
)
def test_a_format_that_transformers_does_not_load_is_loaded_by_another_program(
    here: Path, format: str, library: str | None, words: str
) -> None:
    with prepare(RECIPE) as prepared:
        provenance = replace(prepared.plan.provenance, format=format)
    front, body = card(provenance=provenance)
    assert front.get("library_name") == library
    assert words in body
    assert ("AutoModelForCausalLM" in body) == (library == "transformers")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("CAUSAL_LM", "AutoModelForCausalLM"),
        ("SEQ_CLS", "AutoModelForSequenceClassification"),
        ("FEATURE_EXTRACTION", "AutoModel"),
        (None, None),
    ],
)
def test_the_base_of_an_adapter_is_loaded_for_its_task(here: Path, task: str | None, expected: str | None) -> None:
    front, body = card(container=PEFT, config={"base_model_name_or_path": "org/base", "task_type": task})
    assert front["library_name"] == "peft"
    (code,) = blocks(body, "python")
    ast.parse(code)
    assert (f'base = {expected}.from_pretrained("org/base", ' in code) == (expected is not None)
    assert ("AutoModel" in code) == (expected is not None)
    assert 'PeftModel.from_pretrained(base, "merged")' in code


def test_what_all_inputs_say_of_task_and_language_stays(here: Path) -> None:
    for name in ("base", "a", "b"):
        write_card(name, "pipeline_tag: image-text-to-text\nlanguage:\n- en\n- de")
    front, _ = card(config=VISION)
    assert (front["pipeline_tag"], front["language"]) == ("image-text-to-text", ["en", "de"])
    write_card("b", "language: en")
    front, _ = card(config=VISION)
    assert front["pipeline_tag"] == "image-text-to-text", "a card that names none does not count"
    assert "language" not in front
    write_card("b", "pipeline_tag: 'x`<b>'\nlanguage: ['x`']")
    assert {"pipeline_tag", "language"}.isdisjoint(card(config=VISION)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "# no front matter",
        "---\nlicense: mit",
        "---\n- a list\n---\n",
        "---\nlicense: [unclosed\n---\n",
        f"---\n{'[' * 3_000}\n---\n",
        f"---\nlicense: {'x' * 70_000}\n---\n",
        '---\nlicense: "\\UFFFFFFFF"\n---\n',
        "---\nlicense: !!python/object/apply:os.system [exit]\n---\n",
        pytest.param("---\nlicense: mit\n---\n" + "x" * (4 << 20), id="too long"),
    ],
)
def test_a_damaged_or_hostile_card_says_nothing(here: Path, text: str) -> None:
    Path("a", "README.md").write_text(text)
    assert "license" not in read_card(Path("a")) or not isinstance(read_card(Path("a"))["license"], str)
    front, body = card()
    assert "license" not in front
    assert "Licence" not in body


def test_untrusted_text_of_an_input_s_card_does_not_reach_this_one(here: Path) -> None:
    for name in ("base", "a", "b"):
        write_card(name, 'license: "mit`\\n# Heading"\nbase_model: "x](http://evil)/y"')
    front, body = card()
    assert "license" not in front
    assert "base_model" not in front
    assert "Heading" not in body
    assert "evil" not in body


def test_every_method_is_cited(here: Path) -> None:
    for method in methods.all_methods():
        assert cite(method.source), method.name
        known = set(re.findall(r"eprint += \{(.+)\}", "".join(cite(method.source))))
        assert set(re.findall(r"arxiv\.org/abs/([\d.]+)", method.source)) <= known, method.name


def test_citations_are_entries_of_bibtex() -> None:
    citations = list(entries().values())
    assert len(citations) == Path(cards.__file__).with_name("citations.bib").read_text().count("@") == len(set(citations)) >= 30
    keys = set()
    for text in citations:
        assert re.fullmatch(r"@(misc|article)\{[a-z0-9]+,\n(  \w+ += \{.+\},\n)+\}", text), text
        assert text.count("{") == text.count("}")
        key = text.partition("{")[2].partition(",")[0]
        fields = dict(re.findall(r"  (\w+) += \{(.+)\},", text))
        assert {"title", "author", "year"} <= fields.keys()
        assert fields["year"] in key
        assert all(len(name.split()) >= 2 and "," not in name for name in fields["author"].split(" and "))
        assert key.startswith(fields["author"].split(" and ")[0].split()[-1].lower())
        assert fields.get("eprint", fields["year"][2:])[:2] == fields["year"][2:]
        keys.add(key)
    assert len(keys) == len(citations)


def test_a_name_with_accents_is_written_as_it_is(here: Path) -> None:
    weightsmith.merge(RECIPE, "größe x")
    assert 'from_pretrained("größe x", dtype="auto"' in Path("größe x", "README.md").read_text()


def test_a_paper_that_is_named_twice_is_cited_once() -> None:
    assert len(cite("TIES, https://arxiv.org/abs/2306.01708; mergekit, 0.1; again https://arxiv.org/abs/2306.01708")) == 2


def test_the_card_of_a_merge_cites_its_method_and_is_written(here: Path) -> None:
    write_card("a", "license: mit")
    weightsmith.merge(RECIPE, "out")
    text = Path("out", "README.md").read_text()
    assert "* `a`: `mit`" in text
    (entries,) = blocks(text, "bibtex")
    assert re.findall(r"@misc\{(\w+),", entries) == ["yu2023language", "yadav2023ties"]


def test_an_adapter_s_card_counts_too(here: Path) -> None:
    Path("lora").mkdir()
    write_card("lora", "license: cc-by-4.0")

    class Applied:
        card: ClassVar = {"license": "mit"}
        paths = (Path("base/model.safetensors"), Path("lora/adapter_model.safetensors"))

    with prepare(RECIPE) as prepared:
        plan = replace(prepared.plan, models=(replace(prepared.plan.models[0], ref="base+lora"),))
    text = model_card(plan, "x", inputs=[Applied()])  # type: ignore[list-item]
    assert "* `base`: `mit`\n* `lora`: `cc-by-4.0`\n" in text


def test_the_card_beside_a_file_that_is_opened_alone_is_not_the_file_s(here: Path) -> None:
    write_card("a", "license: mit")
    for ref, its in (("a", True), ("a/model.safetensors", False)):
        with prepare({"merge_method": "passthrough", "models": [{"model": ref}]}) as prepared:
            assert ("license: mit" in model_card(prepared.plan, "x", inputs=prepared.inputs)) == its
