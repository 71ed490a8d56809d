"""The jobs of methods of the user's own; see `user.py`."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsmith._base.errors import MethodError
from weightsmith._kernels.codecs import decode, encode
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


@dataclass(frozen=True, slots=True)
class Call:
    """A user's function with the parameters of one tensor.

    called      the function's name in messages
    plain       the Python function, before numba compiled it
    takes_base  it has an argument `base`
    tensor      name of the output tensor
    """

    function: Callable[..., Any]
    called: str
    plain: Callable[..., Any]
    takes_base: bool
    parameters: Mapping[str, Any]
    tensor: str

    def __call__(self, models: Any, base: Any, **more: Any) -> Any:
        """The function's result; `base` is passed when it takes one. Raises MethodError for whatever it raises."""
        if self.takes_base:
            more["base"] = base
        try:
            return self.function(models=models, **more, **self.parameters)
        except Exception as error:
            first, *rest = str(error).strip().splitlines() or [""]
            raise self.failed(
                f"raised {type(error).__name__}{': ' if first else ''}{first}", [*rest[:8], *self._place(error)]
            ) from error

    def failed(self, what: str, details: Sequence[str] = ()) -> MethodError:
        """The error that says so of this tensor."""
        return MethodError(f"{self.called} {what}", where=f"output tensor {self.tensor}", details=details)

    def _place(self, error: Exception) -> list[str]:
        """The line of the user's file where it happened, if known."""
        file = getattr(getattr(self.plain, "__code__", None), "co_filename", "")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return [f"{file}:{frames[-1].lineno} in {frames[-1].name}"] if frames else []


class BlockJob(Job):
    """Calls the function grain by grain: what it is given then depends on the shape alone, whatever it makes of it."""

    portable = False  # the function may call anything

    def __init__(self, matrix: Matrix, call: Call) -> None:
        super().__init__(matrix)
        self.call = call

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, inputs = self.matrix, len(self.matrix.codes)
        flat = tile.scratch.rows(inputs + 1, m.codes, m.out_code, min(m.grain, tile.size)).reshape(-1)
        first = 1 if m.base else 0
        for start in range(0, tile.size, m.grain):
            n = min(m.grain, tile.size - start)
            # Cut from one run of memory, so that all arrays are contiguous: numba compiles for that, and so always the same.
            rows, made = flat[: inputs * n].reshape(inputs, n), flat[inputs * n : (inputs + 1) * n]
            for i in range(inputs):
                decode(tile.raw[i], m.codes[i], start, n, rows[i])
            made.fill(np.nan)
            if self.call(rows[first:], rows[0] if m.base else None, out=made) is not None:
                raise self.call.failed("returned a value; a block_method fills out and returns nothing")
            encode(made, n, m.out_code, start, out)


class TensorJob(Job):
    """Gathers the whole matrix in a pass, calls the function once, and writes what it returned."""

    portable = False

    def __init__(self, matrix: Matrix, call: Call) -> None:
        super().__init__(matrix)
        self.call = call
        self._kind = np.dtype(np.float64 if matrix.wide else np.float32)
        self.resident_bytes = (len(matrix.codes) + 2) * matrix.size * self._kind.itemsize  # its result, and a copy on the way
        self._lock = threading.Lock()
        self._whole: np.ndarray | None = None
        self._made = np.empty(0)

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        with self._lock:  # not before there is a tile: a job may only be asked for its passes
            if self._whole is None:
                self._whole = np.empty((len(m.codes), m.size), self._kind)
        for i, row in enumerate(self._whole):
            decode(tile.raw[i], m.codes[i], 0, tile.size, row[tile.start : tile.start + tile.size])

    def finish_pass(self, number: int, results: list[Any]) -> None:
        assert self._whole is not None
        m, kind = self.matrix, self._kind
        models = [row.reshape(m.shape) for row in self._whole]
        self._whole = None
        base = models.pop(0) if m.base else None
        made = self.call(models, base)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(made, torch.Tensor):
            made = made.detach().to("cpu", getattr(torch, kind.name)).numpy()
        if not isinstance(made, np.ndarray | np.generic) or (made.dtype.kind not in "fiub" and made.dtype.name != "bfloat16"):
            raise self.call.failed(f"returned a {type(made).__qualname__}, not an array of numbers")
        if made.shape != m.shape:
            raise self.call.failed(f"returned an array of shape {list(made.shape)}, not {list(m.shape)}")
        self._made = np.ascontiguousarray(made, kind).reshape(-1)

    def apply(self, tile: Tile, out: Bytes) -> None:
        encode(self._made[tile.start : tile.start + tile.size], tile.size, self.matrix.out_code, 0, out)
