"""What models disagree on though their tensors have equal shapes: settings that change the computation, and tokenizers.

The output has the donor's. A setting that a config.json does not state is not compared: what it is by default depends on the
model class. Vision and audio towers are not compared, only the text model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, LayerError, MismatchError, ShapeError, WeightsmithError
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import some, some_lines
from weightsmith._files.copied import holds_tokens, is_tokenizer
from weightsmith._files.subfolders import MODULES, module_steps
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.structure.vocabulary import count_rows, may_have_tokens
from weightsmith._models.tokenizers.files import templates_of
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary, token_digest_of
from weightsmith._planning.planner.inputs import changed
from weightsmith._planning.planner.match import InputModels
from weightsmith._planning.planner.segments import Segment

_SHOWN = 3  # problems, and models in one line

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """What is compared of one model.

    label  as the user named it
    text   the section of config.json that describes its text model
    folder, files  where its tokenizer may be
    rows   of its embedding: ids from there on are of no use
    sizes  of its files elsewhere, by name; -1: unknown
    fetch  downloads some of them
    """

    label: str
    text: Config
    folder: Path
    files: Sequence[str]
    rows: int
    sizes: Mapping[str, int]
    fetch: Callable[[Sequence[str]], None]


def compared(label: str, checkpoint: Checkpoint, structure: Structure | None = None) -> ComparedModel:
    """What is compared of a checkpoint. text: where config.json describes the main stack of layers, else all of it.

    structure  None: its tokenizer alone is compared
    """
    config = checkpoint.config or {}
    text = {} if structure is None else config if structure.main is None else structure.main.section(config)
    rows = count_rows(checkpoint.specs.values(), config)
    sizes = checkpoint.repositories[0].sizes if checkpoint.repositories else {}
    return ComparedModel(label, text, checkpoint.folder, checkpoint.files, rows, sizes, checkpoint.fetch)


def disagreements(
    models: Sequence[ComparedModel],
    donor: int,
    *,
    tokenizer: int | None = None,
    template: int | None = None,
    seen: dict[str, Vocabulary] | None = None,
) -> list[Finding]:
    """One warning for each kind of setting in which a model differs from the donor, whose value the output has.

    tokenizer, template  index of the model whose tokenizer or chat template the output has; None: these are not compared,
                         because the recipe chooses them
    seen                 tokenizers that were read, see `read_vocabulary`

    No tensor is read. Cost: nothing for the settings; tokenizers are parsed only where their files differ.
    """
    findings = []
    for kind in _KINDS:
        values = [kind.read(model.text) for model in models]
        first = next((i for i in (donor, *range(len(models))) if values[i] is not None), None)
        if first is None or all(value is None or _equal(value, values[first]) for value in values):
            continue
        fix = kind.fix or "test the result: weights were trained for the value of their own model"
        what = f"the models differ in {kind.name}; the output has {_text(values[first])}"
        findings.append(Finding(what, "config.json", _by_value(models, values), fix))
    return findings + _modules(models, donor) + tokenizer_disagreements(models, tokenizer, template, seen)


def tokenizer_disagreements(
    models: Sequence[ComparedModel], tokenizer: int | None, template: int | None, seen: dict[str, Vocabulary] | None
) -> list[Finding]:
    """The same for tokenizers and chat templates alone."""
    findings = [] if tokenizer is None else _tokenizers(models, tokenizer, {} if seen is None else seen)
    return findings + ([] if template is None else _templates(models, template))


def _by_value(models: Sequence[ComparedModel], values: Sequence[Any]) -> tuple[str, ...]:
    """Models and their value, those with the same together."""
    groups: dict[str, list[str]] = {}
    for model, value in zip(models, values, strict=True):
        if value is not None:
            groups.setdefault(_text(value), []).append(model.label)
    return tuple(f"{_names(labels)}: {text}" for text, labels in groups.items())


def _names(labels: Sequence[str]) -> str:
    """Models in one line.

    >>> _names(["a", "b", "c"]), _names(["a", "b", "c", "d"])
    ('a, b and c', 'a, b, c and 1 more')
    """
    others = [f"{len(labels) - _SHOWN} more"] if len(labels) > _SHOWN else []
    listed = [*labels[:_SHOWN], *others]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def _modules(models: Sequence[ComparedModel], donor: int) -> list[Finding]:
    """A warning if modules of sentence-transformers compute something else. A model without any does not count."""
    steps = [module_steps(model.folder) or None for model in models]
    if len({step for step in steps if step}) < 2:
        return []
    what = "the models differ in the modules of sentence-transformers"
    if steps[donor]:
        what += f"; the output has {models[donor].label}'s"
    fix = "test the result: its embeddings are computed in one way, and some models were trained for another"
    return [Finding(what, MODULES, _by_value(models, steps), fix)]


# ---- settings


@dataclass(frozen=True, slots=True)
class _ComparedSetting:
    """One kind of setting. read: its value in a config, None where it is not stated."""

    name: str
    read: Callable[[Config], Any]
    fix: str = ""


_NONE = "none"
_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_python": "gelu"}
_ROPE_TYPES = {"mrope": "default", "su": "longrope"}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_OTHER = (
    *("query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("logit_scale", "scale_emb", "scale_depth", "clip_qkv", "use_parallel_residual", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "num_kv_shared_layers", "scoring_func", "topk_method", "n_group"),
    *("topk_group", "scale_embedding", "scale_attn_by_inverse_layer_idx", "normalize_before", "do_layer_norm_before", "alibi"),
    *("use_qk_norm", "attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale", "rope_local_base_freq"),
    "rope_interleave",
    *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),  # Falcon-H1
    *("ssm_in_multiplier", "ssm_out_multiplier", "dim_model_base", "swiglu_limit"),
    *("ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num"),
)


def _stated(*keys: str) -> Callable[[Config], Any]:
    """The first of some keys that is a number, text or a truth value; "none" for null."""

    def read(config: Config) -> Any:
        for key in keys:
            if key in config:
                value = config[key]
                if value is None:
                    return _NONE
                return value if isinstance(value, int | float | str) else None
        return None

    return read


def _activation(config: Config) -> str | None:
    # Gemma's code has its own idea of what a null means.
    key = next((k for k in ("hidden_activation", "hidden_act", "activation_function") if k in config), "")
    value = config.get(key)
    return _ACTIVATIONS.get(value, value) if isinstance(value, str) else None


def _kv_heads(config: Config) -> Any:
    value = _stated("num_key_value_heads", "num_kv_heads")(config)
    return _stated(*_HEADS)(config) if value == _NONE else value


def _window(config: Config) -> Any:
    """The sliding window; "none" where it is switched off or no shorter than the context."""
    value = _stated("sliding_window")(config)
    longest = config.get("max_position_embeddings")
    if value is not None and config.get("use_sliding_window") is False:
        return _NONE
    whole = isinstance(value, int) and isinstance(longest, int) and value >= longest
    return _NONE if whole else value


def _rope(config: Config) -> Config:
    """`rope_scaling`, taken first, or `rope_parameters`; those of full attention where layers have their own."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, Mapping) and settings:
            nested = settings.get("full_attention")
            return nested if isinstance(nested, Mapping) else settings
    return {}


