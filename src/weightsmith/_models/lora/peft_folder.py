"""Opens a folder with adapter_config.json: PEFT's, with adapter_model.safetensors or .bin, or MLX's (`other_programs`).

Adapters of other kinds than LoRA are read here: which of their tensors belong to which module, and their configs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import FormatError, NotFound, Unsupported
from weightsmith._base.files import file_names, show
from weightsmith._base.strict_json import read_object
from weightsmith._base.text import count
from weightsmith._files.copied import is_tokenizer
from weightsmith._files.hf_folder import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint, HubModel, ModelFolder, locate, open_place
from weightsmith._models.formats.opening import open_file
from weightsmith._models.lora.adapter import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    PREFIX,
    SAVED,
    WEIGHTS_NAMES,
    Adapter,
    OtherParts,
    check_empty,
    saved_modules,
    sort_tensors,
)
from weightsmith._models.lora.config import BIASES, REPAIR, ModulePatterns, check_config
from weightsmith._models.lora.forms import other_kind
from weightsmith._models.lora.kinds import KINDS, kind_of_type
from weightsmith._models.lora.mlx_and_gguf import MLX_NAME, sort_mlx
from weightsmith._models.sources.composed import WRAPPERS
from weightsmith._models.structure.configs import finite_number
from weightsmith.abc.adapter import AdapterKind

if TYPE_CHECKING:
    from weightsmith._files.hub import Repository
    from weightsmith._files.remote.addresses import Address
    from weightsmith._files.remote.folder import RemoteFolder


def open_peft(ref: str, *, revision: str | None = None, name: str = "") -> Adapter:
    """Open an adapter in PEFT's or in MLX's format: a local folder, or a Hub id `org/name[@revision]`.

    Reads its config and header. name: of the weight file, if not the first of those that the programs load

    Raises NotFound, FormatError (bytes or settings that break the format), Unsupported (what is more than LoRA), and what
    `open_checkpoint` raises for a name. All problems of one file are in one error.
    """
    place = locate(ref, revision)
    folder, names, repository = _files(place)
    weights = name or next((known for known in (*WEIGHTS_NAMES, MLX_NAME) if known in names), "")
    if repository is not None and weights:
        repository.download([CONFIG_NAME], quiet=True)
        repository.want([weights, CARD_NAME])
        repository.read_starts([weights])
        if isinstance(place, HubModel) and place.streams:
            repository.stream()
    if CONFIG_NAME not in names or not weights:
        missing = [] if CONFIG_NAME in names else [CONFIG_NAME]
        missing += [] if weights else [" or ".join(WEIGHTS_NAMES)]
        details = (f"it holds {', '.join(sorted(names)[:8])}",) if names else ()
        fix = "name a folder that PEFT's save_pretrained or mlx_lm.lora has written"
        if below := sorted(config.parent.name for config in folder.glob(f"*/{CONFIG_NAME}")):  # checkpoints of a training run
            details = (f"subfolders with an adapter: {', '.join(below[:8])}{', ...' if len(below) > 8 else ''}",)
            fix = f"name one of them, such as {ref}/{below[-1]}"
        raise NotFound(f"not a PEFT adapter: it has no {' and no '.join(missing)}", where=ref, details=details, fix=fix)
    config_path, path = folder / CONFIG_NAME, folder / weights
    config = read_object(config_path, MAX_CONFIG_BYTES, CONFIG_NAME, REPAIR)
    of_mlx = weights.endswith(MLX_NAME)  # its config has other keys
    kind = kind_of_type(config.get("peft_type"))
    if kind and not of_mlx:
        check_other(config, KINDS.get(kind), str(config_path))
    elif not of_mlx:
        check_config(config, str(config_path))
    tokenizer = tuple(sorted(name for name in names if is_tokenizer(name)))
    opened = open_file(path, ref) if repository is None else open_file(path, ref, repository.open)
    checkpoint = Checkpoint(
        ref,
        opened.source,
        ModelFolder.of(folder, repository, config=config, files=tokenizer),
        metadata=opened.metadata,
        notes=(*(() if repository is None else repository.notes), *opened.notes),
    )
    if of_mlx:
        return sort_mlx(checkpoint, config, str(config_path))
    return sort_others(checkpoint, config, kind) if kind else sort_tensors(checkpoint, config)


def _files(place: Path | HubModel | Address) -> tuple[Path, list[str], Repository | RemoteFolder | None]:
    """The adapter's folder, the names of its files, and the repository of one that is elsewhere."""
    if isinstance(place, Path):
        return place, file_names(place), None
    repository, _ = open_place(place)
    known = (CONFIG_NAME, *WEIGHTS_NAMES, MLX_NAME)
    return repository.folder, [name for name in repository.sizes if name in known or is_tokenizer(name)], repository


