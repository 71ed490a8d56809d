"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The first call of a kernel compiles it, which takes seconds; a deadline would fail whichever test comes first.
settings.register_profile("weightsmith", deadline=None)
settings.load_profile("weightsmith")
