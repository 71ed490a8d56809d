"""Opens an adapter, in whatever form it is: a folder that PEFT has written, one with a single file of factors, or that file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported, WeightsmithError
from weightsmith._base.files import exists, file_names, is_folder, show
from weightsmith._base.strict_json import parse_object, read_object
from weightsmith._base.text import count
from weightsmith._files.copied import is_weights
from weightsmith._files.hf_folder import PYTORCH_SUFFIXES
from weightsmith._models.checkpoint import Checkpoint, HubModel, ModelFolder, locate, open_place
from weightsmith._models.formats.opening import open_file
from weightsmith._models.lora.adapter import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MOST_DIMENSIONS,
    PREFIX,
    WEIGHTS_NAMES,
    Adapter,
    Factors,
    FileNames,
    OtherParts,
    Scalings,
    sort_tensors,
)
from weightsmith._models.lora.apply import apply_adapter
from weightsmith._models.lora.config import check_config
from weightsmith._models.lora.forms import (
    ALPHA,
    BASE_LAYER,
    DORA,
    Factored,
    FactorNames,
    find_factors,
    other_kind,
    split_factor,
    unnamed,
)
from weightsmith._models.lora.kinds import KINDS, kind_of_part
from weightsmith._models.lora.mlx_and_gguf import SUFFIX, is_gguf, is_gguf_adapter, is_mlx
from weightsmith._models.lora.networks import DENOISER_BLOCKS, PUT_PREFIX, UNKNOWN, network_of
from weightsmith._models.lora.peft_folder import open_peft
from weightsmith._models.sources.composed import PartTensors, renamed

# ---- Single files of LoRA factors, without an adapter_config.json: kohya's, diffusers', ComfyUI's


METADATA_KEY = "lora_adapter_metadata"
"""What diffusers writes into a file's metadata: rank, alpha and more of each network, as JSON."""

DORA_SCALE = ".dora_scale"
"""Ending of norms of DoRA in files of LyCORIS and OneTrainer: of rows [outputs, 1] or of columns [1, inputs]."""

_NORMS = re.compile(rf"(.+)(?:{re.escape(DORA_SCALE)}|\.lora_magnitude_vector(?:\.default)?(?:\.weight)?)")
_EMBEDDING_BUNDLE = "bundle_emb."
_OF_MODULATION = "diff_m"
"""A difference for a module's parameter `modulation`, in lightx2v's adapters for Wan."""
_SHOWN = 8
_WAY_OUT = "merge it into its base with the program that made it, and use that model"
_Parts = dict[str, tuple[str, FactorNames]]


def read_file(checkpoint: Checkpoint, path: Path) -> Adapter:
    """The adapter in a file whose names are of factors.

    Raises Unsupported for what is no B @ A, and for a scale that is in no file; FormatError for factors that do not fit.
    """
    where = str(path)
    parts_of_module, alphas, strange = _sorted(checkpoint)
    norms, strange = _norms(strange, parts_of_module)
    others, strange = _others(checkpoint, strange, alphas, parts_of_module)
    strange += [norms[module] for module in norms if module not in parts_of_module]
    if kinds := dict.fromkeys(filter(None, map(other_kind, strange))):
        named = [f"{show(name)}: {other_kind(name)}" for name in strange if other_kind(name)]
        what = f"it is {' and '.join(kinds)}, which is not applied from a single file"
        raise Unsupported(what, where=where, details=named[:_SHOWN], fix=_WAY_OUT)
    if not parts_of_module and not others:
        fix = f"name the folder that holds {CONFIG_NAME}, or a single file with lora_down and lora_up, or lora_A and lora_B"
        details = [show(name) for name in strange[:3]]
        what = "a single file that is not a LoRA of kohya's scripts, or of diffusers"
        raise Unsupported(what, where=where, details=details, fix=fix)
    strange += [alphas.pop(module) for module in [*alphas] if module not in parts_of_module and not _states(others, module)]
    if strange:
        what = f"{count(len(strange), 'tensor')} of it are neither factors nor alpha of a module"
        fix = _WAY_OUT
        if all(name.startswith(_EMBEDDING_BUNDLE) for name in strange):
            what = f"it has embeddings of new words beside the factors: {count(len(strange), 'tensor')}"
            fix = "remove these tensors from a copy of the file, and use the copy; load the embeddings from a file of their own"
        raise Unsupported(what, where=where, details=[show(name) for name in strange[:_SHOWN]], fix=fix)
    flat = _is_flat([*parts_of_module, *others], where)
    scale = _Scale(checkpoint, alphas, where, flat=flat)
    problems, updates = list[str](), dict[str, Factors]()
    for module, parts in parts_of_module.items():
        factors = _factors(checkpoint, module, parts, scale, norms.get(module, ""))
        if isinstance(factors, str):
            problems.append(factors)
        else:
            updates[module] = factors
    if problems:
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        raise FormatError(what, where=where, details=problems[:_SHOWN], fix="repair it, or save it again with its trainer")
    pairs = {module: parts["A"][1] for module, parts in parts_of_module.items()}
    return Adapter(checkpoint, updates, file=FileNames(flat, pairs, frozenset(alphas)), others=others)


