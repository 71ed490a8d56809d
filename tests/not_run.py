"""The last line of a run: whether the second ring was left out, and the programs and packages whose tests were skipped.

A test that needs a program or a package is skipped with the reason `needs NAME`, or `needs NAME: detail`. Every NAME has a row
in the table of CONTRIBUTING.md, unless the `test` extra installs it. Other reasons say why a case does not apply; they are
not counted.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import pytest

PAGE = 'CONTRIBUTING.md, "Programs that tests need"'
_COMMANDS = {"Chromium": "make browser"}
_REASON = re.compile(r"needs ([^:]+)|could not import '([^.']+)|(.+) is not installed")


def missing(reasons: Iterable[str]) -> Counter[str]:
    """How many tests were skipped for each program or package.

    >>> missing(["needs vLLM: WEIGHTSMITH_VLLM", "needs vLLM", "could not import 'ray': …", "not for vectors"])
    Counter({'vLLM': 2, 'ray': 1})
    """
    matches = (_REASON.match(reason.removeprefix("Skipped: ")) for reason in reasons)
    return Counter(next(filter(None, match.groups())) for match in matches if match)


def last_line(reasons: Iterable[str], *, is_first_ring: bool = False, share: str = "") -> str:
    """Empty if nothing was missing.

    >>> last_line(["needs vLLM", "needs Chromium", "needs vLLM"])
    'not run: 2 tests of vLLM, 1 of Chromium (make browser). How to get them: CONTRIBUTING.md, "Programs that tests need"'
    >>> last_line([], is_first_ring=True)
    'not run: the second ring (make test-all)'
    >>> last_line([], share="1/3")
    'not run: repetitions but for the share 1/3 (make test-all)'
    """
    counts = missing(reasons).most_common()
    named = [f"{count} of {name}" + (f" ({_COMMANDS[name]})" if name in _COMMANDS else "") for name, count in counts]
    if counts:
        number, rest = named[0].split(" ", 1)
        named[0] = f"{number} {'test' if number == '1' else 'tests'} {rest}"
    ring = ["the second ring (make test-all)"] if is_first_ring else []
    ring += [f"repetitions but for the share {share} (make test-all)"] if share and not is_first_ring else []
    if not (ring or named):
        return ""
    return f"not run: {', '.join([*ring, *named])}" + (f". How to get them: {PAGE}" if named else "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """After what pytest prints last. The workers of xdist print nothing."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        skipped = (report.longrepr for report in reporter.stats.get("skipped", ()))
        reasons = [place_and_reason[2] for place_and_reason in skipped if isinstance(place_and_reason, tuple)]
        is_first_ring = "not second" in session.config.option.markexpr
        if line := last_line(reasons, is_first_ring=is_first_ring, share=os.environ.get("WEIGHTSMITH_REPETITIONS", "")):
            reporter.write_line(line)
    return result
