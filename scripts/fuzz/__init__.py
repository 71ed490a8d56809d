"""Spoils a good input of each kind in many small ways, and looks whether weightsmith takes it or refuses it, in bounds.

    python -m scripts.fuzz                                   # 1,000 files of each kind
    python -m scripts.fuzz --kinds plan recipe --cases 10000 --seed 3
    python -m scripts.fuzz --kinds config --only 4711 --keep /tmp/case     # one case again; its files stay

A mutated file must end in success or in a WeightsmithError whose text is short and printable; within 5 seconds of processor
time (30 by the clock), and with at most 500 MB of resident memory more than before it. Anything else is a failure: another
exception, a dead process, a hang. Cases run in a child process, one after another; a case depends on kind, seed and number
alone. The parent starts another child after one that has died or does not answer. Prints each failure of a new sort, and a line
of numbers for each kind; the status is 1 if there is a failure.
"""

from __future__ import annotations

from scripts.fuzz import adapters, looks, measured, models, outputs, plans, recipes, stored, texts, tokenizers
from scripts.fuzz.kind import Kind

KINDS: dict[str, Kind] = {
    **models.KINDS,
    **stored.KINDS,
    **adapters.KINDS,
    **measured.KINDS,
    **texts.KINDS,
    **tokenizers.KINDS,
    **looks.KINDS,
    **recipes.KINDS,
    **plans.KINDS,
    **outputs.KINDS,
}
