"""Opens a folder with adapter_config.json: PEFT's, with adapter_model.safetensors or .bin, or MLX's (`mlx_folder`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import NotFound
from weightsmith._base.files import file_names
from weightsmith._base.strict_json import read_object
from weightsmith._files.copied import is_tokenizer
from weightsmith._models.card import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint, HubModel, ModelFolder, locate, open_place
from weightsmith._models.formats.opening import open_file
from weightsmith._models.lora.adapter import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAMES, Adapter, sort_tensors
from weightsmith._models.lora.config import REPAIR, check_config
from weightsmith._models.lora.kinds import KINDS, kind_of_type
from weightsmith._models.lora.mlx_folder import MLX_NAME, sort_mlx
from weightsmith._models.lora.others import check_other, sort_others

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
    return repository.folder, [name for name in (CONFIG_NAME, *WEIGHTS_NAMES, MLX_NAME) if name in repository.sizes], repository
