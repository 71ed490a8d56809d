"""The last line of a run: the programs and packages whose tests were skipped, and where to read how to get them.

A test that needs a program or a package is skipped with the reason `needs NAME`, or `needs NAME: detail`. Every NAME has a row
in the table of CONTRIBUTING.md, unless the `test` extra installs it. Other reasons say why a case does not apply; they are
not counted.
"""

from __future__ import annotations

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
    found = (_REASON.match(reason.removeprefix("Skipped: ")) for reason in reasons)
    return Counter(next(filter(None, match.groups())) for match in found if match)


def last_line(reasons: Iterable[str]) -> str:
    """Empty if nothing was missing.

    >>> last_line(["needs vLLM", "needs Chromium", "needs vLLM"])
    'not run: 2 tests of vLLM, 1 of Chromium (make browser). How to get them: CONTRIBUTING.md, "Programs that tests need"'
    """
    counts = missing(reasons).most_common()
    if not counts:
        return ""
    named = [f"of {name} ({_COMMANDS[name]})" if name in _COMMANDS else f"of {name}" for name, _ in counts]
    (first, *others) = (f"{count} {name}" for (_, count), name in zip(counts, named, strict=True))
    number, rest = first.split(" ", 1)
    first = f"{number} {'test' if number == '1' else 'tests'} {rest}"
    return f"not run: {', '.join([first, *others])}. How to get them: {PAGE}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """After what pytest prints last. The workers of xdist print nothing."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        skipped = (report.longrepr for report in reporter.stats.get("skipped", ()))
        if line := last_line(place_and_reason[2] for place_and_reason in skipped if isinstance(place_and_reason, tuple)):
            reporter.write_line(line)
    return result
