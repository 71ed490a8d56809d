"""Shared test suites: one for each kind of plug-in. Subclass one in a test file of pytest, whose name begins with `Test`."""

from weightsmith.testing.encodings import EncodingTests
from weightsmith.testing.sources import SourceCase, SourceTests

__all__ = ["EncodingTests", "SourceCase", "SourceTests"]