def _norms(strange: Sequence[str], modules: Container[str]) -> tuple[dict[str, str], list[str]]:
    """Module with factors → its norms of DoRA; and the tensors that are none."""
    norms, rest = dict[str, str](), list[str]()
    for name in strange:
        match = _NORMS.fullmatch(name)
        if match and match[1] in modules and match[1] not in norms:
            norms[match[1]] = name
        else:
            rest.append(name)
    return norms, rest


def _others(
    checkpoint: Checkpoint, strange: Sequence[str], alphas: Mapping[str, str], parts_of_factors: dict[str, _Parts]
) -> tuple[dict[str, OtherParts], list[str]]:
    """Module → its tensors of another kind; and the tensors of none. Takes the factors around a core out of `parts_of_factors`.

    A module may have factors and a difference of its bias.
    """
    parts_of_module: dict[str, dict[str, str]] = {}
    rest = list[str]()
    for name in strange:
        module, dot, part = name.removesuffix(".weight").rpartition(".")
        if part == _OF_MODULATION:
            module, part = f"{module}{'.' if '.' in module else '_'}modulation", "diff"
        if dot and kind_of_part(part) and part not in parts_of_module.get(module, {}):
            parts_of_module.setdefault(module, {})[part] = name
        else:
            rest.append(name)
    others = dict[str, OtherParts]()
    for module, parts in parts_of_module.items():
        if "lora_mid" in parts:
            around = parts_of_factors.pop(module, {})
            parts |= {"lora_down" if part == "A" else "lora_up": name for part, (name, _) in around.items()}
        kind = kind_of_part(next(iter(parts)))
        stated = module in alphas and "alpha" in KINDS.get(kind).used
        others[module] = OtherParts(kind, parts, {"alpha": _alpha_in(checkpoint, alphas[module])} if stated else {})
    return others, rest


def _states(others: Mapping[str, OtherParts], module: str) -> bool:
    """Whether an alpha of a module counts."""
    return module in others and "alpha" in others[module].settings


def _alpha_in(checkpoint: Checkpoint, name: str) -> float | str:
    """A number of a module; or what is wrong with it."""
    spec = checkpoint.specs[name]
    if spec.size != 1 or spec.dtype.name == "BOOL":
        return f"{spec} is not one number"
    alpha = float(checkpoint.read(name).astype(float).reshape(()))
    if alpha == 0:
        return f"{name} is 0: kohya's scripts and LyCORIS take that for the rank, ComfyUI and diffusers for no change at all"
    return alpha if math.isfinite(alpha) else f"{name} is {alpha}"


def _sorted(checkpoint: Checkpoint) -> tuple[dict[str, _Parts], dict[str, str], list[str]]:
    """Module → its A and B; module → its alpha; and all other tensors."""
    parts_of_module: dict[str, _Parts] = {}
    alphas: dict[str, str] = {}
    strange: list[str] = []
    for name in checkpoint.specs:
        factor = split_factor(name)
        if factor is not None and factor[1] not in parts_of_module.get(factor[0], {}):
            parts_of_module.setdefault(factor[0], {})[factor[1]] = name, factor[2]
        elif factor is None and name.endswith(ALPHA):
            alphas[name.removesuffix(ALPHA)] = name
        else:
            strange.append(name)
    return parts_of_module, alphas, strange


def _is_flat(modules: Sequence[str], where: str) -> bool:
    """Whether names of modules have `_` for each dot. Raises Unsupported if some do and others do not."""
    dotted = [module for module in modules if "." in module]
    if dotted and len(dotted) < len(modules):
        flat = next(module for module in modules if "." not in module)
        details = [show(flat), show(dotted[0])]
        raise Unsupported("it names modules in two ways, with dots and with _", where=where, details=details, fix=_WAY_OUT)
    return not dotted


