"""Runs any plan: `tiles.py` cuts, `schedule.py` says what is next, `local.py` is the threads that do it."""
