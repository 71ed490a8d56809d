"""Looks at models, and at what a recipe would make of them. Writes nothing.

What is measured are products of plans without output, which the engine computes like those of a merge: it cuts and reads the
tensors, and a survey takes their tiles. The results are frozen values with `to_json`, which the command line draws as tables.

    models.py       the models: opened, their tensors paired and placed
    surveys.py      what their surveys have in common, and running them
    files.py        config.json, tokenizer, chat template, card
    inspect.py      what one model is: `Inspection`
    diff.py         what a model differs in from another: `Difference`, in values.py; reading.py says it in words
    comparison.py   the task vectors of several models side by side: `Comparison`
    preview.py      what a merge will do to its models: `Preview`, from a sample of its plan (sampling.py)
    nonfinite.py    NaN and infinities: counted, and left out of totals
    pages.py        what was found as pages, for --report

The products: `differences` in differences.py, with singular values from sketches; `statistics` in inspect.py, `alignments` in
comparison.py, `survival` in sampling.py.
"""
