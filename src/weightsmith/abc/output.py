"""The interfaces of outputs.

`Output`        what the engine writes to
`Target`        where an output goes: it receives finished files, and makes them visible. `outputs.staging` does all else
`OutputScheme`  the targets whose addresses begin with `scheme://`
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from weightsmith._base.errors import Finding, StoreError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    from weightsmith._files.containers import Layout
    from weightsmith._plans import Product

    BytesLike = Buffer | npt.NDArray[np.generic]  # before Python 3.12, numpy's types do not say that arrays are buffers

    Arrays = Sequence[npt.NDArray[Any]]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from one thread at a time."""


class Finished(NamedTuple):
    """A finished tensor.

    checksum   `checksum.combine` of its grain digests, 32 hex digits
    made_from  digest of the products that it was computed from; "" without any
    distance   squared norms of the tensor - its base, and of the base; None without a base
    differing  the models disagree on these integers; those of the first one were copied
    nonfinite  a NaN or an infinity is the same in all models, and was copied
    """

    checksum: str
    made_from: str = ""
    distance: tuple[float, float] | None = None
    differing: bool = False
    nonfinite: bool = False


class Built(NamedTuple):
    """What a process that built a part has finished, for the process that publishes.

    tensors   by name, also those that an earlier run had finished
    products  their checksums by name, of all that were computed
    files     that it has put where the output goes, and what `Target.put` says of each
    """

    tensors: Mapping[str, Finished]
    products: Mapping[str, str]
    files: Mapping[str, Any]


