"""A prefix in a bucket as the target of an output: S3, Google Cloud Storage and Azure, written with the package obstore.

    models/
      out/                              the files of the output
      .out.weightsmith-staging/
        claim                           names the run that builds the output, with its token; created if there is none
        products/                       values that several processes need before some tensors
        parts/                          what each part has finished, if no driver leads them: see `bucket_parts`

An object store has no rename. Weight files are put as soon as they are finished, and no loader takes them for a model, because
config.json and the index come after all other files, and the manifest last. If publishing was cut off, the next run completes
it. An output that is replaced stays as it is until every tensor of the new one is finished: see `BucketTarget.holds_back`.

All objects of a run carry its token as metadata, and the checksum of their bytes. What has neither is not ours: it is neither
overwritten nor deleted. Before each file, a run looks whether the claim still has its token: it stops once another run has
taken the output over, which happens only if its user says so (`--no-resume`, `weightsmith clean`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Busy,
    CannotResume,
    Finding,
    NotFound,
    StoreError,
    WeightsmithError,
)
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._files.remote.addresses import Address, parse_address
from weightsmith._outputs.area import STAGING_SUFFIX, left_behind, staging_folder
from weightsmith._outputs.bucket_parts import LAST, OwnRecord, Record, is_there, new_token, read_record, read_records
from weightsmith._outputs.bucket_store import THREADS, Bucket, Object, SmallObject, Taken
from weightsmith._outputs.journal import changes, read_journal
from weightsmith._outputs.local import absolute, is_address, occupied
from weightsmith._outputs.locks import JOURNAL
from weightsmith._outputs.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    Read,
    check_ours,
    compare,
    decode_manifest,
    differences,
    hash_file,
    list_files,
)
from weightsmith.abc.output import (
    Built,
    FilesGone,
    OutputScheme,
    OutputSpec,
    PartProgress,
    Progress,
    Target,
    Unfinished,
    Verified,
)

ENTRANCES = ("config.json", "adapter_config.json", "model_index.json")
"""Files that loaders read first: put after all others, but for the manifest."""
_MAX_PREFIX_BYTES = 700  # of 1,024 of a key
_MAX_CLAIM_BYTES = 1 << 16
_TOKEN, _REPLACED = "token", "replaced"
"""Keys of notes: the token of the run; the ETags of the objects that its output replaces, once the first of them is deleted."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The run that builds an output: the token of its objects, the work's identity, its process, and where its journal is.

    parts  no driver leads: each process that does a part, and the last run, has a record of its own
    """

    token: str
    plan: str
    process: int
    host: str
    folder: str
    parts: bool = False

    @property
    def is_running(self) -> bool:
        """Its process is on this machine, and is there. A process of another machine cannot be seen."""
        return not self.parts and self.is_here and is_there(self.process, self.token)

    @property
    def is_here(self) -> bool:
        """It was made on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_lost(self) -> bool:
        """Nobody will resume it: it was made here, its process has ended, and its staging folder is gone."""
        return not self.parts and self.is_here and not self.is_running and not Path(self.folder).exists()

    def encode(self) -> bytes:
        values = (self.token, self.plan, self.process, self.host, self.folder, self.parts)
        return json.dumps(["weightsmith claim", *values]).encode()


def decode_claim(data: bytes, where: str) -> Claim:
    """The claim in these bytes. Raises StoreError for those of another program."""
    with suppress(JsonError):
        match parse(data):
            case [
                "weightsmith claim",
                str(token),
                str(plan),
                int(process),
                str(host),
                str(folder),
                bool(parts),
            ] if token and process > 0:
                return Claim(token, plan, process, host, folder, parts)
    what = "this object is in the way: it has the name of unfinished work, and weightsmith did not write it"
    raise StoreError(what, where=where, fix="remove it yourself, or choose another output", state=NOTHING_WRITTEN)


