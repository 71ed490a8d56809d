"""Looks at models, and at what a recipe would make of them. Writes nothing.

What is measured are products of plans without output, which the engine computes like those of a merge: it cuts and reads the
tensors, and a survey takes their tiles. The results are frozen values with `to_json` and `report`.

    models.py       the models: opened, their tensors paired and placed; config.json, tokenizer, chat template, card
    surveys.py      what their surveys have in common, and running them; NaN and infinities, which totals leave out
    inspect.py      what one model is: `Inspection`, and the product `statistics`
    diff.py         what a model differs in from another; the task vectors of several models side by side: `Comparison`, and the
                    product `alignments`
    differences.py  the product `differences`, with singular values from sketches
    difference.py   `Difference`: values, sums, and what it says in words
    preview.py      what a merge will do to its models: `Preview`, from a sample of its plan, and the product `survival`
    reports.py      the report of each result
"""