# ---- Adapters of other kinds than LoRA


_USED = frozenset(
    "auto_mapping base_model_name_or_path bias fan_in_fan_out modules_to_save peft_type peft_version task_type".split()
)
_UNUSED = frozenset("exclude_modules inference_mode init_weights layers_pattern layers_to_transform revision".split())
_UNUSED |= {"runtime_config", "target_modules"}


def check_other(config: Mapping[str, Any], kind: AdapterKind, where: str) -> None:
    """Raise Unsupported for settings of an adapter whose meaning is not known, FormatError for values of a wrong type."""
    known = _USED | _UNUSED | kind.used | kind.unused | set(kind.patterns.values())
    if unknown := [f"{show(key)}: {show(value)}" for key, value in config.items() if value and key not in known]:
        what = f"keys that weightsmith does not know may change what the tensors of {kind.title} mean"
        fix = "Merge the adapter with the program that wrote it. If a key changes no weights, remove it from the file."
        raise Unsupported(what, where=where, details=unknown, fix=fix)
    if (bias := config.get("bias")) not in (None, *BIASES) and bias != f"{config.get('peft_type')}_only".lower():
        raise FormatError(f"bias is {show(bias)}, none of {', '.join(BIASES)}", where=where, fix=REPAIR)
    if not isinstance(value := config.get("fan_in_fan_out"), bool | None):
        raise FormatError(f"fan_in_fan_out is {show(value)}, not true or false", where=where, fix=REPAIR)


def sort_others(checkpoint: Checkpoint, config: Mapping[str, Any], name_of_kind: str) -> Adapter:
    """The adapter in a file. Raises FormatError for tensors that belong to no module."""
    check_empty(checkpoint)
    kind, where = KINDS.get(name_of_kind), checkpoint.ref
    names = "|".join(map(re.escape, sorted((*kind.parts, *kind.shared), key=len, reverse=True)))
    pattern = re.compile(rf"(.+?)(?:\.token_adapter)?\.({names})(?:\.default)?(\.\w+)?")
    parts_of_module: dict[str, dict[str, str]] = {}
    shared, replacements, problems = dict[str, str](), dict[str, str](), list[str]()
    for name in checkpoint.specs:
        inner = WRAPPERS.sub("", name).removeprefix(PREFIX)
        match, last = pattern.fullmatch(inner), inner.removeprefix("base_model.").removesuffix(".default")
        if ".original_module." in inner:
            continue
        if last in kind.shared:
            shared[last] = name
        elif match and kind.replaces:
            replacements[f"{match[1]}{match[3] or ''}"] = name
        elif match and match[3] in (None, ".weight"):
            if parts_of_module.setdefault(match[1], {}).setdefault(match[2], name) != name:
                problems.append(f"{show(name)} and {show(parts_of_module[match[1]][match[2]])} are the same part")
        elif match or other_kind(inner):
            problems.append(f"{show(name)} is no part of {kind.title}")
        else:
            replacements[SAVED.sub("", inner).replace(".base_layer", "")] = name
    if problems:
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        fix = "Save it again with peft: the config and the weights are of different adapters, or this is not one of PEFT's."
        raise FormatError(what, where=str(checkpoint.paths[0]), details=problems[:8], fix=fix)
    settings = _Settings(config, kind, f"{where}, {CONFIG_NAME}")
    others = {
        module: OtherParts(name_of_kind, shared | parts, settings.of(module)) for module, parts in parts_of_module.items()
    }
    return Adapter(
        checkpoint,
        {},
        replacements,
        transposed=config.get("fan_in_fan_out") is True,
        saved=frozenset(saved_modules(config, replacements)),
        others=others,
    )


class _Settings:
    """The config, with what patterns say of a module in place of a number of all."""

    def __init__(self, config: Mapping[str, Any], kind: AdapterKind, where: str) -> None:
        self._all = {key: value for key, value in config.items() if key in kind.used | {"init_weights"}}
        self._patterns = {
            key: ModulePatterns(dict(_numbers(config, name, where)), name, where) for key, name in kind.patterns.items()
        }

    def of(self, module: str) -> Mapping[str, Any]:
        return self._all | dict(self._of_patterns(module))

    def _of_patterns(self, module: str) -> Iterator[tuple[str, Any]]:
        for key, patterns in self._patterns.items():
            value = patterns.find(module, float("nan"))
            if value == value:
                yield key, int(value) if value == int(value) else value


def _numbers(config: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, float]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise FormatError(f"{key} is {show(value)}, not an object", where=where, fix=REPAIR)
    for text, stated in value.items():
        if (number := finite_number(stated)) is None:
            raise FormatError(f"{key} of {show(text)} is {show(stated)}, not a finite number", where=where, fix=REPAIR)
        yield text, float(number)
