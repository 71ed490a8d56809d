"""Benchmarks, one file per question, run from the repository root: `python -m benchmarks.bench`. Start there."""
