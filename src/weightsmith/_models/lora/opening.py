"""Opens an adapter, in whatever form it is: a folder that PEFT has written, one with a single file of factors, or that file."""

from __future__ import annotations

from pathlib import Path

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._base.files import exists, file_names, is_folder
from weightsmith._files.copied import is_weights
from weightsmith._files.pytorch import SUFFIXES as PYTORCH
from weightsmith._models.checkpoint import Checkpoint, HubModel, ModelFolder, locate, open_place
from weightsmith._models.formats.opening import open_file
from weightsmith._models.lora.adapter import CONFIG_NAME, WEIGHTS_NAMES, Adapter, open_peft
from weightsmith._models.lora.files import read_file
from weightsmith._models.lora.forms import find_factors

DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
"""The file that diffusers looks for in a folder."""

_SUFFIXES = (".safetensors", *PYTORCH)


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
    if not path.name.lower().endswith(_SUFFIXES):
        what = f"an adapter is a folder, or a {_SUFFIXES[0]} file"
        raise Unsupported(what, where=ref, fix=f"Name the one that holds {CONFIG_NAME}.")
    return _open_single(ref, path)


def _open_single(ref: str, path: Path, folder: ModelFolder | None = None) -> Adapter:
    opened = open_file(path, ref)
    folder = folder or ModelFolder(path.parent, config={})
    checkpoint = Checkpoint(ref, opened.source, folder, metadata=opened.metadata, notes=opened.notes)
    try:
        return read_file(checkpoint, path)
    except Exception:
        checkpoint.close()
        raise
