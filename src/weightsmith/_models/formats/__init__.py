"""Stored formats: one file or folder for each, with what its bytes mean, how they are read and, for some, how they are written.

opening.py   how a model's weight files become plain tensors
config.py    what config.json says of quantisation; config.json as programs with readers of their own take it
decoded.py   sources whose weights are decoded from codes on each read
matrices.py  encodings of weight matrices, and what several formats share of them
hessians.py  codes that suit what enters a weight
unfused.py   a model with a step for each matrix, as programs with formats of their own load it
engines.py   which formats the programs that run models load

To add a format, add a file or folder with a `FORMAT`, and its name to `NAMES` (and `OF_FILES`); or a package with an entry
point of the group `weightsmith.formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module

from weightsmith._base.errors import Finding, PluginError, UnknownName, nearest
from weightsmith._base.plugins import Plugins, installed
from weightsmith.abc.stored import CacheEncoding
from weightsmith.abc.stored import Encoding as Encoding
from weightsmith.abc.stored import StoredFormat as StoredFormat

NAMES = (
    "plain", "compressed_tensors", "fp8", "gptq", "awq", "autoround", "bitnet", "bitsandbytes", "comfyui", "exl2", "exl3",
    "gguf", "hqq", "mlx", "modelopt", "mxfp4", "quark", "torchao", "training",
)  # fmt: skip
"""weightsmith's formats. The first that recognises a model reads it."""

OF_FILES = ("plain", "gguf", "training")
"""Those that are told by files of their own; the others by config.json and tensors, in safetensors files or PyTorch's."""

FORMATS = Plugins(
    "stored format",
    "weightsmith.formats",
    StoredFormat,
    {name: f"weightsmith._models.formats.{name}:FORMAT" for name in NAMES},
)

GGUF_ARCHITECTURES = "weightsmith.gguf_architectures"
"""Entry points of packages that bring architectures of GGUF files."""


@cache
def formats() -> tuple[StoredFormat, ...]:
    """Every format: weightsmith's, then those of installed packages that work.

    >>> [each.name for each in formats()][:3]
    ['plain', 'compressed_tensors', 'fp8']
    """
    return (*_ours(), *(stored_format for stored_format in _installed().values() if isinstance(stored_format, StoredFormat)))


def each_format(names: Iterable[str] = NAMES) -> Iterator[StoredFormat]:
    """As `formats`, each imported when it is reached. names: weightsmith's own among them."""
    yield from map(FORMATS.get, names)
    yield from (stored_format for stored_format in _installed().values() if isinstance(stored_format, StoredFormat))


def each_of_files() -> Iterator[StoredFormat]:
    """Every format that may have files of its own."""
    return each_format(OF_FILES)


def each_of_tensors() -> Iterator[StoredFormat]:
    """Every format that may recognise tensors."""
    return each_format(name for name in NAMES if name not in OF_FILES)


def formats_for(name: str) -> Iterator[StoredFormat]:
    """As `each_format`, but first those of weightsmith's whose names begin `name`, of an encoding or a way to store models.

    >>> next(formats_for("gguf-q4_k_m")).name
    'gguf'
    """
    return each_format(sorted(NAMES, key=lambda known: not name.startswith(known)))


def _ours() -> tuple[StoredFormat, ...]:
    return tuple(map(FORMATS.get, FORMATS.builtin))


def broken() -> tuple[Finding, ...]:
    """Why formats of installed packages cannot be used."""
    return tuple(problem for problem in _installed().values() if isinstance(problem, Finding))


def installed_code() -> tuple[str, ...]:
    """What identifies each format and GGUF architecture of an installed package: its code may change the bytes of an output."""
    stored = [FORMATS.identity(name) for name, loaded in _installed().items() if isinstance(loaded, StoredFormat)]
    if not installed(GGUF_ARCHITECTURES):  # most have none, and need not import those of weightsmith
        return tuple(stored)
    families: Plugins[object] = import_module("weightsmith._models.formats.gguf.architectures").FAMILIES
    return (*stored, *map(families.identity, families.brought))


@cache
def _installed() -> dict[str, StoredFormat | Finding]:
    """The formats that installed packages bring, or why they cannot be used."""
    by_name: dict[str, StoredFormat | Finding] = {}
    if not FORMATS.brought:
        return by_name
    taken = {encoding.name for loaded in _ours() for encoding in loaded.encodings}
    for name in FORMATS.brought:
        try:
            loaded = by_name[name] = FORMATS.get(name)
        except PluginError as error:
            by_name[name] = error.finding
            continue
        names = [encoding.name for encoding in loaded.encodings]
        if other := next((name for name in names if name in taken), ""):
            what = f"the stored format {name} has an encoding of another format: {other}"
            by_name[name] = Finding(what, FORMATS.source(name), fix="remove the package")
        taken.update(names)
    return by_name


def encodings() -> dict[str, Encoding]:
    """Every encoding without a setting, by name.

    >>> list(encodings())[:4]
    ['plain', 'fp8-dynamic', 'fp8-static', 'fp8-block']
    """
    return {encoding.name: encoding for stored_format in formats() for encoding in stored_format.encodings}


def format_of_encoding(name: str) -> StoredFormat:
    """The format that has an encoding without a setting. Raises UnknownName.

    >>> format_of_encoding("w4a16").name
    'compressed_tensors'
    """
    for stored_format in formats_for(name):
        if any(encoding.name == name for encoding in stored_format.encodings):
            return stored_format
    raise UnknownName(f"unknown encoding '{name}'{nearest(name, encodings())}")


def find_cache(name: str) -> CacheEncoding | None:
    """How keys and values are stored as `name`: `fp8`."""
    return next((cache for stored_format in each_format() for cache in stored_format.caches if cache.name == name), None)


def find_encoding(name: str) -> Encoding:
    """The encoding of this name, which may have a setting: `exl2 4/g128`, `plain F16`. Raises UnknownName.

    >>> find_encoding("exl2 5@0.1/g128+4@0.9/g64").params.bits
    (5, 4)
    """
    try:
        for stored_format in formats_for(name):
            named = next((encoding for encoding in stored_format.encodings if encoding.name == name), None)
            if (encoding_of_name := named or stored_format.parse(name)) is not None:
                return encoding_of_name
    except ValueError:
        family, _, setting = name.partition(" ")
        raise UnknownName(f"encoding '{family}' has no setting '{setting}'") from None
    known = encodings()
    details = tuple(f"{problem.where}: {problem.what}" for problem in broken())
    fix = f"write one of {', '.join(known)}"
    raise UnknownName(f"unknown encoding '{name}'{nearest(name, known)}", details=details, fix=fix)
