"""What a plan needs to have computed is computed in a thread, while the engine does what needs it not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weightsmith.mixture.prepared import PreparedMixture
from weightsmith.mixture.routing.report_files import report_files, report_section

if TYPE_CHECKING:
    from weightsmith.mixture.routing.report import Report
    from weightsmith.mixture.routing.route import Progress


class Filling:
    """`PreparedMixture.fill` in a thread of its own. As a context manager it is begun, and ended whatever happens.

    folder    where the output is built
    report, device, progress  as for `fill`; `progress` is called from the thread
    filled    called with the report of the routing, if there is one, when the result is asked for
    error     what went wrong in the thread
    """

    def __init__(
        self,
        prepared: PreparedMixture,
        folder: Path,
        *,
        report: bool | None,
        device: str,
        progress: Progress | None,
        filled: Callable[[Report | None], None],
    ) -> None:
        self._prepared = prepared
        self._folder = folder
        self._report = report
        self._device = device
        self._progress = progress
        self._filled = filled
        self._stopped = False
        self.error: BaseException | None = None
        self._told: Report | None = None
        self._thread = threading.Thread(target=self._fill, name="weightsmith-fill", daemon=True)

    def check(self) -> None:
        """Raise what went wrong, if anything has so far."""
        if self.error is not None:
            raise self.error

    def result(self) -> tuple[Mapping[str, bytes], str]:
        """Wait until it is done: the report of the routing as files of the output, and as a section of its model card."""
        self._thread.join()
        self.check()
        self._filled(self._told)
        return report_files(self._told), report_section(self._told)

    def _fill(self) -> None:
        def progress(done: int, total: int) -> None:
            if self._stopped:
                raise _Stopped
            if self._progress is not None:
                self._progress(done, total)

        try:
            self._told = self._prepared.fill(self._folder, report=self._report, device=self._device, progress=progress)
            assert all(model.ready for model in self._prepared.prepared.inputs)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stopped = True
        self._thread.join()


class _Stopped(Exception):
    """Nobody waits for it any more."""
