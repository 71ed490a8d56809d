"""`weightsmith.write`: a model writes a text file by itself. And the texts that the fine-tunes of `weightsmith.auto` write."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from weightsmith._activations.decoder.forward import fast_arithmetic, narrow_linears, transformers_config
from weightsmith._activations.own_text import Starts, checked_starts, encoded_starts, starts_of
from weightsmith._activations.rows import text_source
from weightsmith._activations.sampling import Sampling, draw
from weightsmith._activations.scored_rows import Cutter
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    Unsupported,
)
from weightsmith._base.files import expand_user, write_whole
from weightsmith._base.options import lists_options, read_options
from weightsmith._base.process import return_freed
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.local import MemoryOutput, run
from weightsmith._engine.resources import Workload
from weightsmith._execution.identity import program_digest
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.progress import Meter, Reading, shown_meter
from weightsmith._planning.planner.prepared import Prepared, make_readable
from weightsmith._reports.evaluate.opening import Named, Opened, name_of, opened, prepare_named
from weightsmith._reports.options import WriteSettings
from weightsmith.abc.product import WholeTensor

if TYPE_CHECKING:
    from weightsmith._reports.keywords import WriteKeywords


@dataclass(frozen=True, slots=True)
class OwnText:
    """`weightsmith.write` makes it.

    out     the file
    model   that wrote it, as it was named
    rows    number of lines
    tokens  drawn in all
    starts  texts that rows begin with, in turn; they are not in the file
    unused_template  why no row begins as the model's chat template does; "" if rows do, or the model has no template
    """

    out: Path
    model: str
    rows: int
    tokens: int
    starts: tuple[str, ...] = ()
    unused_template: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {"rows": self.rows, "tokens": self.tokens}
        starts = {"starts": list(self.starts), "unused_template": self.unused_template}
        return {"out": str(self.out), "model": self.model, **counts, **starts}


@lists_options("write", WriteSettings, RunOptions)
def write(
    model: Named, out: str | os.PathLike[str], *, progress: bool | Meter = True, **options: Unpack[WriteKeywords]
) -> OwnText:
    """Let a model write text by itself, into a .jsonl file with one row of text on each line.

    model     folder, Hub id or `base+adapter`, stored in any format that weightsmith reads; or a recipe, whose result is not
              written
    out       a new .jsonl file, which everything that reads a text takes
    progress  True: a bar in terminals and notebooks, False: none
    options   see `weightsmith._base.options`: `WriteSettings` and `RunOptions`

    Tokens are drawn from the model's predictions, beginning with a start token. With a chat template, rows also begin where the
    template lets a user speak, and where it lets the model answer an empty question (Xu et al. 2024, Magpie,
    https://arxiv.org/abs/2406.08464). A fine-tune writes text of its domain if its training was long enough; look at the file.
    The same seed gives the same text on one machine, for any number of threads.

    Raises PlanError for a model that is not a decoder with a tokenizer.json; OutputExists; NonFinite.

    Memory: the whole model in float32.

    >>> weightsmith.write("fr", "fr.jsonl", rows=20, tokens=128).rows  # doctest: +SKIP
    20
    """
    settings, running = read_options("write", options, WriteSettings, RunOptions)
    with shown_meter(progress) as shown:
        return _written(model, os.fspath(out), settings, running, shown)


def _written(model: Named, out: str, settings: WriteSettings, running: RunOptions, shown: Meter) -> OwnText:
    path = _check_output(out, overwrite=running.overwrite)
    name = name_of(model)
    with prepare_named(model) as prepared, writer(name, prepared, running) as model_writer:
        rows, starts = model_writer(settings, shown), model_writer.starts(settings)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows]
    try:
        write_whole(path, "".join(lines).encode(errors="surrogatepass"))
    except OSError as error:
        raise StoreError(f"the text cannot be written: {error.strerror}", where=out) from error
    cutter, tokens = model_writer.cutter, settings.rows * settings.tokens
    texts = tuple(cutter.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in starts.ids[: settings.rows])
    return OwnText(path, name, len(rows), tokens, texts, starts.unused_template)


@contextmanager
def writer(name: str, prepared: Prepared, running: RunOptions) -> Iterator[Writer]:
    """A model in memory, which draws texts. Afterwards its memory is the system's again. Raises PlanError."""
    make_readable(prepared.inputs, streamed=running.stream)
    one = opened(name, prepared)
    resources = resources_of(prepared, running)
    device = usable_device(resources.device)
    model_writer = Writer(one, _module(one, running, device), resources.workers, device)
    try:
        yield model_writer
    finally:
        model_writer.close()


class Writer:
    """A model in memory that draws texts."""

    def __init__(self, model: Opened, module: Any, threads: int, device: str) -> None:
        """module: transformers' causal language model, on the device."""
        self._model, self._module, self._threads, self._device = model, module, threads, device

    def close(self) -> None:
        """Free the model. transformers keeps it in cycles, which Python would collect much later; and malloc would keep its
        blocks, of a few megabytes each.
        """
        self._module = None
        gc.collect()
        return_freed()

    @property
    def cutter(self) -> Cutter:
        """The model's tokenizer and chat template."""
        return self._model.cutter

    def starts(self, settings: WriteSettings) -> Starts:
        """What rows begin with, in turn. Raises Unsupported for a tokenizer that is not the model's."""
        if settings.start:
            return checked_starts(self.cutter, tuple(encoded_starts(self.cutter, settings.start)))
        room = self._model.positions - settings.tokens
        return starts_of(
            self.cutter, self._model.model.template_starts, room, f"{settings.tokens:,} more do not fit into a row"
        )

    def __call__(self, settings: WriteSettings, shown: Meter) -> list[str]:
        """The texts of the rows, without their starts.

        Raises ParameterError for rows that are longer than the model takes; and as `starts` and `draw` do.
        """
        name = self._model.name

        def tell(done: int, total: int) -> None:
            shown.show(Reading(f"{name} writes", done, total, None))

        sampling = _sampling(self._model, self.starts(settings).ids, settings)
        rows = draw(self._module, sampling, self._threads, self._device, tell, name)
        return self.cutter.tokenizer.decode_batch(rows, skip_special_tokens=False)


def _check_output(out: str, *, overwrite: bool) -> Path:
    path = expand_user(out).absolute()
    if path.suffix != ".jsonl":
        has_name = Path(out).name not in ("", "..")
        raise ParameterError(
            "the output is a text file, whose name ends in .jsonl",
            where=out or "output file",
            fix=f"write {Path(out).with_suffix('.jsonl')}" if has_name else "write the name of a new file, such as own.jsonl",
            state=NOTHING_WRITTEN,
        )
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent}", where=out, fix="create it", state=NOTHING_WRITTEN)
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise OutputExists("the output exists", where=out, fix="name another file, or remove this one", state=NOTHING_WRITTEN)
    return path


