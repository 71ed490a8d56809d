"""Heads of classifiers: their modules, the classes of transformers that have them, and what config.json says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from weightsmith._models.structure.vocabulary import in_head

TASK_HEADS = ("score", "classifier", "pre_classifier", "qa_outputs", "classification_head")
"""First modules of names: what classes for classification and for answers have in place of a causal head."""

_OTHER_HEADS = ("vocab_", "generator_", "discriminator_", "pred_layer.", "lm_loss.")
"""Beginnings of names: heads of DistilBERT, ELECTRA and XLM, besides those that `in_head` knows."""

_LABELS = re.compile(r"(score|classifier|qa_outputs|classifier\.out_proj|classification_head\.out_proj)\.weight")
_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
_STEM = re.compile(r"(.+?)(?:For[A-Z]\w*|(?:With|ModelWith)?LMHead(?:Model)?|(?:Base)?Model)")
_TEXT_MODELS = ("gemma3_text", "qwen3_5_text", "cohere_compass_text")
"""Types whose classes for classification have `Text` in their names, and those for causal models have not."""


def is_task_head(name: str) -> bool:
    """True for a tensor of the head of a classifier.

    >>> is_task_head("score.weight"), is_task_head("classifier.dense.bias"), is_task_head("lm_head.weight")
    (True, True, False)
    """
    return name.partition(".")[0] in TASK_HEADS


def is_other_head(name: str) -> bool:
    """True for a tensor that a causal or masked model has, and a classifier with the same layers has not.

    >>> is_other_head("lm_head.weight"), is_other_head("vocab_transform.bias"), is_other_head("score.weight")
    (True, True, False)
    """
    return not is_task_head(name) and (in_head(name) or name.startswith(_OTHER_HEADS))


def labels_matrix(names: Iterable[str]) -> str:
    """The tensor of a head that has a row for each label; "" for a head whose form is not known.

    >>> labels_matrix(["classifier.dense.weight", "classifier.out_proj.weight"])
    'classifier.out_proj.weight'
    """
    return next((name for name in names if _LABELS.fullmatch(name)), "")


def class_of(config: dict[str, Any], task: object, trained: object) -> str:
    """The class of transformers that has a model's layers and the head of a task; "" if it is not known.

    task     of PEFT
    trained  the class that the adapter's config names, where it names one

    >>> class_of({"architectures": ["LlamaForCausalLM"]}, "SEQ_CLS", None)
    'LlamaForSequenceClassification'
    """
    if isinstance(trained, str) and trained.endswith(tuple(_CLASSES.values())):
        return trained
    names = config.get("architectures")
    stem = _STEM.fullmatch(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    if stem is None or not isinstance(task, str) or task not in _CLASSES:
        return ""
    text = "" if stem[1].endswith("Text") or config.get("model_type") not in _TEXT_MODELS else "Text"
    return f"{stem[1]}{text}{_CLASSES[task]}"


def set_class(config: dict[str, Any], name: str, n_labels: int) -> None:
    """Make a config that of a class with so many labels. Labels of the config stay if they are as many."""
    config["architectures"] = [name]
    labels = config.get("id2label")
    if not isinstance(labels, dict) or len(labels) != n_labels:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(n_labels)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(n_labels)}
    if "num_labels" in config:
        config["num_labels"] = n_labels
