"""Embeddings and heads: tensors with a row for each token, which may be tied. And other tables that token ids are keys of.

A model that ties its head to its embedding stores one tensor for both, although old files may store both. The last module of
the name identifies them: `model.embed_tokens.weight`, `lm_head.weight`. Only this file knows these names. Some of them have
another meaning inside a numbered layer (`attention.output.weight`).

Other tables with a row for each token follow a change of the vocabulary too. Tables that hash ids, or hold ids, cannot follow
it: `obstacle` says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.configs import replace_value, sections, text_sections, whole_number
from weightsmith._models.structure.stacks import INDEX, side_words

EMBEDDINGS = (
    *("embed_tokens", "wte", "word_embeddings", "word_embedding", "tok_embeddings", "embed_in", "embeddings", "embedding"),
    "shared",
)
"""Modules that may be a token embedding."""

TIED_HEAD = "lm_head.weight"
"""The name of a head that no file holds: what transformers' causal language models call it."""
HEADS = ("lm_head", "embed_out", "output", "output_layer", "head", "proj_out", "decoder", "vocab_proj")
"""Modules that may be an output head."""

_MODULES = frozenset({*EMBEDDINGS, *HEADS})

_TABLES = re.compile(
    r"(^|\.)((token_embedding|tokens_embed|text_token_embedding|text_embed_tokens|embed_text_tokens|input_embedding|"
    r"value_embeddings|generator_lm_head|output_projection|vocab_projector|lm_loss|lm_head\.out_proj|pred_layer\.proj|"
    r"text_lm_head|ctc_head)\.(weight|bias)|lm_head\.logit_scale|tid2eid)$"
)
"""Further tables with a row for each token: of CLIP's text models, GPT, DistilBERT, XLNet, XLM, T5Gemma, Dory, NeoMME; and
DeepSeek V4's experts of each token, which are integers."""

_LIKE_TABLES = re.compile(r"(embed|token|vocab|logit|word|lookup|table|head)[^.]*(\.(weight|bias))?$")
"""Names that a table with a row for each token may have. Whole numbers may be one under any name."""

_HASHED = re.compile(
    r"(^|\.)(ngram_embedding|ngram_embeddings\.(embedders|embedder_units)|oe_embed_tokens|encoder_hash_tok_embedding|"
    r"multi_head_embedding|HashBucketCodepointEmbedder_\d+)\."
)
"""Embeddings of Qwen4-Exp, LongCat (under two names), BLT, Engram and CANINE: a row is looked up by a hash of ids."""

_HASHES = re.compile(r"\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))$")
"""Numbers that Qwen4-Exp hashes ids with."""

_IDS = re.compile(r"(^|\.)(d2t|t2d|draft_id_to_target_id|hot_token_id)$")
"""EAGLE-3's maps between the ids of a small vocabulary and those of the model that it drafts for."""

_SHARED = ("shared.weight", "encoder.embed_tokens.weight")
"""Names of T5's embedding, of which a file holds one or both."""

_OUTSIDE_LAYERS = ("output", "output_layer", "proj_out", "decoder", "shared")

_FIRST = re.compile(
    r"embed(?!_out|ding_norm)|(^|\.)(wte|wpe|shared|stem|patch|class_token|cls_token|token_type|pos_emb|ln_pre|pre_la?y[er]+norm)"
)
# `decoder` as one of the first two components is one side of an encoder-decoder, not a head.
_HEAD_COMPONENT = re.compile(rf"head|^(score|classifier|cls|mtp|nextn|{'|'.join(h for h in HEADS if h != 'decoder')})$")


def module_of(name: str) -> str:
    """The last module of a tensor's name: `lm_head` for `lm_head.weight`; "" if there is none."""
    return name.rpartition(".")[0].rpartition(".")[2]


def names_embedding(tensor: str) -> bool:
    """True for a name that the weight of a token embedding may have."""
    return _is_of(tensor, EMBEDDINGS)


def names_head(tensor: str) -> bool:
    """True for a name that the weight of an output head may have.

    >>> names_head("lm_head.weight"), names_head("model.decoder.embed_tokens.weight")
    (True, False)
    """
    return _is_of(tensor, HEADS)


