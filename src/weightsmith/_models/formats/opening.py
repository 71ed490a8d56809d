"""How a model's weight files become plain tensors: which file format they have, and which stored format decodes them.

What no format has decoded is refused if it looks like codes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.files import Opener, open_local, show
from weightsmith._base.strict_json import parse_object, read_object
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import some
from weightsmith._files.hf_folder import FolderWeights, natural_key, no_weights, of_ranks, read_index, unlisted_shards
from weightsmith._files.subfolders import within
from weightsmith._models.formats import FORMATS, broken, each_of_files, each_of_tensors
from weightsmith._models.formats.config import (
    DAMAGED_CHECKPOINT,
    SETTINGS_FILES,
    SETTINGS_METADATA,
    config_entries,
    method_of,
    without_entries,
)
from weightsmith._models.formats.fused_experts import with_single_experts
from weightsmith._models.sources.composed import unwrapped, with_current_norms
from weightsmith.abc.stored import Config, Specs, Wrapped
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles, Verbatim

MAX_CONFIG_BYTES = 16 << 20


_MEGATRON_EMBEDDING = "embedding.word_embeddings.weight"
_SAFETENSORS = ".safetensors"
_PLAIN_ENDS = (".weight", ".bias")
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_LOADED_STEMS = (("model", "pytorch_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model"))
"""Names under which transformers and diffusers look for weights, without suffixes: in safetensors, and in pickles."""


def kinds() -> Iterator[FileKind]:
    """File formats, in order of preference if a folder holds several."""
    return (kind for stored_format in each_of_files() for kind in stored_format.files)


def surely_plain(config: Config | None, specs: Specs) -> bool:
    """Whether a look at names and dtypes is enough to say that no format stores these tensors. Formats are not imported then.

    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> surely_plain({}, {"q.weight": TensorSpec("q.weight", DTYPES["BF16"], (8, 8))})
    True
    >>> surely_plain({}, {"q.scale": TensorSpec("q.scale", DTYPES["BF16"], (8, 8))})
    False
    """
    if config_entries(config or {}) or FORMATS.brought:
        return False
    return all(name.endswith(_PLAIN_ENDS) and spec.dtype.name in _PLAIN_DTYPES for name, spec in specs.items())


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder, not yet opened.

    kind     their format
    paths    in natural order
    index    the index that lists them, if any
    ignored  names of weight files that are not part of the model: of this format, and those that it is read instead of
    """

    kind: FileKind
    paths: tuple[Path, ...]
    index: Index | None
    ignored: tuple[str, ...]

    def open(self, where: str, open_file: Opener = open_local) -> OpenedFiles:
        """Open them; see `FileKind.open`. where: the model as the user named it. Files of weights that are not read are noted:
        shards that the index leaves out, and safetensors that transformers and diffusers do not find.
        """
        opened = self.kind.open(self.paths, self.index, where, open_file)
        safetensors = [name for name in self.ignored if name.lower().endswith(_SAFETENSORS)]
        if safetensors and _SAFETENSORS not in self.kind.suffixes:
            what = f"{self.paths[0].name} is read, as in transformers and diffusers. vLLM prefers safetensors: "
            what += f"{some(safetensors, 2)}, not read here"
            fix = "move the .bin files away to read the safetensors, or name a single file"
            opened = replace(opened, notes=(*opened.notes, Finding(what, where, fix=fix)))
        if self.index is None:
            return opened
        unlisted = unlisted_shards([path.name for path in self.paths], self.ignored)
        notes = []
        if unlisted.there:
            notes.append(f"its index has no tensor of {some(unlisted.there, 2)}, so nothing is read from there")
        if unlisted.lost:
            others = ", …" if unlisted.count > len(unlisted.lost) else ""
            what = f"its shards are numbered as if there were {unlisted.count:,} more"
            notes.append(f"{what}, neither in its index nor in the folder: {', '.join(unlisted.lost)}{others}")
        fix = "download index and weight files again, if the model should have these tensors"
        return replace(opened, notes=(*opened.notes, *(Finding(what, where, fix=fix) for what in notes)))


def choose_kind(names: Collection[str], where: str) -> tuple[FileKind, FolderWeights]:
    """The first kind with weights in the folder, and their files. Looks only at names.

    names  relative names of all files in the folder
    where  the folder or hub repository, for messages

    Raises what `FileKind.choose` raises, and the errors of `no_weights` and of `of_ranks`.
    """
    passed_over = _not_found(names)
    listed = [name for name in names if name not in passed_over]
    error: Unsupported | None = None
    for kind in kinds():
        if error is not None and not kind.joins:
            continue
        chosen = kind.choose(listed, where)
        if chosen is not None:
            if kind.joins or (error := of_ranks(chosen.files, where)) is None:
                weights = (name for name in sorted(passed_over, key=natural_key) if not name.endswith(".json"))
                return kind, replace(chosen, ignored=(*chosen.ignored, *weights))
    raise error or of_ranks(listed, where) or no_weights(listed, where, suffixes())


