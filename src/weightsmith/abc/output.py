"""The interfaces of outputs.

`Output`         what the engine writes to
`Place`          where an output can be: it makes the backend of an output, and knows the names that follow from an address
`OutputScheme`   the places whose addresses begin with `scheme://`
`OutputBackend`  keeps the bytes and the record of unfinished work, and publishes them; `outputs.staging` is built on it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    from weightsmith._base.errors import Finding
    from weightsmith._base.files import Extent
    from weightsmith._files.containers import Layout
    from weightsmith._plans import Product
    from weightsmith._plans.parts import Together

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
    products  their checksums by name, of all that are in the staging folder
    groups    in a bucket, ETags of the parts of uploads: see `bucket.parts.GroupKey`
    """

    tensors: Mapping[str, Finished]
    products: Mapping[str, str]
    groups: Mapping[tuple[str, int, int, int], tuple[str, ...]]


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

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """These bytes of a tensor, which are about to be written, are a run of a file elsewhere: a store may copy that."""

    def finish(self, name: str, done: Finished) -> None:
        """All bytes of a tensor are written."""

    def create(self, product: Product) -> Arrays | None:
        """Arrays of zeros in a file for a product that is being made; None where there is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """A product is finished: keep it for a run that resumes this one. Returns its arrays, as they are to be read."""

    def forget(self, product: Product) -> None:
        """Nothing needs a product any more."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.

    in_order      it holds a few weight files at a time, so tensors must be written about in the order of the layout; False:
                  bytes of any tensor at any time
    copies        it copies runs of bytes of objects on its server: see `Output.equal`
    publication   files appear by one "rename" or one "commit", or by "requests" in an order in which no loader takes part of
                  them for a model, and which the next run completes
    parts         other processes can build parts of a plan, for the process that publishes
    shared_locks  its lock can be shared and waited for, so that processes can build parts before one that publishes is there
    """

    in_order: bool
    copies: bool
    publication: Literal["rename", "commit", "requests"]
    parts: bool
    shared_locks: bool


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What is built, and how.

    layout     where every byte goes
    plan_hash  identity of the work: only work with the same one is resumed
    part       label (`plans.parts.label`): build one part together with other processes. Each part has a journal of its own. A
               part cannot publish, and always resumes; "": build everything
    names      the tensors that this process builds; None: all
    helping    the part is built for a process that is in `Staging.shared`: nothing is prepared, even if no lock is seen
    facts      what the plan was made from, by the user's names for it, to tell the user what has changed
    resume     False discards what an earlier run left
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
    facts: Mapping[str, str] = field(default_factory=dict)
    resume: bool = True
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


class Address(Protocol):
    """An output that is not a local folder. `str` and `os.fspath` give its address."""

    def __fspath__(self) -> str: ...

    @property
    def name(self) -> str:
        """The name of the model: the last part of the address."""


class Place(Protocol):
    """Where an output can be. `str` gives its path or address; `outputs.places.place_of` finds it."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of its backend."""

    @property
    def name(self) -> str:
        """The name of the model: the last part of the path or address."""

    @property
    def spec(self) -> str:
        """The model on the Hub, as `--push` takes it: org/name[@branch]; "" elsewhere."""

    @property
    def url(self) -> str:
        """The page of the model; "" where it has none."""

    @property
    def absolute(self) -> str:
        """The address, or the absolute path: the same place for a process in another folder."""

    @property
    def local(self) -> Path:
        """A path on this machine that no other output has: the output itself, or a name in the current folder."""

    def backend(self, spec: OutputSpec) -> OutputBackend:
        """The backend of an output here. Changes nothing."""

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str]) -> None:
        """Raise as `Staging.open` will if the output cannot be written. Changes nothing."""

    def together(self, layout: Layout) -> Together:
        """Sets of tensors, each of which one process must build."""

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        """See `outputs.places.verify`."""


class Followed(Protocol):
    """Follows the journals of parts while other processes write them."""

    def look(self, parts: Iterable[str]) -> set[str]:
        """Tensors of these parts (labels) that were finished since the last call. They may be seen some seconds late."""