class BucketTarget(Target):
    """An output in a bucket, or a folder of outputs: the objects whose keys start with `prefix` and a slash.

    scheme  of the store
    prefix  without a slash at either end; "" for the whole bucket

    >>> address = parse_bucket_address("s3://models/llama/merged/")
    >>> str(address), address.name, address.staging
    ('s3://models/llama/merged', 'merged', 'llama/.merged.weightsmith-staging')
    """

    publication, parts, leaderless = "requests", True, True

    def __init__(self, scheme: str, bucket: str, prefix: str) -> None:
        """Sends nothing."""
        self.scheme, self.bucket, self.prefix = scheme, bucket, prefix
        self.warnings: tuple[Finding, ...] = ()
        self._notes: MutableMapping[str, Any] = {}
        self._token = ""
        self._replaced: dict[str, str] = {}
        self._has_way = self._helping = False
        self._record: OwnRecord | None = None
        self._built: tuple[Built, ...] = ()
        self._mutex = threading.Lock()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketTarget) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    @property
    def local(self) -> Path:
        """A name in the current folder, which no other address has."""
        return absolute(super().local)

    @property
    def staging(self) -> str:
        """The prefix of the claim and the products of unfinished work, next to the output."""
        parent, slash, name = self.prefix.rpartition("/")
        return f"{parent}{slash}.{name}{STAGING_SUFFIX}"

    def key(self, name: str) -> str:
        """The key of a file of the output."""
        return f"{self.prefix}/{name}" if self.prefix else name

    @property
    def _claim_key(self) -> str:
        return f"{self.staging}/claim"

    def shown(self, key: str) -> str:
        """A key of the bucket, for messages."""
        return f"{self.scheme}://{self.bucket}/{key}"

    @cached_property
    def store(self) -> Bucket:
        return Bucket(self.scheme, self.bucket)

    # what is there

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str], notes: Mapping[str, Any]) -> None:
        """With `overwrite`, objects are replaced only if weightsmith's manifest, which is with them, lists all of them.

        They must be what was written; tensors are compared by their sizes alone.
        """
        there = self.store.names(self.prefix)
        if not there:
            return
        check_not_read(self, reads)
        unchanged = _still(notes.get(_REPLACED), there)
        ours = unchanged.keys() | self._put_by(self._tokens(notes), there)
        others = [name for name in there if name not in ours]
        if others and not overwrite:
            fix = "choose another prefix, or replace this output with --overwrite (overwrite=True)"
            raise occupied("the output already exists", self, fix, holds=others)
        if others:
            sizes, fix = (
                {name: there[name].nbytes for name in others},
                "choose another prefix, or remove these objects yourself",
            )
            check_ours(
                self._manifest,
                lambda manifest: [name for name in others if name not in manifest.names],
                lambda manifest: differences(manifest, sizes, self._reader),
                lambda why, lost: occupied(f"will not be overwritten: {why}", self, fix, lost=lost or others),
            )
        self._replaced = unchanged | {name: there[name].etag for name in others}

    def _tokens(self, notes: Mapping[str, Any]) -> set[str]:
        """The tokens of unfinished work: that of these notes, and that of the claim. `connect` decides what becomes of it."""
        claim = self._read_claim()
        return {str(notes.get(_TOKEN) or ""), "" if claim is None else claim[0].token} - {""}

    def _marks(self, names: Collection[str]) -> dict[str, str]:
        """The marks of objects; "" for one that another program has written."""
        with ThreadPoolExecutor(THREADS) as pool:
            marks = pool.map(lambda name: self.store.mark(self.key(name)) or "", names)
            return dict(zip(names, marks, strict=True))

    def _put_by(self, tokens: Collection[str], there: Collection[str]) -> set[str]:
        """The objects that runs with these tokens have put; those of a finished output are not of unfinished work."""
        if not tokens:
            return set()
        put_by = {name: _token(mark) for name, mark in self._marks(there).items()}
        return {name for name, token in put_by.items() if token in tokens and token != put_by.get(MANIFEST_NAME)}

    def _manifest(self) -> Manifest:
        """The manifest. Raises NotFound, and the errors of `decode_manifest`."""
        object_ = self.store.read(self.key(MANIFEST_NAME), MAX_MANIFEST_BYTES)
        where = self.shown(self.key(MANIFEST_NAME))
        if object_ is None:
            what = "there is no manifest to compare with"
            raise NotFound(what, where=where, fix="name a prefix that weightsmith wrote")
        return decode_manifest(object_.data, where)

    @property
    def _reader(self) -> Read:
        return lambda name, start, nbytes: self.store.read_range(self.key(name), start, nbytes)

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        manifest = self._manifest()
        sizes = {name: object_.nbytes for name, object_ in self.store.names(self.prefix).items()}
        return compare(str(self), manifest, sizes, self._reader, progress)

    def recover(self, notes: Mapping[str, Any]) -> bool:
        token = notes.get(_TOKEN)
        if not token or _token(self.store.mark(self.key(MANIFEST_NAME))) != token:
            return False
        self._remove_staging(str(token))
        return True

    # the claim

    def _read_claim(self) -> tuple[Claim, SmallObject] | None:
        object_ = self.store.read(self._claim_key, _MAX_CLAIM_BYTES)
        return None if object_ is None else (decode_claim(object_.data, self.shown(self._claim_key)), object_)

    def connect(self, spec: OutputSpec, notes: MutableMapping[str, Any], files: Mapping[str, Any]) -> Collection[str]:
        self._notes, self._helping = notes, spec.helping
        current = self._read_claim()
        if spec.helping:
            if current is None or current[0].plan != spec.plan_hash:
                what = "another run has taken the unfinished work, or published it"
                raise StoreError(what, where=str(self), fix="run again", state=NOTHING_WRITTEN)
            self._token = current[0].token
            return self._gone(files)
        if spec.part:
            return self._join(spec, files)
        if current is not None and current[0].parts and current[0].plan == spec.plan_hash and spec.resume:
            return self._lead(current[0], spec, files)
        if current is not None and current[0].token == notes.get(_TOKEN):
            self._token = current[0].token
            return self._gone(files)
        if current is not None:
            self._check_may_take(current[0], spec)
        self._token = notes[_TOKEN] = new_token()
        folder = (spec.folder or Path.cwd()) / staging_folder(self.local).name
        claim = Claim(self._token, spec.plan_hash, os.getpid(), socket.gethostname(), str(folder))
        self._create(claim, None if current is None else current[1].version)
        if current is not None:
            self._remove_files(current[0].token)
            self._remove_shared(current[0].token)
        return tuple(files)

    def _gone(self, files: Mapping[str, Any]) -> list[str]:
        """Which of these files, with what `put` has returned, are not there as they were put."""
        there = self.store.names(self.prefix) if files else {}
        marks = self._marks(files)
        return [name for name, value in files.items() if name not in there or self._stamp(there[name], marks[name]) != value]

    def _stamp(self, object_: Object, mark: str) -> list[Any]:
        token, _, checksum = mark.partition(" ")
        return [object_.nbytes, checksum if token == self._token else ""]

    # parts without a driver

    @property
    def _records(self) -> str:
        return f"{self.staging}/parts"

    def _records_of(self, claim: Claim) -> list[Record]:
        """The records of the parts of a claim, and of its last run; [] if a driver leads."""
        return [r for r in read_records(self.store, self._records) if r.token == claim.token] if claim.parts else []

    def _join(self, spec: OutputSpec, files: Mapping[str, Any]) -> Collection[str]:
        """Build a part beside those of other processes. The first one creates the claim, which all share."""
        while True:
            current = self._read_claim()
            if current is not None and not current[0].is_lost:
                break
            token = new_token()
            with suppress(Taken):
                self._write_claim(self._shared_claim(token, spec), None if current is None else current[1].version)
                if current is not None:
                    self._remove_files(current[0].token)
                    self._remove_shared(current[0].token)
        claim = current[0]
        if not claim.parts:
            self._check_may_take(claim, spec)
        elif claim.plan != spec.plan_hash:
            raise self._other_plan(claim, spec)
        self._token = claim.token
        self._check_no_last()
        self._record = OwnRecord(self.store, self._records, spec.part, self._token, spec)
        built = self._record.take()
        try:  # all may have been published or discarded meanwhile: nobody would remove this record then
            self._check_claim(Busy)
            self._check_no_last()
        except Busy as error:
            self._record.remove()
            error.state = NOTHING_WRITTEN
            raise
        self._built = self._there([built])
        if self.store.names(f"{self.staging}/products"):
            records = self._records_of(claim)
            shared = {name: checksum for record in records for name, checksum in record.built.products.items()}
            self._built = (Built({}, shared, {}), *self._built)
        return self._gone(files)

    def _check_no_last(self) -> None:
        """Raise Busy if the last run has begun."""
        last = read_record(self.store, self._records, LAST)
        if last is not None and last.token == self._token:
            what = f"{last} is publishing this output, or was interrupted"
            fix = "wait if it runs; else run the plan again without --part, which computes what is missing"
            raise Busy(what, where=str(self), fix=fix, state=NOTHING_WRITTEN)

    def _shared_claim(self, token: str, spec: OutputSpec) -> Claim:
        return Claim(token, spec.plan_hash, os.getpid(), socket.gethostname(), "", parts=True)

    def _lead(self, claim: Claim, spec: OutputSpec, files: Mapping[str, Any]) -> Collection[str]:
        """Take over what parts have finished, to publish it. Raises Busy if a part may still run."""
        self._token = self._notes[_TOKEN] = claim.token
        records = self._records_of(claim)
        running = [record for record in records if record.label != LAST and record.may_run]
        if running:
            what = f"{running[0]}, is building this output now, or was interrupted"
            others = [f"and so is {record}" for record in running[1:4]]
            part = running[0].label.replace("-of-", "/")
            fix = f"wait if it runs; else run it again: --part {part}"
            raise Busy(what, where=str(self), details=others, fix=fix, state=NOTHING_WRITTEN)
        self._record = OwnRecord(self.store, self._records, LAST, self._token, spec)
        self._record.take()
        self._built = self._there([record.built for record in records])
        return self._gone(files)

    def _there(self, built: Sequence[Built]) -> tuple[Built, ...]:
        """The work of parts, without files that are not there as they were put."""
        names = {name for part in built for name in part.files}
        there = self.store.names(self.prefix) if names else {}
        marks = self._marks(names & there.keys())
        stamps = {name: self._stamp(there[name], mark) for name, mark in marks.items()}
        return tuple(
            part._replace(files={name: value for name, value in part.files.items() if stamps.get(name) == value})
            for part in built
        )

    def built(self) -> Sequence[Built]:
        return self._built

    def recorded(self) -> Sequence[PartProgress]:
        current = self._read_claim()
        return [] if current is None else [record.progress for record in self._records_of(current[0])]

    def record(self, built: Built, *, done: bool) -> None:
        if self._record is not None:
            self._record.write(built, done=done)

    def _other_plan(self, claim: Claim, spec: OutputSpec) -> CannotResume:
        facts = next((record.entries.facts for record in self._records_of(claim) if record.entries.facts), {})
        details = changes(facts, spec.facts) if facts else []
        what = "the parts that were built there are those of another plan, or of other input files"
        fix = f"undo the change, choose another prefix, or discard them: weightsmith clean {self} --yes"
        return CannotResume(what, where=str(self), details=details, fix=fix, state=NOTHING_WRITTEN)

    def _check_may_take(self, claim: Claim, spec: OutputSpec) -> None:
        """Raise Busy unless the run of a claim has ended, and this run may discard its work."""
        if claim.parts and spec.resume:
            raise self._other_plan(claim, spec)
        if (running := next(filter(_runs, self._records_of(claim)), None)) is not None:
            what, fix = f"{running}, is building this output now", "wait until it has ended, or stop it"
            raise Busy(what, where=str(self), fix=fix, state=NOTHING_WRITTEN)
        if claim.is_lost or (not spec.resume and not claim.is_running):
            return
        where = f"{claim.folder} on {claim.host}"
        if claim.is_running:
            what, fix = (
                f"process {claim.process} on {claim.host} is building this output now",
                "wait until it has ended, or stop it",
            )
        else:
            what = f"process {claim.process} on {claim.host} is building this output, or was interrupted"
            fix = (
                "wait if it runs; else run again there to resume, or discard its work with --no-resume (resume=False), or "
                f"weightsmith clean {self} --yes"
            )
        raise Busy(what, where=str(self), details=[f"its work: {where}"], fix=fix, state=NOTHING_WRITTEN)

    def _create(self, claim: Claim, before: Mapping[str, Any] | None) -> None:
        """Write the claim, if there is none, or in place of one that this run may take over. Raises Busy."""
        with suppress(Taken):  # by ourselves, if the answer to the first attempt was lost
            self._write_claim(claim, before)
        self._check_claim(Busy)

    def _write_claim(self, claim: Claim, before: Mapping[str, Any] | None) -> None:
        """Write the claim in place of a version, or if there is none. Raises Taken."""
        self.store.put_version(self._claim_key, claim.encode(), before)
        if self.store.unconditional:
            what = "this store has no conditional writes, so nothing stops a second process from building the same output"
            self.warnings = (Finding(what, str(self)),)

    def _check_claim(self, kind: type[StoreError] = StoreError) -> None:
        """Raise if another run has taken the output over, or another process the last run."""
        current = self._read_claim()
        if not self._holds(current):
            raise self._taken_over(current, kind)
        self._check_last()

    def _holds(self, current: tuple[Claim, SmallObject] | None) -> bool:
        return current is not None and current[0].token == self._token

    def _taken_over(self, current: tuple[Claim, SmallObject] | None, kind: type[StoreError] = StoreError) -> StoreError:
        by = "" if current is None else f", process {current[0].process} on {current[0].host}"
        what, fix = f"another run{by} has taken this output over", "wait until it has ended"
        return kind(what, where=str(self), fix=fix)

    def _check_last(self) -> None:
        """Raise Busy if this is the last run, and another process has taken it over."""
        if self._record is not None and self._record.label == LAST:
            self._record.check()

    # finished files

    @property
    def holds_back(self) -> bool:
        return bool(self._replaced)

    def put(self, name: str, file: Path) -> Any:
        self._check_claim()
        self.make_way()
        if not self._helping:  # the driver has made way
            self._check_no_others([name])
        value = self._put(name, file)
        current = self._read_claim()
        if not self._holds(current):  # discarded, taken over, or published by this run: this worker was not needed
            is_published = _token(self.store.mark(self.key(MANIFEST_NAME))) == self._token
            if not is_published and _token(self.store.mark(self.key(name))) == self._token:
                self.store.delete([self.key(name)])
            raise self._taken_over(current)
        self._check_last()  # the process that has taken the last run over has the same token: the file may be its own
        return value

    def _put(self, name: str, file: Path) -> list[Any]:
        whole = hash_file(file)
        self.store.put_file(self.key(name), file, f"{self._token} {whole.xxh3_128}")
        return [whole.nbytes, whole.xxh3_128]

    def _make_way(self) -> None:
        if self._has_way or not self._replaced:
            return
        there = self.store.names(self.prefix)
        self._check_no_others(there)
        self._notes[_REPLACED] = self._replaced
        indexes = [name for name in self._replaced if "/" not in name and name.endswith(".index.json")]
        for name in (MANIFEST_NAME, *indexes, *ENTRANCES):
            if name in self._replaced and name in there:
                self.store.delete([self.key(name)])
        self._has_way = True

    def _check_no_others(self, names: Iterable[str]) -> None:
        """Raise OutputExists if another program has written one of these objects meanwhile."""
        there = self.store.names(self.prefix)
        unknown = [name for name in names if name in there and self._replaced.get(name) != there[name].etag]
        if others := [name for name, mark in self._marks(unknown).items() if _token(mark) != self._token]:
            what, fix = "another program has written there meanwhile", "remove these objects, and run again"
            error = occupied(what, self, fix, holds=sorted(others))
            error.state = f"Everything is finished, but not published to {self}"
            raise error

    def publish(self, content: Path, files: Mapping[str, Any], *, fsync: bool) -> None:
        """The other files, then the index and `config.json`, then the manifest."""
        self._check_claim()
        there = self.store.names(self.prefix)
        self._check_no_others(there)
        if gone := self._gone(files):
            what, fix = (
                f"{len(gone):,} of the uploaded files are gone, the first is {gone[0]}",
                "run again: these are made again",
            )
            error = FilesGone(what, where=str(self), fix=fix)
            error.names = gone
            raise error
        self.make_way()
        names = list_files(content)
        last = [name for name in names if name.endswith(".index.json") and "/" not in name]
        last += [name for name in ENTRANCES if name in names]
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda name: self._put(name, content / name), {*names} - {*last, MANIFEST_NAME}):
                pass
        new = {*names, *files}  # a loader that finds the new config.json must not find old weights with it
        self.store.delete(self.key(name) for name in self._replaced if name not in new and name in there)
        for name in last:
            self._put(name, content / name)
        self._check_claim()
        self._put(MANIFEST_NAME, content / MANIFEST_NAME)
        try:
            self._remove_staging(self._token)
        except StoreError as error:
            self.warnings += (left_behind(error, str(self), f"run: weightsmith clean {self} --yes"),)

    # removing

    def discard(self, notes: Mapping[str, Any]) -> None:
        token = notes.get(_TOKEN)
        if token and not self.recover(notes):
            self._remove_files(str(token))
            self._remove_staging(str(token))

    def _remove_files(self, token: str) -> None:
        """Delete what a run has put, unless it is a finished output."""
        names = self._put_by({token}, self.store.names(self.prefix))
        self.store.delete(self.key(name) for name in names)

    def _remove_staging(self, token: str) -> None:
        """Delete the products, the records of parts and the claim of a run; what is not ours stays."""
        self._remove_shared(token)
        current = self._read_claim()
        if current is not None and current[0].token == token:
            self.store.delete([self._claim_key])

    def _remove_shared(self, token: str) -> None:
        """Delete what the processes of a run have shared: products, and records of parts."""
        names = [
            f"{self.staging}/{name}" for name in self.store.names(self.staging) if name.startswith(("products/", "parts/"))
        ]
        self.store.delete(name for name in names if _token(self.store.mark(name)) == token)

    # other processes

    def make_way(self) -> None:
        """Delete what makes the output that is replaced a model. From now on the next run completes the publication."""
        with self._mutex:
            self._make_way()

    def share(self, name: str, file: Path) -> None:
        self.store.put_file(f"{self.staging}/products/{name}", file, f"{self._token} {name}")

    def fetch(self, name: str, file: Path) -> None:
        self.store.download(f"{self.staging}/products/{name}", file)