def _not_found(names: Collection[str]) -> set[str]:
    """Safetensors and their indexes that transformers and diffusers do not find, in a folder with pickles that they load.

    >>> sorted(_not_found(["pytorch_model.bin", "model.fp16.safetensors", "config.json"]))
    ['model.fp16.safetensors']
    """
    present = set(names)
    for stem, pickled in _LOADED_STEMS:
        if present & {f"{stem}{_SAFETENSORS}", f"{stem}{_SAFETENSORS}.index.json"}:
            return set()
        shards = f"{pickled}.bin.index.json" in present and any(re.fullmatch(rf"{pickled}-.+\.bin", name) for name in present)
        if shards or f"{pickled}.bin" in present:
            ends = (_SAFETENSORS, f"{_SAFETENSORS}.index.json")
            others = (name for name in present if "/" not in name and name.lower().endswith(ends))
            return {name for name in others if not name.startswith("adapter_model")}
    return set()


def find_weights(folder: Path, names: Collection[str], where: str) -> WeightFiles:
    """The weight files of a folder; arguments as for `choose_kind`. Reads only the index, if any.

    Raises as `choose_kind` and `read_index`.
    """
    kind, chosen = choose_kind(names, where)
    index, files = None, chosen.files
    if chosen.index is not None:
        index = folder / chosen.index, read_index(folder / chosen.index, set(names), kind.suffixes)
        files = tuple(sorted(set(index[1].values()), key=natural_key))
    ignored = tuple(name for name in chosen.ignored if name not in files)
    return WeightFiles(kind, tuple(folder / name for name in files), index, ignored)


def find_subfolders(folder: Path, names: Collection[str], folders: Sequence[str], where: str) -> dict[str, WeightFiles]:
    """The weight files of the subfolders that have some, by folder. folders: with modules of the model.

    Raises as `find_weights`, also for weights that are not read, such as those of an adapter.
    """
    subfolders = {}
    for inner in folders:
        inside = [name.removeprefix(f"{inner}/") for name in names if within(name, (inner,))]
        if any(name.lower().endswith(suffixes()) for name in inside):
            subfolders[inner] = find_weights(folder / inner, inside, f"{where}/{inner}")
    return subfolders


def open_file(path: Path, where: str, opener: Opener = open_local) -> OpenedFiles:
    """Open a single weight file. Raises Unsupported for an unknown suffix or a part of a model, else as `FileKind.open`."""
    if error := of_ranks([path.name], str(path.parent)):
        raise error
    for kind in kinds():
        if path.name.lower().endswith(kind.suffixes) or kind.owns(path):
            return kind.open((path,), None, where, opener)
    if path.suffix in (".yml", ".yaml"):
        fix = "Name a model. For a recipe: weightsmith plan, or weightsmith preview."
        raise Unsupported("this is a recipe, not a model", where=where, fix=fix)
    *others, last = suffixes()
    raise Unsupported(
        f"not a weight file: its name does not end with {', '.join(others)} or {last}",
        where=where,
        fix="Name a folder, or a weight file in one of these formats.",
    )


def suffixes() -> tuple[str, ...]:
    """The suffixes of weight files of all kinds, lower case."""
    return tuple(suffix for kind in kinds() for suffix in kind.suffixes)


def describe_quantisation(config: Mapping[str, Any] | None, specs: Specs) -> str | None:
    """What the weights are quantised with and how that shows, or None if they are plain numbers.

    config  the model's config.json; a multi-modal one may keep the entry in a sub-config
    specs   all tensors by name

    >>> describe_quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {})
    "'gptq', 4 bits (quantization_config in config.json)"
    """
    for where, entry in config_entries(config or {}):
        method = entry.get("quant_method") or entry.get("mode") or "unnamed method"
        bits = f", {show(entry['bits'])} bits" if "bits" in entry else ""
        return f"{show(method)}{bits} ({where} in config.json)"
    if surely_plain(config, specs):
        return None
    marks = [mark for stored_format in each_of_tensors() for mark in stored_format.marks.items()]
    suffixes = tuple(suffix for suffix, _ in marks)
    for name in specs:
        if name.endswith(suffixes):
            for suffix, mark in marks:
                if name.endswith(suffix) and (label := mark(name, specs)):
                    return f"{label} (tensor {show(name)})"
    return describe_codes(specs)


