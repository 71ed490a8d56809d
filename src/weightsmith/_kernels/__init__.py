"""Compiled loops over contiguous 1-D rows, and `reference.py`, the slow obvious twin of each.

Imports `_base`. Three rules make these loops fast, deterministic and readable:

* A kernel sees 1-D C-contiguous arrays. LLVM cannot vectorise an unknown stride (16 s instead of 0.9 s on the same loop).
* No fastmath, and conditions joined with `&` and `|`: a short-circuit `and` is a branch, and a branch stops vectorisation.
  Reductions run over 64 lanes written out in the code, so their order is ours and not the SIMD width's.
* Inputs are decoded block by block into rows of float32 (float64 when the output is F32 or F64), which stay in the L2
  cache; sums are float64 (but for the elected sums of `task_vector.py`); the result is rounded to the output dtype
  at the end.
"""