def _token(mark: str | None) -> str:
    return (mark or "").partition(" ")[0]


def _still(replaced: object, there: Mapping[str, Object]) -> dict[str, str]:
    """Which of the objects that an interrupted publication replaces are there, as they were."""
    if not isinstance(replaced, dict):
        return {}
    return {name: object_.etag for name, object_ in there.items() if replaced.get(name) == object_.etag}


def check_not_read(address: BucketTarget, reads: Iterable[str]) -> None:
    """Raise StoreError if the output is, contains, or lies in anything that the run reads."""
    output_slash = f"{address}/"
    for read in reads:
        for place in _addresses(read):
            if f"{place}/".startswith(output_slash) or output_slash.startswith(f"{place}/"):
                what = f"the run reads {place}, which would be lost"
                raise StoreError(what, where=str(address), fix="choose another output", state=NOTHING_WRITTEN)


def _addresses(read: str) -> Iterator[Address]:
    """What a name of a model may address: a folder, in whose name is a `+`, or a model and its adapter."""
    for text in (read, *read.split("+")):
        if is_address(text):
            with suppress(WeightsmithError):  # not an address as a whole
                yield parse_address(text)


def parse_bucket_address(text: str, *, folder: bool = False) -> BucketTarget:
    """The prefix that an address names. folder: it may be a whole bucket.

    Raises StoreError for one that no output can have, ParameterError for what no address may hold.
    """
    place = parse_address(text)
    if not place.path and not folder:
        raise _refused(text, "it is a whole bucket", f"write {place.scheme}://{place.host}/prefix")
    if len(place.path.encode()) > _MAX_PREFIX_BYTES:
        raise _refused(text, f"the prefix is longer than {_MAX_PREFIX_BYTES} bytes", "choose a shorter one")
    return BucketTarget(place.scheme, place.host, place.path)