def stale_entry(config: Config | None, specs: Specs) -> str:
    """What config.json says of a quantisation that the tensors do not have; "" if it says nothing, or may be right.

    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> plain = {"q.weight": TensorSpec("q.weight", DTYPES["BF16"], (8, 8))}
    >>> stale_entry({"quantization_config": {"quant_method": "gptq", "bits": 4}}, plain)
    "'gptq', 4 bits (quantization_config in config.json)"
    """
    described = describe_quantisation(config, {}) or ""
    if not described:
        return ""
    return described if are_plain(specs) and describe_quantisation({}, specs) is None else ""


def without_stale_entry(wrapped: Wrapped, where: str) -> Wrapped:
    """The model without what config.json says of a quantisation that the tensors do not have, and a note on that."""
    stale = stale_entry(wrapped.config, wrapped.source.specs)
    if not stale:
        return wrapped
    note = Finding(f"its weights are plain, so the quantisation that config.json names is ignored: {stale}", where)
    return replace(wrapped, config=without_entries(wrapped.config or {}), notes=(*wrapped.notes, note))


def read_config(path: Path) -> dict[str, Any]:
    """config.json, or a file like it. Of a repeated key the last one counts, as in other readers. Raises FormatError."""
    return read_object(path, MAX_CONFIG_BYTES, path.name, f"Repair {path.name}, or download it again.", unique=False)


def complete_config(config: Config | None, folder: Path, names: Collection[str], specs: Specs) -> Config | None:
    """config.json; if it says nothing of a quantisation that the tensors have, with what a file of `SETTINGS_FILES` says.

    Only a file whose format the tensors may have is read. Raises FormatError if it is no JSON object.
    """
    if config is None or config_entries(config):
        return config
    for name, method in SETTINGS_FILES.items():
        if name not in names or not _is_quantised({**config, "quantization_config": {"quant_method": method}}, specs):
            continue
        settings = read_config(folder / name)
        inner = settings.get("quantization")
        entry = inner if isinstance(inner, Mapping) else settings
        whole = {**config, "quantization_config": {**entry, "quant_method": entry.get("quant_method") or method}}
        if _is_quantised(whole, specs):
            return whole
    return config


def with_metadata(config: Config | None, opened: OpenedFiles, where: str) -> Config | None:
    """config.json; if it says nothing of a quantisation that the tensors have, with what the metadata of their files say. Both
    may name the same one: the metadata say more.

    Raises FormatError if that is no JSON object.
    """
    for key, method in SETTINGS_METADATA.items():
        if config_entries(config or {}) and method_of(config or {}) != method:
            continue
        named = {**(config or {}), "quantization_config": {"quant_method": method}}
        if key in opened.metadata and _is_quantised(named, opened.source.specs):
            entry = parse_object(opened.metadata[key].encode(), f"{key} in its metadata", where, DAMAGED_CHECKPOINT)
            return {**without_entries(config or {}), "quantization_config": {**entry, "quant_method": method}}
    return config


def _is_quantised(config: Config, specs: Specs) -> bool:
    """A stored format recognises the model."""
    return not surely_plain(config, specs) and any(known.recognises(config, specs) for known in each_of_tensors())


def wrap(opened: OpenedFiles, config: Config | None, where: str) -> Wrapped:
    """The tensors of a model, decoded by the first stored format that recognises them, else as stored. Without config.json it
    stays so. What torch's wrappers have added to names is left out, with a note. BERT's norms have their current names, and
    experts that transformers joins in memory are apart, as in its files.

    Raises FormatError if two names become the same.
    """
    of_transformers = "model_type" in (config or {})
    source = unwrapped(opened.source, where, parallel=of_transformers)
    named = source if config is None else with_current_norms(source, where)
    current = named if config is None else with_single_experts(named, config, where)
    wrapped = _wrap(opened if current is opened.source else replace(opened, source=current), config, where)
    notes = []
    if source is not opened.source:
        stored = next(name for name in opened.source.specs if name not in source.specs)
        notes.append(f"names of its tensors are read without what torch's wrappers added to them, as in {show(stored)}")
    if current is not named:
        joined = next(name for name in named.specs if name not in current.specs)
        notes.append(f"its experts are read as a matrix for each, which transformers has joined in memory ({show(joined)})")
    return replace(wrapped, notes=(*(Finding(what, where) for what in notes), *wrapped.notes))


