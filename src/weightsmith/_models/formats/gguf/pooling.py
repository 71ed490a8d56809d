"""How a model makes one vector or one score of a text: modules of sentence-transformers, as keys and tensors of a GGUF file.

A reranker that is a language model, such as Qwen3-Reranker, answers "yes" or "no". In a GGUF file, its head is the two rows of
these tokens, and llama.cpp gives the probability of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.base.encoder import RANKS
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.mmproj import TokenRow
from weightsmith._models.formats.gguf.tokenizer.parts import list_of, object_of
from weightsmith._models.formats.gguf.writing import GgufEncoding
from weightsmith._models.tokenizers.files import json_bytes, settings_in
from weightsmith._plans import COPY, JOIN, PRODUCTS, PlanDraft, Product, Read, Step

MODULES = "modules.json"
CARD = "README.md"

_MODULE_FOLDER = re.compile(r"\w[\w.-]*", re.ASCII)
_MODE_PREFIX = "pooling_mode_"
_MODES = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
"""Names of modes, behind `_MODE_PREFIX`, and llama.cpp's numbers."""
_ALSO = {"mean": "mean_tokens", "cls": "cls_token"}
_OTHER_FORMAT = "choose another format, such as fp8-dynamic"
_DONE = ("Transformer", "Pooling", "Normalize")
"""Modules that llama.cpp has: it normalises vectors unless told otherwise."""
_INSTEAD = ("SpladePooling", "MLMTransformer", "WeightedLayerPooling")
"""Modules that make vectors of something else than the last layer's, or of several layers'."""
_DENSE = "Dense"
_DENSE_ARCHITECTURES = {"gemma-embedding": ("dense_2", "dense_3")}
"""Architectures of which llama.cpp has matrices behind the pooling, and its names of them: all or none."""
_IDENTITY = "torch.nn.modules.linear.Identity"
_SCORING = "LogitScore"
_SCORING_ARCHITECTURES = ("qwen3",)
"""Architectures of language models that llama.cpp gives a head which ranks."""
_RERANKER = re.compile(r"^# Qwen3-Reranker", re.MULTILINE)
"""In the model card: config.json says nothing of it, so llama.cpp's converter looks for the same."""
_HEAD = "cls.output.weight"
_LABELS = ("yes", "no")
_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of the model card of Qwen3-Reranker, which `llama-server --reranking` fills."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a GGUF file says of it.

    values    keys
    warnings  of modules that the file does not have
    rows      of the head, whose logits are the scores of yes and no; (): there are none
    dense     matrices behind it: the Hub's name of a tensor → llama.cpp's
    """

    values: dict[str, Value] = field(default_factory=dict)
    warnings: tuple[Finding, ...] = ()
    rows: tuple[int, ...] = ()
    dense: Mapping[str, str] = field(default_factory=dict)

    @property
    def folders(self) -> list[str]:
        """The subfolders of the matrices."""
        return [name.partition("/")[0] for name in self.dense]


def pooling_of(files: Mapping[str, bytes], architecture: str, read: Callable[[str], bytes | None]) -> Pooling:
    """How a model pools.

    files  the contents of modules.json and tokenizer.json, if the model has them
    read   gives the contents of a file of the model's folder, by its name

    Raises FormatError for a damaged modules.json, Unsupported for a way to pool that llama.cpp does not know.
    """
    values: dict[str, Value] = {}
    others: list[str] = []
    warnings: list[Finding] = []
    rows: tuple[int, ...] = ()
    modules = _modules(files.get(MODULES))
    dense, sizes = _dense(modules, architecture, read)
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], module.get("path")
        if kind in ("Pooling", _SCORING) and isinstance(path, str) and _MODULE_FOLDER.fullmatch(path):
            where = f"{path}/config.json"
            data = read(where)
            if data is None:
                what = f"{MODULES} names the module {show(path)}, which is missing: the file does not say how tokens are pooled"
                warnings.append(Finding(what, where, fix="download the folder, or name the way to pool when you run the model"))
            elif kind == "Pooling":
                values[f"{architecture}.pooling_type"] = Value("u32", _pooling(settings_in(data), where))
            elif not (rows := _scored(settings_in(data), architecture)):
                others.append(kind)
        elif kind in _INSTEAD:
            what = f"its module {show(kind)} makes vectors that llama.cpp does not make"
            raise Unsupported(what, where=MODULES, fix=_OTHER_FORMAT)
        elif kind not in _DONE and not (kind == _DENSE and dense):
            others.append(kind)
    if (
        MODULES not in files
        and architecture in _SCORING_ARCHITECTURES
        and _RERANKER.search((read(CARD) or b"").decode(errors="replace"))
    ):
        rows = _answers(files)
    if rows:
        values |= {f"{architecture}.pooling_type": Value("u32", RANKS)}
        values |= {f"{architecture}.classifier.output_labels": Value("str", list(_LABELS))}
        values |= {"tokenizer.chat_template.rerank": Value("str", _TEMPLATE)}
    if others:
        what = f"the file holds the model without its modules {', '.join(map(show, others))}: llama.cpp gives other vectors"
        warnings.append(Finding(what, MODULES, fix=_OTHER_FORMAT))
    return Pooling(values | sizes, tuple(warnings), rows, dense)


def score_head(head: Step, rows: Sequence[int], draft: PlanDraft) -> tuple[list[Product], Step]:
    """The products and the step of a head that scores, from rows of another.

    head  the step of the head of a language model, or of its embedding if they are one

    Raises Unsupported for a row that it does not have.
    """
    count, cols = head.out.shape
    if not all(row < count for row in rows):
        what = f"the head has {count:,} rows, and the scores are those of {', '.join(map(str, rows))}"
        raise Unsupported(what, where=head.out.name, fix="repair the tokenizer's files")
    products: list[Product] = []
    pieces: list[Step] = []
    for i, row in enumerate(rows):
        product = TokenRow(row).made_of(f"{_HEAD}.{i}", head, draft)
        spec = TensorSpec(product.name, DTYPES["F32"], (cols,))
        products.append(product)
        pieces.append(Step(spec, COPY, (Read(PRODUCTS, product.outs[0].name),), settings=head.settings))
    spec = TensorSpec(_HEAD, DTYPES["F32"], (len(rows), cols))
    encoding = GgufEncoding(spec.dtype).name
    return products, Step(spec, JOIN, (), pieces=tuple(pieces), encoding=encoding, stored=(spec,))


def with_template(keys: dict[str, Value]) -> dict[str, Value]:
    """The keys, with a prompt for reranking in the list of templates."""
    named = keys.get("tokenizer.chat_templates")
    if "tokenizer.chat_template.rerank" not in keys:
        return keys
    names = list(named.value) if named is not None and isinstance(named.value, list) else []
    return keys | {"tokenizer.chat_templates": Value("str", list(dict.fromkeys([*names, "rerank"])))}


def pooling_files(keys: Mapping[str, Any], architecture: str) -> dict[str, bytes]:
    """modules.json and the settings of its pooling, of a GGUF file that says how it pools; {} of another.

    llama.cpp normalises vectors whatever the file says, so there is no module for it.
    """
    number, width = (keys.get(f"{architecture}.{name}") for name in ("pooling_type", "embedding_length"))
    mode = next((mode for mode, known in _MODES.items() if type(number) is int and number == known), "")
    if not mode:
        return {}
    folders = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(folders.items())
    ]
    modes = {f"{_MODE_PREFIX}{name}": name == mode for name in _MODES}
    settings = {"word_embedding_dimension": width, **modes}
    return {MODULES: f"{json.dumps(modules, indent=2)}\n".encode(), f"{folders['Pooling']}/config.json": json_bytes(settings)}


def _modules(modules: bytes | None) -> list[Mapping[str, Any]]:
    try:
        value = [] if modules is None else parse(modules, max_memory=1 << 24)
    except JsonError as error:
        raise FormatError(f"it {error}", where=MODULES, fix="repair it, or download it again") from error
    return [module for module in list_of(value) if isinstance(module, dict)]


def _dense(
    modules: Sequence[Mapping[str, Any]], architecture: str, read: Callable[[str], bytes | None]
) -> tuple[dict[str, str], dict[str, Value]]:
    """Names of the matrices behind the pooling, and keys of their sizes; empty if llama.cpp does not have all of them."""
    names = _DENSE_ARCHITECTURES.get(architecture, ())
    paths = [str(module.get("path")) for module in modules if str(module.get("type")).rpartition(".")[2] == _DENSE]
    if len(paths) != len(names) or not all(map(_MODULE_FOLDER.fullmatch, paths)):
        return {}, {}
    sizes: dict[str, Value] = {}
    for path, name in zip(paths, names, strict=True):
        settings = settings_in(read(f"{path}/config.json") or b"{}")
        plain = settings.get("bias") is False and settings.get("activation_function") == _IDENTITY
        widths = [settings.get(f"{end}_features") for end in ("in", "out")]
        if not plain or settings.get("use_residual") or not all(type(width) is int and width > 0 for width in widths):
            return {}, {}
        keys = (f"{architecture}.{name}_feat_{end}" for end in ("in", "out"))
        sizes |= {key: Value("u32", width) for key, width in zip(keys, map(int, widths), strict=True)}  # type: ignore[arg-type]
    return {f"{path}/linear.weight": f"{name}.weight" for path, name in zip(paths, names, strict=True)}, sizes


def _pooling(settings: Mapping[str, Any], where: str) -> int:
    """llama.cpp's number for how a module pools. Raises Unsupported."""
    stated = settings.get("pooling_mode")
    modes = [
        name.removeprefix(_MODE_PREFIX) for name, value in settings.items() if name.startswith(_MODE_PREFIX) and value is True
    ]
    modes = [_ALSO.get(stated, stated)] if isinstance(stated, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        what = f"its tokens are pooled by {' and '.join(map(show, modes)) or 'no known mode'}, and llama.cpp knows "
        raise Unsupported(what + ", ".join(_MODES), where=where, fix=_OTHER_FORMAT)
    return _MODES[modes[0]]


def _scored(settings: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    """The rows of the head that a module scores by; () if llama.cpp cannot."""
    numbers = tuple(settings.get(f"{name}_token_id") for name in ("true", "false"))
    known = all(type(number) is int and number >= 0 for number in numbers)
    return tuple(map(int, numbers)) if known and architecture in _SCORING_ARCHITECTURES else ()  # type: ignore[arg-type]


def _answers(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The numbers of the tokens for yes and no; () if the tokenizer has none."""
    model = object_of(files, "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    numbers = [vocab.get(label) if isinstance(vocab, dict) else None for label in _LABELS]
    return tuple(number for number in numbers if type(number) is int) if None not in numbers else ()


def unstated(keys: Mapping[str, Value]) -> list[Finding]:
    """A warning that the file of an encoder does not say how it pools."""
    if any(name.endswith(".pooling_type") for name in keys):
        return []
    what = "the file does not say how the vectors of tokens become one: the model has no modules.json"
    return [Finding(what, MODULES, fix="name the way to pool when you run the model, such as llama.cpp's --pooling mean")]