class WeightFiles(Protocol):
    """The weight files of an output under construction. Thread-safe for different tensors, or parts of one."""

    def location(self, name: str) -> tuple[int, int] | None:
        """Open file and byte offset of a tensor; None if its bytes go to no file."""

    def write(self, name: str, start_byte: int, view: memoryview) -> None:
        """Write a 1-D view of bytes into a tensor, inside its bounds. Raises OSError, StoreError."""

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """See `Output.equal`. Called only if the backend can copy."""

    def drain(self, progress: Progress | None) -> None:
        """Wait until everything that was finished is stored where it belongs. Nothing may be written afterwards."""

    def problems(self) -> list[str]:
        """Why the files cannot be published."""

    def abandon(self) -> None:
        """Wake threads that wait in `write` or `location`: the run has failed."""


class OutputBackend(Protocol):
    """Keeps bytes, products and the journal of one output under construction, and makes it visible.

    out       path or address of the output
    folder    where unfinished work is, for messages
    disk      a folder of this machine, on whose disk work is kept
    weights   its weight files; raises ValueError before `open` and after `close`
    warnings  what the user should know
    kept      for messages: what remains of the work, and how to resume it
    is_open   False once it is published, closed or discarded

    Methods may raise OSError for the disk of this machine: `Staging` handles these.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def out(self) -> Path | Address: ...
    @property
    def folder(self) -> Path | str: ...
    @property
    def disk(self) -> Path: ...
    @property
    def weights(self) -> WeightFiles: ...
    @property
    def warnings(self) -> tuple[Finding, ...]: ...
    @property
    def kept(self) -> str: ...
    @property
    def is_open(self) -> bool: ...

    def open(self) -> None:
        """Take the lock, find what an interrupted run has finished, and prepare everything else.

        Raises OutputExists, CannotResume (for work of another plan), NoSpace, Busy, StoreError. Nothing is written then.
        """

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors by name. A snapshot."""

    @property
    def products(self) -> dict[str, str]:
        """The checksums of the finished products by name. A snapshot."""

    @property
    def holds_work(self) -> bool:
        """`open` has found a finished tensor or product."""

    def finish(self, name: str, done: Finished) -> None:
        """Record that all bytes of a tensor are written."""

    def redo(self, names: Collection[str]) -> bool:
        """These finished tensors are computed again. True if others, which are stored with them, must be too."""

    def reread(self, names: Collection[str], threads: int, progress: Progress | None) -> None:
        """Of these finished tensors, keep those whose stored bytes have the right checksum."""

    def product(self, product: Product) -> Arrays | None:
        """The arrays of a finished product; None if there are none."""

    def create(self, product: Product) -> Arrays | None:
        """See `Output.create`."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `Output.keep`."""

    def forget(self, product: Product) -> None:
        """See `Output.forget`."""

    # other processes, if `capabilities.parts`

    def only_process(self, waiting: Callable[[], None] | None) -> AbstractContextManager[None]:
        """See `Staging.only_process`."""

    def shared(self) -> AbstractContextManager[None]:
        """See `Staging.shared`."""

    def hand_over(self) -> Built:
        """See `Staging.hand_over`."""

    def adopt(self, built: Built) -> None:
        """See `Staging.adopt`."""

    def followed(self) -> Followed:
        """See `Staging.followed`."""

    # the end

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight, under a name that `check_file_name` accepts."""

    def publish(self, manifest: Callable[[Mapping[str, OtherFile]], bytes], *, fsync: bool) -> Path | Address:
        """Make the output visible, which is complete: its path or address. What cannot be cleaned up goes to `warnings`.

        manifest  its bytes, of the sizes and checksums of all files that are not weights
        """

    def discard(self) -> None:
        """Remove the unfinished work. The output is not touched."""

    def close(self) -> None:
        """Close files, end threads and release the lock; work stays. May be called twice, and after a failed `open`."""


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

    out: Path | Address
    folder: Path | str
    tensors: int
    nbytes: int
    changed: float
    reason: str
    remove: Callable[[], None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class OutputScheme:
    """Outputs whose addresses begin with `scheme://`.

    place       the place that an address names. Reads nothing. Raises StoreError for one that no output can have
    unfinished  the work of interrupted runs at an address, or below it. Changes nothing
    """

    place: Callable[[str], Place]
    unfinished: Callable[[str], Iterable[Unfinished]] = lambda where: ()
