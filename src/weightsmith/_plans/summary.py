"""The totals of a plan: what a run reads, transfers, holds and writes, and about how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weightsmith._base.text import count, duration, size

if TYPE_CHECKING:
    from weightsmith._files.remote.ahead import TransferEstimate


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The output tensors of one op: their number, and their bytes in the output."""

    op: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Output tensors with one encoding, or stored plain for one reason.

    why     reason; also that they are calibrated
    nbytes  in the output
    """

    encoding: str
    why: str
    tensors: int
    nbytes: int
    first: str


@dataclass(frozen=True, slots=True)
class KindFacts:
    """The weights of one kind in a quantised output: attention, MLP, the head.

    elements  numbers that they hold
    """

    kind: str
    tensors: int
    nbytes: int
    elements: int


@dataclass(frozen=True, slots=True)
class StackFacts:
    """A stack of layers: the prefix of their names, and their number."""

    prefix: str
    layers: int


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One module, as `modules:` in a recipe names it.

    tensors  output tensors
    aliases  mergekit's names for it
    """

    name: str
    stacks: tuple[StackFacts, ...]
    tensors: int
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DroppedFacts:
    """Input tensors of one model that the output lacks for one reason."""

    model: str
    reason: str
    tensors: int
    first: str


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One key of a JSON file, `text_config.num_hidden_layers`, in two models; None where it is absent."""

    key: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class Download:
    """A file of a Hub model that a merge would download."""

    model: str
    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak of resident memory, and its causes.

    calibrates  plus a calibration: torch, transformers, a layer and its inputs
    """

    peak_bytes: int
    threads: int
    tile_bytes: int
    calibrates: bool = False


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The result of another recipe that the plan reads.

    name    name of the recipe or of its result
    why     why it is written before it is read; "" if it is computed on the fly
    """

    name: str
    method: str
    models: tuple[str, ...]
    tensors: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class TextFacts:
    """A text that a model is measured on, for the merge method.

    text    or the folder of its statistics
    rows    0 for statistics in a folder
    nbytes  statistics of all layers
    """

    model: str
    text: str
    rows: int
    tokens: int
    kinds: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """The time of a run, from similar ones on this machine: same method, format, device and number of threads.

    seconds  by their median speed
    runs     number of similar runs
    """

    seconds: float
    runs: int


@dataclass(frozen=True, slots=True)
class OpeningEstimate:
    """What opening remote models transfers: headers of weight files, settings, tokenizers. Planning does it, and so does a run.

    requests  of byte ranges; lists of files and files that huggingface_hub downloads are not counted
    nbytes    of their answers
    """

    requests: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class UploadEstimate:
    """What a run sends to a bucket or to the Hub, if nothing fails, is replaced, or was sent before.

    files          weight files and others
    nbytes         of the weight files; the others have a few MB at most
    bucket_writes  requests that write to a bucket: PUT, and for files in parts POST. A part has 8 MiB or more
    bucket_reads   requests that look at its objects: GET, HEAD and lists
    hub_writes     requests to the Hub, if it takes each file in one part: PUT and POST
    """

    files: int
    nbytes: int
    bucket_writes: int
    bucket_reads: int
    hub_writes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals of a plan. `print` shows the most important ones.

    tensors         output weights, however many arrays each is stored as
    measured        the model is measured first, which decides the storage; `out_bytes` is an estimate then, 0 for unknown
    out_bytes       of all output tensors
    write_bytes     of the weight files, headers included
    input_bytes     input tensors as they are decoded, each use counted once
    stored_bytes    the same as they are stored in their files, by the share of each model
    read_bytes      as stored, in all passes; an upper bound, as a pass may prove needless
    survey_bytes    the part of `read_bytes` before the first tensor is merged, for statistics of the whole model
    passes          maximum number of times that a tensor is read
    memory          peak of resident memory
    downloads       files of Hub models that are neither cached nor streamed
    transfer        bytes that are streamed
    opening         bytes transferred to open remote models
    upload          if the output is in a bucket or on the Hub
    time            from similar runs; None without one
    ops             output tensors by op, most bytes first
    stored          output tensors by encoding, if some are encoded
    kinds           output tensors by kind, if some are encoded; an estimate like `out_bytes`
    modules         as a recipe may name them
    dropped         input tensors that the output lacks
    changes         of config.json
    stages          other recipes whose results are read, in the order of their dependencies
    texts           what models are measured on first, for the merge method
    product_bytes   the most that the values computed before tensors take beside the output, at a time
    measuring_bytes  memory for the largest layer that is measured, in float32, and its statistics
    writing_bytes    memory for the largest model that writes a text by itself, in float32; it takes one layer at a time if
                     that does not fit
    """

    tensors: int
    measured: bool
    out_bytes: int
    write_bytes: int
    input_bytes: int
    stored_bytes: int
    read_bytes: int
    survey_bytes: int
    passes: int
    memory: Memory
    transfer: TransferEstimate
    opening: OpeningEstimate
    upload: UploadEstimate
    downloads: tuple[Download, ...] = ()
    time: TimeEstimate | None = None
    ops: tuple[OpFacts, ...] = ()
    stored: tuple[StoredFacts, ...] = ()
    kinds: tuple[KindFacts, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    dropped: tuple[DroppedFacts, ...] = ()
    changes: tuple[ConfigChange, ...] = ()
    stages: tuple[StageFacts, ...] = ()
    texts: tuple[TextFacts, ...] = ()
    product_bytes: int = 0
    measuring_bytes: int = 0
    writing_bytes: int = 0

    @property
    def download_bytes(self) -> int:
        """Bytes of all downloads."""
        return sum(download.nbytes for download in self.downloads)

    def to_json(self) -> dict[str, Any]:
        """The totals as JSON values, as `weightsmith plan --json` prints them."""
        return {
            "tensors": self.tensors,
            "measured_first": self.measured,
            "bytes": self.out_bytes,
            "write_bytes": None if self.measured else self.write_bytes,
            "input_bytes": self.input_bytes,
            "stored_input_bytes": self.stored_bytes,
            "read_bytes_at_most": None if self.measured else self.read_bytes,
            "survey_bytes": self.survey_bytes,
            "passes": self.passes,
            "download_bytes": self.download_bytes,
            "stream": asdict(self.transfer),
            "opening": _record(self.opening),
            "upload": None if self.measured else _record(self.upload),
            "peak_memory_bytes": self.memory.peak_bytes,
            "calibrates": self.memory.calibrates,
            "product_bytes": self.product_bytes,
            "measuring_bytes": self.measuring_bytes,
            "writing_bytes": self.writing_bytes,
            "threads": self.memory.threads,
            "time": None if self.time is None else asdict(self.time),
            "downloads": _records(self.downloads),
            "stages": _records(self.stages),
            "texts": _records(self.texts),
            "ops": _records(self.ops),
            "stored": _records(self.stored),
            "kinds": _records(self.kinds),
            "modules": _records(self.modules),
            "dropped": _records(self.dropped),
            "config_changes": _records(self.changes),
        }

    def __str__(self) -> str:
        rows = [("tensors", f"{self.tensors:,}")]
        rows += [] if self.measured else [("write", size(self.write_bytes))]
        rows += [("read", reading_text(self))]
        rows += [("download", size(self.download_bytes))] if self.downloads else []
        rows += [("stream", stream_text(self.transfer))] if self.transfer.needed_bytes else []
        rows += [("memory", f"{size(self.memory.peak_bytes)} at most, with {count(self.memory.threads, 'thread')}")]
        rows += [] if self.time is None else [("time", time_text(self.time))]
        return "\n".join(f"{name:<9} {text}" for name, text in rows)


def reading_text(summary: Summary) -> str:
    """What is read, in words."""
    several = summary.passes > 1
    facts = [f"inputs of {size(summary.stored_bytes)}, read up to {summary.passes} times"] if several else []
    if summary.stored_bytes != summary.input_bytes:
        facts.append(f"the inputs decoded: {size(summary.input_bytes)}")
    details = f" ({'; '.join(facts)})" if facts else ""
    return f"{'up to ' if several else ''}{size(summary.read_bytes)}{details}"


def stream_text(transfer: TransferEstimate) -> str:
    """What is transferred of streamed models, in words."""
    return f"{size(transfer.network_bytes)} in {count(transfer.requests, 'request')}"


def time_text(time: TimeEstimate) -> str:
    """The time of a run, in words."""
    return f"about {duration(time.seconds)}, by {count(time.runs, 'similar run')} on this machine"


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[ConfigChange]:
    """The keys in which two configs differ; lists are compared whole.

    >>> [change.key for change in config_changes({"a": 1, "b": {"c": [1], "d": 0}}, {"a": 1, "b": {"c": [1, 1], "d": 0}})]
    ['b.c']
    """
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from config_changes(before, after, f"{path}{key}.")
        elif before != after or type(before) is not type(after):
            yield ConfigChange(f"{path}{key}", before, after)


def _records(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records as JSON: their fields, and `bytes` for `nbytes`."""
    return [_record(one) for one in records]


def _record(record: Any) -> dict[str, Any]:
    return {"bytes" if name == "nbytes" else name: value for name, value in asdict(record).items()}
