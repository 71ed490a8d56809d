"""Benchmarks: one file per question, run from the repository root with `python -m benchmarks.NAME`. Start with bench.py."""