class _Scale:
    """What the product of a module's factors is multiplied with."""

    def __init__(self, checkpoint: Checkpoint, alphas: Mapping[str, str], where: str, *, flat: bool) -> None:
        self._checkpoint, self._alphas, self._where, self._flat = checkpoint, alphas, where, flat
        text = checkpoint.metadata.get(METADATA_KEY, "")
        fix = "repair it, or save it again with diffusers"
        self._metadata = parse_object(text.encode(), METADATA_KEY, where, fix) if text else {}
        self._stated: dict[str, Scalings | None] = {}

    def of(self, module: str, rank: int, pair: FactorNames, *, normed: bool = False) -> float | str:
        """The number; or what is wrong with it. normed: it has norms of DoRA. Raises Unsupported if it is in no file."""
        network, inner = network_of(module, flat=self._flat)
        beginning = module.removesuffix(inner).removesuffix(".")
        stated = self._of_network(beginning, normed=normed)
        if stated is not None:
            if (stated_rank := stated.rank(inner)) != rank:
                return f"{module} has rank {stated_rank} by the file's metadata, and factors of {rank}"
            return stated.of(inner)
        if module in self._alphas:
            return self._alpha(self._alphas[module], rank)
        if network is UNKNOWN and pair.a.startswith(".lora_A"):
            what = "neither an alpha nor the name of a network says what the factors are multiplied with"
            if module.startswith(PREFIX):
                what = "its factors are named as PEFT names them, and lora_alpha / r, their scale, is in no file"
            fix = f"name the folder that holds {CONFIG_NAME} beside it"
            if DENOISER_BLOCKS.match(module):
                fix = f"{PUT_PREFIX}, or {fix}"
            raise Unsupported(what, where=self._where, details=[show(module)], fix=fix)
        return 1.0

    def _alpha(self, name: str, rank: int) -> float | str:
        alpha = _alpha_in(self._checkpoint, name)
        return alpha if isinstance(alpha, str) else alpha / rank

    def _of_network(self, beginning: str, *, normed: bool) -> Scalings | None:
        """What the metadata says of a network; None if it says nothing."""
        if beginning not in self._stated:
            start = f"{beginning}."
            stated = self._metadata.items() if beginning else ()
            network_config: dict[str, Any] = {key.removeprefix(start): value for key, value in stated if key.startswith(start)}
            if network_config:
                check_config({**network_config, "peft_type": "LORA"}, f"{self._where}, {METADATA_KEY}")
            if network_config.get("use_dora") and not normed:
                what = f"it is {DORA} by its metadata, and has no norms of rows"
                raise Unsupported(what, where=self._where, fix=_WAY_OUT)
            self._stated[beginning] = Scalings(network_config, f"{self._where}, {METADATA_KEY}") if network_config else None
        return self._stated[beginning]


def _factors(checkpoint: Checkpoint, module: str, parts: _Parts, scale: _Scale, norms: str) -> Factors | str:
    """The factors of a module; or what is wrong with them."""
    if len(parts) < 2:
        (part,) = parts
        return f"{module} has an {part}, {show(parts[part][0])}, and no {'B' if part == 'A' else 'A'}"
    (a, pair), (b, other) = parts["A"], parts["B"]
    down, up = checkpoint.specs[a], checkpoint.specs[b]
    shapes = f"{list(down.shape)} and {list(up.shape)}"
    alike = pair is other and 2 <= len(down.shape) == len(up.shape) <= MOST_DIMENSIONS and set(up.shape[2:]) <= {1}
    if not alike or down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
        return f"{module}: {shapes} are no factors of a linear layer or a convolution"
    if not (down.dtype.floating and up.dtype.floating):
        return f"{module}: {down.dtype} and {up.dtype} are no floating numbers"
    scaling = scale.of(module, down.shape[0], pair, normed=bool(norms))
    if isinstance(scaling, str):
        return scaling
    if not norms:
        return Factors(a, b, pair.embedding, scaling)
    spec, outputs, inputs = checkpoint.specs[norms], up.shape[0], down.shape[1]
    of_lycoris = norms.endswith(DORA_SCALE)
    columns = of_lycoris and spec.shape[:2] == (1, inputs)
    fits = spec.size == max(spec.shape, default=0) == (inputs if columns else outputs)
    if not spec.dtype.floating or not fits or (of_lycoris and not columns and spec.shape[0] != outputs):
        return f"{module}: {spec} has not one number for each of {outputs} outputs, nor [1, {inputs}] for inputs"
    return Factors(a, b, pair.embedding, scaling, norms, columns)


# ---- Models that hold an adapter which was never merged: saved while PEFT had wrapped their modules


_SAVED, _REPLACED = ".modules_to_save.default.", ".original_module."
_MERGE_FIRST = "merge the adapter first, with the program that saved it: PEFT's merge_and_unload, then save_pretrained"
_REPAIR = "Repair it, or copy it again from the adapter that was trained."


