"""compressed-tensors' entry of config.json, read and written: which scheme the weights have.

format                        codes                  scales
float-, naive-quantized       X.weight, F8_E4M3      X.weight_scale: of the matrix, a row, a group of a row, a block
int-, naive-quantized         X.weight, I8           the same
pack-quantized, 1 to 8 bits   X.weight_packed, I32   the same; and X.weight_shape. If not symmetric, also
                                                     X.weight_zero_point, I32, which is subtracted from the codes. If groups are
                                                     not in order, also X.weight_g_idx, I32: the group of each column
nvfp4-pack-quantized          X.weight_packed, U8    X.weight_scale, F8_E4M3: of 16 elements, divided by
                                                     X.weight_global_scale
mxfp4-pack-quantized          X.weight_packed, U8    X.weight_scale, U8: exponents, of 32 elements
mxfp8-quantized               X.weight, F8_E4M3      the same

**Targets.** A group has the modules that its `targets` name: names of modules, regular expressions after `re:` that fit the
beginning of a name, and names of classes. If several fit a module, names come first, then expressions in alphabetical order,
then classes, as in compressed-tensors. The expressions are strangers', so RE2 matches them, in linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from weightsmith._base.errors import Finding, FormatError
from weightsmith._base.files import show
from weightsmith._models.formats.config import damaged, unsupported
from weightsmith._models.formats.scaled import TENSOR, Scheme, Structure, read_block
from weightsmith._models.lora.config import INSTRUCTIONS, MAX_PATTERNS, MAX_STEPS, compiled

METHOD, MIXED = "compressed-tensors", "mixed-precision"


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    status = entry.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):  # older releases say frozen of codes too
        raise unsupported(f"compressed-tensors weights with quantization_status {show(status)} are not read", where)
    if rotation := entry.get("transform_config"):
        raise unsupported(f"compressed-tensors weights with a transform_config are not read: {show(rotation)}", where)
    sparsity = entry.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise unsupported(f"compressed-tensors weights with a sparsity_config are not read: {show(sparsity)}", where)
    groups = entry.get("config_groups")
    if not groups and entry.get("kv_cache_scheme"):
        groups = {}
    elif not isinstance(groups, Mapping) or not groups:
        raise unsupported(f"compressed-tensors without config_groups is not read: {show(groups)}", where)
    schemes = []
    for name, group in groups.items():
        label = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise unsupported(f"{show(label)} is not read: it is {show(group)}, not an object", where)
        if (weights := group.get("weights")) is None:  # activations alone
            continue
        scheme = scheme_of(group.get("format") or entry.get("format"), weights, label, where)
        schemes.append(replace(scheme, group=name))
    notes = []
    if entry.get("kv_cache_scheme"):
        notes.append(Finding("the KV cache's quantisation is dropped: plain weights have none", f"{where}: {place}"))
    return schemes, notes


def read_groups(entry: Mapping[str, Any], where: str) -> Callable[[str], str]:
    """The group of a module, from the entry in config.json. Targets are read for the first module: few models need them."""

    @cache
    def targets() -> Targets:
        return Targets({name: group.get("targets") for name, group in entry["config_groups"].items()}, where)

    return lambda module: targets().group_of(module)


_FORMATS: Mapping[str, Mapping[tuple[str, int], Scheme]] = {
    "float-quantized": {("float", 8): Scheme("float8", "F8_E4M3", TENSOR)},
    "int-quantized": {("int", 8): Scheme("int8", "I8", TENSOR)},
    "naive-quantized": {("float", 8): Scheme("float8", "F8_E4M3", TENSOR), ("int", 8): Scheme("int8", "I8", TENSOR)},
    "pack-quantized": {("int", bits): Scheme(f"offset{bits}", "I32", TENSOR, packed=True, shaped=True) for bits in range(1, 9)},
    "nvfp4-pack-quantized": {("float", 4): Scheme("float4", "U8", TENSOR, packed=True, scales=("F8_E4M3",), divided=True)},
    "mxfp8-quantized": {("float", 8): Scheme("float8", "F8_E4M3", TENSOR, scales=("U8",))},
    "mxfp4-pack-quantized": {("float", 4): Scheme("float4", "U8", TENSOR, packed=True, scales=("U8",))},
}
"""compressed-tensors' formats: (type, bits) → how the weights are stored. The block comes from the strategy."""

_ZEROED = ("group", "channel")
"""Strategies with which packed codes may have zero points."""


def scheme_of(format_: object, weights: object, label: str, where: str) -> Scheme:
    """How weights are stored, from a group of config.json. label: of the group. Raises Unsupported, FormatError."""
    if not isinstance(format_, str) or format_ not in _FORMATS:
        raise unsupported(f"compressed-tensors format {show(format_)} is not read, only {', '.join(_FORMATS)}", where)
    if not isinstance(weights, Mapping):
        raise unsupported(f"{show(label)}.weights is not read: it is {show(weights)}, not an object", where)
    read = _FORMATS[format_]
    stated = {key: weights.get(key, default) for key, default in (("type", "int"), ("num_bits", 8))}
    for key, expected in (("type", {t for t, _ in read}), ("num_bits", {b for _, b in read})):
        if type(stated[key]) not in (str, int) or stated[key] not in expected:
            names = " and ".join(sorted(map(str, expected)))
            what = f"compressed-tensors {format_} weights with {key} {show(stated[key])} are not read, only {key} {names}"
            raise unsupported(f"{what} ({show(label)})", where)
    zeroed = format_ == "pack-quantized" and weights.get("symmetric") is False and weights.get("strategy") in _ZEROED
    for key, required, default in (("symmetric", not zeroed, True), ("dynamic", False, False)):
        if (value := weights.get(key, default)) is not required:
            what = f"compressed-tensors {format_} weights with {key} {show(value)} are not read, only {key} {required!r}"
            raise unsupported(f"{what} ({show(label)})", where)
    block = _structure(weights, format_, label, where)
    return replace(read[stated["type"], stated["num_bits"]], block=block, zeroed=zeroed)


