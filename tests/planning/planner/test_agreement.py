"""Models whose tensors fit and whose settings do not: warned of, once for each kind, and never for what is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import decoder, only, plan, problems, warnings

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def merge_of(folder: Path, *settings: Mapping[str, Any], **files: Mapping[str, str]) -> dict[str, Any]:
    """A linear merge of models m0, m1, … with these settings in config.json. files: of each model, by its name."""
    models = []
    for k, model_settings in enumerate(settings):
        path = plan_help.model(folder / f"m{k}", seed=k, settings=model_settings)
        for name, text in files.get(f"m{k}", {}).items():
            (folder / f"m{k}" / name).write_text(text)
        models.append({"model": path})
    return {"merge_method": "linear", "models": models, "parameters": {"weight": 1}}


def said(folder: Path, *settings: Mapping[str, Any], **files: Mapping[str, str]) -> list[str]:
    texts = warnings(plan(merge_of(folder, *settings, **files)))
    return [text.replace(f"{folder}/", "") for text in texts]


@pytest.mark.parametrize(
    ("a", "b", "kind", "values"),
    [
        ({"model_type": "llama"}, {"model_type": "mistral"}, "model type", ("llama", "mistral")),
        ({"rope_theta": 10000.0}, {"rope_theta": 500000.0}, "RoPE theta", ("10000", "500000")),
        (
            {"rope_theta": 10000.0},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "RoPE theta",
            ("10000", "500000"),
        ),
        (
            {"rope_scaling": None},
            {"rope_scaling": LLAMA3},
            "RoPE scaling",
            (
                "default",
                "llama3, factor 8, low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192",
            ),
        ),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling", ("default", "linear, factor 2")),
        ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, "activation", ("silu", "gelu")),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, "norm epsilon", ("1e-05", "1e-06")),
        ({"num_attention_heads": 4}, {"num_attention_heads": 2}, "number of attention heads", ("4", "2")),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": 2}, "number of key-value heads", ("4", "2")),
        ({"sliding_window": 4096}, {"sliding_window": None}, "sliding window", ("4096", "none")),
        (
            {"attn_logit_softcapping": 50.0},
            {"attn_logit_softcapping": None},
            "softcap of attention logits",
            ("50", "none"),
        ),
        ({"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 20}, "softcap of output logits", ("30", "20")),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}, "num_experts_per_tok", ("2", "4")),
        ({"scoring_func": "sigmoid"}, {"scoring_func": "softmax"}, "scoring_func", ("sigmoid", "softmax")),
        ({"lm_head_multiplier": 0.5}, {"lm_head_multiplier": 1.0}, "lm_head_multiplier", ("0.5", "1")),
        ({"scale_embedding": True}, {"scale_embedding": False}, "scale_embedding", ("True", "False")),
    ],
)
def test_a_setting_that_differs_is_one_warning_with_both_values(
    a: dict[str, Any], b: dict[str, Any], kind: str, values: tuple[str, str], tmp_path: Path
) -> None:
    fix = "Test the result: weights were trained for the value of their own model."
    if kind == "model type":
        fix = "Merge models of one architecture; mergekit refuses this without --allow-crimes."
    assert said(tmp_path, a, b, b) == [
        f"config.json: the models differ in {kind}; the output has {values[0]}\n"
        f"  m0: {values[0]}\n  m1 and m2: {values[1]}\n  -> {fix}"
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"rope_theta": 500000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 8}},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 8}}),
        (
            {"rope_theta": 1e6},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        ),
        ({}, {"rope_theta": 500000.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 4096}),  # not stated
        ({"hidden_act": "silu"}, {"hidden_act": "swish"}),
        ({"hidden_act": "gelu", "hidden_activation": None}, {"hidden_activation": "gelu_pytorch_tanh"}),
        ({"num_attention_heads": 4, "num_key_value_heads": None}, {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}),
        ({"sliding_window": 32768, "max_position_embeddings": 32768}, {"sliding_window": None}),
        ({"max_position_embeddings": 4096}, {"max_position_embeddings": 8192}),
        ({"_name_or_path": "a", "transformers_version": "4.1"}, {"use_cache": False, "torch_dtype": "float32"}),
        ({"rope_theta": "much", "rope_scaling": [1], "hidden_act": 7}, {"rope_theta": [], "sliding_window": {"a": 1}}),
    ],
)
def test_the_same_said_otherwise_is_no_difference(a: dict[str, Any], b: dict[str, Any], tmp_path: Path) -> None:
    assert said(tmp_path, a, b) == []


def test_labels_in_another_order_are_a_warning(tmp_path: Path) -> None:
    """Two classifiers of equal shapes: each row of the merged head would stand for two labels."""
    one, other = {"id2label": {"0": "negative", "1": "positive"}}, {"id2label": {"1": "NEGATIVE", "0": "POSITIVE"}}
    assert said(tmp_path / "other", one, one, other) == [
        "config.json: the models differ in labels; the output has 0 negative, 1 positive\n"
        "  m0 and m1: 0 negative, 1 positive\n  m2: 0 positive, 1 negative\n"
        "  -> Give all models the same labels in the same order first: the rows of their heads are merged by number."
    ]
    unstated: list[dict[str, Any]] = [{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, {"id2label": ["x"]}, {"id2label": {}}, {}]
    assert said(tmp_path / "same", one, {"id2label": {"0": "Negative", "1": "Positive"}}, *unstated) == []


def test_the_text_part_of_a_composed_config_is_compared(tmp_path: Path) -> None:
    def composed(theta: float, eps: float) -> dict[str, Any]:
        text = {"model_type": "x_text", "num_hidden_layers": 2, "rope_theta": theta}
        return {"num_hidden_layers": None, "text_config": text, "vision_config": {"layer_norm_eps": eps}}

    messages = said(tmp_path, composed(1e4, 1e-5), composed(1e6, 1e-6))
    assert [line.split("\n")[0] for line in messages] == ["config.json: the models differ in RoPE theta; the output has 10000"]


def tokenizer(*tokens: str, added: Mapping[int, str] | None = None, unigram: bool = False) -> dict[str, str]:
    vocab: Any = [[t, -1.0] for t in tokens] if unigram else {t: i for i, t in enumerate(tokens)}
    added_tokens = [{"id": i, "content": t} for i, t in (added or {}).items()]
    return {"tokenizer.json": json.dumps({"model": {"vocab": vocab}, "added_tokens": added_tokens})}


def test_ids_that_stand_for_other_tokens_are_a_warning(tmp_path: Path) -> None:
    files = {"m0": tokenizer("a", "b", "c"), "m1": tokenizer("a", "c", "b"), "m2": tokenizer("a", "b", "c")}
    assert said(tmp_path, {}, {}, {}, **files) == [
        "tokenizer.json: the models differ in their tokenizers: the same ids mean different tokens; the output has m0's\n"
        "  m1: 2 of 3 ids; 1 is 'c', and 'b' in m0\n"
        "  -> Set tokenizer_source: base, or union, which match rows by token."
    ]


def test_tokens_that_the_outputs_tokenizer_lacks_are_a_warning(tmp_path: Path) -> None:
    """Fine-tunes often add a token in a row that the base has for padding, each another one."""
    files = {
        "m0": tokenizer("a", "b"),
        "m1": tokenizer("a", "b", added={2: "<x>"}),
        "m2": tokenizer("a", "b", added={2: "<y>", 9: "<without a row>"}),
    }
    assert said(tmp_path, {}, {}, {}, **files) == [
        "tokenizer.json: the output has the tokenizer of m0, which lacks tokens of other models\n"
        "  m1: 2 is '<x>'\n"
        "  m2: 2 is '<y>'\n"
        "  -> Keep added tokens, each with its own row, with tokenizer_source: union."
    ]


@pytest.mark.parametrize("key", ["added_tokens_decoder", "pad_token"])
def test_tokens_that_only_tokenizer_config_names_are_compared(key: str, tmp_path: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", key: {"2": {"content": "<x>"}}}
    if key == "pad_token":
        settings[key] = "<x>"
    plain = {**tokenizer("a", "b"), "tokenizer_config.json": '{"chat_template": "{{ a }}", "add_bos_token": true}'}
    named = {**tokenizer("a", "b"), "tokenizer_config.json": json.dumps({"chat_template": "{{ a }}", **settings})}
    (text,) = said(tmp_path, {}, {}, m0=plain, m1=named)
    assert "m1: 2 is '<x>'" in text


def test_tokenizers_of_other_files_are_compared_too(tmp_path: Path) -> None:
    (text,) = said(tmp_path, {}, {}, m0={"vocab.txt": "a\nb\nc\n"}, m1=tokenizer("a", "c", "b"))
    assert "m1: 2 of 3 ids; 1 is 'c', and 'b' in m0" in text


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (tokenizer("a", "b"), tokenizer("a", "b", unigram=True)),
        (tokenizer("a", "b"), tokenizer("a", added={1: "b"})),
        (tokenizer("a", "b"), {"vocab.json": '{"a": 0}', "added_tokens.json": '{"b": 1}'}),
        (tokenizer("a", "b"), tokenizer("a", "b", added={9: "<without a row>"})),
        (tokenizer("a", "b", added={5: "<new>"}), tokenizer("a", "b")),
        (tokenizer("a", "b"), {"tokenizer.json": "not json"}),
        (tokenizer("a", "b"), {"tokenizer.json": '{"model": {"vocab": 3}, "added_tokens": {"a": 1}}'}),
        (tokenizer("a", "b"), {}),
    ],
)
def test_the_same_tokens_in_other_files_are_no_difference(a: dict[str, str], b: dict[str, str], tmp_path: Path) -> None:
    assert said(tmp_path, {}, {}, m0=a, m1=b) == []


def test_chat_templates_that_differ_are_a_warning(tmp_path: Path) -> None:
    files = {
        "m0": {"chat_template.jinja": "{{ a }}\n"},
        "m1": {"tokenizer_config.json": '{"chat_template": "{{ a }}"}'},
        "m2": {"tokenizer_config.json": '{"chat_template": "{{ bb }}"}'},
        "m3": {},
    }
    messages = said(tmp_path, {}, {}, {}, {}, **files)
    assert len(messages) == 1
    assert messages[0].startswith("chat_template: the models differ in chat template; the output has m0's\n  m0 and m1: 7 char")
    assert said(tmp_path / "x", {}, {}, m0=files["m0"], m1=files["m1"]) == []
    assert said(tmp_path / "y", {}, {}, m0=files["m0"]) == []


def test_a_donor_without_a_chat_template_is_pointed_out(tmp_path: Path) -> None:
    messages = said(tmp_path, {}, {}, m1={"chat_template.jinja": "{{ a }}"})
    assert messages == ["chat_template: m0 has no chat template: the output has that of m1"]


# ---- architectures


def test_two_architectures_are_one_error_with_the_first_dimension_that_differs(tmp_path: Path) -> None:
    tensors = {name: t.repeat(2, axis=-1) for name, t in decoder().items() if t.ndim == 2}
    a = plan_help.model(tmp_path / "a", settings={"hidden_size": 4, "intermediate_size": 6})
    b = str(write_checkpoint(tmp_path / "b", tensors, plan_help.config(model_type="gpt2", n_embd=8, hidden_size=8)))
    recipe = {"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 1}}
    lines = str(only(recipe)).replace(f"{tmp_path}/", "").split("\n")
    assert lines[0] == (
        "models: the models have different architectures: a is llama, hidden size 4, and b is gpt2, hidden size 8"
    )
    assert len(lines) == 6
    assert lines[4].startswith("  and ")
    assert lines[5] == "  -> Merge models of one architecture and size."


def test_models_of_one_architecture_keep_their_own_problems(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", settings={"hidden_size": 4})
    b = str(write_checkpoint(tmp_path / "b", decoder(vocab=9), plan_help.config(hidden_size=4, vocab_size=9)))
    recipe = {"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 1}}
    errors = problems(recipe)
    assert all("The vocabularies differ: write tokenizer_source: base" in str(problem) for problem in errors)


def test_other_mistakes_are_reported_beside_it(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", settings={"hidden_size": 4})
    b = str(
        write_checkpoint(
            tmp_path / "b",
            {n: t.repeat(2, axis=-1) for n, t in decoder().items()},
            plan_help.config(hidden_size=8),
        )
    )
    models = [{"model": a, "parameters": {"weight": "x"}}, {"model": b, "parameters": {"weight": 1}}]
    messages = [
        str(p).split("\n")[0].replace(f"{tmp_path}/", "") for p in problems({"merge_method": "linear", "models": models})
    ]
    assert messages == [
        "models[0].parameters.weight: weight must be a number, not 'x'",
        "models: the models have different architectures: a is llama, hidden size 4, and b is llama, hidden size 8",
    ]