def vocabulary_modules(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """The modules that may be token embeddings, and those that may be output heads, by their names.

    >>> vocabulary_modules(["model.embed_tokens", "model.layers.0.mlp.up_proj", "lm_head"])
    (['model.embed_tokens'], ['lm_head'])
    """
    names = [*modules]
    embeddings = [module for module in names if names_embedding(f"{module}.weight")]
    return embeddings, [module for module in names if names_head(f"{module}.weight")]


def _is_of(tensor: str, modules: tuple[str, ...]) -> bool:
    module = module_of(tensor)
    inner = "/" in tensor  # in a subfolder, whose rows belong to a tokenizer of its own
    if module not in modules or inner or (module in _OUTSIDE_LAYERS and INDEX.search(tensor)):
        return False
    return not hashes_ids(tensor)


def is_embedding(spec: TensorSpec) -> bool:
    """True for a matrix that may be a token embedding, by its name."""
    return len(spec.shape) == 2 and names_embedding(spec.name)


def is_head(spec: TensorSpec) -> bool:
    """True for a matrix that may be an output head, by its name.

    >>> from weightsmith._base.tensors import DTYPES
    >>> [is_head(TensorSpec(n, DTYPES["BF16"], (8, 4))) for n in ("lm_head.weight", "model.decoder.embed_tokens.weight")]
    [True, False]
    """
    return len(spec.shape) == 2 and names_head(spec.name)


def is_model_head(spec: TensorSpec) -> bool:
    """True for a matrix that may be the head of the whole model, not of a layer that predicts several tokens at a time.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = "lm_head.weight", "model.layers.61.shared_head.head.weight"
    >>> [is_model_head(TensorSpec(name, DTYPES["BF16"], (8, 4))) for name in names]
    [True, False]
    """
    return is_head(spec) and not INDEX.search(spec.name)


def is_model_embedding(spec: TensorSpec) -> bool:
    """True for a matrix that may be the token embedding of the whole model."""
    return is_embedding(spec) and not INDEX.search(spec.name)


def is_vocabulary(spec: TensorSpec) -> bool:
    """True for a matrix [tokens, hidden] that may be an embedding or a head, by its name."""
    if len(spec.shape) != 2 or module_of(spec.name) not in _MODULES:  # nearly every tensor, quickly
        return False
    return is_embedding(spec) or is_head(spec)


PER_LAYER = "embed_tokens_per_layer"
"""Module of an embedding with a row for each token and columns for each layer, which may have fewer rows than the others."""

PER_LAYER_SIZE_KEY = "vocab_size_per_layer_input"
"""The key of config.json for its rows."""

SIZE_KEYS = ("vocab_size", "padded_vocab_size", "text_vocab_size", "decoder_vocab_size", "n_vocab")
"""Keys of config.json for the number of rows."""


_OFFSETS = {"vision_config": 262_144, "audio_config": 262_272}
"""Gemma 3n's first ids for images and audio, for sections without vocab_offset."""


def first_reserved(config: Mapping[str, Any] | None) -> tuple[int, str] | None:
    """The first id reserved for images or audio, whatever the tokenizer has (Gemma 3n), and the key of config.json for it.

    >>> first_reserved({"vision_config": {"vocab_offset": 50}, "audio_config": {"vocab_offset": 60}})
    (50, 'vision_config.vocab_offset')
    """
    config = config or {}
    known = _OFFSETS if config.get("model_type") == "gemma3n" else {}
    offsets = {path: whole_number(section.get("vocab_offset")) for path, section in sections(config)}
    stated = {path: known.get(".".join(path)) if offset is None else offset for path, offset in offsets.items()}
    return min(((n, ".".join((*path, "vocab_offset"))) for path, n in stated.items() if n is not None), default=None)


def count_rows(specs: Iterable[TensorSpec], config: Mapping[str, Any] | None) -> int:
    """The rows of the token embedding or the head; 0 if there is neither.

    The number that config.json states if a tensor has it, else the largest: vision towers have embeddings too.
    """
    specs = list(specs)
    counts = [spec.shape[0] for spec in specs if is_vocabulary(spec)]
    counts = counts or [spec.shape[0] for spec in specs if len(spec.shape) == 2 and _TABLES.search(spec.name)]
    stated = [section.get("vocab_size") for section in text_sections(config or {})]
    return next((rows for rows in stated if isinstance(rows, int) and rows in counts), max(counts, default=0))


def has_tokens(spec: TensorSpec, rows: int) -> bool:
    """True for a tensor with a row (a bias: an element) for each token; `rows` is `count_rows` of its model."""
    if module_of(spec.name) == PER_LAYER:
        return len(spec.shape) == 2
    if len(spec.shape) == 2 and spec.name.endswith("final_logits_bias"):
        return spec.shape == (1, rows)
    if len(spec.shape) == 1 and spec.shape[0] == rows:
        return spec.name.endswith(".predictions.bias") or (spec.name.endswith(".bias") and names_head(spec.name))
    return spec.shape[:1] == (rows,) and (is_vocabulary(spec) or _TABLES.search(spec.name) is not None)


def may_have_tokens(spec: TensorSpec) -> bool:
    """True for a tensor that has a row for each token by its name, whatever its number of rows is."""
    return is_vocabulary(spec) or module_of(spec.name) == PER_LAYER or _TABLES.search(spec.name) is not None


def hashes_ids(name: str) -> bool:
    """True for an embedding whose rows are looked up by hashes of token ids.

    >>> [hashes_ids(f"model.{n}.weight") for n in ("ngram_embeddings.embedders.3", "ngram_embeddings", "embed_tokens")]
    [True, False, False]
    """
    return _HASHED.search(name) is not None


def holds_ids(name: str) -> bool:
    """True for a tensor that maps ids of one vocabulary to those of another."""
    return _IDS.search(name) is not None


def must_agree(name: str) -> bool:
    """True for integers by which rows of other tensors are found: models that differ in them have no rows in common.

    >>> must_agree("t2d"), must_agree("model.layers.0.mlp.gate.tid2eid")
    (True, False)
    """
    return holds_ids(name) or _HASHES.search(name) is not None


def obstacle(spec: TensorSpec, rows: int, config: Mapping[str, Any] | None) -> str:
    """Why a tensor cannot follow a change of the vocabulary; "" if it can, or has nothing to do with it.

    rows    `count_rows` of its model
    config  the model's: a number of rows that it states as another size too says nothing of a tensor

    >>> from weightsmith._base.tensors import DTYPES
    >>> obstacle(TensorSpec("d2t", DTYPES["I64"], (8,)), 32, None)
    'it holds token ids'
    """
    if hashes_ids(spec.name):
        return "its rows belong to hashes of token ids"
    if holds_ids(spec.name):
        return "it holds token ids"
    if not rows or has_tokens(spec, rows):
        return ""
    if module_of(spec.name) in ("embed_tokens", "lm_head") and len(spec.shape) == 2:
        return f"it has {spec.shape[0]:,} rows, and the vocabulary {rows:,}"
    named = not spec.dtype.floating or _LIKE_TABLES.search(spec.name)
    unknown = named and rows in spec.shape and not _states(config or {}, rows)
    return "it has the size of the vocabulary, and is no known table" if unknown else ""


def _states(config: Mapping[str, Any], number: int) -> bool:
    """True if a config has the number as another size than that of a vocabulary."""
    return any(
        whole_number(value) == number and "vocab" not in key and "token" not in key
        for _, section in sections(config)
        for key, value in section.items()
    )


def comes_first(name: str) -> bool:
    """True if a tensor outside the layers comes before them (embeddings), False if after (final norm, head, MTP layers).

    >>> [comes_first(n) for n in ("model.embed_tokens.weight", "model.norm.weight", "embed_out.weight", "lm_head.weight")]
    [True, False, False, False]
    """
    before, _, _ = name.partition(".layers.")
    return _FIRST.search(before) is not None and "head" not in before


def in_head(name: str) -> bool:
    """True for a tensor outside the layers that belongs to a head of any kind, or to prediction layers.

    >>> in_head("lm_head.dense.weight"), in_head("model.mtp.norm.weight"), in_head("model.decoder.norm.weight")
    (True, True, False)
    """
    return any(_HEAD_COMPONENT.search(part) for part in name.split(".")[:2])


def tied_substitute(spec: TensorSpec, loose: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> str | None:
    """The tensor that a model uses as `spec`, which it does not store; None if there is none.

    spec    an embedding, head, or bias of a head in another model
    loose   the model's tensors outside its layers, under the donor's names
    config  the model's; if `tie_word_embeddings` is false, the embedding does not serve as head

    Embedding and head of a numbered layer, which predicts several tokens at a time, are tensors of their own: no other serves
    as one of them, and they serve as no other. Returns the donor's name.

    >>> from weightsmith._base.tensors import DTYPES
    >>> head, *sides = (TensorSpec(f"{n}.weight", DTYPES["F32"], (8, 4)) for n in ("lm_head", "encoder.wte", "decoder.wte"))
    >>> tied_substitute(head, {side.name: side for side in sides}, None)
    'decoder.wte.weight'
    """
    if INDEX.search(spec.name):
        return None
    if twins := _twins_in_part(spec.name):
        return next((n for n in twins if n in loose and loose[n].shape == spec.shape), None)
    if len(spec.shape) == 1:
        return next((n for n in _bias_twins(spec.name) if n in loose and loose[n].shape == spec.shape), None)
    if not is_vocabulary(spec) or (is_head(spec) and tie_flag(config) is False):
        return None
    fitting = [s for s in loose.values() if s.shape == spec.shape and not INDEX.search(s.name)]
    if is_head(spec):  # it predicts what the decoder reads: Marian's encoder may have an embedding of its own
        fitting.sort(key=lambda s: "encoder" in side_words(s.name))
    return next((s.name for test in (is_embedding, is_head) for s in fitting if test(s)), None)


def _bias_twins(name: str) -> Iterator[str]:
    """The other name under which the bias of a BERT head is stored.

    >>> list(_bias_twins("lm_head.decoder.bias")), list(_bias_twins("lm_head.bias"))
    (['lm_head.bias'], ['lm_head.decoder.bias'])
    """
    if name.endswith(".decoder.bias"):
        yield name.removesuffix(".decoder.bias") + ".bias"
    elif name.endswith(".bias"):
        yield name.removesuffix(".bias") + ".decoder.bias"


def _twins_in_part(name: str) -> tuple[str, ...]:
    """All names of the embedding of a T5 that is a part of a pipeline: its encoder has no other than the shared one.

    >>> _twins_in_part("text_encoder_2/encoder.embed_tokens.weight")
    ('text_encoder_2/shared.weight', 'text_encoder_2/encoder.embed_tokens.weight')
    """
    folder, slash, inner = name.rpartition("/")
    return tuple(f"{folder}/{twin}" for twin in _SHARED) if slash and inner in _SHARED else ()


def primary(spec: TensorSpec, stored: Iterable[TensorSpec]) -> str:
    """The name under which tied copies of `spec` are written once, among all stored names.

    Prefers an embedding to a head, the one shared by encoder and decoder to their own, and the shortest name.
    """
    if INDEX.search(spec.name):  # of a layer that predicts several tokens at a time
        return spec.name
    if twins := _twins_in_part(spec.name):
        alike = {s.name for s in stored if s.shape == spec.shape}
        return next(name for name in twins if name in alike)
    if len(spec.shape) == 1:
        return min([spec.name, *_bias_twins(spec.name)], key=len)
    names = [s for s in stored if s.shape == spec.shape and is_vocabulary(s) and not INDEX.search(s.name)]
    return min(names, key=lambda s: (is_head(s), module_of(s.name) != "shared", len(s.name), s.name)).name


def tie_flag(config: Mapping[str, Any] | None) -> bool | None:
    """`tie_word_embeddings` at the top of a config, else in its text section; None if in neither."""
    flags = (section.get("tie_word_embeddings") for section in text_sections(config or {}))
    return next((flag for flag in flags if isinstance(flag, bool)), None)


_SCALED = ("t5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano")
"""Types whose classes scale the input of a tied head: they divide it by the square root of the width."""


def untie(config: dict[str, Any]) -> None:
    """Set `tie_word_embeddings` to false in every section that has it, because other models of the recipe do not tie.

    Raises Unsupported for types whose untied head computes something else from the same numbers (T5).
    """
    if config.get("model_type") in _SCALED:
        what = "the embedding of a model that ties it would become a head, and models of this type scale what a tied head reads"
        fix = "use models that all tie; for an adapter, merge it with peft's merge_and_unload"
        raise Unsupported(what, where="tie_word_embeddings of config.json", fix=fix)
    replace_value(config, "tie_word_embeddings", True, False)
    config["tie_word_embeddings"] = False


def ties(config: Mapping[str, Any] | None, *, stores_head: bool) -> bool:
    """Whether a model uses its embedding as head: by its config, else whether its files hold no head."""
    flag = tie_flag(config)
    return flag if flag is not None else not stores_head


# ---- Heads of classifiers: their modules, the classes of transformers that have them, and what config.json says of them


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