def _wrap(opened: OpenedFiles, config: Config | None, where: str) -> Wrapped:
    source, described = opened.source, with_metadata(config, opened, where) or {}
    if _MEGATRON_EMBEDDING in source.specs:
        from weightsmith._models.formats.training.megatron_names import in_hub_names, is_megatron

        if is_megatron(source.specs):
            return in_hub_names(source, config, where)
    if surely_plain(described, source.specs):
        return _of_mlx(opened, config, where)
    for stored_format in each_of_tensors():
        if stored_format.recognises(described, source.specs):
            wrapped = stored_format.read(source, described, where)
            return replace(wrapped, kind=stored_format.title, config=None if config is None else wrapped.config)
    return replace(_of_mlx(opened, config, where), notes=broken() if config_entries(config or {}) else ())


def verbatim_of(wrapped: Wrapped, opened: OpenedFiles) -> Verbatim | None:
    """The tensors as the files have them, if those that are decoded can be copied so.

    wrapped  what became of the opened files
    """
    if wrapped.source is opened.source:
        return opened.verbatim
    if not wrapped.kind:
        return None
    from weightsmith._models.formats.decoded import DecodedTensors

    return wrapped.source.verbatim if isinstance(wrapped.source, DecodedTensors) else None


def _of_mlx(opened: OpenedFiles, config: Config | None, where: str) -> Wrapped:
    """Plain tensors, in the Hub's layout if MLX has written them."""
    plain = Wrapped(opened.source, config)
    if opened.metadata.get("format") != "mlx":
        return plain
    from weightsmith._models.formats.mlx import in_hub_layout

    return in_hub_layout(plain, where)


# ---- Codes that no format has decoded: tensors that are no weights by themselves, although neither config.json nor a name
# says so. Programs call scales by dozens of names, so what is looked for is not a name. A matrix of 8-bit floats is plain
# numbers only if it is alone. If its module has another floating-point tensor, that may be a scale, and the numbers are codes:
#
#     X.weight F8_E4M3, with X.scale, X.weight_scales, X.weight._scale or X_scale
#
# A matrix of integers under the name of a weight is codes in any case. Other integers are positions, masks, tables of tokens
# or counters. They are codes only if their module has a scale and no other weight. Some programs use names that no plain model
# has.


_UNDECODED = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_FLOAT8 = ("F8_E4M3", "F8_E5M2", *_UNDECODED)
_EXPONENTS = "F8_E8M0"
_WEIGHT = "weight"
_CODE_WORDS = frozenset("codes data fp8 int8 packed q qdata quantized values weight".split())
"""Last words of names of codes: the scale of X_qdata is X_scale."""
_SCALE_WORDS = ("scale", "scaling", "amax", "absmax", "zero", "codebook", "lut")
_HARMLESS_WORDS = ("bias", "norm", "gamma", "beta", "running", "correction")
"""Parts of names of tensors that plain weights have beside them."""
_TABLE_WORDS = ("index", "indices", "idx", "ids", "mask", "bias", "position", "coords")
"""Parts of names of integers that are no codes, even beside a learned scale."""

_PROGRAMS = {
    ".dense_weights": "SpQR",
    ".dqweight": "FP-Quant",
    ".forward_hadamard_matrix": "FP-Quant",
    ".centroids.weight": "VPTQ",
}
"""Ends of names of tensors that only one program has."""

_CODES = ("w_q", "b", "blocks")
"""Last components of names of codes: HQQ's, Marlin's and QQQ's, and those of gpt-oss's own files."""

_PARTS = frozenset("absmax centroids codebooks codes g_idx indices qidxs qweight qzeros scales w_q zeros".split())
"""Last parts of tensor names that plain models never have, whatever the dtype."""


def describe_codes(specs: Specs) -> str | None:
    """Which tensor holds codes, and how that shows; None if all tensors are plain numbers.

    >>> from weightsmith._base.tensors import DTYPES
    >>> found = TensorSpec("q.weight", DTYPES["F8_E4M3"], (8, 8)), TensorSpec("q.wscale", DTYPES["F32"], ())
    >>> describe_codes({spec.name: spec for spec in found})
    "F8_E4M3 codes in an unknown layout, beside 'q.wscale' F32 [] (tensor 'q.weight')"
    """
    ends = tuple(_PROGRAMS)
    for spec in specs.values():
        if spec.name.endswith(ends):
            program = next(program for end, program in _PROGRAMS.items() if spec.name.endswith(end))
            return f"{program} (tensor {show(spec.name)})"
        if spec.dtype.name == _EXPONENTS:
            return f"codes with scales in F8_E8M0 (tensor {show(spec.name)})"
        if _is_integer_weight(spec):
            return f"{spec.dtype} codes in an unknown layout (tensor {show(spec.name)})"
        if spec.dtype.name in _UNDECODED and len(spec.shape) > 1 and spec.size:
            return f"numbers in {spec.dtype}, which are not decoded (tensor {show(spec.name)})"
    for codes, scale in _pairs(specs):
        scale_text = f"beside {show(scale.name)} {scale.dtype} {list(scale.shape)}"
        return f"{codes.dtype} codes in an unknown layout, {scale_text} (tensor {show(codes.name)})"
    return None