class PartProgress(NamedTuple):
    """What a target's record says of a part.

    part     its label; "" for the run that publishes
    process  its number, and `machine` its host name; 0 if they are not known
    running  whether the process is there; None on another machine, which cannot be asked
    done     the part is finished
    tensors  the names of those in files that are put
    total    number of tensors of the part, `plan_total` of the plan
    began, changed   when its process began, and when it last put a file: seconds since 1970
    """

    part: str
    process: int
    machine: str
    running: bool | None
    done: bool
    tensors: Collection[str]
    total: int
    plan_total: int
    began: float
    changed: float


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Any other file: its size and xxh3_128."""

    nbytes: int
    xxh3_128: str


class Output(Protocol):
    """Where the engine writes to. Thread-safe for different tensors, or parts of one."""

    def location(self, name: str) -> tuple[int, int] | None:
        """File descriptor and absolute offset of a tensor; None if it is not in a file."""

    def write(self, name: str, start_byte: int, buffer: memoryview | npt.NDArray[np.uint8]) -> None:
        """Write a C-contiguous buffer at a byte of a tensor."""

    def finish(self, name: str, done: Finished) -> None:
        """All bytes of a tensor are written."""

    def create(self, product: Product) -> Arrays | None:
        """Arrays of zeros in a file for a product that is being made; None where there is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """A product is finished: keep it for a run that resumes this one. Returns its arrays, as they are to be read."""

    def forget(self, product: Product) -> None:
        """Nothing needs a product any more."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What is built, and how.

    layout     where every byte goes
    plan_hash  identity of the work: only work with the same one is resumed
    part       label (`plans.parts.label`): build one part together with other processes. Each part has a journal of its own. A
               part cannot publish, and always resumes; "": build everything
    names      the tensors that this process builds; None: all
    helping    the part is built for a process that is in `Staging.shared`: nothing is prepared, even if no lock is seen
    products   checksums of products that other processes have finished, and that `Target.fetch` gets
    facts      what the plan was made from, by the user's names for it, to tell the user what has changed
    resume     False discards what an earlier run left
    folder     where work is kept until it is uploaded, for an output that is not a folder; None: the current folder
    overwrite  `publish` may replace an output that weightsmith wrote
    protected  every file and folder that the run reads: never replaced
    reads      the models that the run reads, as the user names them: never replaced
    other_bytes  of the files that are not weights: their space is reserved
    threads, progress   for verifying the finished tensors of an earlier run
    uploading  called while `publish` uploads the last weight files
    public     who may see a repository that is created; the default is its owner alone
    message    of the commit
    """

    layout: Layout
    plan_hash: str
    part: str = ""
    names: Collection[str] | None = None
    helping: bool = False
    products: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    resume: bool = True
    folder: Path | None = None
    overwrite: bool = False
    protected: Sequence[Path] = ()
    reads: Sequence[str] = ()
    other_bytes: int = 0
    threads: int = 2
    progress: Progress | None = None
    uploading: Progress | None = None
    public: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that is what was written.

    folder   what was checked: a folder, or an address
    plan     hash of the plan that made it
    tensors  number of tensors read and found right
    files    number of other files read and found right
    nbytes   bytes read
    extra    files that are not of the checkpoint, and that no loader reads: a note, a cache
    """

    folder: Path | str
    plan: str
    tensors: int
    files: int
    nbytes: int
    extra: tuple[str, ...]


class FilesGone(StoreError):
    """Files that were put are gone. names: of these files, which the next run makes again."""

    names: Sequence[str] = ()


class Target(ABC):
    """Where an output goes. It receives finished files, and makes them visible as a whole. `str` gives its path or address.

    A process that builds an output calls `check_free`, `connect`, `put` for each weight file if `streams`, and `publish`.

    streams      weight files are put as soon as they are finished, and then removed from this machine; False: all files stay
                 in the staging folder, for `publish`
    publication  files appear by one "rename" or one "commit", or by "requests" in an order in which no loader takes part of
                 them for a model, and which the next run completes
    parts        other processes can build parts of a plan, for the process that publishes
    leaderless   they can do so before that process is there (`run --part`): the target keeps `record`s. Always so in a folder
    warnings     what the user should know
    """

    streams: ClassVar[bool] = True
    publication: ClassVar[Literal["rename", "commit", "requests"]] = "requests"
    parts: ClassVar[bool] = False
    leaderless: ClassVar[bool] = False
    warnings: tuple[Finding, ...] = ()

    # its address

    @abstractmethod
    def __str__(self) -> str: ...

    def __fspath__(self) -> str:
        return str(self)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the model: the last part of the path or address."""

    @property
    def spec(self) -> str:
        """The model on the Hub, as `--push` takes it: org/name[@branch]; "" elsewhere."""
        return ""

    @property
    def url(self) -> str:
        """The page of the model; "" where it has none."""
        return ""

    @property
    def absolute(self) -> str:
        """The address, or the absolute path: the same target for a process in another folder."""
        return str(self)

    @property
    def local(self) -> Path:
        """A path on this machine that no other output has: the output itself, or a name in the current folder."""
        return Path.cwd() / f"{self.name}-{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"

    # what is there

    @abstractmethod
    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str], notes: Mapping[str, Any]) -> None:
        """Raise OutputExists, or StoreError, if the output cannot be written. Changes nothing.

        protected  every file and folder that the run reads
        reads      the models that the run reads, as the user names them
        notes      of an earlier run, which this one resumes: see `connect`
        """

    @abstractmethod
    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        """Compare every byte with the manifest; see `outputs.places.verify`."""

    def recover(self, notes: Mapping[str, Any]) -> bool:
        """True if the run with these notes has published its output. What it could not clean up is removed."""
        return False

    # finished files

    def connect(self, spec: OutputSpec, notes: MutableMapping[str, Any], files: Mapping[str, Any]) -> Collection[str]:
        """Prepare for `put` and `publish`. Returns the names of those files that an earlier run has put and that are gone.

        notes  JSON values that the next run gets, if this one is interrupted. What is entered is on the disk at once
        files  that an earlier run has put, with what `put` returned

        Raises OutputExists, Busy, StoreError.
        """
        return ()

    @property
    def holds_back(self) -> bool:
        """Weight files are put at the end only, because the output replaces another one. Known after `connect`."""
        return False

    def put(self, name: str, file: Path) -> Any:
        """Put a finished weight file, which no loader may take for a model yet: a JSON value, for the run that resumes."""
        raise NotImplementedError

    @abstractmethod
    def publish(self, content: Path, files: Mapping[str, Any], *, fsync: bool) -> None:
        """Make the output visible: the files that are put, and those in a folder, with index and manifest.

        fsync  False does not wait until the bytes are on the local disk
        """

    def discard(self, notes: Mapping[str, Any]) -> None:  # noqa: B027  optional
        """Remove what a run with these notes has put. Nothing that is visible as a model is touched."""

    def close(self) -> None:  # noqa: B027  optional
        """End what `connect` began. May be called twice, and without it."""

    # other processes, if `parts` and `streams`

    def make_way(self) -> None:  # noqa: B027  optional
        """Other processes begin to put files: what the output replaces cannot stay longer."""

    def share(self, name: str, file: Path) -> None:
        """Give a finished product to the other processes."""
        raise NotImplementedError

    def fetch(self, name: str, file: Path) -> None:
        """Get a product that another process has shared. Raises StoreError."""
        raise NotImplementedError

    # other processes, if `leaderless` and `streams`

    def record(self, built: Built, *, done: bool) -> None:
        """Keep what this process, which builds a part, has finished so far. done: that is all of it. One thread at a time."""
        raise NotImplementedError

    def built(self) -> Sequence[Built]:
        """What earlier processes of this part have finished; all parts, for the run that publishes. Known after `connect`."""
        return ()

    def recorded(self) -> Sequence[PartProgress]:
        """How far each part is, also without `connect`; () if there are no records."""
        return ()


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The work of an interrupted run.

    out      its output
    folder   where the work is
    tensors  number of finished tensors
    nbytes   that it takes
    changed  when the last tensor was finished, or the work began, in seconds since the epoch
    reason   why it may not be removed: a process works on it, or it is not ours; "" if it may be removed
    remove   remove it, or finish the publishing that was cut off. Raises Busy while a process works on it, StoreError
    """

    out: Path | Target
    folder: Path | str
    tensors: int
    nbytes: int
    changed: float
    reason: str
    remove: Callable[[], None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class OutputScheme:
    """Outputs whose addresses begin with `scheme://`.

    target      the target that an address names. Reads nothing. Raises StoreError for one that no output can have
    unfinished  the work of interrupted runs at an address, or below it. Changes nothing
    """

    target: Callable[[str], Target]
    unfinished: Callable[[str], Iterable[Unfinished]] = lambda where: ()
