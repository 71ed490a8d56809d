"""Shared pytest suites, one for each kind of plug-in. Subclass one, with a name that starts with `Test`."""

from weightsmith.testing.encodings import EncodingTests
from weightsmith.testing.outputs import OutputCase, OutputTests
from weightsmith.testing.sources import SourceCase, SourceTests

__all__ = ["EncodingTests", "OutputCase", "OutputTests", "SourceCase", "SourceTests"]
