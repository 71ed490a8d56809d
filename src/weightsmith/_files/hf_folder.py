"""The folder (or hub repository) of a model: which of its files are the weights, and what its card says.

The weights are known from file names alone, so that a hub repository can be judged before a byte of it is downloaded. Only the
top level counts: what lies in subfolders (`original/`, `onnx/`) is another copy of the model, or another model.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weightsmith._base.errors import FormatError, NotFound, Unsupported, WeightsmithError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.strict_json import read_object
from weightsmith._files.copied import WEIGHTS, is_weights

# ---- Checkpoints of distributed training: each file holds what one process had of every tensor, so none of them is a model


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a program stores the parts of a model.

    pattern  of the end of a file's path, in lower case
    what     for messages
    command  that makes a model of it: `{folder}` is the folder with the files, `{parent}` the one above it
    joined   it is read, if all files of its folder are there and the folder is named
    nested   each file is in a folder of its own, below that one
    """

    pattern: str
    what: str
    command: str
    joined: bool = False
    nested: bool = False

    def matches(self, path: str) -> bool:
        """Whether a file is one of its files."""
        return re.fullmatch(rf"(?:.*/)?(?:{self.pattern})", path.lower(), re.ASCII) is not None


_LAYOUTS = (
    _Layout(r"(?:\w*zero_pp_rank_\d+|mp_rank_\d+)_\w*states\.pt", "a part of a DeepSpeed checkpoint", "", joined=True),
    _Layout(
        r"\w*model_world_size_(?:[2-9]|[1-9]\d+)_rank_\d+\.pt",
        "an FSDP checkpoint of verl, with a file for each process",
        "",
        joined=True,
    ),
    _Layout(
        r"mp_rank_\d+(?:_\d+)*/(?:model_optim_rng|model_rng|distrib_optim)\.pt",
        "a part of a Megatron checkpoint",
        "",
        joined=True,
        nested=True,
    ),
    _Layout(r"\.metadata|\w+\.distcp", "a part of a distributed checkpoint of PyTorch (FSDP, DCP)", "", joined=True),
)
_RANK = re.compile(r"(.*[_-])?rank[_-]?(\d+)((?:[_-]part[_-]\d+)?\.(?:safetensors|pt|pth|bin))", re.ASCII)
_OTHERS = _Layout("", "a checkpoint with a file for each process", "")


def of_ranks(names: Iterable[str], where: str) -> Unsupported | None:
    """The error for files of single processes; None if none of these is one.

    names  of files, relative, `/` between folders
    where  the folder or repository

    >>> print(of_ranks(["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "c").finding)
    c: an FSDP checkpoint of verl, with a file for each process: no file holds the model
      'model_world_size_2_rank_0.pt', 'model_world_size_2_rank_1.pt'
      -> Name its folder, with the files of all processes in it: c.
    """
    listed = sorted(names)
    for layout in _LAYOUTS:
        if files_of_layout := [name for name in listed if layout.matches(f"{where}/{name}")]:
            return _error(layout, files_of_layout, where)
    ranks: dict[tuple[str, str], dict[str, str]] = {}
    for name in listed:
        if match := _RANK.fullmatch(name.lower()):
            ranks.setdefault((match[1] or "", match[3]), {})[match[2].lstrip("0")] = name
    for files in ranks.values():
        if {"", "1"} <= files.keys():  # one file alone may be an adapter whose name states its rank
            return _error(_OTHERS, list(files.values()), where)
    return None


def _error(layout: _Layout, files: list[str], where: str) -> Unsupported:
    inner = files[0].rpartition("/")[0]
    folder = f"{where}/{inner}" if inner else where
    parent = folder.rpartition("/")[0] or "."
    fix = "Use the model that it was made from, or one that the program which wrote it exports."
    if layout.nested:
        folder = folder.rpartition("/")[0] or "."
    if layout.joined:
        fix = f"Name its folder, with the files of all processes in it: {shlex.quote(folder)}"
    if layout.command:
        command = layout.command.format(folder=shlex.quote(folder), parent=shlex.quote(parent))
        fix = f"Make a model of all its files first: `{command}`"
    others = f", … ({len(files):,} in all)" if len(files) > _SHOWN else ""
    details = (", ".join(map(show, files[:_SHOWN])) + others,)
    return Unsupported(f"{layout.what}: no file holds the model", where=where, details=details, fix=fix)


MAX_INDEX_BYTES = 100_000_000  # an index of 100,000 tensors takes 10 MB

PYTORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_SUFFIXES = (".safetensors",)
_FIRST = ("model.safetensors", "diffusion_pytorch_model.safetensors")  # what transformers and diffusers write
_NUMBERED = re.compile(r"(.*?)-?([0-9]+)-of-([0-9]+)(\.\w+)")
_INDEX = ".index.json"
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """The weight files of a folder.

    index    name of the index file that lists the shards, or None
    files    names of the files; () when the index lists them
    ignored  files of the format at the top level that are no part of the model as chosen (with an index, the shards too:
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


def choose_weights(
    names: Iterable[str], where: str, suffixes: tuple[str, ...] = _SUFFIXES, first: Sequence[str] = _FIRST
) -> FolderWeights | None:
    """Which files of a format hold the model; None where there are none, or only those of an adapter.

    names     of all files, relative, `/` between folders
    where     the folder or repository, for messages
    suffixes  of the format's files, lower case
    first     names of the single files that libraries write, in order of preference

    In this order: of each of `first` the index or the file; any other one index; all other files of the format;
    `consolidated*` files (Mistral's own layout: most of its repositories have the same tensors in both).

    Raises FormatError when two of these contradict each other or numbered shards are missing.

    >>> choose_weights(["model.safetensors", "consolidated.safetensors", "config.json"], "here")
    FolderWeights(index=None, files=('model.safetensors',), ignored=('consolidated.safetensors',))
    """
    top = _top_level(names)
    weights = [n for n in top if n.lower().endswith(suffixes)]
    indexes = [n for n in top if n.lower().endswith(tuple(f"{suffix}{_INDEX}" for suffix in suffixes))]

    def chosen(index: str | None, files: Collection[str]) -> FolderWeights:
        _check_numbers_complete(files, where)
        return FolderWeights(index, tuple(files), tuple(n for n in weights if n not in files))

    for single in first:
        if f"{single}{_INDEX}" in indexes:
            return chosen(f"{single}{_INDEX}", ())
        if single in weights:
            shards = [n for n in weights if (m := _NUMBERED.fullmatch(n)) and m[1] + m[4] == single]
            if shards:
                raise two_models(where, single, shards[0])
            return chosen(None, (single,))
    is_adapter = "adapter_config.json" in top
    for consolidated in (False, True):
        group = [n for n in top if n.startswith("consolidated") == consolidated and not n.startswith("adapter_model")]
        mine = [n for n in group if n in weights]
        lists = [n for n in group if n in indexes]
        if len(lists) > 1:
            raise two_models(where, lists[0], lists[1])
        if lists:
            return chosen(lists[0], ())
        if mine and not is_adapter:
            return chosen(None, mine)
    return None


def read_index(path: Path, present: Collection[str], suffixes: tuple[str, ...] = _SUFFIXES) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> file name, in the file's order, every file name checked.

    present   names of the files at the top level of the folder
    suffixes  that weight files may have, lower case

    Raises FormatError: not JSON, no weight_map or not str -> str, a file name that is absolute, climbs with `..`, holds
    a path separator, has another suffix or does not exist.
    """
    where = str(path)
    fix = "Download the checkpoint again from a source you trust: the index is damaged or hostile."
    data = read_object(path, MAX_INDEX_BYTES, "the index", fix)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict):
        shown = show(weight_map) if "weight_map" in data else f"only the keys {show(sorted(data))}"
        raise FormatError(f"the index has no weight_map object, but {shown}", where=where, fix=fix)
    if not weight_map:
        raise FormatError("the index lists no tensor: its weight_map is empty", where=where, fix=fix)
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise FormatError(f"weight_map: {show(tensor)} is in {show(file)}, which is not a string", where=where, fix=fix)
    first_tensor = dict(zip(reversed(weight_map.values()), reversed(weight_map), strict=True))
    single = path.name.removesuffix(_INDEX)
    for file in sorted(first_tensor, key=natural_key):
        if problem := _unsafe(file, suffixes):
            what = f"weight_map: tensor {show(first_tensor[file])} is in {show(file)}: {problem}"
            raise FormatError(what, where=where, fix=fix)
        if file not in present:
            what = f"the index names the file {show(file)} (tensor {show(first_tensor[file])}), which does not exist"
            raise FormatError(what, where=where, fix="Get the missing file: the download was probably interrupted.")
    if single in present and single not in first_tensor:
        raise two_models(str(path.parent), path.name, single)
    return weight_map


