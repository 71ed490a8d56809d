"""`python -m weightsmith`."""

from __future__ import annotations

from weightsmith.cli import main

if __name__ == "__main__":
    main()
