"""`python -m weightsmith`."""

from __future__ import annotations

from weightsmith._app.cli import main

if __name__ == "__main__":
    main()
