"""What the donor lacks of tokenizer, chat template and generation_config.json comes from another model; the rest is listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import weightsmith
from tests import plan_help
from tests.cli_help import Cli
from tests.mini import write_checkpoint
from tests.plan_help import decoder, problems
from tests.tokenizer_help import OTHER_TEXT, files, trained, write
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers import vocabulary
from weightsmith._plans import plan_from_json

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a model into a folder below the working directory."""
    monkeypatch.chdir(tmp_path)

    def make_model(
        name: str,
        tokenizer: Tokenizer | None = None,
        extra_files: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
        rows: int = 330,
        whole: bool = False,
        **settings: Any,
    ) -> None:
        write_checkpoint(tmp_path / name, *(llama(seed, rows) if whole else plain(seed, rows)))
        if tokenizer is not None:
            write(tmp_path / name, files(tokenizer, **settings))
        write(tmp_path / name, {file: text.encode() for file, text in (extra_files or {}).items()})

    return make_model


def plain(seed: int, rows: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    config = plan_help.config(vocab_size=rows, tie_word_embeddings=True)
    return decoder(seed=seed, vocab=rows, head=False), config


def llama(seed: int, rows: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A Llama with MLPs, of 64 columns."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, 64), "model.norm.weight": (64,)}
    for i in range(2):
        inner = {f"self_attn.{p}_proj.weight": (64, 64) for p in "qkvo"}
        inner |= {"mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96)}
        inner |= {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in inner.items()}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": rows},
        **{"tie_word_embeddings": True, "dtype": "float32", "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, config


def recipe(*models: str, **keys: Any) -> dict[str, Any]:
    """A linear merge; the first model is the base."""
    listed = [{"model": name, "parameters": {"weight": 1}} for name in models]
    return {"merge_method": "linear", "models": listed, "base_model": models[0], **keys}


def said(plan: weightsmith.Plan) -> list[str]:
    return [str(warning) for warning in plan.warnings]


def test_the_tokenizer_is_that_of_the_first_model_that_has_one(make: Make) -> None:
    make("base")
    make("fr", trained(), {"special_tokens_map.json": "{}", "LICENSE": "fr"}, seed=1)
    make("de", trained(), seed=2, model_max_length=7)
    plan = weightsmith.plan(recipe("base", "fr", "de"))
    assert said(plan) == ["tokenizer: base has no tokenizer: the output has that of fr"]
    assert plan.lacking == {"fr": ("LICENSE",)}
    weightsmith.merge(recipe("base", "fr", "de"), "out", progress=False, fsync=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert Path("out", name).read_bytes() == Path("fr", name).read_bytes()
    assert not Path("out/LICENSE").exists()
    restored = plan_from_json(json.loads(json.dumps(plan.to_json())))
    assert (restored.lacking, restored.files, restored.hash) == (plan.lacking, plan.files, plan.hash)


def test_tokenizers_that_differ_are_refused_with_the_way_out(make: Make) -> None:
    make("base", extra_files={"tokenizer_config.json": "{}"})
    make("fr", trained(), seed=1)
    make("de", trained(special=["<s>", "<x>"]), seed=2)
    (problem,) = problems(recipe("base", "fr", "de"))
    assert str(problem) == (
        "base_model: base has no tokenizer, and those of the other models differ\n"
        "  fr: 322 tokens\n  de: 322 tokens; 321 is '<x>', and '</s>' there\n"
        "  -> Write tokenizer_source: and the model whose tokenizer the output is to have."
    )
    plan = weightsmith.plan(recipe("base", "fr", "de", tokenizer_source="fr"))
    assert plan.files["tokenizer.json"] == Path("fr/tokenizer.json").read_bytes()


@pytest.mark.parametrize("changed", [False, True])
def test_tokenizers_that_cannot_be_parsed_are_compared_as_files(make: Make, changed: bool) -> None:
    make("base")
    make("fr", extra_files={"source.spm": "a", "vocab.txt": "a\nb"})
    make("de", extra_files={"source.spm": "b" if changed else "a"}, seed=1)
    make("es", extra_files={"source.spm": "a"}, seed=2)
    if changed:
        assert "base has no tokenizer, and those of the other models differ" in str(problems(recipe("base", "de", "es"))[0])
    else:
        assert weightsmith.plan(recipe("base", "de", "es")).files == {"source.spm": b"a"}


@pytest.mark.parametrize("how", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_chat_template_is_that_of_the_first_model_that_has_one(make: Make, how: str, with_tokenizer: bool) -> None:
    make("base", trained() if with_tokenizer else None)
    make("fr", trained(), seed=1)
    settings = {"chat_template": TEMPLATE} if how == "tokenizer_config.json" else {}
    text = TEMPLATE if how.endswith("jinja") else json.dumps({"chat_template": TEMPLATE})
    make("de", trained(), {} if settings else {how: text}, seed=2, **settings)
    plan = weightsmith.plan(recipe("base", "fr", "de"))
    assert plan.files["chat_template.jinja"].decode().strip() == TEMPLATE
    assert said(plan)[-1] == "chat_template: base has no chat template: the output has that of de"
    assert len(said(plan)) == (1 if with_tokenizer else 2)
    assert ("tokenizer.json" in plan.files) != with_tokenizer
    assert plan.lacking == {}


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
def test_a_template_in_the_settings_of_the_tokenizer_is_not_called_missing(make: Make, file: str) -> None:
    make("base", trained(), chat_template=TEMPLATE)
    text = TEMPLATE if file.endswith("jinja") else json.dumps({"chat_template": TEMPLATE})
    make("fr", trained(), {file: text, "LICENSE": "mine"}, seed=1)
    plan = weightsmith.plan(recipe("base", "fr"))
    assert json.loads(Path("base", "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert "tokenizer_config.json" in plan.carried
    assert plan.lacking == {"fr": ("LICENSE",)}
    inner = recipe("fr", "base") | {"name": "inner"}
    assert weightsmith.plan([recipe("base", "inner"), inner]).lacking == {"inner": ("LICENSE",)}


def test_named_chat_templates_are_kept(make: Make) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    make("base", trained())
    make("fr", trained(), seed=1, chat_template=named)
    plan = weightsmith.plan(recipe("base", "fr"))
    written = json.loads(plan.files["tokenizer_config.json"])
    assert written == {**json.loads(Path("base/tokenizer_config.json").read_text()), "chat_template": named}


def test_chat_templates_that_differ_are_a_warning_and_the_first_is_taken(make: Make) -> None:
    make("base", trained())
    make("fr", trained(), {"chat_template.jinja": TEMPLATE}, seed=1)
    make("de", trained(), {"chat_template.jinja": "{{ other }}"}, seed=2)
    plan = weightsmith.plan(recipe("base", "fr", "de"))
    assert plan.files["chat_template.jinja"].decode().strip() == TEMPLATE
    assert [text.split("\n")[0] for text in said(plan)] == [
        "chat_template: base has no chat template: the output has that of fr",
        "chat_template: the models differ in chat template; the output has fr's",
    ]


def test_a_base_without_a_tokenizer_keeps_its_chat_template(make: Make) -> None:
    make("base", extra_files={"chat_template.jinja": "{{ mine }}", "added_tokens.json": "{}"})
    make("fr", trained(), {"chat_template.json": json.dumps({"chat_template": TEMPLATE})}, seed=1)
    plan = weightsmith.plan(recipe("base", "fr"))
    assert plan.files["chat_template.jinja"] == b"{{ mine }}\n"
    assert "chat_template.json" not in plan.files
    assert plan.lacking == {"base": ("added_tokens.json",)}


def test_the_tokenizer_that_a_recipe_names_gets_no_other_models_template(make: Make) -> None:
    make("base", trained(), {"chat_template.jinja": TEMPLATE})
    make("fr", trained(special=["<x>"]), seed=1)
    plan = weightsmith.plan(recipe("base", "fr", tokenizer_source="fr"))
    assert "chat_template.jinja" not in {*plan.files, *plan.carried}
    assert plan.lacking == {"base": ("chat_template.jinja",)}


@pytest.mark.parametrize("source", ["", "base", "union"])
def test_generation_config_is_that_of_the_first_model_that_has_one(make: Make, source: str) -> None:
    make("base", trained(special=["</s>", "<s>"]))
    generation, other = {"temperature": 0.6, "eos_token_id": 321}, {"temperature": 1.0}
    fr = trained(special=["<s>", "</s>"]) if source else trained(special=["</s>", "<s>"])
    make("fr", fr, {"generation_config.json": json.dumps(generation)}, seed=1)
    make("de", fr, {"generation_config.json": json.dumps(other)}, seed=2)
    keys = {"tokenizer_source": source} if source else {}
    plan = weightsmith.plan(recipe("base", "fr", "de", **keys))
    assert json.loads(plan.files["generation_config.json"]) == {**generation, "eos_token_id": 320 if source else 321}
    note = "generation_config.json: base has no generation_config.json: the output has that of fr\n  de has another one"
    assert note in said(plan)


@pytest.mark.parametrize("union", [False, True])
def test_tokens_that_end_texts_of_other_models_alone_are_a_warning(make: Make, union: bool) -> None:
    """A merge with the chat template of such a model writes on and on."""
    chat, pads = trained(special=["</s>", "<|end|>"]), trained(special=["</s>", "<pad>", "<|end|>"])
    stop, end, moved = (t.token_to_id(name) for t, name in ((chat, "</s>"), (chat, "<|end|>"), (pads, "<|end|>")))
    make(
        "base",
        trained(special=["</s>", "<pad>"]) if union else chat,
        {"generation_config.json": json.dumps({"eos_token_id": stop})},
    )
    make("fr", chat, {"generation_config.json": json.dumps({"eos_token_id": [end, stop]})}, seed=1)
    make("de", chat, {"generation_config.json": json.dumps({"eos_token_id": [stop]})}, seed=2)
    merge = {**recipe("base", "fr", "de"), **({"tokenizer_source": "union"} if union else {})}
    note = (
        "generation_config.json: the models end texts with different tokens; those of the output end with '</s>'\n"
        "  fr: '<|end|>'\n"
        "  -> Add the others to eos_token_id in its generation_config.json, if its chat template ends turns with them."
    )
    assert note in said(weightsmith.plan(merge))
    ends = {"eos_token_id": [stop, moved if union else end]}
    make("base", pads if union else chat, {"generation_config.json": json.dumps(ends)})
    assert not any("end texts" in text for text in said(weightsmith.plan(merge)))


@pytest.mark.parametrize(
    ("union", "keys"), [(False, {}), (True, {}), (False, {"chat_template": "auto"}), (True, {"chat_template": "auto"})]
)
def test_texts_end_as_those_of_the_model_whose_chat_template_is_taken(make: Make, union: bool, keys: dict[str, Any]) -> None:
    """A base's texts end with one token, and the turns of its fine-tunes with another: without it, they go on and on."""
    tokenizer = trained(special=["</s>", "<|end|>"])
    stop, end = (tokenizer.token_to_id(name) for name in ("</s>", "<|end|>"))
    base = trained(special=["<pad>", "</s>", "<|end|>"]) if union else tokenizer
    old, new = (base.token_to_id(name) for name in ("</s>", "<|end|>"))
    make("base", base, {"generation_config.json": json.dumps({"eos_token_id": old, "top_p": 0.5})})
    ends = {"generation_config.json": json.dumps({"eos_token_id": [end, stop]})}
    make("fr", tokenizer, {**ends, "chat_template.jinja": TEMPLATE}, seed=1)
    make("de", tokenizer, ends, seed=2)
    merge = {**recipe("base", "fr", "de"), **({"tokenizer_source": "union"} if union else {}), **keys}
    plan = weightsmith.plan(merge)
    assert json.loads(plan.files["generation_config.json"]) == {"eos_token_id": [old, new], "top_p": 0.5}
    assert "generation_config.json: texts end with '<|end|>' too, as those of fr, whose chat template the output has" in said(
        plan
    )
    assert not any("end texts" in text for text in said(plan))


def test_no_end_is_added_to_a_template_of_the_donor_s_own_or_to_tokens_that_are_not_known(make: Make) -> None:
    tokenizer = trained(special=["</s>", "<|end|>"])
    stop, end = (tokenizer.token_to_id(name) for name in ("</s>", "<|end|>"))
    own = {"generation_config.json": json.dumps({"eos_token_id": stop})}
    make("base", tokenizer, {**own, "chat_template.jinja": TEMPLATE})
    theirs = {"generation_config.json": json.dumps({"eos_token_id": end}), "chat_template.jinja": TEMPLATE}
    make("fr", tokenizer, theirs, seed=1)
    plan = weightsmith.plan(recipe("base", "fr"))
    assert "generation_config.json" not in plan.files
    assert any("end texts" in text for text in said(plan))
    Path("base/chat_template.jinja").unlink()
    Path("base/tokenizer.json").write_text("not json")
    assert "generation_config.json" not in weightsmith.plan(recipe("base", "fr")).files


ST = "sentence_transformers.models"
POOLING = {
    "modules.json": json.dumps([{"path": "", "type": f"{ST}.Transformer"}, {"path": "1_Pooling", "type": f"{ST}.Pooling"}]),
    "1_Pooling/config.json": '{"pooling_mode": "cls"}',
    "config_sentence_transformers.json": '{"prompts": {"query": "q: "}}',
    "sentence_bert_config.json": '{"max_seq_length": 64}',
}


def test_a_plain_base_of_embedding_models_gets_their_modules(make: Make) -> None:
    """Without them, sentence-transformers pools the mean of the tokens, and knows no prompts."""
    make("base", trained())
    make("fr", trained(), POOLING, seed=1)
    make("de", trained(), POOLING, seed=2)
    plan = weightsmith.plan(recipe("base", "fr", "de"))
    assert {name: data.decode() for name, data in plan.files.items()} == POOLING
    assert "modules.json: base has no modules of sentence-transformers: the output has those of fr" in said(plan)
    assert plan.lacking == {}
    done = weightsmith.merge(recipe("base", "fr", "de"), "out", progress=False, fsync=False)
    assert (done.out / "1_Pooling/config.json").read_text() == POOLING["1_Pooling/config.json"]
    assert weightsmith.verify(done.out)


def test_a_gguf_file_says_how_the_modules_that_are_taken_pool_tokens(make: Make) -> None:
    make("base", trained(), whole=True)
    make("fr", trained(), POOLING, seed=1, whole=True)
    plan = weightsmith.plan(recipe("base", "fr"), quantize="gguf-f16")
    assert b"llama.pooling_type" in plan.header
    assert plan.lacking == {"fr": ("config_sentence_transformers.json", "sentence_bert_config.json")}


@pytest.mark.parametrize("case", ["another pooling", "a plain model", "code", "weights", "the base's own"])
def test_modules_are_not_taken_if_not_all_models_have_the_same(make: Make, case: str) -> None:
    make("base", trained(), {"modules.json": "[]"} if case == "the base's own" else {})
    files = dict(POOLING)
    if case == "code":
        files |= {"modules.json": '[{"path": "", "type": "custom_st.Transformer"}]', "custom_st.py": ""}
    if case == "weights":
        dense = {"path": "2_Dense", "type": f"{ST}.Dense"}
        files |= {"modules.json": json.dumps([*json.loads(POOLING["modules.json"]), dense]), "2_Dense/config.json": "{}"}
    make("fr", trained(), files, seed=1)
    other = {**files, "1_Pooling/config.json": '{"pooling_mode": "mean"}'} if case == "another pooling" else files
    make("de", trained(), {} if case == "a plain model" else other, seed=2)
    if case == "weights":
        for name in ("fr", "de"):
            write_checkpoint(Path(name, "2_Dense"), {"linear.weight": np.zeros((2, 2), np.float32)})
    assert "1_Pooling/config.json" not in weightsmith.plan(recipe("base", "fr", "de")).files


def test_a_vision_model_without_a_processor_gets_that_of_another(make: Make) -> None:
    seeing = {**plan_help.config(vocab_size=330, tie_word_embeddings=True), "vision_config": {"hidden_size": 8}}
    stated = {"config.json": json.dumps(seeing)}
    processor = {"preprocessor_config.json": '{"size": 1}', "video_preprocessor_config.json": "{}"}
    make("base", trained(), stated)
    make("fr", trained(), {**stated, **processor}, seed=1)
    make("de", trained(), {**stated, "preprocessor_config.json": '{"size": 2}'}, seed=2)
    plan = weightsmith.plan(recipe("base", "fr", "de"))
    assert {name: data.decode() for name, data in plan.files.items()} == processor
    note = "preprocessor_config.json: base has no processor of images or audio: the output has that of fr\n  de has another one"
    assert note in said(plan)
    assert plan.lacking == {}


def test_a_processor_with_code_of_its_own_is_not_taken(make: Make) -> None:
    """Only the donor's code is copied."""
    seeing = {**plan_help.config(vocab_size=330, tie_word_embeddings=True), "vision_config": {"hidden_size": 8}}
    stated = {"config.json": json.dumps(seeing)}
    make("base", trained(), stated)
    own = {"processor_config.json": '{"auto_map": {"AutoProcessor": "processing_x.XProcessor"}}', "processing_x.py": ""}
    make("fr", trained(), {**stated, **own}, seed=1)
    assert weightsmith.plan(recipe("base", "fr")).files == {}


def test_ends_of_texts_are_compared_only_where_tokens_are_known(make: Make) -> None:
    ends = {"generation_config.json": '{"eos_token_id": 5}'}
    make("base", None, ends)
    make("fr", None, {"generation_config.json": '{"eos_token_id": [6, "x"]}', "tokenizer.json": "not json"}, seed=1)
    make("de", None, {"generation_config.json": "not json"}, seed=2)
    assert not any("end texts" in text for text in said(weightsmith.plan(recipe("base", "de"))))
    make("base", trained(), ends)
    assert not any("end texts" in text for text in said(weightsmith.plan(recipe("base", "fr"))))


@pytest.mark.parametrize("config", [{}, {"eos_token_id": 1}])
def test_a_generation_config_without_an_end_is_a_warning_whatever_config_json_states(
    make: Make, config: dict[str, Any]
) -> None:
    """transformers takes no end from config.json where there is a generation_config.json."""
    tokenizer = trained(special=["</s>"])
    end = tokenizer.token_to_id("</s>")
    stated = plan_help.config(vocab_size=330, tie_word_embeddings=True, **{key: end for key in config})
    make("base", tokenizer, {"generation_config.json": '{"do_sample": true}', "config.json": json.dumps(stated)})
    make("fr", tokenizer, {"generation_config.json": json.dumps({"eos_token_id": end})}, seed=1)
    texts = said(weightsmith.plan(recipe("base", "fr")))
    assert any("those of the output end with no token\n  fr: '</s>'" in text for text in texts)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_donors_own_end_is_compared_where_another_model_gives_the_tokenizer(make: Make, file: str) -> None:
    for name, special in {"base": ["</s>", "<|end|>"], "fr": ["<|end|>", "</s>"]}.items():
        tokenizer = trained(special=special)
        end = tokenizer.token_to_id(special[0])
        settings = plan_help.config(vocab_size=330, tie_word_embeddings=True) if file == "config.json" else {}
        settings |= {"eos_token_id": end, "architectures": ["LlamaForCausalLM"]}
        make(name, tokenizer, {file: json.dumps(settings)}, seed=len(name), eos_token=special[0])
    texts = said(weightsmith.plan(recipe("base", "fr", tokenizer_source="fr")))
    assert any("those of the output end with '<|end|>'\n  base: '</s>'" in text for text in texts)


def test_ends_of_models_that_write_no_text_are_not_compared(make: Make) -> None:
    """CLIP's config.json has an `eos_token_id` of 2 in old files, which no code reads."""
    tokenizer = trained(special=["</s>"])
    for name, end in {"base": 2, "fr": tokenizer.token_to_id("</s>")}.items():
        settings = plan_help.config(vocab_size=330, tie_word_embeddings=True, eos_token_id=end, architectures=["LlamaModel"])
        make(name, tokenizer, {"config.json": json.dumps(settings)}, seed=len(name))
    assert not any("end texts" in text for text in said(weightsmith.plan(recipe("base", "fr"))))


def test_one_tokenizer_is_parsed_once_whatever_token_ends_the_texts_of_each_model(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    parse = vocabulary._parse
    monkeypatch.setattr(vocabulary, "_parse", lambda *about: parsed.append(about[0]) or parse(*about))
    tokenizer = trained(special=["</s>", "<|end|>"])
    for i, token in enumerate(["</s>", "<|end|>", "<|end|>", "<|end|>"]):
        ends = json.dumps({"eos_token_id": tokenizer.token_to_id(token)})
        make(f"m{i}", tokenizer, {"generation_config.json": ends}, seed=i, eos_token=token)
    texts = said(weightsmith.plan(recipe("m0", "m1", "m2", "m3")))
    assert any("end with '</s>'\n  m1: '<|end|>'\n  m2: '<|end|>'\n  m3: '<|end|>'" in text for text in texts)
    assert not any("tokenizer.json" in text for text in texts)
    assert len(parsed) == 1


def test_ends_that_tokenizer_config_lists_are_known_without_tokenizer_json(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: set[str] = set()
    monkeypatch.setattr(Checkpoint, "fetch", lambda _self, names: fetched.update(names))
    tokenizer = trained(special=["</s>", "<|end|>"])
    listed = {str(tokenizer.token_to_id(token)): {"content": token} for token in ("</s>", "<|end|>")}
    for i, token in enumerate(["</s>", "<|end|>"]):
        ends = json.dumps({"eos_token_id": tokenizer.token_to_id(token)})
        make(f"m{i}", tokenizer, {"generation_config.json": ends}, seed=i, added_tokens_decoder=listed)
    assert any("m1: '<|end|>'" in text for text in said(weightsmith.plan(recipe("m0", "m1"))))
    assert "tokenizer_config.json" in fetched
    assert "tokenizer.json" not in fetched


def test_models_without_tokenizers_merge_as_before(make: Make) -> None:
    make("base")
    make("fr", seed=1)
    plan = weightsmith.plan(recipe("base", "fr"))
    assert (said(plan), plan.files, plan.lacking) == ([], {}, {})
    assert "lacking" not in plan.to_json()


def test_a_stack_takes_the_tokenizer_too(make: Make) -> None:
    make("base")
    make("fr", trained(), seed=1)
    slices = [{"sources": [{"model": name, "layer_range": [0, 1]}]} for name in ("base", "fr")]
    plan = weightsmith.plan({"merge_method": "passthrough", "slices": slices})
    assert plan.files.keys() == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_files_that_a_stage_loses_are_listed(make: Make, keep: bool) -> None:
    make("base")
    make("fr", trained(), {"preprocessor_config.json": "{}", "generation_config.json": "{}"}, seed=1)
    make("de", trained(), {"video_preprocessor_config.json": "{}"}, seed=2)
    stages = [{**recipe("base", "fr"), "name": "one"}, recipe("one", "de")]
    plan = weightsmith.plan(stages)
    assert plan.lacking == {"fr": ("preprocessor_config.json",), "de": ("video_preprocessor_config.json",)}
    weightsmith.merge(stages, "out", progress=False, fsync=False, keep_stages=keep)
    assert Path("out/tokenizer.json").read_bytes() == Path("fr/tokenizer.json").read_bytes()
    assert Path("out/generation_config.json").read_text() == "{}"


def test_a_gguf_file_gets_the_tokenizer_that_is_taken(make: Make) -> None:
    make("base", whole=True)
    files = {"generation_config.json": '{"temperature": 0.5}', "chat_template.jinja": TEMPLATE, "LICENSE": "x"}
    make("fr", trained(), files, seed=1, whole=True)
    plan = weightsmith.plan(recipe("base", "fr"), quantize="gguf-f16")
    assert TEMPLATE.encode() in plan.header
    assert b"tokenizer.ggml.tokens" in plan.header
    assert plan.lacking == {"fr": ("LICENSE",)}


def test_a_gguf_file_made_from_another_has_the_tokenizer_of_the_adapter(make: Make) -> None:
    """Keys of the base's file are kept only if its tokenizer is."""
    make("base", trained(), whole=True)
    weightsmith.quantize("base", "gguf", format="gguf-f16", progress=False, fsync=False)
    factors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones((64, 64)) for part in "AB"}
    write_checkpoint(Path("a"), {name: array.astype(np.float32) for name, array in factors.items()})
    Path("a/model.safetensors").rename("a/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"]}
    own = {"adapter_config.json": json.dumps(config).encode(), "chat_template.jinja": TEMPLATE.encode()}
    write(Path("a"), {**files(trained(), eos_token="</s>"), **own})
    chat = {"merge_method": "passthrough", "models": [{"model": "gguf/model.gguf+a"}]}
    plan = weightsmith.plan(chat, quantize="gguf-f16")
    assert TEMPLATE.encode() in plan.header
    Path("a/chat_template.jinja").unlink()
    assert b"tokenizer.chat_template" not in weightsmith.plan(chat, quantize="gguf-f16").header


@pytest.mark.parametrize("model", ["plain", "inline"])
def test_a_mixture_takes_what_its_base_lacks(make: Make, model: str) -> None:
    make("base", whole=True)
    make("fr", trained(), {"chat_template.jinja": TEMPLATE, "LICENSE": "x"}, seed=1, whole=True)
    make("de", trained(), {"generation_config.json": "{}"}, seed=2, whole=True)
    base: Any = "base" if model == "plain" else recipe("base", "fr")
    experts = [{"source_model": "fr"}, {"source_model": "de"}]
    document = {"base_model": base, "experts": experts, "gate_mode": "random"}
    plan = weightsmith.plan(document)
    assert plan.files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert plan.lacking == {"fr": ("LICENSE",)}
    notes = [text for text in said(plan) if "has no" in text]
    assert any(text.endswith("no tokenizer: the output has that of fr") for text in notes)
    make("de", trained(special=["<x>"]), seed=2, whole=True)
    with pytest.raises(weightsmith.PlanError) as caught:
        weightsmith.plan(document)
    assert "has no tokenizer, and those of the other models differ" in str(caught.value)
    assert "Put the tokenizer that the output is to have next to the weights of the base" in str(caught.value)


@pytest.mark.parametrize("kind", ["merge", "mixture"])
def test_an_output_is_not_called_by_the_name_of_an_input(kind: str, make: Make) -> None:
    """llama.cpp's converter takes the name, the author and the version of a model from this key."""
    for seed, name in enumerate(("base", "fr")):
        make(name, trained(), seed=seed, whole=True)
        path = Path(name, "config.json")
        stated = {**json.loads(path.read_text()), "_name_or_path": f"org/{name}-7B-v1.0", "text": {"_name_or_path": "org/part"}}
        path.write_text(json.dumps(stated))
    experts = [{"source_model": "fr"}, {"source_model": "base"}]
    mixture = {"base_model": "base", "experts": experts, "gate_mode": "random"}
    config = weightsmith.plan(recipe("base", "fr") if kind == "merge" else mixture).config
    assert config is not None
    assert "_name_or_path" not in config
    assert config["text"] == {"_name_or_path": "org/part"}, "where a part came from is still true"


def test_a_transplant_lists_what_its_output_lacks(make: Make) -> None:
    make("model", trained(), {"chat_template.jinja": TEMPLATE})
    make("donor", trained(text=OTHER_TEXT), {"generation_config.json": "{}", "preprocessor_config.json": "{}"}, seed=1)
    from weightsmith._features.transplant.options import TransplantSettings
    from weightsmith._features.transplant.plan import prepare_transplant

    with prepare_transplant("model", "donor", TransplantSettings(approximation="mean")) as prepared:
        assert prepared.plan.lacking == {
            "model": ("chat_template.jinja",),
            "donor": ("generation_config.json", "preprocessor_config.json"),
        }


@pytest.mark.slow
def test_the_screen_names_the_files(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make("base", trained())
    make("fr", trained(), {"preprocessor_config.json": "{}", "LICENSE": ""}, seed=1)
    Path("r.yml").write_text(json.dumps(recipe("base", "fr")))
    cli = Cli(monkeypatch, capsys)
    assert "\nfiles not in the output\nmodel  files\nfr     LICENSE, preprocessor_config.json\n" in cli("plan", "r.yml").out
    names: Sequence[str] = ["LICENSE", "preprocessor_config.json"]
    assert json.loads(cli("plan", "r.yml", "--json").out)["lacking"] == {"fr": names}
    assert "not in the output, files of fr: LICENSE, preprocessor_config.json" in cli("merge", "r.yml", "out").out
    assert json.loads(cli("merge", "r.yml", "two", "--json").out)["lacking"] == {"fr": names}