def _module(one: Opened, running: RunOptions, device: str) -> Any:
    """transformers' module with the weights of the model, on a device: in float32, but for linear layers where a processor
    multiplies bfloat16. Raises PlanError.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    plan = one.prepared.plan
    arrays = {step.out.name: np.empty(step.out.shape, np.float32) for step in plan.steps}
    targets = {step.out.name: WholeTensor(step.out, arrays[step.out.name]) for step in plan.steps}
    folders = [model.folder for model in one.prepared.inputs]
    work = Workload(folders=folders, allow_nonfinite=running.allow_nonfinite)
    run(plan, one.prepared.inputs, MemoryOutput(targets), resources_of(one.prepared, running), work)
    bars = logging.is_progress_bar_enabled()
    if bars:
        logging.disable_progress_bar()
    try:
        config = transformers_config(one.base.config)
        module, report = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={name: torch.from_numpy(array) for name, array in arrays.items()},
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # a bad config can raise anything in transformers
        kind = one.base.config.get("model_type", "")
        what = f"transformers cannot build a model of type '{kind}': {type(error).__name__}: {error}"
        raise PlanError([Unsupported(what[:300], where=one.name, fix="give a text of your own")]) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        what = f"transformers finds no weights for {len(missing):,} of its tensors, such as {missing[0]}"
        raise PlanError([Unsupported(what, where=one.name, fix="check its config.json")])
    del arrays, targets  # each weight is freed when it is narrowed
    if fast_arithmetic(device) == "bfloat16":
        narrow_linears(module, module.get_output_embeddings())
    return module.eval().to(device)


def _sampling(one: Opened, starts: tuple[tuple[int, ...], ...], settings: WriteSettings) -> Sampling:
    longest = max(map(len, starts))
    if longest + settings.tokens > one.positions:
        what = (
            f"a row has at most {one.positions:,} tokens, and a start of {longest:,} and {settings.tokens:,} more are asked for"
        )
        raise ParameterError(what, where=one.name, fix=f"use --tokens {max(1, one.positions - longest)} (tokens)")
    return Sampling(starts, settings.rows, settings.tokens, settings.temperature, settings.seed)


# ---- The two texts of each fine-tune: one that statistics are measured on, and one that is held back to score candidates. A
# text that is given is cut into rows, of which every fourth is held back. Without one, the fine-tune writes both.


TOKENS = 128
"""The most tokens of a row, also of those that a fine-tune writes."""

STATISTICS_ROWS = 36
"""Rows of a given text that statistics are measured on."""

HELD_ROWS = 12
"""Rows held back. With four, differences that were there could not be told from noise."""

TEXTS, HELD_BACK = "texts", "held-back"
"""Folders for the texts of all fine-tunes."""

OWN_ROWS = 20
"""Rows that a fine-tune writes for statistics."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """The texts of a fine-tune, as files of one row on each line. user_file: the user's file, "" for text of its own."""

    user_file: str
    statistics: Path
    held: Path