def two_models(where: str, one: str, other: str) -> FormatError:
    """The error for a folder that holds two candidates."""
    what = f"both {one} and {other} are there: two models, or one and the rest of an older one"
    return FormatError(what, where=where, fix="Remove or move away the one that is not meant, or name a single file.")


def _top_level(names: Iterable[str]) -> list[str]:
    """The names at the top level that are not hidden, in natural order."""
    return sorted((n for n in names if "/" not in n and not n.startswith(".")), key=natural_key)


def _unsafe(file: str, suffixes: tuple[str, ...]) -> str:
    """Why a shard's name may not be used, or an empty string. Backslashes too: the folder may go to Windows next."""
    if file.startswith(("/", "\\")) or re.match("[A-Za-z]:", file):
        return "an absolute path, a shard must be in the folder of the index"
    if ".." in re.split(r"[/\\]", file):
        return "it leaves the folder through '..'"
    if "/" in file or "\\" in file or "\0" in file:
        return "it holds a path separator, a shard must be in the folder of the index"
    if not file.lower().endswith(suffixes):
        return f"not a {' or '.join(suffixes)} file"
    return ""


@dataclass(frozen=True, slots=True)
class _ShardSet:
    """Files that are numbered alike: `model-00002-of-00005.safetensors` says that there are five.

    total    as their names write it
    width    of the numbers: DeepSeek has written `model-00002-of-000163.safetensors`
    numbers  of those that are there
    """

    stem: str
    total: str
    suffix: str
    width: int
    numbers: set[int]

    @property
    def count(self) -> int:
        """How many there are by their names."""
        return int(self.total) if len(self.total) < 10 else 10**9

    @property
    def first(self) -> int:
        """The lowest number."""
        return 0 if 0 in self.numbers else 1

    @property
    def lost(self) -> int:
        """How many are not there."""
        return self.count - sum(self.first <= number < self.first + self.count for number in self.numbers)

    def missing(self) -> Iterator[str]:
        """The names of those that are not there, in order. There may be a billion."""
        for number in range(self.first, self.first + self.count):
            if number not in self.numbers:
                yield f"{self.stem}-{number:0{self.width}d}-of-{self.total}{self.suffix}"


def _sets(files: Iterable[str]) -> Iterable[_ShardSet]:
    sets: dict[tuple[str, str, str], _ShardSet] = {}
    for name in files:
        if (match := _NUMBERED.fullmatch(name)) and len(match[2]) < 10:
            key = match[1], match[3], match[4]
            sets.setdefault(key, _ShardSet(*key, len(match[2]), set())).numbers.add(int(match[2]))
    return sets.values()


def _check_numbers_complete(files: Iterable[str], where: str) -> None:
    """Raise FormatError if numbered files are missing: without an index nothing else would tell."""
    for shards in _sets(files):
        if (lost := shards.lost) > 0:
            listed = ", ".join(itertools.islice(shards.missing(), 3))
            raise FormatError(
                f"{lost} of {shards.count} shards are missing: {listed}" + (", …" if lost > 3 else ""),
                where=where,
                fix="Get the missing files: the download was probably interrupted.",
            )


@dataclass(frozen=True, slots=True)
class UnlistedShards:
    """Shards of the sets that an index lists files of, by their numbers, and that it does not list.

    there  names of files in the folder
    lost   the first few names of others
    count  of all others
    """

    there: tuple[str, ...]
    lost: tuple[str, ...]
    count: int


def unlisted_shards(listed: Iterable[str], others: Iterable[str]) -> UnlistedShards:
    """Which shards an index leaves out.

    listed  names of files that it lists
    others  names of other files in the folder

    >>> unlisted_shards(["model-00001-of-00004.safetensors"], ["model-00003-of-00004.safetensors", "consolidated.safetensors"])
    UnlistedShards(there=('model-00003-of-00004.safetensors',), lost=('model-00002-of-00004.safetensors', \
'model-00004-of-00004.safetensors'), count=2)
    """
    files = list(listed)
    stems = {(shards.stem, shards.total, shards.suffix) for shards in _sets(files)}
    there = tuple(name for name in others if (match := _NUMBERED.fullmatch(name)) and (match[1], match[3], match[4]) in stems)
    incomplete = [shards for shards in _sets([*files, *there]) if shards.lost > 0]
    lost = itertools.chain.from_iterable(shards.missing() for shards in incomplete)
    return UnlistedShards(there, tuple(itertools.islice(lost, _SHOWN)), sum(shards.lost for shards in incomplete))


