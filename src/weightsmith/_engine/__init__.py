"""Runs any plan: `tiles.py` cuts tensors, `schedule.py` picks the next task, `local.py` runs the threads."""