def _of_rope(key: str, older: str) -> Callable[[Config], Any]:
    """A number of RoPE, which older configs have at the top level."""
    return lambda config: _stated(key)(_rope(config)) or _stated(key, older)(config)


def _scaling(config: Config) -> dict[str, Any]:
    """Type and parameters of RoPE scaling; without any it is the default, in every model class."""
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = _ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else "default"
    numbers = {k: v for k, v in rope.items() if isinstance(v, int | float) and k not in ("rope_theta", "partial_rotary_factor")}
    return {"type": kind, **(numbers if kind != "default" else {})}


def _labels(config: Config) -> str | None:
    """The labels of a classifier, in the order of the rows of its head; None for the names that transformers gives."""
    stated = config.get("id2label")
    labels = {str(number): str(label).casefold() for number, label in stated.items()} if isinstance(stated, dict) else {}
    if all(label == f"label_{number}" for number, label in labels.items()):
        return None
    return ", ".join(f"{number} {labels[number]}" for number in sorted(labels, key=lambda number: (len(number), number)))


_KINDS = (
    _ComparedSetting(
        "model type", _stated("model_type"), "merge models of one architecture; mergekit refuses this without --allow-crimes"
    ),
    _ComparedSetting(
        "labels",
        _labels,
        "give all models the same labels in the same order first: the rows of their heads are merged by number",
    ),
    _ComparedSetting("RoPE theta", _of_rope("rope_theta", "rotary_emb_base")),
    _ComparedSetting("RoPE scaling", _scaling),
    _ComparedSetting("the share of a head that RoPE turns", _of_rope("partial_rotary_factor", "rotary_pct")),
    _ComparedSetting("activation", _activation),
    _ComparedSetting("norm epsilon", _stated(*_EPSILONS)),
    _ComparedSetting("number of attention heads", _stated(*_HEADS)),
    _ComparedSetting("number of key-value heads", _kv_heads),
    _ComparedSetting("sliding window", _window),
    _ComparedSetting("softcap of attention logits", _stated("attn_logit_softcapping")),
    _ComparedSetting("softcap of output logits", _stated("final_logit_softcapping")),
    *(_ComparedSetting(key, _stated(key)) for key in _OTHER),
)


