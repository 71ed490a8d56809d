"""What every other package uses. Imports none of them.

`errors.py` draws the error tree; `tensors.py` has dtypes, specs and grains: start there. `options.py` says each option once;
`plugins.py` finds plug-ins. `text.py`, `report/` and `process.py` are for people: tables, reports, both output streams.
`files.py` and `strict_json.py` open what someone else named, with bounds; `redaction.py` hides secrets.
"""