def _hub_cache(folder: Path) -> NotFound | None:
    """The error for huggingface_hub's cache, or the folder of one model in it, in the place of a model."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("models--"))
        snapshots = sorted(entry.name for entry in (folder / "snapshots").iterdir()) if (folder / "snapshots").is_dir() else []
    except OSError:
        return None
    if names:
        ids = [name.removeprefix("models--").replace("--", "/", 1) for name in names]
        listed = (f"models in it: {', '.join(ids[:5])}{f', … ({len(ids)} in all)' if len(ids) > 5 else ''}",)
        return NotFound("the cache of Hub models, not a model", where=str(folder), details=listed, fix=f"Write {ids[0]}.")
    if snapshots:
        fix = f"Write the folder of one revision, {folder / 'snapshots' / snapshots[-1]}"
        if folder.name.startswith("models--"):
            fix += f", or the model's Hub id, {folder.name.removeprefix('models--').replace('--', '/', 1)}"
        return NotFound("the cache folder of a Hub model, which holds its revisions", where=str(folder), fix=fix)
    return None


def no_weights(names: Iterable[str], where: str, suffixes: tuple[str, ...]) -> Unsupported | NotFound:
    """The error for a folder without weights that can be read: what it holds instead, and the next step.

    names     of all files, relative, `/` between folders
    where     the folder or repository
    suffixes  of the weight files that can be read
    """
    everything = list(names)
    top = _top_level(everything)

    def some(names: list[str]) -> tuple[str, ...]:
        return (", ".join(map(show, names[:5])) + (f", … ({len(names)} in all)" if len(names) > 5 else ""),)

    if not top and (cache_error := _hub_cache(Path(where))):
        return cache_error
    kind: type[Unsupported] | type[NotFound] = NotFound
    if "adapter_config.json" in top or any(n.startswith("adapter_model.") for n in top):
        kind, what = Unsupported, "an adapter (LoRA), not a model"
        details = some([n for n in top if n.startswith("adapter")])
        fix = f"Write its base model in front of it: base_model_folder_or_hub_id+{where}"
    elif others := [n for n in top if n.lower().endswith(WEIGHTS) and is_weights(n) and not n.lower().endswith(suffixes)]:
        kind, what = Unsupported, "no weights in a format that is read"
        details, fix = some(others), "Convert them to safetensors."
    elif nested := sorted(n for n in everything if "/" in n and n.lower().endswith(suffixes)):
        what, details = "no weights at the top level, only in subfolders", some(nested)
        fix = "Name one of the subfolders. If it is in a Hub model, download the model first."
    else:
        what = f"no weights: there is no {', '.join(suffixes[:-1])} or {suffixes[-1]} file"
        details = ("it holds " + some(top)[0],) if top else ("it is empty",)
        fix = "Name the folder that holds config.json and the weights."
    return kind(what, where=where, details=details, fix=fix)


# ---- The front matter of model cards: what README.md says about a model in a form that programs read


CARD_NAME = "README.md"
MAX_CARD_BYTES = 4 << 20
MAX_FRONT_CHARACTERS = 64 << 10

_FRONT = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_IN_HUB_CACHE = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+", re.ASCII)


def read_card(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's README.md, every value as text; {} without one that can be read."""
    try:
        text = read_bounded(folder / CARD_NAME, MAX_CARD_BYTES).decode(errors="replace").removeprefix("\ufeff")
    except WeightsmithError:
        return {}
    match = _FRONT.match(text)
    if match is None or len(match[1]) > MAX_FRONT_CHARACTERS:
        return {}
    try:
        front_matter = yaml.load(
            match[1], Loader=yaml.BaseLoader
        )  # text, lists and mappings alone: no numbers, no dates, no objects
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):  # PyYAML's own for \UFFFFFFFF
        return {}
    return {key: value for key, value in front_matter.items() if isinstance(key, str)} if isinstance(front_matter, dict) else {}


def hub_id_of(path: str) -> str:
    """The name on the Hub of a folder in its cache; "" for any other path.

    >>> hub_id_of("/home/me/.cache/huggingface/hub/models--org--name/snapshots/0123abc")
    'org/name'
    """
    match = _IN_HUB_CACHE.fullmatch(path.rstrip("/"))
    return f"{match[1]}/{match[2]}" if match else ""
