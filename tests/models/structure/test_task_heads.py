"""Classes of transformers for classification: their names follow from those of the causal or masked models."""

from __future__ import annotations

from typing import Any

import pytest

from weightsmith._models.structure.vocabulary import class_of, labels_matrix, set_class

TASKS = {"SEQ_CLS": "SEQUENCE_CLASSIFICATION", "TOKEN_CLS": "TOKEN_CLASSIFICATION", "QUESTION_ANS": "QUESTION_ANSWERING"}


@pytest.mark.parametrize("task", TASKS)
def test_the_class_is_transformers_own(task: str) -> None:
    """For the classes of all types of models that have both."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    class_names = getattr(auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")
    compared = 0
    for kinds in ("FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_PRETRAINING_", ""):
        for kind, names in getattr(auto, f"MODEL_{kinds}MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if kind in class_names and not class_names[kind].endswith("Simple"):  # of XLM and XLNet: heads of another form
                config = {"architectures": [name], "model_type": kind}
                assert class_of(config, task, None) == class_names[kind], (kind, name)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("config", "task", "trained", "expected"),
    [
        ({"architectures": ["X"]}, "SEQ_CLS", "LlamaForTokenClassification", "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForCausalLM"]}, "SEQ_CLS", "LlamaForCausalLM", "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM"]}, "CAUSAL_LM", None, ""),
        ({"architectures": ["LlamaForCausalLM"]}, None, None, ""),
        ({"architectures": ["LlamaForCausalLM"]}, ["SEQ_CLS"], 3, ""),
        ({"architectures": ["Unusual"]}, "SEQ_CLS", None, ""),
        ({"architectures": [7]}, "SEQ_CLS", None, ""),
        ({"architectures": "LlamaForCausalLM"}, "SEQ_CLS", None, ""),
        ({}, "SEQ_CLS", None, ""),
    ],
)
def test_a_class_that_is_not_known_is_not_guessed(config: dict[str, Any], task: Any, trained: Any, expected: str) -> None:
    assert class_of(config, task, trained) == expected


def test_the_labels_of_a_head() -> None:
    assert labels_matrix(["pre_classifier.weight", "classifier.weight", "classifier.bias"]) == "classifier.weight"
    assert labels_matrix(["score.0.weight", "score.2.weight"]) == ""


def test_labels_of_the_config_stay_if_they_are_as_many() -> None:
    config: dict[str, Any] = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}, "num_labels": 2}
    set_class(config, "XForSequenceClassification", 2)
    assert config["id2label"] == {"0": "no", "1": "yes"}
    set_class(config, "XForSequenceClassification", 1)
    assert config == {
        "architectures": ["XForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_labels": 1,
    }
