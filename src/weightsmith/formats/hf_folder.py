"""The folder (or hub repository) of a model: which of its files are the weights, which go along with them.

Decided from file names alone, so that a hub repository can be judged before a byte of it is downloaded. Only the top
level counts: what lies in subfolders (`original/`, `onnx/`) is another copy of the model, or another model.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from weightsmith.errors import FormatError, NotFound, Unsupported
from weightsmith.formats.files import read_bounded, show
from weightsmith.formats.strict_json import parse_object

MAX_INDEX_BYTES = 256 << 20  # an index of 100,000 tensors takes 10 MB

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_STEMS = ("model", "diffusion_pytorch_model")  # what transformers and diffusers write
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS = (_SUFFIX, *_PICKLES, *".gguf .onnx .onnx_data .h5 .msgpack .npz .npy .tflite .mlmodel".split())
_MEDIA = tuple(".png .jpg .jpeg .gif .webp .svg .mp4 .mp3 .wav .pdf .zip .gz .tar .csv .parquet .arrow .lock .log".split())
_TRAINING = re.compile(r"readme\.md|(optimizer|scheduler|rng_state|trainer_state|training_args|events\.out).*")
_OURS = frozenset({"weightsmith.json", "recipe.yml", "routing.json"})
"""What we write about a model that we made: it says how that one was made, and not the next."""
_NUMBERED = re.compile(r"(.*?)-?([0-9]+)-of-([0-9]+)\.safetensors")
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files of a folder.

    index    name of the index file that lists the shards, or None
    files    names of the files; () when the index lists them
    ignored  safetensors files at the top level that are no part of the model as chosen (with an index, the shards too:
             subtract what the index lists)
    """

    index: str | None
    files: tuple[str, ...]
    ignored: tuple[str, ...]


def natural_key(name: str) -> tuple[str, str]:
    """Sort key under which numbers compare as numbers.

    >>> sorted(["layers.10.w", "layers.9.w", "embed"], key=natural_key)
    ['embed', 'layers.9.w', 'layers.10.w']
    """
    return ".".join(map(_sortable, name.split("."))), name


@functools.lru_cache(maxsize=8192)  # the parts of 100,000 tensor names are a few hundred: half the time
def _sortable(part: str) -> str:
    # A number becomes its length and its digits: "9" < "10" as text. No int(): a name may hold a million digits.
    return _DIGITS.sub(lambda m: f"{len(digits := m[0].lstrip('0')):06d}{digits}", part)


def choose_weights(names: Iterable[str], where: str) -> Weights:
    """Which files hold the model.

    names  of all files, relative, `/` between folders
    where  the folder or repository, for messages

    In this order: `model.safetensors.index.json` or `model.safetensors`; the same of `diffusion_pytorch_model`; any
    other one index; all other safetensors files; `consolidated*` files (Mistral's own layout, which stands beside the
    first kind in most of its repositories and holds the same tensors again).

    Raises FormatError when two of these contradict each other or numbered shards are missing, Unsupported for adapters
    and for formats other than safetensors, NotFound when there are no weights.

    >>> choose_weights(["model.safetensors", "consolidated.safetensors", "config.json"], "here")
    Weights(index=None, files=('model.safetensors',), ignored=('consolidated.safetensors',))
    """
    everything = list(names)
    top = sorted((n for n in everything if "/" not in n and not n.startswith(".")), key=natural_key)
    safe = [n for n in top if n.lower().endswith(_SUFFIX)]
    indexes = [n for n in top if n.lower().endswith(_INDEX_SUFFIX)]

    def chosen(index: str | None, files: Collection[str]) -> Weights:
        _check_numbers_complete(files, where)
        return Weights(index, tuple(files), tuple(n for n in safe if n not in files))

    for stem in _STEMS:
        if f"{stem}{_INDEX_SUFFIX}" in indexes:
            return chosen(f"{stem}{_INDEX_SUFFIX}", ())
        single = f"{stem}{_SUFFIX}"
        if single in safe:
            shards = [n for n in safe if (m := _NUMBERED.fullmatch(n)) and m[1] == stem]
            if shards:
                raise two_models(where, single, shards[0])
            return chosen(None, (single,))
    is_adapter = "adapter_config.json" in top
    for consolidated in (False, True):
        group = [n for n in top if n.startswith("consolidated") == consolidated and not n.startswith("adapter_model")]
        mine = [n for n in group if n in safe]
        lists = [n for n in group if n in indexes]
        if len(lists) > 1:
            raise two_models(where, lists[0], lists[1])
        if lists:
            return chosen(lists[0], ())
        if mine and not is_adapter:
            return chosen(None, mine)
    raise _no_weights(everything, top, where)


def carried_files(names: Iterable[str]) -> tuple[str, ...]:
    """The files that go with the weights into a new model, sorted: config, tokenizer, chat template, code, licence.

    Top level only. Left behind: weights of any format and their indexes, README.md, hidden files, media and data, what a
    training run leaves (optimizer, scheduler, rng_state, trainer_state, training_args), and what weightsmith says of a model.

    >>> carried_files(["config.json", "model.safetensors", "README.md", "tokenizer.model", "original/params.json"])
    ('config.json', 'tokenizer.model')
    """
    left_behind = (*_WEIGHTS, ".index.json", *_MEDIA)
    return tuple(
        sorted(
            n
            for n in names
            if "/" not in n
            and not n.startswith(".")
            and n not in _OURS
            and not n.lower().endswith(left_behind)
            and not _TRAINING.fullmatch(n.lower())
        )
    )


