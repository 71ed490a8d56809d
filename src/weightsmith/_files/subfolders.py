"""Subfolders of a model's folder: which of them loaders read.

    1_Pooling/, 2_Dense/         modules of sentence-transformers, which modules.json and router_config.json name
    unet/, vae/, tokenizer/      parts of a pipeline of diffusers, which model_index.json names
    additional_chat_templates/   chat templates of transformers besides the default one
    qformer_tokenizer/           a second tokenizer of a processor, which has no weights
    code/                        Python packages that the model's own code imports

All others (`original/`, `onnx/`) are another copy of the model, or another model.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith._base.errors import CheckpointError, FormatError, WeightsmithError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.strict_json import JsonError, parse

CONFIG = "config.json"
MODULES, ROUTER = "modules.json", "router_config.json"
PIPELINE = "model_index.json"
SETTINGS = (MODULES, ROUTER, f"*/{ROUTER}", PIPELINE)
"""Patterns of the files that name subfolders."""
TEMPLATES = "additional_chat_templates"

MAX_FILES = 1_000  # looked at in one subfolder, and copied from all of them: sentence-transformers writes a dozen
MAX_DEPTH = 4  # names of a path: a router's module in a module, and its file
MAX_MODULES = 100
MAX_SETTINGS_BYTES = 1 << 20

_FOLDER = re.compile(r"\w[\w. -]*", re.ASCII)
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_REFERENCE = re.compile(r"(?:[A-Za-z_]\w*[./]){1,4}[A-Za-z_]\w*", re.ASCII)
_WITHOUT_WEIGHTS = re.compile(r"(Scheduler|Tokenizer(Fast)?|Processor(Fast)?|FeatureExtractor|Guidance)$")
"""How the classes of a pipeline's parts end that have no weights."""
_OTHER_COPIES = re.compile(
    r"\..*|original|onnx|openvino|gguf|mlx|coreml|metal|tensorrt|tflite|flax|tf|checkpoint-\d+|runs|logs|wandb|"
    r"assets|images?|imgs?|figures?|figs?|media|docs?|examples?|eval(uation)?s?|__pycache__",
    re.IGNORECASE,
)
"""Folders in many repositories, of which no loader of the model reads a file. Of all others that are left out, plans say so."""


def list_names(folder: Path) -> list[str]:
    """Relative names of the files of a folder, and of up to `MAX_FILES` in each subfolder, none of which is hidden.

    Links to folders are followed: the files in them that are copied are checked one by one. Raises OSError.
    """
    entries = sorted(folder.iterdir())
    names = [path.name for path in entries if not path.is_dir()]
    for path in entries:
        if path.is_dir() and not path.name.startswith("."):
            names += sorted(_within(path, path.name))
    return names


def template_names(folder: Path) -> list[str]:
    """Relative names of the chat templates in a folder's subfolder for them."""
    return sorted(name for name in _within(folder / TEMPLATES, TEMPLATES) if name.count("/") == 1)


def _within(folder: Path, prefix: str) -> list[str]:
    """The first `MAX_FILES` + 1 files of a subfolder, level by level."""
    names: list[str] = []
    level = [(folder, prefix)]
    for _ in range(MAX_DEPTH - 1):
        deeper: list[tuple[Path, str]] = []
        for place, name in level:
            try:
                with os.scandir(place) as entries:
                    for entry in entries:
                        inner = f"{name}/{entry.name}"
                        if not entry.is_dir():
                            names.append(inner)
                        elif len(deeper) <= MAX_FILES:
                            deeper.append((place / entry.name, inner))
                        if len(names) > MAX_FILES:
                            return names
            except OSError:  # a loader that needs it will say so
                continue
        level = deeper
    return names


