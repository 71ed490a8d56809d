"""The other files of a model: which of them are copied into a new model.

Named one by one, so that nothing else is copied into a model that will be published: a key, a backup, a note. `subfolders` says
which folders in the model's folder a loader reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith._base.errors import CheckpointError, Finding, FormatError
from weightsmith._base.files import expand_user, open_regular, read_bounded, show
from weightsmith._base.strict_json import read_object
from weightsmith._files import subfolders

MAX_CODE_BYTES = 4 << 20  # of one Python file; the longest in transformers has 0.3 MB
MAX_COPIED_BYTES = 1 << 30  # of one file: a tokenizer of a million tokens takes 100 MB
MAX_SETTINGS_BYTES = 64 << 20  # of a JSON file that may name code; a tokenizer_config.json of 100,000 tokens takes 20 MB
_SHOWN = 6  # names that a warning lists

_TOKENS = (
    # of transformers, sentencepiece, tiktoken, Mistral; vocabularies under the names that repositories give them
    r"tokenizer\.json|tekken\.json",
    r"tokenizer\.model(\.v\d+\w*)?|(spiece|spm|source|target|tiktoken|ice_text|sentencepiece[\w.-]*)\.(model|spm)",
    r"([\w-]+[._-])?vocab([._-][\w-]+)?\.(json|txt|bpe|model)|merges\.txt|bpe\.codes|[\w.-]+\.tiktoken",
)
_TOKENIZER = (
    *_TOKENS,
    r"tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|normalizer\.json",
    r"chat_template([._-][\w-]+)?\.(json|jinja)",
    rf"{subfolders.TEMPLATES}/\w[\w.-]*\.jinja",
)
_ALTERNATIVES = (
    # settings of the model
    r"config\.json|generation_config\.json|configuration\.json",
    *_TOKENIZER,
    # processors, diffusers, sentence-transformers
    r"(preprocessor|processor|video_preprocessor)_config\.json|(image_processor|feature_extractor)(_\w+)?\.json",
    r"model_index\.json|modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json",
)
_LICENCE = re.compile(
    r"(licen[cs]e|notice|use_policy|copying)([-_. ][\w-]+(\.\d+)*)?(\.(txt|md|rst))?", re.ASCII | re.IGNORECASE
)
_READ = re.compile("|".join(_ALTERNATIVES), re.ASCII)
_OF_TOKENS = re.compile("|".join(_TOKENS), re.ASCII)
_OF_TOKENIZER = re.compile("|".join(_TOKENIZER), re.ASCII)
_CODE = re.compile(rf"([A-Za-z_]\w*/){{0,{subfolders.MAX_DEPTH - 1}}}[A-Za-z_]\w*\.py", re.ASCII)
_MODULE_SETTINGS = re.compile(r"[\w-]+\.json", re.ASCII)
"""Files in the folder of a module of sentence-transformers: `whitespacetokenizer_config.json`, `idf.json`."""
_OURS = frozenset(
    "weightsmith.json recipe.yml routing.json routing.svg transplant.json report.html distance.svg distance_by_layer.svg "
    "extraction.json extraction.svg measurement.json imatrix.dat".split()
)
"""Files that weightsmith writes about a model. They describe how that model was made, so they are not copied to the next."""

_QUANTISATION = frozenset("quantization_config.json hf_quant_config.json quantize_config.json quant_config.json".split())
"""Files of quantisers about the weights that they stored: an output has other weights, and says so in config.json."""

WEIGHTS = tuple(
    ".safetensors .bin .pt .pth .ckpt .distcp .pkl .gguf .onnx .onnx_data .h5 .msgpack .npz .npy .tflite .mlmodel".split()
)
"""How the names of weight files end, of any format."""
_LOADED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
TRAINING = re.compile(
    r"readme\.md|latest|zero_to_fp32\.py|(optimizer|scheduler|scaler|sampler|rng_state|random_states|trainer_state|training_args|events\.out).*"
)
"""What a training run leaves beside a model, in lower case."""
_HEAD = re.compile(r"[\w-]+_(linear|head|projection)\.(pt|pth|bin)", re.ASCII)
"""Weights of a head beside the model: `colbert_linear.pt` and `sparse_linear.pt` of BGE-M3, which FlagEmbedding reads."""
_MEDIA = tuple(".png .jpg .jpeg .gif .webp .svg .mp4 .mp3 .wav .pdf .zip .gz .tar .csv .parquet .arrow .lock .log".split())

_RELATIVE_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+(\.{1,3})[ \t]*([A-Za-z_][\w.]{0,200})?[ \t]+import[ \t]+(\([^)]{0,4000}\)|[\w, \t]+)",
    re.MULTILINE | re.ASCII,
)
_NAMING_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def copied_files(names: Iterable[str], folders: Sequence[str] = ()) -> tuple[str, ...]:
    """The files that may go with the weights into a new model, sorted: what a loader reads, and licences.

    folders  with modules, see `module_folders`

    Decided from names alone: of the Python files, `choose_copied` takes those that a configuration names.

    >>> copied_files(["config.json", "model.safetensors", "README.md", "id_rsa", "tokenizer.model", "original/params.json"])
    ('config.json', 'tokenizer.model')
    >>> copied_files(["1_Pooling/config.json", "2_Dense/model.safetensors", "qformer_tokenizer/vocab.json"], ["1_Pooling"])
    ('1_Pooling/config.json', 'qformer_tokenizer/vocab.json')
    """
    listed = list(names)
    tokenizers = _second_tokenizers(listed)
    return tuple(sorted(name for name in listed if _may_be_copied(name, folders, tokenizers)))


def _may_be_copied(name: str, folders: Sequence[str], tokenizers: Container[str]) -> bool:
    if is_read(name) or _LICENCE.fullmatch(name):
        return True
    folder, _, base = name.rpartition("/")
    if _CODE.fullmatch(name):
        return not folder or not subfolders.is_another_copy(name.partition("/")[0])
    if subfolders.within(name, folders):
        return is_read(base) or _MODULE_SETTINGS.fullmatch(base) is not None
    return folder in tokenizers and is_tokenizer(base)


def _second_tokenizers(names: Iterable[str]) -> set[str]:
    """Folders of a processor's other tokenizers: named so, and without weights (`speech_tokenizer/` may be a codec)."""
    tokens, weights = set[str](), set[str]()
    for name in names:
        folder, _, base = name.rpartition("/")
        if "tokenizer" in folder and "/" not in folder and not subfolders.is_another_copy(folder):
            (weights if is_weights(base) else tokens if holds_tokens(base) else set[str]()).add(folder)
    return tokens - weights