def read_index(path: Path, present: Collection[str]) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> file name, in the file's order, every file name checked.

    present  names of the files at the top level of the folder

    Raises FormatError: not JSON, no weight_map or not str -> str, a file name that is absolute, climbs with `..`, holds
    a path separator, is no .safetensors file or does not exist.
    """
    where = str(path)
    fix = "The index is damaged or hostile: download the checkpoint again from a source you trust."
    data = parse_object(read_bounded(path, MAX_INDEX_BYTES), "the index", where, fix)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict):
        found = show(weight_map) if "weight_map" in data else f"only the keys {show(sorted(data))}"
        raise FormatError(f"the index has no weight_map object, but {found}", where=where, fix=fix)
    if not weight_map:
        raise FormatError("the index lists no tensor: its weight_map is empty", where=where, fix=fix)
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise FormatError(f"weight_map: {show(tensor)} is in {show(file)}, which is not a string", where=where, fix=fix)
    first_tensor = dict(zip(reversed(weight_map.values()), reversed(weight_map), strict=True))
    single = path.name.removesuffix(".index.json")
    for file in sorted(first_tensor, key=natural_key):
        if problem := _unsafe(file):
            raise FormatError(
                f"weight_map: tensor {show(first_tensor[file])} is in {show(file)}: {problem}", where=where, fix=fix
            )
        if file not in present:
            raise FormatError(
                f"the index names the file {show(file)} (tensor {show(first_tensor[file])}), which does not exist",
                where=where,
                fix="The download was probably interrupted: get the missing file.",
            )
    if single in present and single not in first_tensor:
        raise two_models(str(path.parent), path.name, single)
    return weight_map


def two_models(where: str, one: str, other: str) -> FormatError:
    """The error for a folder that holds two candidates."""
    return FormatError(
        f"both {one} and {other} are there: two models, or one and the rest of an older one",
        where=where,
        fix="Remove or move away the one that is not meant, or name a single .safetensors file.",
    )


def _unsafe(file: str) -> str:
    """Why a shard's name may not be used, or an empty string. Backslashes too: the folder may go to Windows next."""
    if file.startswith(("/", "\\")) or re.match("[A-Za-z]:", file):
        return "an absolute path, a shard must be in the folder of the index"
    if ".." in re.split(r"[/\\]", file):
        return "it leaves the folder through '..'"
    if "/" in file or "\\" in file or "\0" in file:
        return "it holds a path separator, a shard must be in the folder of the index"
    if not file.lower().endswith(_SUFFIX):
        return "not a .safetensors file"
    return ""


def _check_numbers_complete(files: Iterable[str], where: str) -> None:
    """`model-00002-of-00005.safetensors` says that there are five: without an index nothing else would."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in files:
        if (match := _NUMBERED.fullmatch(name)) and len(match[2]) < 10:
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in sets.items():
        expected = int(total) if len(total) < 10 else 10**9
        if len(numbers) < expected:
            first = 0 if 0 in numbers else 1
            missing = itertools.islice((n for n in range(first, expected + first) if n not in numbers), 3)
            listed = ", ".join(f"{stem}-{n:0{len(total)}d}-of-{total}{_SUFFIX}" for n in missing)
            raise FormatError(
                f"{expected - len(numbers)} of {expected} shards are missing: {listed}"
                + (", …" if expected - len(numbers) > 3 else ""),
                where=where,
                fix="The download was probably interrupted: get the missing files.",
            )


def _no_weights(everything: list[str], top: list[str], where: str) -> Unsupported | NotFound:
    def some(names: list[str]) -> tuple[str, ...]:
        return (", ".join(map(show, names[:5])) + (f", … ({len(names)} in all)" if len(names) > 5 else ""),)

    if "adapter_config.json" in top or any(n.startswith("adapter_model.") for n in top):
        return Unsupported(
            "an adapter (LoRA), not a model",
            where=where,
            details=some([n for n in top if n.startswith("adapter")]),
            fix=f"Write its base model in front of it: base_model_folder_or_hub_id+{where}",
        )
    if pickles := [n for n in top if n.lower().endswith(_PICKLES) and not _TRAINING.fullmatch(n.lower())]:
        return Unsupported(
            "the weights are pickles, which can run any code when they are loaded; weightsmith never loads them",
            where=where,
            details=some(pickles),
            fix="Convert them once: load the model with transformers where you trust it, and save_pretrained() it.",
        )
    if ggufs := [n for n in top if n.lower().endswith(".gguf")]:
        return Unsupported(
            "only GGUF weights, which this version does not read",
            where=where,
            details=some(ggufs),
            fix="Use the safetensors checkpoint that the GGUF files were made from.",
        )
    if others := [n for n in top if n.lower().endswith(_WEIGHTS) and not n.lower().endswith(_PICKLES)]:
        return Unsupported("no safetensors weights", where=where, details=some(others), fix="Convert them to safetensors.")
    if nested := sorted(n for n in everything if "/" in n and n.lower().endswith(_SUFFIX)):
        return NotFound(
            "no weights at the top level, only in subfolders",
            where=where,
            details=some(nested),
            fix="Name the subfolder that is meant (of a hub model: download it first).",
        )
    return NotFound(
        "no weights: there is no .safetensors file",
        where=where,
        details=("it holds " + some(top)[0],) if top else ("it is empty",),
        fix="Name the folder that holds config.json and *.safetensors.",
    )
