"""Shared pytest suites, one for each kind of plug-in. Subclass one, with a name that starts with `Test`."""

from weightsmith.testing.formats import EncodingTests, StoredFormatTests
from weightsmith.testing.methods import MethodCase, MethodTests
from weightsmith.testing.outputs import OutputCase, OutputTests, run_histories
from weightsmith.testing.products import ProductCase, ProductTests
from weightsmith.testing.sources import SourceCase, SourceTests

__all__ = [
    "EncodingTests",
    "MethodCase",
    "MethodTests",
    "OutputCase",
    "OutputTests",
    "ProductCase",
    "ProductTests",
    "SourceCase",
    "SourceTests",
    "StoredFormatTests",
    "run_histories",
]
