"""The base of encoders, such as BERT: models that make vectors or scores of a text, and attend to all of it.

Their published names differ from those of language models in two ways. A model with a head has all other tensors in a module
(`bert.`), which the bare model does not have, and layers have a name of their own (`encoder.layer.3.`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED
from weightsmith._base.text import count
from weightsmith._models.formats.gguf.base.architecture import COMPUTED, LAYER_NORM, Contents, GgufArchitecture
from weightsmith._models.formats.gguf.base.tensors import LAYERS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

RANKS = 4
"""llama.cpp's number for pooling with a head that scores, in `pooling_type`."""

_MASKED = "the head that predicts masked tokens"
COUNTED = {r"embeddings\.(position|token_type)_ids": COMPUTED}
MASKED_HEADS = {r"(lm_head|cls|vocab_transform|vocab_layer_norm|vocab_projector|decoder)\..*": _MASKED}
POOLER = {r"pooler\..*": "the pooler: llama.cpp takes the vectors of tokens"}
EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
POSITIONS = {"position_embd": "embeddings.position_embeddings"}
_POSITION_ROWS = "position_embd.weight"
_POSITIONS = "max_position_embeddings"
_ENDS = ("bos_token_id", "eos_token_id")
_SCORES = "cls.output.weight"
_MOST_LABELS = 100_000


def classifies(config: Mapping[str, Any]) -> bool:
    """Whether a model gives a text scores: a classifier, or a cross-encoder, which ranks."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names
    )


class Encoder(GgufArchitecture):
    """A model that attends to all of a text.

    modules     the names, with a dot, of modules that hold all but the head in models with a head
    layers      how names of layers begin
    prefix      the one of `modules` that the names in a file that is read get; "": none
    head        how the names of the head's tensors begin, which are not in that module
    ranks       whether the model has a head that gives scores
    vocabulary  tokenizer.ggml.model of its files; "": any
    renamed     settings of most encoders → names that config.json has instead
    defaults    of transformers, on which published files rely
    padded      whether positions begin behind the number of the padding token. The first rows of the position embedding are
                then those of no token, and a GGUF file does not have them
    """

    modules: ClassVar[tuple[str, ...]] = ()
    layers: ClassVar[str] = "encoder.layer."
    prefix: ClassVar[str] = ""
    head: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[bool] = False
    vocabulary: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    padded: ClassVar[bool] = False
    encodes = True
    eps = LAYER_NORM
    activation = "gelu"
    activations: ClassVar[Mapping[str, str]] = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_python": "gelu"}
    rotary = False
    sizes: ClassVar[Mapping[str, str]] = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
    }
    unused: ClassVar[Mapping[str, str]] = {**COUNTED, **POOLER, **MASKED_HEADS}

    # ---- which models

    def fits(self, config: Mapping[str, Any]) -> bool:
        return classifies(config) == self.ranks

    def owns(self, values: GgufValues) -> bool:
        return self.vocabulary in ("", values.elsewhere("tokenizer.ggml.model"))

    def holds(self, tensors: Container[str]) -> bool:
        typed = "token_types" not in self.ends or "token_types.weight" in tensors
        return (_SCORES in tensors) == self.ranks and typed

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        alike = {name: config[stated] for name, stated in self.renamed.items() if stated in config}
        return {**self.defaults, **config, **alike}

    # ---- keys from config.json

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        """The width of a head follows from their number."""

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put("attention.causal", "bool", False)
        if self.padded:
            keys.u32("context_length", config.count("max_position_embeddings") - _first_position(config))
        if self.ranks:
            keys.u32("pooling_type", RANKS)
            keys.put("classifier.output_labels", "str", _labels(config))

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        if _POSITION_ROWS in shapes and (rows := shapes[_POSITION_ROWS][0]) != (most := config.count(_POSITIONS)):
            what = f"{_POSITIONS} is {most:,} in config.json, and this tensor has {rows:,} rows"
            raise FormatError(what, where=f"{self.ends['position_embd']}.weight", fix=f"repair {_POSITIONS} in config.json")
        if not self.ranks:
            return
        tensor = f"{self.ends['cls.output']}.weight"
        if _SCORES not in shapes:
            raise FormatError("the head that scores is missing", where=tensor, fix=DAMAGED)
        names, scores = len(_labels(config)), shapes[_SCORES][0]
        if names != scores:
            what = f"config.json has names of {count(names, 'score')} in id2label or num_labels, and the head has {scores:,}"
            raise FormatError(what, where=tensor, fix="repair id2label in config.json")

    def setting_of(self, key: str, config: GgufConfig) -> str:
        setting = super().setting_of(key, config)
        return self.renamed.get(setting, setting)

    # ---- config.json from the keys

    def config(self, keys: Mapping[str, Any], contents: Contents, dtype: str, where: str) -> dict[str, Any]:
        config = {**self.defaults, **super().config(keys, contents, dtype, where)}
        if self.padded:
            config["max_position_embeddings"] += _first_position(GgufConfig(config))
        if self.vocabulary == "bert":  # llama.cpp has names for them that BERT's config.json has not
            config = {name: value for name, value in config.items() if name not in _ENDS}
        return {self.renamed.get(name, name): value for name, value in config.items()}

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config["hidden_act"] = self.activation
        if "rope_theta" in config:
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        if "token_types" in self.ends:
            config["type_vocab_size"] = contents.shapes["token_types.weight"][0]
        if self.ranks:
            names = values.get("classifier.output_labels")
            scores = contents.shapes[_SCORES][0]
            if scores > _MOST_LABELS:
                what = f"a head of {scores:,} scores, and at most {_MOST_LABELS:,} are read"
                raise FormatError(what, where=values.where, fix=DAMAGED)
            named = names if isinstance(names, list) and len(names) == scores else [f"LABEL_{i}" for i in range(scores)]
            config["id2label"] = {str(number): name for number, name in enumerate(named)}
            config["label2id"] = {name: number for number, name in enumerate(named)}

    # ---- tensors

    def canonical(self, name: str) -> str:
        for module in self.modules:
            name = name.removeprefix(module)
        return f"{LAYERS}{name.removeprefix(self.layers)}" if name.startswith(self.layers) else name

    def published(self, canonical: str) -> str:
        return canonical if canonical.startswith(self.head) else self.prefix + canonical.replace(LAYERS, self.layers, 1)

    def rows_skipped(self, name: str, config: GgufConfig) -> int:
        return _first_position(config) if self.padded and name == _POSITION_ROWS else 0


def _first_position(config: GgufConfig) -> int:
    """The first row of the position embedding that a token has."""
    return config.count("pad_token_id", least=0) + 1


def _labels(config: GgufConfig) -> list[str]:
    """The names of a classifier's scores, in order. Raises FormatError."""
    named = config.get("id2label")
    if named is None:
        labels = config.count("num_labels", 2)
        if labels > _MOST_LABELS:
            raise config.wrong("num_labels", labels, f"more than {_MOST_LABELS:,}")
        return [f"LABEL_{number}" for number in range(labels)]
    numbers = list(map(str, range(len(named)))) if isinstance(named, dict) else []
    if not numbers or set(numbers) != set(named) or not all(isinstance(name, str) for name in named.values()):
        raise config.wrong("id2label", named, "not a name for each number from 0 on")
    return [named[number] for number in numbers]