def module_folders(folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """The subfolders with modules of sentence-transformers, or parts of a pipeline, in the order of the files that name them.
    Not the folder itself.

    names  of all files, relative

    Raises FormatError for a path that leaves the folder, and for more files or modules than there can be.
    """
    folders: dict[str, None] = {}
    if is_pipeline(folder, names):
        parts = _parts(_settings(folder / PIPELINE))
        folders |= dict.fromkeys(_checked_parts([*parts, *_numbered(parts, names)], folder / PIPELINE))
    if MODULES in names:
        folders |= dict.fromkeys(_checked(path, folder / MODULES) for path in _paths(_settings(folder / MODULES)))
    for parent in ("", *folders):
        router = f"{parent}/{ROUTER}" if parent else ROUTER
        types = _types(folder / router) if router in names else {}
        folders |= dict.fromkeys(_checked(f"{parent}/{key}" if parent else key, folder / router) for key in types)
    _check_counts(folders, names, folder)
    return tuple(folders)


def is_pipeline(folder: Path, names: Collection[str]) -> bool:
    """True for a pipeline of diffusers: model_index.json names its class, and no config.json beside it names a model's.

    names  of all files, relative

    Raises FormatError for a model_index.json that is not JSON: other weights of the folder would be taken for the model.
    """
    if PIPELINE not in names:
        return False
    config = _settings(folder / CONFIG) if CONFIG in names else {}
    if isinstance(config, dict) and any(config.get(key) for key in ("model_type", "architectures")):
        return False
    data = read_bounded(folder / PIPELINE, MAX_SETTINGS_BYTES)
    try:
        return _is_index(parse(data, unique=False))
    except JsonError as error:
        what = f"{PIPELINE}, which names the parts of the pipeline, {error}"
        fix = "Repair it, or download it again. To merge one part, name its folder."
        raise FormatError(what, where=str(folder), fix=fix) from error


def model_parts(folder: Path) -> tuple[str, ...]:
    """The parts of a pipeline that may have weights: not its schedulers, tokenizers and processors."""
    parts = _parts(_settings(folder / PIPELINE))
    return tuple(name for name, (_, kind) in parts.items() if not _WITHOUT_WEIGHTS.search(kind))


def folders_in(data: bytes) -> tuple[str, ...]:
    """The subfolders that the bytes of a modules.json or model_index.json name, as far as they can be read: opening the model
    says what is wrong.

    >>> folders_in(b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "../../etc"}]')
    ('1_Pooling',)
    >>> folders_in(b'{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"], "image_encoder": [null, null]}')
    ('vae',)
    """
    try:
        settings = parse(data, unique=False)
    except JsonError:
        return ()
    return tuple(path for path in (*_paths(settings), *_parts(settings)) if _is_subfolder(path))[:MAX_MODULES]


def module_code(folder: Path, names: Collection[str], folders: Collection[str]) -> Iterator[str]:
    """The classes of modules that may be the model's own code: `custom_st.Transformer`. folders: see `module_folders`."""
    routers = [name for parent in ("", *folders) if (name := f"{parent}/{ROUTER}".lstrip("/")) in names]
    listed = _settings(folder / MODULES) if MODULES in names else []
    types = [module.get("type") for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    if is_pipeline(folder, names):
        pipeline = _settings(folder / PIPELINE)
        types += [".".join(reference) for reference in _parts(pipeline).values()]
        own_class = pipeline.get("_class_name")  # of a pipeline with code of its own: [its file, its class]
        types += [".".join(own_class)] if _is_reference(own_class) else []
    for reference in (*types, *(value for router in routers for value in _types(folder / router).values())):
        if (
            isinstance(reference, str)
            and not reference.startswith("sentence_transformers.")
            and _REFERENCE.fullmatch(reference)
        ):
            yield reference


_POOLINGS = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
"""How releases of sentence-transformers before 6 call a pooling, after `pooling_mode_` → its name since.

In the order in which the vectors of several poolings are joined.
"""


def module_steps(folder: Path) -> str:
    """What a sentence-transformer computes, module by module; "" where modules.json names none.

    Only what no tensor shows: the classes, how tokens are pooled, the activation of dense modules.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> modules = [{"path": "", "type": "st.Transformer"}, {"path": "1", "type": "st.Pooling"}]
    >>> _ = (folder / MODULES).write_text(json.dumps(modules))
    >>> (folder / "1").mkdir()
    >>> _ = (folder / "1" / CONFIG).write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    >>> module_steps(folder)
    'Transformer, Pooling (cls)'
    """
    listed = _settings(folder / MODULES)
    return ", ".join(_steps(folder, listed[:MAX_MODULES])) if isinstance(listed, list) else ""


def _steps(folder: Path, modules: Sequence[Any]) -> Iterator[str]:
    for module in modules:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str):
            continue
        settings = _settings(folder / path / CONFIG) if isinstance(path, str) and _is_subfolder(path) else {}
        name = kind.rpartition(".")[2]
        detail = ", ".join(_details(settings, pools=name == "Pooling")) if isinstance(settings, dict) else ""
        yield show(name)[1:-1] + (f" ({detail})" if detail else "")


def _details(settings: Mapping[str, Any], *, pools: bool) -> Iterator[str]:
    """The values in the settings of a module that change what it computes. pools: whether it pools tokens."""
    if pools:
        mode = settings.get("pooling_mode")
        modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
        modes = modes or [name for old, name in _POOLINGS.items() if settings.get(f"pooling_mode_{old}")] or ["mean"]
        yield from (show(name)[1:-1] for name in modes if isinstance(name, str))
        if settings.get("include_prompt") is False:
            yield "without the prompt"
    if isinstance(activation := settings.get("activation_function"), str):
        yield show(activation.rpartition(".")[2])[1:-1]


def within(name: str, folders: Iterable[str]) -> str:
    """The innermost of these folders that a file is directly in, else "".

    >>> within("2_Dense/model.safetensors", ["1_Pooling", "2_Dense"]), within("2_Dense/old/config.json", ["2_Dense"])
    ('2_Dense', '')
    """
    parent = name.rpartition("/")[0]
    return parent if parent and parent in folders else ""


def is_another_copy(folder: str) -> bool:
    """True for a subfolder with what no loader of the model reads, by its name.

    >>> list(map(is_another_copy, ("onnx", ".git", "checkpoint-500", "speech_tokenizer")))
    [True, True, True, False]
    """
    return _OTHER_COPIES.fullmatch(folder) is not None


def _settings(path: Path) -> Any:
    """A JSON file; {} for one that is damaged: it is copied as it is, and loaders say so."""
    try:
        return parse(read_bounded(path, MAX_SETTINGS_BYTES), unique=False)
    except (JsonError, WeightsmithError):
        return {}


def _paths(modules: Any) -> Iterator[str]:
    """The folders that modules.json names, without the model's own."""
    for module in modules if isinstance(modules, list) else ():
        path = module.get("path") if isinstance(module, dict) else None
        if isinstance(path, str) and (folder := posixpath.normpath(path or ".")) != ".":
            yield folder


def _parts(pipeline: Any) -> dict[str, list[str]]:
    """The parts of a pipeline: the name of each one's folder, and its [library, class]."""
    listed = pipeline.items() if _is_index(pipeline) else ()
    return {name: value for name, value in listed if not name.startswith("_") and _is_reference(value)}


def _numbered(parts: Mapping[str, Sequence[str]], names: Collection[str]) -> Iterator[str]:
    """Further folders of parts that are several models: of a MultiControlNetModel `controlnet`, `controlnet_1` and so on."""
    folders = {name.partition("/")[0] for name in names if "/" in name}
    for part, (_, kind) in parts.items():
        for i in range(1, MAX_MODULES if kind.startswith("Multi") else 1):
            if f"{part}_{i}" not in folders:
                break
            if f"{part}_{i}" not in parts:
                yield f"{part}_{i}"


def _is_index(pipeline: Any) -> bool:
    """True for the model_index.json of a pipeline, which names its class, or the file and class of its own code."""
    name = pipeline.get("_class_name") if isinstance(pipeline, dict) else None
    return (isinstance(name, str) and bool(name)) or _is_reference(name)


def _is_reference(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)


def _types(path: Path) -> Mapping[str, Any]:
    """The modules of a router, by the names of their folders."""
    settings = _settings(path)
    types = settings.get("types") if isinstance(settings, dict) else None
    return types if isinstance(types, dict) else {}


def _checked(path: str, where: Path) -> str:
    """The path of a module's folder. Raises FormatError for one that is no subfolder."""
    if not _is_subfolder(path):
        what = f"a module's folder is {show(path)}, which is no subfolder of the model"
        raise FormatError(what, where=str(where), fix="Download the model again from a source you trust.")
    return path


def _checked_parts(parts: Iterable[str], where: Path) -> Iterator[str]:
    """The parts of a pipeline. Raises FormatError for one that is no attribute of a class, as of diffusers, and for two that
    some disks hold as one folder: a part `README.md` or `unet/sub` would be in the way of other files of the output.
    """
    spelled: dict[str, str] = {}
    for part in parts:
        what = ""
        if not _ATTRIBUTE.fullmatch(_checked(part, where)):
            what = f"a part is named {show(part)}, and parts have names of letters, digits and _"
        elif (other := spelled.setdefault(part.casefold(), part)) != part:
            what = f"the parts {show(other)} and {show(part)} differ only in case"
        if what:
            raise FormatError(what, where=str(where), fix="Rename the part's folder, and the part in this file.")
        yield part


def _is_subfolder(path: str) -> bool:
    parts = path.split("/")
    return len(parts) < MAX_DEPTH and all(map(_FOLDER.fullmatch, parts))


def _check_counts(folders: Collection[str], names: Iterable[str], where: Path) -> None:
    files: dict[str, int] = dict.fromkeys(folders, 0)
    if len(files) > MAX_MODULES:
        what = f"{len(files):,} modules, and at most {MAX_MODULES} are read"
        raise FormatError(what, where=str(where / MODULES), fix="Download the model again from a source you trust.")
    for name in names:
        top = name.partition("/")[0]
        for folder in {parent for parent in (top, within(name, files)) if parent in files}:
            files[folder] += 1
    for folder, count in files.items():
        if count > MAX_FILES:
            what = f"over {MAX_FILES:,} files, and a module has a dozen"
            raise CheckpointError(what, where=str(where / folder), fix="Move out of the folder what is no part of the model.")