def _structure(weights: Mapping[str, Any], format_: str, label: str, where: str) -> Structure:
    strategy = weights.get("strategy")
    if strategy in ("group", "tensor_group"):
        group = weights.get("group_size")
        if type(group) is not int or group < 1:
            raise damaged(f"{show(label)}.weights.group_size is {show(group)}, not a positive integer", where)
        return 1, group
    if strategy == "tensor" or strategy is None:
        return TENSOR
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        return read_block(weights.get("block_structure"), f"{label}.weights.block_structure", where)
    what = f"compressed-tensors strategy {show(strategy)} is not read for {format_} weights"
    raise unsupported(f"{what}, only tensor, channel, group, tensor_group and block ({show(label)})", where)


def _activations(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Quantised at run time, unless they say otherwise."""
    return {**arguments, "symmetric": True, "dynamic": arguments.get("dynamic", True)}


def quantization_config(
    format: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None, ignored: Sequence[str]
) -> dict[str, Any]:
    """compressed-tensors' entry of config.json: one group with all linear modules except the ignored ones.

    >>> quantization_config("int-quantized", {"num_bits": 8}, None, ["lm_head"])["quantization_config"]["ignore"]
    ['lm_head']
    """
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "symmetric": True, "dynamic": False},
        "input_activations": None if activations is None else _activations(activations),
        "output_activations": None,
        "format": format,
    }
    return {
        "quantization_config": {
            "quant_method": METHOD,
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    }


def mixed_config(configs: Sequence[Mapping[str, Any]], targets: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The entry of weights in several encodings: a group for each, of the format `mixed-precision`.

    configs  `quantization_config` of each
    targets  the modules of each, names or patterns

    >>> floats = quantization_config("float-quantized", {"num_bits": 8}, None, ["lm_head"])
    >>> integers = quantization_config("int-quantized", {"num_bits": 8}, None, ["lm_head"])
    >>> both = mixed_config([floats, integers], [["re:.*attn.*"], ["re:.*mlp.*"]])["quantization_config"]
    >>> both["format"], {name: (group["format"], group["targets"]) for name, group in both["config_groups"].items()}
    ('mixed-precision', {'group_0': ('float-quantized', ['re:.*attn.*']), 'group_1': ('int-quantized', ['re:.*mlp.*'])})
    """
    entries = [config["quantization_config"] for config in configs]
    groups = [
        {**entry["config_groups"]["group_0"], "targets": list(names)} for entry, names in zip(entries, targets, strict=True)
    ]
    formats = dict.fromkeys(group["format"] for group in groups)
    format_ = next(iter(formats)) if len(formats) == 1 else MIXED
    named_groups = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quantization_config": {**entries[0], "format": format_, "config_groups": named_groups}}


# ---- the group of a module

_EXPRESSION = "re:"
_CLASSES, _EMBEDDING_CLASSES = ("Linear", "LinearBase", "Module"), ("Embedding", "Module")
"""Classes of modules that have a matrix of codes, by which groups name them."""
_EMBEDDING = "embed"
"""What names of embeddings contain."""


class Targets:
    """The targets of all groups.

    groups  name of a group in config.json → its targets
    """

    def __init__(self, groups: Mapping[str, object], where: str) -> None:
        """Raises FormatError for targets that are no texts, and for expressions that are not read."""
        self._where = where
        self._group_of: dict[str, str] = {}
        for group, targets in groups.items():
            for target in ["Linear"] if targets is None else targets if isinstance(targets, list) else [targets]:
                if not isinstance(target, str):
                    raise self._unread(f"config_groups.{group}.targets holds {show(target)}, not a text")
                # compressed-tensors takes the later of two groups. That may be a mistake, so such a target tells nothing.
                self._group_of[target] = "" if target in self._group_of else group
        texts = sorted(target for target in self._group_of if target.startswith(_EXPRESSION))
        if len(texts) > MAX_PATTERNS:
            raise self._unread(f"config_groups has {len(texts):,} regular expressions, and at most {MAX_PATTERNS:,} are read")
        self._expressions = {text: self._compiled(text) for text in texts}
        self._left = MAX_STEPS

    def group_of(self, module: str) -> str:
        """The group of a module whose matrix is stored as codes; "" if no target fits, or several groups have it. Raises
        FormatError."""
        if module in self._group_of:
            return self._group_of[module]
        if self._expressions and not (module.isascii() and module.isprintable()):  # RE2's classes are those of ASCII
            raise self._unread(f"the targets of config_groups are compared with the name {show(module)}, which is not ASCII")
        self._left -= len(module) * sum(pattern.programsize for pattern in self._expressions.values()) // INSTRUCTIONS
        if self._left < 0:
            raise self._unread("the targets of config_groups take too long to match with the names of all modules")
        for target, expression in self._expressions.items():
            if expression.match(module):
                return self._group_of[target]
        classes = _EMBEDDING_CLASSES if _EMBEDDING in module.rpartition(".")[2] else _CLASSES
        return next((self._group_of[name] for name in classes if name in self._group_of), "")

    def _compiled(self, text: str) -> Any:
        try:
            return compiled(text.removeprefix(_EXPRESSION))
        except ValueError as error:
            raise self._unread(f"config_groups has a target {show(text)} that is not read: {error}") from None

    def _unread(self, what: str) -> FormatError:
        return FormatError(what, where=self._where, fix="Write names of modules in place of regular expressions.")
