"""Configs of mergekit-evolve."""

from __future__ import annotations

from weightsmith._planning.recipe import Source


def converted(source: Source) -> Source | None:
    return None
