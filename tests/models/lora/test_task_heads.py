"""Adapters with the head of a classifier, on a base with a causal or masked head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.models.lora.test_lora import TOKENS, H, P, Q, adapter, baked, base, factors, normal, refusal
from weightsmith._base.errors import ShapeError

SIZES = {"vocab_size": TOKENS, "hidden_size": H, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2}
LLAMA = {**SIZES, "num_key_value_heads": 1, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "parent", "task", "labels"),
    [
        ("Llama", "LlamaForCausalLM", "SEQ_CLS", 1),
        ("Llama", "LlamaForCausalLM", "SEQ_CLS", 3),
        ("Llama", "LlamaForCausalLM", "TOKEN_CLS", 5),
        ("Llama", "tied", "SEQ_CLS", 2),
        ("Llama", "LlamaModel", "SEQ_CLS", 2),
        ("Bert", "BertForMaskedLM", "TOKEN_CLS", 3),
        ("Bert", "BertForMaskedLM", "QUESTION_ANS", 2),
        ("Bert", "BertModel", "SEQ_CLS", 4),
        ("Roberta", "RobertaForMaskedLM", "SEQ_CLS", 3),
        ("DistilBert", "DistilBertForMaskedLM", "SEQ_CLS", 3),
        ("GPT2", "GPT2LMHeadModel", "SEQ_CLS", 2),
    ],
)
def test_the_output_is_the_classifier_that_was_trained(
    family: str, parent: str, task: str, labels: int, tmp_path: Path
) -> None:
    """The right class of transformers loads it, with nothing missing or left over, and gives PEFT's own logits."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, dict[str, Any]] = {
        "Llama": {**LLAMA, "tie_word_embeddings": parent == "tied"},
        "Bert": SIZES,
        "Roberta": {**SIZES, "max_position_embeddings": 40},
        "DistilBert": {"vocab_size": TOKENS, "dim": H, "hidden_dim": 40, "n_heads": 2, "n_layers": 2},
        "GPT2": {"vocab_size": TOKENS, "n_embd": H, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0},
    }
    config = getattr(transformers, f"{family}Config")(**sizes[family])
    getattr(transformers, "LlamaForCausalLM" if parent == "tied" else parent)(config).save_pretrained(tmp_path / "base")
    names = {"SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}
    auto = getattr(transformers, f"AutoModelFor{names[task]}")
    model = auto.from_pretrained(tmp_path / "base", num_labels=labels, dtype=torch.float32)
    target = {"Llama": "q_proj", "DistilBert": "q_lin", "GPT2": "c_attn"}.get(family, "query")
    options = {"fan_in_fan_out": True} if family == "GPT2" else {}
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=4, target_modules=[target], **options))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(1, TOKENS, (2, 9))
    with torch.no_grad():
        want = tuned.eval()(ids)
    weightsmith.dequantize(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}", tmp_path / "out", fsync=False)
    loaded, info = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded).__name__ == f"{family}For{names[task]}"
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [type(loaded).__name__]
    with torch.no_grad():
        output = loaded.eval()(ids)
    fields = ("start_logits", "end_logits") if task == "QUESTION_ANS" else ("logits",)
    for field in fields:
        np.testing.assert_allclose(output[field].numpy(), want[field].numpy(), rtol=1e-4, atol=1e-5)


def classifier(folder: Path, head: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    head = {"score.weight": normal(2, H, seed=3)} if head is None else head
    tensors = factors(Q, H, H) | {f"{P}{name}": array for name, array in head.items()}
    return adapter(folder, tensors, **{"task_type": "SEQ_CLS", "base_model_name_or_path": "org/base", **config})


def test_the_head_takes_the_place_of_the_base_s(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    weights = baked(model, classifier(tmp_path / "a"), tmp_path / "out")
    np.testing.assert_array_equal(weights["score.weight"], normal(2, H, seed=3))
    assert "lm_head.weight" not in weights
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    notes = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{model}+{tmp_path / 'a'}"}]}).warnings
    (note,) = [note for note in notes if "head of a classifier" in note.what]
    assert "LlamaForSequenceClassification, with 2 labels, and without lm_head.weight" in note.what


def test_the_class_of_the_training_is_taken_where_the_task_is_not_said(tmp_path: Path) -> None:
    mapping = {"base_model_class": "LlamaForTokenClassification", "parent_library": "transformers.models.llama"}
    head = {"score.weight": normal(2, H), "score.bias": normal(2)}
    lora = classifier(tmp_path / "a", head, task_type=None, auto_mapping=mapping)
    weights = baked(base(tmp_path / "base"), lora, tmp_path / "out")
    assert {"score.weight", "score.bias"} < weights.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_tokenizer_of_an_adapter_that_adds_tokens(with_tokenizer: bool, tmp_path: Path) -> None:
    tokenizers, transformers = (pytest.importorskip(name) for name in ("tokenizers", "transformers"))

    def tokenizer(folder: Path, size: int) -> None:
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)

    model = base(tmp_path / "base", np.float32)
    tokenizer(model, TOKENS)
    (model / "generation_config.json").write_text('{"max_length": 7}')
    tensors = {f"{P}model.embed_tokens.weight": normal(TOKENS + 3, H), f"{P}lm_head.weight": normal(TOKENS + 3, H, seed=2)}
    lora = adapter(tmp_path / "adapter", factors(Q, H, H) | tensors)
    if with_tokenizer:
        tokenizer(lora, TOKENS + 3)
    weights = baked(model, lora, tmp_path / "out")
    assert len(weights["lm_head.weight"]) == TOKENS + 3
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == TOKENS + 3
    assert (tmp_path / "out/generation_config.json").exists()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.convert_tokens_to_ids(f"w{TOKENS + 2}") == (TOKENS + 2 if with_tokenizer else 0)
    assert len(loaded) == TOKENS + 3 * with_tokenizer


def test_a_tied_base_keeps_its_embedding_as_it_is(tmp_path: Path) -> None:
    """A classifier has no head that the embedding could be."""
    embedding = normal(TOKENS, H, seed=6)
    lora = classifier(tmp_path / "a", {"score.weight": normal(1, H), "model.embed_tokens.weight": embedding})
    weights = baked(base(tmp_path / "base", np.float32, tie=True), lora, tmp_path / "out")
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], embedding)
    assert "lm_head.weight" not in weights
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("head", "config"),
    [
        ({"score.weight": normal(1, H)}, {"task_type": None}),
        ({"score.weight": normal(1, H)}, {"task_type": "CAUSAL_LM"}),
        ({"score.0.weight": normal(4, H), "score.2.weight": normal(1, 4)}, {}),
        ({"score.weight": normal(H)}, {}),
        ({"value_head.weight": normal(1, H)}, {}),
    ],
)
def test_a_head_whose_class_is_not_known_has_no_place(head: dict[str, Any], config: dict[str, Any], tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), classifier(tmp_path / "a", head, **config))
    assert isinstance(problem, ShapeError)
    assert f"{next(iter(head))}: the base has no such tensor" in str(problem)


def test_a_class_that_names_its_layers_otherwise_is_refused(tmp_path: Path) -> None:
    """LlamaForQuestionAnswering has `transformer.layers`: it would load none of the base's `model.layers`."""
    module = Q.replace("model.", "transformer.", 1)
    head = {f"{P}qa_outputs.weight": normal(2, H), f"{P}qa_outputs.bias": normal(2)}
    lora = adapter(tmp_path / "a", factors(module, H, H) | head, task_type="QUESTION_ANS")
    assert "qa_outputs.weight: the base has no such tensor" in str(refusal(base(tmp_path / "base"), lora))