def is_read(name: str) -> bool:
    """True for a file beside the weights that a loader reads for its name: settings, tokenizer, processor, chat template."""
    return _READ.fullmatch(name) is not None


def is_tokenizer(name: str) -> bool:
    """True for a file of a tokenizer, and for a chat template."""
    return _OF_TOKENIZER.fullmatch(name) is not None


def holds_tokens(name: str) -> bool:
    """True for a file with a tokenizer's tokens or merges; not for its settings, and not for a chat template.

    >>> list(map(holds_tokens, ("tokenizer.json", "spiece.model", "tokenizer_config.json", "chat_template.jinja")))
    [True, True, False, False]
    """
    return _OF_TOKENS.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    """True for weights of any format, their indexes, and an adapter's configuration; not for what a training run leaves."""
    lower = name.lower()
    if TRAINING.fullmatch(lower):
        return False
    return lower.endswith((*WEIGHTS, ".index.json")) or lower == "adapter_config.json"


def is_loaded(name: str) -> bool:
    """True for a file that a loader picks up because it is there: weights, an index, an adapter; settings at the top level.

    name  relative, `/` between folders

    >>> list(map(is_loaded, ("pytorch_model.bin", "adapter_config.json", "tokenizer.json", "optimizer.pt", "notes.txt")))
    [True, True, True, False, False]
    """
    lower = name.rpartition("/")[2].lower()
    if TRAINING.fullmatch(lower):
        return False
    return lower.endswith(_LOADED) or lower == "adapter_config.json" or is_read(name)


