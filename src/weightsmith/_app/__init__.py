"""The surfaces: nothing else imports this package.

`api.py` has the Python functions, `cli/` the commands: they parse, call and draw, and decide nothing. `studio/` is a local web
page. `goals.py` has recipes to begin with, for `weightsmith init` and the studio.
"""