def _refused(text: str, reason: str, fix: str) -> StoreError:
    scheme, mark, rest = text.partition("?")[0].partition("://")
    shown = scheme + mark + rest.rpartition("@")[2]  # no key or password in a message
    return StoreError(f"cannot be the output: {reason}", where=shown, fix=fix, state=NOTHING_WRITTEN)


# ---- unfinished work


def find_unfinished(where: str) -> Iterator[Unfinished]:
    """The unfinished work for this output, and for outputs directly under it. Nothing is changed."""
    address = parse_bucket_address(where, folder=True)
    prefixes = [address.prefix] if address.prefix else []
    for prefix in address.store.folders(address.prefix):
        parent, slash, name = prefix.rpartition("/")
        if name.startswith(".") and name.endswith(STAGING_SUFFIX):
            prefixes.append(f"{parent}{slash}{name[1:].removesuffix(STAGING_SUFFIX)}")
    for prefix in prefixes:
        if (unfinished := _unfinished(BucketTarget(address.scheme, address.bucket, prefix))) is not None:
            yield unfinished


def _unfinished(out: BucketTarget) -> Unfinished | None:
    folder = out.shown(out.staging)
    try:
        current = out._read_claim()
    except StoreError as error:
        return Unfinished(out, folder, 0, 0, datetime.now().timestamp(), error.finding.what, lambda: None)
    if current is None:
        return _unclaimed(out, folder)
    claim, object_ = current
    records = out._records_of(claim)
    there = out.store.names(out.prefix)
    nbytes = sum(there[name].nbytes for name in out._put_by({claim.token}, there))
    if claim.parts:
        tensors = len({name for record in records for name in record.built.tensors})
    elif claim.is_here and Path(claim.folder).is_dir():
        tensors = len(read_journal(Path(claim.folder) / JOURNAL).tensors)
    else:
        tensors = 0
    running = claim.is_running or any(_runs(record) for record in records)
    reason = "a process is working on it" if running else ""
    changed = object_.meta["last_modified"].timestamp()
    return Unfinished(out, folder, tensors, nbytes, changed, reason, partial(_remove, out, claim))