def _equal(a: Any, b: Any) -> bool:
    """Equal as far as both are stated: of two mappings the keys that both have."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(a[key] == b[key] for key in a.keys() & b.keys())
    return bool(a == b)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_text(v) if k == "type" else f"{show(k)[1:-1]} {_text(v)}" for k, v in value.items())
    return f"{value:g}" if isinstance(value, float) else show(value)[1:-1] if isinstance(value, str) else show(value)


# ---- tokenizers


def _digest_of(model: ComparedModel) -> str:
    """Equal for models with equal files of tokens; "" if they cannot be read."""
    with contextlib.suppress(WeightsmithError, OSError):
        return token_digest_of(model.folder, model.files)
    return ""


def _sizes(model: ComparedModel) -> dict[str, int]:
    """Bytes of the files that hold tokens, by name. Files of equal sizes are not downloaded to be compared."""
    paths = {name: model.folder / name for name in model.files if holds_tokens(name)}
    return {name: path.stat().st_size if path.is_file() else model.sizes.get(name, -1) for name, path in paths.items()}


def _vocabulary(model: ComparedModel, seen: dict[str, Vocabulary]) -> Vocabulary | None:
    """The tokens of a model; None if unknown."""
    with contextlib.suppress(WeightsmithError, OSError):
        return read_vocabulary(model.label, model.folder, model.files, seen)
    return None


def _tokenizers(models: Sequence[ComparedModel], donor: int, seen: dict[str, Vocabulary]) -> list[Finding]:
    """A warning if an id means different tokens in two models, and one for tokens that the output's tokenizer lacks."""
    sizes = [_sizes(model) for model in models]
    differing_sizes = [k for k, size in enumerate(sizes) if size and size != sizes[donor]]
    for k in [donor, *differing_sizes] if differing_sizes and sizes[donor] else ():
        models[k].fetch([name for name in models[k].files if is_tokenizer(name)])
    digests = [_digest_of(model) for model in models]
    others = [model for model, digest in zip(models, digests, strict=True) if digest != digests[donor]]
    output = _vocabulary(models[donor], seen) if others else None
    donor_tokens = {} if output is None else output.tokens
    differing, lacking = [], []
    for model in others if donor_tokens else ():
        vocabulary = _vocabulary(model, seen)
        if vocabulary is None or vocabulary is output:
            continue
        tokens = vocabulary.tokens
        changed_ids = [n for n in donor_tokens.keys() & tokens.keys() if donor_tokens[n] != tokens[n]]
        if changed_ids:
            first = min(changed_ids)
            meanings = f"{first} is {show(tokens[first])}, and {show(donor_tokens[first])} in {models[donor].label}"
            differing.append(f"{model.label}: {len(changed_ids):,} of {len(tokens):,} ids; {meanings}")
        further = sorted(n for n in tokens.keys() - donor_tokens.keys() if n < model.rows)
        if further:
            lacking.append(f"{model.label}: {some([f'{n} is {show(tokens[n])}' for n in further], _SHOWN)}")
    findings = []
    if differing:
        what = "the models differ in their tokenizers: the same ids mean different tokens"
        what += f"; the output has {models[donor].label}'s"
        fix = "set tokenizer_source: base, or union, which match rows by token"
        findings.append(Finding(what, "tokenizer.json", tuple(differing), fix))
    if lacking:
        what = f"the output has the tokenizer of {models[donor].label}, which lacks tokens of other models"
        fix = "keep added tokens, each with its own row, with tokenizer_source: union"
        findings.append(Finding(what, "tokenizer.json", tuple(lacking), fix))
    return findings