def choose_copied(
    folder: Path, names: Sequence[str], config: Mapping[str, Any] | None, folders: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(files to copy, files that are left out), both sorted.

    names    of all files of the model, relative
    config   config.json
    folders  with modules, see `module_folders`

    Copied are what `copied_files` lists, but of the Python files those that the configurations name (`auto_map`, modules.json),
    and what these import from the model's folder. Left out and not listed: weights, README.md, hidden files, media, leftovers
    of a training run, files that weightsmith writes about a model. A subfolder of which no file is copied is listed as one,
    with a `/`, unless its name says that it is another copy of the model.

    Raises CheckpointError for more files in subfolders than `MAX_FILES`.
    """
    candidates = copied_files(names, folders)
    present = {name for name in candidates if name.endswith(".py")}
    code = _named_code(folder, present, set(names), config, folders) if present else set()
    files = tuple(name for name in candidates if name not in present or name in code)
    if sum("/" in name for name in files) > subfolders.MAX_FILES:
        what = f"over {subfolders.MAX_FILES:,} files in subfolders would be copied into the new model"
        raise CheckpointError(what, where=str(folder), fix="Move out of the folder what is no part of the model.")
    return files, _left_out(set(names).difference(files), files)


def _left_out(names: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    read = {name.partition("/")[0] for name in files if "/" in name}
    names_left = set[str]()
    for name in names:
        top, slash, _ = name.partition("/")
        base = name.rpartition("/")[2]
        if not slash:
            names_left.update(() if _never_copied(name) else (name,))
        elif not subfolders.is_another_copy(top) and not _never_copied(base) and not base.endswith(".py"):
            names_left.add(name if top in read else f"{top}/")
    return tuple(sorted(names_left))


def read_to_choose(names: Iterable[str]) -> tuple[str, ...]:
    """The files that `choose_copied` reads: where there is Python code, the settings that may name it, and the code."""
    code = [name for name in copied_files(names) if name.endswith(".py")]
    return (*_NAMING_CODE, *code) if code else ()


def _never_copied(name: str) -> bool:
    lower = name.lower()
    if name.startswith(".") or name in _OURS or name in _QUANTISATION:
        return True
    if _HEAD.fullmatch(lower):
        return False
    if lower.endswith((*WEIGHTS, *_MEDIA)) or TRAINING.fullmatch(lower):
        return True
    return lower.endswith(".json") and ".index." in lower  # `.safetensors.index.fp16.json` too


def left_out_findings(names: Sequence[str], where: str) -> tuple[Finding, ...]:
    """The warnings that files and subfolders (with a `/`) of the donor are not copied; () when all are.

    >>> print(*left_out_findings(["id_rsa"], "base"))
    base: 1 file is not copied into the output, because no loader reads it: 'id_rsa'
      -> Copy what is needed into the output yourself.
    >>> print(*left_out_findings(["speech_tokenizer/"], "base"))
    base: 1 subfolder is not copied into the output: 'speech_tokenizer/'
      -> Copy it into the output yourself, if code that loads the model reads it.
    """
    findings = []
    heads, inner = [n for n in names if _HEAD.fullmatch(n.lower())], [n for n in names if n.endswith("/")]
    files = [n for n in names if n not in (*heads, *inner)]
    if heads:
        noun, it = ("file is", "it") if len(heads) == 1 else ("files are", "them")
        what = f"{len(heads)} {noun} neither merged nor copied, with weights of a head beside the model: {_some(heads)}"
        findings.append(
            Finding(what, where, fix=f"copy {it} into the output yourself, if code that loads the model reads {it}")
        )
    if files:
        noun, it = ("file is", "it") if len(files) == 1 else ("files are", "them")
        what = f"{len(files)} {noun} not copied into the output, because no loader reads {it}: {_some(files)}"
        findings.append(Finding(what, where, fix="copy what is needed into the output yourself"))
    if inner:
        noun, it = ("subfolder is", "it") if len(inner) == 1 else ("subfolders are", "them")
        what = f"{len(inner)} {noun} not copied into the output: {_some(inner)}"
        findings.append(
            Finding(what, where, fix=f"copy {it} into the output yourself, if code that loads the model reads {it}")
        )
    return tuple(findings)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(show, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def check_copied(folder: Path, files: Sequence[str]) -> None:
    """Raise for a file that cannot be copied: NotFound, FormatError (a pipe, over 1 GiB), CheckpointError (not readable)."""
    for name in files:
        with open_regular(folder / name) as file:
            nbytes = file.seek(0, 2)
        if nbytes > MAX_COPIED_BYTES:
            what = f"{nbytes:,} bytes, and a file that goes along with the weights has at most {MAX_COPIED_BYTES:,}"
            raise FormatError(what, where=str(folder / name), fix="Move it out of the folder if it is no part of the model.")


_DESCRIBING = ("modelspec.", "ss_")
"""Metadata of single files of image models and their adapters: what they are, and how they were trained."""
_HASHES = ("modelspec.hash_sha256",)
BUILDING_KEYS = ("config", "is_512", "resolution")
"""Metadata that ComfyUI builds the model of a single file from: JSON with the settings of LTX-Video, Wan and their VAEs in
`config`, and sizes."""


def kept_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a new model's weight files say of the metadata of one that it is made from. Hashes of the old tensors are left out.

    >>> kept_metadata({"format": "pt", "modelspec.title": "Ink", "modelspec.hash_sha256": "0x12", "sshs_model_hash": "34"})
    {'modelspec.title': 'Ink'}
    >>> kept_metadata({"config": '{"vae": {}}', "other": "5"})
    {'config': '{"vae": {}}'}
    """
    kept = (key for key in metadata if key.startswith(_DESCRIBING) or key in BUILDING_KEYS)
    return {key: metadata[key] for key in kept if key not in _HASHES}


def adapter_metadata(metadata: Mapping[str, str], ranks: Collection[int], alphas: Collection[float]) -> dict[str, str]:
    """`kept_metadata` of a file of an adapter. Its rank and alpha, where stated, are those of the new file's modules.

    kohya's programs write `Dynamic` for modules that differ.

    >>> adapter_metadata({"ss_network_dim": "8", "ss_network_alpha": "4", "ss_output_name": "ink"}, {8}, {8.0})
    {'ss_network_dim': '8', 'ss_network_alpha': '8.0', 'ss_output_name': 'ink'}
    """
    kept = kept_metadata(metadata)
    for key, values in (("ss_network_dim", ranks), ("ss_network_alpha", alphas)):
        if key in kept:
            kept[key] = str(next(iter(values))) if len({*values}) == 1 else "Dynamic"
    return kept


_MERGED_FROM = "modelspec.merged_from"
_STATED_LICENCE = "modelspec.license"


def merged_metadata(
    metadata: Mapping[str, str], paths: Sequence[str], others: Iterable[Mapping[str, str]] = (), *, alone: bool
) -> dict[str, str]:
    """`kept_metadata` of a merge, with the names of its models in place of an older list, as ModelSpec lists them.

    paths   of the models and adapters that are merged, or their ids on the Hub; of one model, there is no list
    others  metadata of these: the merge has a licence if all of them have it
    alone   the model that the metadata is of is a single file: others have the list only beside keys of ModelSpec

    >>> merged_metadata({"modelspec.title": "Ink"}, ["a/ink.safetensors", "me/sd-xl"], alone=False)["modelspec.merged_from"]
    'ink, sd-xl'
    """
    said = alone or any(key.startswith("modelspec.") for key in metadata)
    names = _model_names(paths)
    listed = {_MERGED_FROM: ", ".join(names)} if said and names and len(paths) > 1 else {}
    left_out = {_MERGED_FROM} | (
        {_STATED_LICENCE} if len({file.get(_STATED_LICENCE, "") for file in (metadata, *others)}) > 1 else set[str]()
    )
    return {key: value for key, value in metadata.items() if key not in left_out} | listed


_USUAL_NAME = re.compile(
    r"(adapter_config|adapter_model|(diffusion_)?pytorch_model|model|pytorch_lora_weights)(-\d+-of-\d+)?(\.\w+)*"
)
"""Names of weight files that say nothing of the model: its folder does."""


def _model_names(paths: Sequence[str]) -> list[str]:
    """The names of models: of a file without its suffix, or of a folder; with the folders that tell equal names apart.

    A comma would end a name in ModelSpec's list.

    >>> _model_names(["/models/ink, v1.5.safetensors", "sd-v1.5/", "photo/model.safetensors"])
    ['ink v1.5', 'sd-v1.5', 'photo']
    >>> _model_names(["me/ink", "you/ink.safetensors", "./me/ink"])
    ['me/ink', 'you/ink']
    """
    places = [*dict.fromkeys(map(_named_place, paths))]
    names = dict[str, None]()
    for place in places:
        lengths = range(1, len(place))
        length = next((n for n in lengths if sum(other[-n:] == place[-n:] for other in places) == 1), len(place))
        names[" ".join("/".join(place[-length:]).replace(",", " ").split())] = None
    return [name for name in names if name]


def _named_place(path: str) -> tuple[str, ...]:
    """The folders of a model, and its name."""
    place = Path(os.path.abspath(expand_user(path)))  # noqa: PTH100  links stay: those of the Hub's cache lead to hashes
    if not is_weights(place.name):
        return place.parts[1:]
    if _USUAL_NAME.fullmatch(place.name) and place.parent.name:
        return place.parent.parts[1:]
    return *place.parent.parts[1:], place.stem


def metadata_findings(labels: Sequence[str], metadata: Sequence[Mapping[str, str]], donor: int) -> tuple[Finding, ...]:
    """Warnings that ComfyUI builds models of a merge from different metadata. metadata: of each, from `kept_metadata`.

    >>> print(*metadata_findings(["a", "b"], [{"config": "{}"}, {"config": '{"vae": {}}'}], 0))
    b: its metadata config differs from that of a, which the output has, and ComfyUI builds the model from it
      -> Check that the models belong to the same version.
    """
    findings = []
    for label, other in zip(labels, metadata, strict=True):
        if differing := [key for key in BUILDING_KEYS if key in other and other[key] != metadata[donor].get(key)]:
            what = f"its metadata {', '.join(differing)} differs from that of {labels[donor]}, which the output has"
            fix = "check that the models belong to the same version"
            findings.append(Finding(f"{what}, and ComfyUI builds the model from it", label, fix=fix))
    return tuple(findings)


def _named_code(
    folder: Path, present: set[str], names: set[str], config: Mapping[str, Any] | None, folders: Sequence[str]
) -> set[str]:
    """The Python files, of those that are present, that the configurations name and that these import."""
    modules = [_module(reference) for reference in _auto_map(config or {})]
    for name in _NAMING_CODE:
        if name in names:
            modules += map(_module, _auto_map(_settings(folder / name)))
    for reference in subfolders.module_code(folder, names, folders):
        module = _module(reference)
        modules += [module, *(f"{parent}/{module}" for parent in folders)]
    code: set[str] = set()
    while modules:
        module = modules.pop()
        parents = [module[:i] for i, letter in enumerate(module) if letter == "/"]
        files = {f"{module}.py", f"{module}/__init__.py", *(f"{parent}/__init__.py" for parent in parents)}
        for name in sorted((files & present) - code):
            code.add(name)
            modules += _imported(name, read_bounded(folder / name, MAX_CODE_BYTES).decode(errors="replace"))
    return code


def _module(reference: str) -> str:
    """The module of a class, as a path without its suffix.

    >>> _module("modeling_x.XModel"), _module("code/modeling_x.XModel")
    ('modeling_x', 'code/modeling_x')
    """
    return reference.rpartition(".")[0].replace(".", "/")


def _imported(name: str, text: str) -> Iterator[str]:
    """The modules that a file imports from the model's folder, as paths; the names that it imports from them may be modules.

    >>> sorted(_imported("code/a.py", "from .b import C\\nfrom .. import d"))
    ['code/b', 'code/b/C', 'd']
    """
    folder = name.split("/")[:-1]
    for dots, module, imported in _RELATIVE_IMPORT.findall(text):
        if len(dots) - 1 > len(folder):
            continue
        parts = [*folder[: len(folder) - len(dots) + 1], *(module.split(".") if module else [])]
        if module:
            yield "/".join(parts)
        for imported_name in imported.strip("()").split(","):
            if words := imported_name.split():
                yield "/".join([*parts, words[0]])


def _settings(path: Path) -> Mapping[str, Any]:
    """A JSON file of settings; {} for one that is damaged: it is copied as it is, and not ours to judge."""
    try:
        return read_object(path, MAX_SETTINGS_BYTES, path.name, "", unique=False)
    except CheckpointError:
        return {}


def _auto_map(settings: Mapping[str, Any]) -> Iterator[str]:
    """The classes in `auto_map`: `"modeling_x.XModel"`, or a list of such names and null."""
    auto_map = settings.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:  # `org/name--modeling_x.X` is code of another repository
                yield reference
