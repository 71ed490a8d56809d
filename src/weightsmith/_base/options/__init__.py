"""Options, each said once: a dataclass field with its help, default and limits, from which all else follows.

    option.py           one option: flags, keyword, help text, and the check that command line and Python share
    docstrings.py       the options of a function in its docstring

A new option is one field of a record in the `options.py` of its feature. The command line's flags, the functions' keywords, the
help and docs/cli.md have it then. A new record is also one line of `RECORDS`.
"""

from weightsmith._base.options.docstrings import lists_options as lists_options
from weightsmith._base.options.option import GROUPS as GROUPS
from weightsmith._base.options.option import Option as Option
from weightsmith._base.options.option import assignment as assignment
from weightsmith._base.options.option import find_option as find_option
from weightsmith._base.options.option import is_option_record as is_option_record
from weightsmith._base.options.option import named as named
from weightsmith._base.options.option import option as option
from weightsmith._base.options.option import option_error as option_error
from weightsmith._base.options.option import option_record as option_record
from weightsmith._base.options.option import option_records as option_records
from weightsmith._base.options.option import options_of as options_of
from weightsmith._base.options.option import read_options as read_options