def row_tokens(one: Opened) -> int:
    """Tokens of a row: fewer than `TOKENS` for a model that takes few."""
    return min(TOKENS, max(2, one.positions // 2))


@dataclass(frozen=True, slots=True)
class CutText:
    """A given text, cut in two: the rows that statistics are measured on, and those that are held back. file: the user's."""

    file: str
    statistics: tuple[str, ...]
    held: tuple[str, ...]

    def write(self, name: str, folder: Path) -> TextPair:
        """Write both parts, as the texts of a fine-tune."""
        return _write(name, self.file, folder, self.statistics, self.held)


def cut(one: Opened, file: str) -> CutText:
    """Cut a given text in two. Raises ParameterError for one that is too short, and as `Cutter.rows` does.

    Rows are taken evenly from the whole text, so that its end counts as its beginning does.
    """
    tokens = row_tokens(one)
    rows = one.cutter.rows(text_source(file, None, tokens, 0, "text"), _MOST_READ)
    count = len(rows.ids)
    if count < 8:
        what = f"the text has {count:,} rows of {tokens:,} tokens, and 8 are needed: 6 for statistics, 2 to score candidates"
        raise ParameterError(what, where=file, fix="give a longer text, or none at all: each fine-tune then writes its own")
    taken = np.unique(np.linspace(0, count - 1, min(count, STATISTICS_ROWS + HELD_ROWS)).round().astype(int))
    texts = [one.cutter.tokenizer.decode(rows.ids[k][rows.nbytes[k] >= 0].tolist(), skip_special_tokens=False) for k in taken]
    return CutText(file, tuple(text for i, text in enumerate(texts) if i % 4 != 3), tuple(texts[3::4]))


def write_own(name: str, model: str, tokens: int, folder: Path, seed: int, running: RunOptions, shown: Meter) -> TextPair:
    """Let a fine-tune write both texts; those of an earlier call of this program with the same seed are taken as they are."""
    settings = WriteSettings(rows=OWN_ROWS + HELD_ROWS, tokens=tokens, seed=seed)
    with prepare_named(model) as prepared:
        facts = [program_digest(), repr(settings), *(checkpoint.state for checkpoint in prepared.inputs)]
        identity = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        record = folder / TEXTS / f"{name}.written"
        pair = _pair(name, "", folder)
        if recorded(record) == identity and pair.statistics.is_file() and pair.held.is_file():
            return pair
        with writer(name, prepared, running) as model_writer:
            rows = model_writer(settings, shown)
    _write(name, "", folder, rows[:OWN_ROWS], rows[OWN_ROWS:])
    write_whole(record, identity.encode())
    return pair


def recorded(path: Path) -> str:
    """What a file beside a text says of the call that wrote it; "" without one."""
    return path.read_text("ascii", "replace")[:80] if path.is_file() else ""


def _pair(name: str, file: str, folder: Path) -> TextPair:
    return TextPair(file, folder / TEXTS / f"{name}.jsonl", folder / HELD_BACK / f"{name}.jsonl")


def _write(name: str, file: str, folder: Path, measured: Sequence[str], held: Sequence[str]) -> TextPair:
    pair = _pair(name, file, folder)
    for path, texts in ((pair.statistics, measured), (pair.held, held)):
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        write_whole(path, "".join(lines).encode(errors="surrogatepass"))
    return pair


_MOST_READ = 4096