def _unclaimed(out: BucketTarget, folder: str) -> Unfinished | None:
    """What parts have left that began while their output was published or discarded: records without a claim."""
    records = _late_records(out)
    if not records:
        return None
    there = out.store.names(out.prefix)
    nbytes = sum(there[name].nbytes for name in out._put_by({record.token for record in records}, there))
    reason = "a process is working on it" if any(map(_runs, records)) else ""
    changed = max(record.changed for record in records)
    return Unfinished(out, folder, 0, nbytes, changed, reason, partial(_remove_unclaimed, out))


def _late_records(out: BucketTarget) -> list[Record]:
    """Records, without those of another program."""
    return [record for record in read_records(out.store, out._records) if record.token and record.owner is not None]


def _remove_unclaimed(out: BucketTarget) -> None:
    """Remove what parts without a claim have left. Raises Busy if one runs on this machine, or there is a claim now."""
    records = _late_records(out)
    if out._read_claim() is not None or any(map(_runs, records)):
        raise _working(out)
    for token in {record.token for record in records}:
        out.discard({_TOKEN: token})


def _working(out: BucketTarget) -> Busy:
    return Busy("a process is working on it", where=str(out), fix="wait until it has ended, or stop it")


def _runs(record: Record) -> bool:
    return not record.done and record.owner is not None and record.owner.is_running


def _remove(out: BucketTarget, claim: Claim) -> None:
    """Remove what a run has put, and its claim. Raises Busy if a process of this machine works on it."""
    from weightsmith._outputs.places import remove_work

    if claim.is_running or any(map(_runs, out._records_of(claim))):
        raise _working(out)
    out.discard({_TOKEN: claim.token})
    folder = Path(claim.folder)
    # What a bucket says of this disk is believed where the journal there says the same: anyone may have written the claim.
    is_ours = not claim.parts and claim.is_here and folder.is_dir()
    if is_ours and read_journal(folder / JOURNAL).notes.get(_TOKEN) == claim.token:
        remove_work(folder.parent / folder.name[1:].removesuffix(STAGING_SUFFIX))


SCHEME = OutputScheme(parse_bucket_address, find_unfinished)
