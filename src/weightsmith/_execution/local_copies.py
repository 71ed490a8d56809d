"""Copies of inputs on this machine's own disk, which a run reads instead of a share, a bucket or the Hub.

A copy has the name of the model's folder and of the file in it: `base/model-00001-of-00002.safetensors` for a file of the model
`/shared/models/base`, `s3://bucket/base` or `org/base`. It is read only if it has the size, the header and the sampled pages of
the file. The plan, the identity of the work and the output do not depend on it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightsmith._base.errors import ParameterError, WeightsmithError
from weightsmith._base.files import FileState, expand_user, file_kind, open_local
from weightsmith._base.options import named
from weightsmith._base.text import count
from weightsmith._files.safetensors import read_header
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.sources.files import SourceFile, SourceFiles, files_behind, sample_file
from weightsmith._planning.planner.prepared import Prepared

OPTION = "local_copy"
_AGAIN = "copy the file again, or remove the copy; or leave out --local-copy to read the model itself"


def use_local_copies(prepared: Prepared, folder: str, *, required: bool) -> tuple[Path, ...]:
    """Have the models of a plan read from copies, where there are any. Returns the copies that are read.

    folder    with the copies
    required  a folder that is missing, or that has no copy of any file, is an error. It is none on one of many machines

    Raises ParameterError for a copy that differs, and for one that may be of either of two models. Cost: of each file that has
    a copy, the headers, 32 pages of 4 KiB, and one page of each tensor if the model is on a disk, are read, of both.
    """
    root = expand_user(folder).absolute()
    if required and not root.is_dir():
        raise ParameterError("no such folder", where=f"{named(OPTION)} {root}", fix="make it, or leave out --local-copy")
    places = _places(prepared)
    copies = []
    for original, (parts, least) in places.items():
        used = _depth(original, parts, least, root, places)
        copy = root.joinpath(*parts[-used:])
        _check_kind(copy)
        groups = [files for files in _all_files(prepared) if original in files.paths]
        waiting = [(files, file) for files in groups for file in files.originals if file.path == original]
        if not copy.is_file() and len(waiting) == len(groups):
            continue
        copies.append(copy)
        if waiting:
            state = _checked(waiting[0][1], copy)
            for files, _ in waiting:
                files.use_copy(original, copy, state)
    if required and not copies:
        parts, least = next(iter(places.values()), ((), 0))
        example = root.joinpath(*parts[-least:])
        raise ParameterError(
            f"the folder has none of {count(len(places), 'weight file')} of the plan",
            where=f"{named(OPTION)} {root}",
            details=[f"expected, for example: {example}"],
            fix="copy the folders of the models into it, under their own names; or leave out --local-copy",
        )
    return tuple(copies)


def _check_kind(copy: Path) -> None:
    """Raise ParameterError if something other than a file is here: the user takes it for a copy."""
    if copy.is_file() or not os.path.lexists(copy):
        return
    mode = copy.lstat().st_mode
    what = "a symbolic link to no file" if stat.S_ISLNK(mode) else f"{file_kind(mode)}, not a file"
    raise ParameterError(f"the local copy is {what}", where=str(copy), fix=_AGAIN)


def _models(prepared: Prepared) -> Iterator[Checkpoint]:
    """All models of files, also those behind the results of other recipes."""
    yield from (model for model in prepared.inputs if model.plan is None)
    for stage in prepared.stages:
        yield from (model for model in stage.source.inputs if model.plan is None)


def _all_files(prepared: Prepared) -> Iterator[SourceFiles]:
    for model in _models(prepared):
        yield from files_behind(model)


def _places(prepared: Prepared) -> dict[Path, tuple[tuple[str, ...], int]]:
    """Each weight file in safetensors: the parts of its name, and how many of the last ones name its copy at least."""
    places = {}
    for model in _models(prepared):
        for path in model.paths:
            if path.suffix == ".safetensors":
                places[path] = _place(model, path)
    return places


def _place(model: Checkpoint, path: Path) -> tuple[tuple[str, ...], int]:
    """Of one weight file: see `_places`."""
    for repository in model.repositories:
        if path.is_relative_to(repository.folder):
            inner = path.relative_to(repository.folder).parts
            outer = [part for part in repository.name.split("/") if part and not part.endswith(":")]
            is_file = outer[-1:] == [*inner]  # the address of a single file
            return (*outer[: len(outer) - is_file], *inner), len(inner) + (not is_file)
    whole = path.absolute()
    if ".." in whole.parts:
        whole = path.parent.resolve() / path.name
    if model.alone and path.parent == model.folder:
        return whole.parts[1:], 1
    inner = path.relative_to(model.folder).parts if path.is_relative_to(model.folder) else (path.name,)
    return whole.parts[1:], len(inner) + 1


def _depth(
    original: Path, parts: Sequence[str], least: int, root: Path, places: dict[Path, tuple[tuple[str, ...], int]]
) -> int:
    """How many of the last parts of its name tell a file from all others: models of one name need their parents' names too."""
    depth, others = least, [(path, names) for path, (names, _) in places.items() if path != original]
    while alike := [path for path, names in others if tuple(names[-depth:]) == tuple(parts[-depth:])]:
        ambiguous = root.joinpath(*parts[-depth:])
        if ambiguous.is_file():
            raise ParameterError(
                "two models have files of this name, so the copy may be of either",
                where=str(ambiguous),
                details=[str(original), str(alike[0])],
                fix=f"name the copies with the folders above them, such as {Path(*parts[-depth - 1 :])}",
            )
        if depth >= len(parts):
            break  # two revisions of one model: neither has a copy
        depth += 1
    return depth


def _checked(original: SourceFile, copy: Path) -> FileState:
    """The state of a copy, which has the size, the header and the sampled pages of its original. Raises ParameterError."""
    with open_local(copy) as file:
        state = file.state
    _compare(original, copy, "another size", f"{original.state.nbytes:,} bytes", f"{state.nbytes:,} bytes")
    try:
        header = read_header(copy)
    except WeightsmithError as error:
        what = f"the local copy is damaged: {error.finding.what}"
        raise ParameterError(what, where=str(copy), details=[f"original  {original.path}"], fix=_AGAIN) from error
    _compare(original, copy, "another header", original.digest, header.digest)
    shared = original.state.elsewhere is None
    # Fine-tunes may have changed few tensors. Elsewhere each page is a request, so there 32 have to do.
    middles = [tensor.offset + tensor.spec.nbytes // 2 for tensor in header.tensors] if shared else []
    expected, actual = sample_file(original.path, original.state, middles), sample_file(copy, state, middles)
    _compare(original, copy, "other weights", expected, actual)
    return state


def _compare(original: SourceFile, copy: Path, kind: str, expected: str, actual: str) -> None:
    if expected != actual:
        raise ParameterError(
            f"the local copy is not the model's file: it has {kind}",
            where=str(copy),
            details=[f"original  {expected}  {original.path}", f"copy      {actual}"],
            fix=_AGAIN,
        )