def _templates(models: Sequence[ComparedModel], donor: int) -> list[Finding]:
    """A warning if chat templates differ. A model without one does not count. donor: whose template the output has."""
    templates = [_template(model) for model in models]
    stated = {template for template in templates if template}
    if not stated or stated == {templates[donor]}:
        return []
    taken = f"the output has {models[donor].label}'s" if templates[donor] else "the output has none"
    digests = [hashlib.sha256(template.encode("utf-8", "replace")).hexdigest()[:8] for template in templates]
    told = [f"{len(t):,} characters ({digest})" if t else _NONE for t, digest in zip(templates, digests, strict=True)]
    details = _by_value(models, told)
    fix = "choose one with chat_template: auto, a name or a file"
    return [Finding(f"the models differ in chat template; {taken}", "chat_template", details, fix)]


def _template(model: ComparedModel) -> str:
    """The chat template as text, "" when there is none."""
    template = templates_of(model.folder, model.files)
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


# ---- architectures

_DIMENSIONS = (
    ("hidden size", ("hidden_size", "d_model", "n_embd", "dim")),
    ("intermediate size", ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim")),
    ("attention heads", _HEADS),
    ("key-value heads", ("num_key_value_heads", "num_kv_heads")),
)


def of_different_architectures(
    problems: Sequence[WeightsmithError], models: Sequence[ComparedModel], donor: int, where: str
) -> list[WeightsmithError]:
    """The problems; if the models' architectures differ, those of their tensors and layers are one.

    problems  in the order found
    where     of the models in the recipe
    """
    mismatches = [problem for problem in problems if isinstance(problem, MismatchError)]
    if all(isinstance(problem, LayerError) for problem in mismatches):  # it says more about what was asked for
        return list(problems)
    first = models[donor]
    for model in models:
        texts = _compared(first, model)
        if texts is None:
            continue
        lines = [f"{p.finding.where}: {p.finding.what}" if p.finding.where else p.finding.what for p in mismatches]
        details, fix = some_lines(lines, _SHOWN), "merge models of one architecture and size"
        what = f"the models have different architectures: {first.label} is {texts[0]}, and {model.label} is {texts[1]}"
        one = MismatchError(what, where=where, details=details, fix=fix)
        return [one, *(problem for problem in problems if not isinstance(problem, MismatchError))]
    return list(problems)


def _compared(a: ComparedModel, b: ComparedModel) -> tuple[str, str] | None:
    """Both architectures in words, with the first dimension that differs; None when they are the same."""
    types = [model.text.get("model_type") for model in (a, b)]
    names = [show(kind).strip("'") if isinstance(kind, str) else "of unknown type" for kind in types]
    for dimension, keys in _DIMENSIONS:
        values = [_stated(*keys)(model.text) for model in (a, b)]
        if None not in values and values[0] != values[1]:
            return f"{names[0]}, {dimension} {values[0]}", f"{names[1]}, {dimension} {values[1]}"
    return (names[0], names[1]) if None not in types and types[0] != types[1] else None


# ---- tensors that do not go together


OTHER_VOCABULARY = (
    "The vocabularies differ: write tokenizer_source: base (the base's tokenizer), union (with the added tokens of all) "
    "or the model whose tokenizer you want, and rows are matched by token."
)


def of_vocabularies(problem: WeightsmithError) -> bool:
    """True for tensors whose only difference is the number of tokens."""
    return isinstance(problem, ShapeError) and problem.finding.fix == OTHER_VOCABULARY


class Mismatches:
    """Collects missing tensors and unequal shapes."""

    def __init__(self, models: InputModels, method: str) -> None:
        self.labels, self.names, self.method = models.labels, models.names, method
        self._found: dict[object, tuple[MismatchError, int]] = {}

    def missing(self, name: str, segment: Segment, places: Sequence[int], sources: Sequence[str | None]) -> None:
        """Some inputs of the segment have no tensor `name`. places: of those that count for it."""
        pairs = [(segment.feeds[k].model, sources[k]) for k in places]
        specs = [(model, None if source is None else self.names[model].specs[source]) for model, source in pairs]
        details = [f"{self.labels[model]}: {'missing' if s is None else _shown(s)}" for model, s in specs]
        fix = "merge models that have the same tensors; only a whole module that one model has is copied from it"
        error = MismatchError("not all the models have this tensor", where=name, details=details, fix=fix)
        self._add(error, segment, tuple(s is None for s in sources))

    def unequal(self, name: str, segment: Segment, inputs: Mapping[int, TensorSpec]) -> None:
        """The inputs of a tensor differ in shape. inputs: by their places in the segment."""
        specs = list(inputs.values())
        fix = "merge models of one size; 'passthrough' takes tensors of one model each"
        if any(map(may_have_tokens, specs)) and len({s.shape[1:] for s in specs}) == 1:
            fix = OTHER_VOCABULARY
        details = [f"{self.labels[segment.feeds[k].model]}: {_shown(spec)}" for k, spec in inputs.items()]
        error = ShapeError(f"'{self.method}' needs equal shapes", where=name, details=details, fix=fix)
        self._add(error, segment, tuple(s.shape for s in specs))

    def unlike_donor(
        self, name: str, segment: Segment, spec: TensorSpec, model: int, donor_spec: TensorSpec, donor: int
    ) -> None:
        """A tensor outside the layers has another shape than in the donor, whose config.json the output takes.

        spec, model  the tensor and the model that it comes from
        own, donor   the donor's
        """
        what = f"the config.json of {self.labels[donor]} builds this tensor with another shape"
        details = [f"{self.labels[model]}: {_shown(spec)}", f"{self.labels[donor]}: {_shown(donor_spec)}"]
        fix = f"choose models of one size, or take what surrounds the layers from {self.labels[donor]}: "
        fix += "embeddings and positions come from the first slice, norms and heads from the last"
        self._add(ShapeError(what, where=name, details=details, fix=fix), segment, (spec.shape, donor_spec.shape))

    def problems(self) -> list[WeightsmithError]:
        """The problems in the order found."""
        suffix = {n: f"; so for {n - 1:,} more like it" if n > 1 else "" for _, n in self._found.values()}
        return [changed(error, what=error.finding.what + suffix[n]) for error, n in self._found.values()]

    def _add(self, error: MismatchError, segment: Segment, differing: tuple[object, ...]) -> None:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "N", error.finding.where)
        key = (error.finding.what, id(segment), pattern, differing)
        first, n = self._found.get(key, (error, 0))
        self._found[key] = first, n + 1


def _shown(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {spec.dtype}"
