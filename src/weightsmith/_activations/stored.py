"""Statistics in a folder: what `weightsmith statistics` writes, and the `stored_statistic` product that reads it.

    stats/model.safetensors    one array for each kind and linear layer: `second_moments of model.layers.0.self_attn.qkv`
    stats/statistics.json      the record: model, text, kinds
    stats/weightsmith.json     the manifest, with the checksum of each array

The arrays of a merge that reads a folder have the names and the bytes of those that it would compute itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from weightsmith._activations.model import TextModel, TextRun, prefix_of
from weightsmith._activations.rows import BUILT_IN, OWN, text_source
from weightsmith._activations.statistic import shapes_of
from weightsmith._activations.statistics import STATISTICS, find_statistic
from weightsmith._base.errors import CheckpointError, Corrupt, FormatError, NotFound, ParameterError, WeightsmithError
from weightsmith._base.files import expand_user, show
from weightsmith._base.strict_json import read_object
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import status
from weightsmith._files.arrays import map_array, release_pages
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._outputs.checksum import GrainHasher, grain_bytes
from weightsmith._outputs.manifest import MANIFEST_NAME, Manifest, read_manifest
from weightsmith._plans import Product, TextSource
from weightsmith._plans.codec import decode_record, has_type
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

RECORD = "statistics.json"
MAX_RECORD_BYTES = 1 << 20
_READ_BYTES = 4 << 20
_AGAIN = "run weightsmith statistics again, or name the text in its place"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that was measured.

    ref       as the user named it
    revision  commit of a Hub model; "" for a folder
    identity  of names, sizes and headers of its weight files
    state     the identity, and the inodes and change times of the files: equal only on the machine that measured
    weights   xxh3_128 of the weight files; "" for a Hub model that was not on the disk
    config    sha256 of config.json
    """

    ref: str
    revision: str
    identity: str
    state: str
    weights: str
    config: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelRecord:
        """Cost: reads the weight files."""
        weights = "" if checkpoint.missing else weights_hash(checkpoint)
        identities = checkpoint.identity, checkpoint.state, weights, config_hash(checkpoint)
        return cls(checkpoint.ref, checkpoint.revision, *identities)


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder of statistics.

    folder    as the user named it
    kinds     names of `statistics.STATISTICS`
    packages  versions of those that computed them
    """

    folder: str
    model: ModelRecord
    text: TextSource
    kinds: tuple[str, ...]
    packages: Mapping[str, str]
    manifest: Manifest

    @property
    def path(self) -> Path:
        """The absolute path of the folder."""
        return expand_user(self.folder).absolute()


def record_of(model: ModelRecord, text: TextSource, kinds: Collection[str], packages: Mapping[str, str]) -> bytes:
    """The contents of `statistics.json`."""
    data = {
        "weightsmith_statistics": 1,
        "model": asdict(model),
        "text": asdict(text),
        "kinds": list(kinds),
        "packages": dict(packages),
    }
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def is_stored(path: str) -> bool:
    """Whether a path in place of a text is a folder of statistics."""
    return path not in (BUILT_IN, OWN) and expand_user(path).is_dir()


def read_stored(path: str) -> Stored:
    """The record of a folder of statistics. Raises NotFound, FormatError, Corrupt."""
    folder = expand_user(path)
    where = str(folder / RECORD)
    if not (folder / RECORD).is_file():
        fix = "name a text, or a folder that weightsmith statistics has written"
        raise NotFound(f"a folder without {RECORD}: no statistics of a text", where=path, fix=fix)
    data = read_object(folder / RECORD, MAX_RECORD_BYTES, RECORD, _AGAIN)
    if data.pop("weightsmith_statistics", None) != 1 or not has_type(data, _Record):
        raise FormatError("not a record of statistics that this weightsmith reads", where=where, fix=_AGAIN)
    record = decode_record(_Record, data, where)
    manifest = read_manifest(folder)
    known = manifest.files.get(RECORD)
    if known is None or known.xxh3_128 != xxhash.xxh3_128_hexdigest((folder / RECORD).read_bytes()):
        raise Corrupt(f"it is not as {MANIFEST_NAME} says", where=where, fix=_AGAIN)
    return Stored(path, record.model, record.text, record.kinds, record.packages, manifest)


@dataclass(frozen=True, slots=True)
class _Record:
    """Types of the record."""

    model: ModelRecord
    text: TextSource
    kinds: tuple[str, ...]
    packages: Mapping[str, str]


def weights_hash(checkpoint: Checkpoint) -> str:
    """xxh3_128 of the weight files of a model, one after another. Cost: reads them."""
    status(f"hashing the weights of {checkpoint.ref}")
    digest = xxhash.xxh3_128()
    for path in checkpoint.paths:
        with path.open("rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    return digest.hexdigest()


def config_hash(checkpoint: Checkpoint) -> str:
    """sha256 of config.json, as values."""
    return hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest()


def check_stored(stored: Stored, model: TextModel, tokenizer: str, kinds: Collection[str]) -> list[WeightsmithError]:
    """Changes of model, text or tokenizer since the measurement, or []. Reads weights only if the model was copied.

    tokenizer  sha256 of the model's
    kinds      that are needed
    """
    problems: list[WeightsmithError] = []
    label, known = model.label, stored.model
    if missing := [kind for kind in kinds if kind not in stored.kinds]:
        what = f"the statistics {show(stored.folder)} have {', '.join(stored.kinds)}, but no {' and no '.join(missing)}"
        every = " ".join(f"--kind {kind}" for kind in (*stored.kinds, *missing))
        problems.append(ParameterError(what, fix=f"run weightsmith statistics with {every}"))
    if config_hash(model.checkpoint) != known.config:
        problems.append(_other(stored, f"config.json of {label} is not that of {known.ref}, which was measured"))
    elif not _same_weights(known, model.checkpoint):
        problems.append(_other(stored, f"the weights of {label} are not those of {known.ref}, which was measured"))
    if tokenizer != stored.text.tokenizer:
        problems.append(_other(stored, f"the tokenizer of {label} is not the one that cut the text"))
    source = stored.text.source
    if source not in (BUILT_IN, OWN) and Path(source).is_file():
        now = text_source(source, None, None, 0, option="")
        if now.sha256 != stored.text.sha256:
            problems.append(_other(stored, f"the text {show(source)} has changed since it was measured"))
    return problems


def _other(stored: Stored, what: str) -> WeightsmithError:
    return CheckpointError(f"{what}; the statistics are in {show(stored.folder)}", fix=_AGAIN)


def _same_weights(known: ModelRecord, checkpoint: Checkpoint) -> bool:
    if checkpoint.state == known.state:
        return True
    if checkpoint.identity != known.identity:
        return False
    if known.revision and known.revision == checkpoint.revision:
        return True
    return bool(known.weights) and not checkpoint.missing and weights_hash(checkpoint) == known.weights


def stored_products(stored: Stored, model: TextModel, kinds: Collection[str]) -> tuple[Product, ...]:
    """The products that read statistics of all linear layers, named as `model.statistic_products` names them.

    Raises FormatError if an array is missing.
    """
    run = TextRun(model, stored.text, prefix_of(model.number, stored.text))
    products = []
    for kind in kinds:
        for layer in range(run.layers):
            weights = run.linear(layer)
            shapes = shapes_of(find_statistic(kind), weights, {step.out.name: step.out.shape for step in run.steps(layer)})
            outs = tuple(run.array(f"{kind} of {key}", "F32", shape) for key, shape in shapes.items())
            arrays = [f"{kind} of {key}" for key in shapes]
            for name in arrays:
                if name not in stored.manifest.tensors:
                    raise FormatError(f"it has no array {show(name)}", where=stored.folder, fix=_AGAIN)
            checksums = {name: stored.manifest.tensors[name].checksum for name in arrays}
            settings = asdict(StoredWork(str(stored.path), model.number, kind, weights, checksums))
            name = f"{prefix_of(model.number, stored.text)}{kind} {layer}"
            products.append(Product(name, "stored_statistic", outs, settings))
    return tuple(products)


@dataclass(frozen=True, slots=True)
class StoredWork:
    """Settings of the product.

    folder     with the arrays
    model      whose statistics these are, by its index in the plan
    weights    names of the linear layers' weights
    checksums  of the arrays, by name, in the order of `Product.outs`
    """

    folder: str
    model: int
    kind: str
    weights: tuple[str, ...]
    checksums: Mapping[str, str]


def _compute(context: ProductContext) -> Arrays:
    work, arrays = StoredWork(**context.product.settings), list[npt.NDArray[Any]]()
    with open_checkpoint(Path(work.folder)) as checkpoint:
        for done, (name, out) in enumerate(zip(work.checksums, context.product.outs, strict=True)):
            context.progress(done, len(work.checksums))
            spec = checkpoint.specs.get(name)
            place = None if spec is None else checkpoint.location(name)
            if spec is None or place is None or (spec.dtype, spec.shape) != (out.dtype, out.shape):
                raise CheckpointError(f"it has no array {show(name)} of shape {list(out.shape)}", where=work.folder, fix=_AGAIN)
            array = map_array(place[0], spec, place[1])
            if checksum_of(array) != work.checksums[name]:
                raise Corrupt(f"the array {show(name)} does not match its checksum", where=work.folder, fix=_AGAIN)
            arrays.append(array)
    return arrays


def checksum_of(array: npt.NDArray[Any]) -> str:
    """The checksum of an array as the manifest has it, a piece at a time."""
    spec = TensorSpec("", DTYPES["F32"], array.shape)
    hasher, flat = GrainHasher(grain_bytes(spec)), array.reshape(-1).view("u1")
    for start in range(0, flat.size, _READ_BYTES):
        hasher.update(flat[start : start + _READ_BYTES])
        release_pages(array)
    return hasher.checksum()


def _check(product: Product) -> str:
    if not has_type(product.settings, StoredWork):
        return "its settings are not those of stored statistics"
    work = StoredWork(**product.settings)
    if work.kind not in STATISTICS:
        return f"there is no statistic {work.kind}"
    same = len(work.checksums) == len(product.outs) and all(out.dtype.name == "F32" for out in product.outs)
    return "" if same else "its arrays are not those of its settings"


def _reads(product: Product) -> list[Path]:
    return [Path(StoredWork(**product.settings).folder)]


KIND = ProductKind("reading statistics", compute=_compute, check=_check, reads=_reads, released=True)
