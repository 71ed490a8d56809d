"""May this run resume the unfinished work in a staging folder? If not, what has changed since?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightsmith._base.errors import CannotResume
from weightsmith._files.containers import Layout
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.journal import Entries


def layout_hash(layout: Layout) -> str:
    """Hash of all headers and the index."""
    return hash_bytes(b"".join(shard.header for shard in layout.shards) + (layout.index or b""))


def is_resumable(entries: Entries, plan_hash: str, layout: Layout, facts: Mapping[str, str], folder: Path | str) -> bool:
    """True if the work is of this very plan, False if nothing in it is finished.

    facts   of this run: what the plan was made from
    folder  where the work is, for messages

    Raises CannotResume if the work is of another plan and something in it is finished.
    """
    if (entries.plan, entries.layout) == (plan_hash, layout_hash(layout)):
        return True
    if not (entries.tensors or entries.products):
        return False
    details: list[str] = []
    if not entries.plan:
        what = "unfinished work is here, but the first line of its journal is unreadable"
    elif entries.plan == plan_hash:
        what = "unfinished work of this plan is here, but its files are laid out otherwise (another version?)"
    else:
        what = "the unfinished work here does not match this run"
        details = changes(entries.facts, facts) if entries.facts else []
    lost = f"{len(entries.tensors):,} of {len(layout.places):,} tensors" if entries.tensors else "a computed product"
    raise CannotResume(
        what,
        where=str(folder),
        details=(*details, f"discarding it would lose: {lost}"),
        fix="undo the change and run again to resume, discard the work with --no-resume (resume=False), "
        "or choose another output folder",
        state=f"Nothing was written. The unfinished work stays in {folder}",
    )


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two sets of facts, the first 20 of them.

    >>> changes({"parameters.t": "0.3", "files of ./b": "#51f0"}, {"parameters.t": "0.4", "files of ./b": "#77aa", "seed": "1"})
    ['parameters.t: 0.3 -> 0.4', 'files of ./b: changed', 'seed: not set -> 1']
    """
    found = []
    for term in dict.fromkeys([*before, *now]):
        old, new = before.get(term, "not set"), now.get(term, "not set")
        if old != new:
            opaque = old.startswith("#") and new.startswith("#")
            found.append(f"{term}: changed" if opaque else f"{term}: {_short(old)} -> {_short(new)}")
    found = found or ["other details of the plan: comments in the recipe, or an option"]
    return [*found[:20], *([f"and {len(found) - 20:,} more"] if len(found) > 20 else [])]


def _short(value: str) -> str:
    if value.startswith("#"):
        return "other"
    return value if len(value) <= 60 else f"{value[:57]}..."