def with_inner_adapter(checkpoint: Checkpoint, names: Callable[[Checkpoint], Mapping[str, str]]) -> Checkpoint:
    """The model itself; if it holds an adapter, its base with that applied. Closing it closes the model.

    names  asks transformers for the names of a model's tensors; see `apply_adapter`

    Raises Unsupported for what is an adapter alone, and for one whose scale is not known.
    """
    factored = find_factors(checkpoint.specs)
    if not factored or _is_its_own(factored, checkpoint):
        return checkpoint
    if problem := refusal(factored, checkpoint.specs, checkpoint.ref):
        raise problem
    path = checkpoint.folder / CONFIG_NAME
    if checkpoint.alone or not exists(path):
        what = f"it holds an adapter that was never merged, and lora_alpha / r, which is part of it, is in no file: {factored}"
        fix = f"put the adapter's {CONFIG_NAME} into the folder of the weights and name the folder, or {_MERGE_FIRST}"
        raise Unsupported(what, where=checkpoint.ref, fix=fix)
    config = read_object(path, MAX_CONFIG_BYTES, CONFIG_NAME, _REPAIR)
    check_config(config, str(path))
    base, adapter = _split(checkpoint)
    inner = sort_tensors(Checkpoint(checkpoint.ref, adapter, ModelFolder(path.parent, config=config)), config)
    model = apply_adapter(base, inner, checkpoint.ref, lambda: names(base))
    what = f"it holds an adapter that was never merged, and is read with it applied: {factored}"
    model.notes = (*model.notes, Finding(what, checkpoint.ref))
    return model


def refusal(factored: Factored, names: Container[str], where: str) -> Unsupported | None:
    """The error for tensors that are no model, or that do more than LoRA; None for a model with an adapter in it."""
    if others := [kind for kind in factored.kinds if kind != DORA]:
        return Unsupported(f"it holds an adapter that is {' and '.join(others)}, not plain LoRA", where=where, fix=_MERGE_FIRST)
    if len(factored.adapters) > 1:
        titles = [name or "default" for name in factored.adapters]
        what = f"it holds {count(len(titles), 'adapter')} that were never merged: {', '.join(map(show, titles))}"
        return Unsupported(what, where=where, fix=_MERGE_FIRST)
    if not factored.modules:
        what = f"it was saved with an adapter, whose factors are not in it: {factored}"
        fix = "save the model again with merge_and_unload, or, without the adapter, with unload"
        return Unsupported(what, where=where, fix=fix)
    if not factored.layers and not factored.has_base_in(names):
        what = f"an adapter (LoRA), not a model: {factored}"
        fix = f"write its base in front of it, BASE+{where}; to merge adapters, all models of the recipe must be adapters"
        return Unsupported(what, where=where, fix=fix)
    return None


_PARAMETRIZED = ".parametrizations."
"""Part of the names of tensors that torch computes a weight from. jina-embeddings-v3 adds its factors itself."""


def _is_its_own(factored: Factored, checkpoint: Checkpoint) -> bool:
    """Whether the adapters belong to the architecture: config.json describes them, and the model chooses among them at work."""
    if factored.modules and not factored.kinds and all(_PARAMETRIZED in module for module in factored.modules):
        return True
    config = checkpoint.config or {}
    described = bool(factored.adapters) and all(isinstance(config.get(f"{name}_lora"), Mapping) for name in factored.adapters)
    return described and not factored.kinds


def _split(checkpoint: Checkpoint) -> tuple[Checkpoint, PartTensors]:
    """The model without its adapter, and the adapter's tensors."""
    base: dict[str, str] = {}
    factors: dict[str, str] = {}
    prefix = PREFIX if all(name.startswith(PREFIX) for name in checkpoint.specs) else ""
    for name in checkpoint.specs:
        plain = unnamed(name.removeprefix(prefix))
        if split_factor(plain) or other_kind(plain) or _SAVED in plain:
            factors[plain] = name
            continue
        key = plain.replace(BASE_LAYER, ".").replace(_REPLACED, ".")
        if key in base or ".lora_" in key:
            what = "two tensors of it are one of the base" if key in base else "a tensor of its adapter is not understood"
            raise Unsupported(what, where=checkpoint.ref, details=[show(name)], fix=_MERGE_FIRST)
        base[key] = name
    model = Checkpoint(
        checkpoint.ref,
        renamed(checkpoint.source, base, checkpoint.ref),
        ModelFolder.like(checkpoint, left_out=tuple(name for name in checkpoint.left_out if name != CONFIG_NAME)),
        metadata=checkpoint.metadata,
        notes=checkpoint.notes,
        decoded=checkpoint.decoded,
    )
    return model, renamed(checkpoint.source, factors, checkpoint.ref)


DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
"""The file that diffusers looks for in a folder."""

_SUFFIXES = (".safetensors", *PYTORCH_SUFFIXES, SUFFIX)


def open_adapter(ref: str, *, revision: str | None = None) -> Adapter:
    """Open an adapter: a folder, a single file, or a Hub id `org/name[@revision]`.

    Reads config and header, no tensor data (of single files, the alpha of each module: one number).

    Raises NotFound, FormatError (bytes or settings that break the format), Unsupported (what is more than LoRA), and what
    `open_checkpoint` raises for a name. All problems of one file are in one error.
    """
    place = locate(ref, revision)
    if isinstance(place, Path):
        if not is_folder(place):
            return _open_named(ref, place)
        return open_peft(ref) if (path := file_in(place)) is None else _open_single(ref, path)
    if isinstance(place, HubModel):
        repository, _ = open_place(place)
        if CONFIG_NAME not in repository.sizes and DIFFUSERS_NAME in repository.sizes:
            repository.want([DIFFUSERS_NAME])
            repository.download(quiet=True)
            folder = ModelFolder.of(repository.folder, repository, config={})
            return _open_single(ref, repository.folder / DIFFUSERS_NAME, folder)
    return open_peft(ref, revision=revision)


def is_adapter(place: Path) -> bool:
    """Whether a path is a folder with an adapter, and no model, in it, or a file of factors. Reads a file's header."""
    if is_folder(place):
        if exists(place / "config.json"):
            return False
        return exists(place / CONFIG_NAME) or file_in(place) is not None
    return _holds_factors(place)


def file_in(folder: Path) -> Path | None:
    """The only weight file of a folder without a config, if it holds factors, or the one that diffusers looks for."""
    try:
        names = file_names(folder)
    except WeightsmithError:
        return None
    if CONFIG_NAME in names or "config.json" in names:
        return None
    weights = [name for name in names if is_weights(name) and name not in WEIGHTS_NAMES]
    chosen = DIFFUSERS_NAME if DIFFUSERS_NAME in weights else weights[0] if len(weights) == 1 else ""
    return folder / chosen if chosen and _holds_factors(folder / chosen) else None


def _holds_factors(path: Path) -> bool:
    """Whether a file is of an adapter alone. False for one that cannot be read: opening it says why."""
    if is_gguf(path):
        return is_gguf_adapter(path)
    if not path.name.lower().endswith(_SUFFIXES):
        return False
    try:
        with Checkpoint(str(path), open_file(path, str(path)).source) as opened:
            factored = find_factors(opened.specs)
    except WeightsmithError:
        return False
    return bool(factored.modules or factored.kinds) and not factored.layers and not factored.has_base_in(opened.specs)


def _open_named(ref: str, path: Path) -> Adapter:
    """A file by its name: PEFT's is opened with the config beside it."""
    if path.suffix in (".yml", ".yaml"):
        fix = "Name a model. For a recipe: weightsmith plan, or weightsmith preview."
        raise Unsupported("this is a recipe, not a model", where=ref, fix=fix)
    if path.name in WEIGHTS_NAMES and exists(path.parent / CONFIG_NAME):
        chosen = next(name for name in WEIGHTS_NAMES if exists(path.parent / name))
        if chosen != path.name:
            what = f"{chosen} is beside it, and is what PEFT loads"
            raise Unsupported(what, where=ref, fix="remove the one that is not meant, and name the folder")
        return open_peft(str(path.parent))
    if is_mlx(path):
        return open_peft(str(path.parent), name=path.name)
    if not path.name.lower().endswith(_SUFFIXES) and not is_gguf(path):
        what = f"an adapter is a folder, or a {_SUFFIXES[0]} or {SUFFIX} file"
        raise Unsupported(what, where=ref, fix=f"Name the one that holds {CONFIG_NAME}.")
    return _open_single(ref, path)


def _open_single(ref: str, path: Path, folder: ModelFolder | None = None) -> Adapter:
    if is_gguf(path):
        from weightsmith._models.formats.gguf.adapter_file import open_gguf_adapter

        return open_gguf_adapter(ref, path)
    opened = open_file(path, ref)
    folder = folder or ModelFolder(path.parent, config={})
    checkpoint = Checkpoint(ref, opened.source, folder, metadata=opened.metadata, notes=opened.notes)
    try:
        return read_file(checkpoint, path)
    except Exception:
        checkpoint.close()
        raise