def are_plain(specs: Specs) -> bool:
    """Weights are floating-point numbers of 16 bits or more, integers are tables, and no name is that of a part of codes.

    >>> from weightsmith._base.tensors import DTYPES
    >>> are_plain({"q.weight": TensorSpec("q.weight", DTYPES["BF16"], (8, 8))})
    True
    >>> are_plain({"q.scales": TensorSpec("q.scales", DTYPES["BF16"], (8, 8))})
    False
    """
    for spec in specs.values():
        leaf = spec.name.rpartition(".")[2].lower()
        table = any(word in leaf for word in _TABLE_WORDS) or spec.dtype.itemsize == 8
        if leaf in _PARTS or (may_be_codes(spec) and not table):
            return False
    return True


def may_be_codes(spec: TensorSpec) -> bool:
    """The tensor is codes if it has scales: 8-bit floats, or a matrix of integers."""
    return spec.dtype.name in _FLOAT8 or _is_integer_matrix(spec)


def _is_integer_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1 and spec.dtype.name[0] in "IU" and spec.size > 0


def _is_integer_weight(spec: TensorSpec) -> bool:
    if not _is_integer_matrix(spec):
        return False
    leaf = spec.name.rpartition(".")[2].lower()
    if any(word in leaf for word in _TABLE_WORDS):
        return False
    return _WEIGHT in leaf or leaf.endswith("_proj") or leaf in _CODES


def _pairs(specs: Specs) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """Codes, each with a tensor that shows what they are."""
    stems: dict[str, TensorSpec] = {}
    for spec in filter(may_be_codes, specs.values()):
        stems |= dict.fromkeys(_stems_of_codes(spec, specs), spec)
    for spec in specs.values() if stems else ():
        if not spec.dtype.floating or spec.dtype.name in _FLOAT8:
            continue
        for stem in _stems(spec.name):
            codes = stems.get(stem)
            if codes is not None and _is_scale(spec.name, stem, codes):
                yield codes, spec


def _stems_of_codes(codes: TensorSpec, specs: Specs) -> Iterator[str]:
    """What the names of the scales of these codes begin with: their own name, less a last word, or the module's."""
    module, _, leaf = codes.name.rpartition(".")
    yield codes.name
    head, _, word = leaf.rpartition("_")
    if head and word in _CODE_WORDS:
        yield f"{module}.{head}" if module else head
    elif leaf == f"_{word}" and word in _CODE_WORDS:  # of Quanto: X.weight._data
        yield module
    if codes.dtype.name in _FLOAT8:
        if leaf == _WEIGHT and len(codes.shape) > 1:
            yield module
    elif codes.dtype.itemsize <= 4 and not any(word in leaf for word in _TABLE_WORDS) and not _has_weight(module, specs):
        yield module


def _has_weight(module: str, specs: Mapping[str, TensorSpec]) -> bool:
    """A module has plain weights, so that its integers are something else: DeepSeek V4's router has a table of tokens."""
    weight = specs.get(f"{module}.{_WEIGHT}")
    return weight is not None and weight.dtype.floating


def _stems(name: str) -> Iterator[str]:
    """Beginnings of a name: up to its last dot, and up to each underscore after it.

    >>> list(_stems("mlp.up_proj.weight_scale"))
    ['mlp.up_proj', 'mlp.up_proj.weight']
    """
    start = max(name.rfind("."), 0)
    yield name[:start]
    while (start := name.find("_", start + 1)) > 0:
        yield name[:start]


def _is_scale(name: str, stem: str, codes: TensorSpec) -> bool:
    """A floating-point tensor may be the scale of codes. stem: of both."""
    rest = name.removeprefix(stem).lower()
    if any(word in rest for word in _HARMLESS_WORDS):
        return False
    belongs = stem == codes.name or not rest.startswith("_") or not stem
    return (belongs and codes.dtype.name in _FLOAT8) or any(word in rest for word in _SCALE_WORDS)
