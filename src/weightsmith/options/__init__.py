"""Options, each said once: a dataclass field with its help, default and limits, from which all else follows.

    records.py   the options, in five records
    option.py    one option: flags, keyword, help text, and the check that command line and Python share
    keywords.py  the records as TypedDicts for type checkers, written by scripts/docs.py

A new option is one field. The command line's flags, the functions' keywords, the help and docs/cli.md have it then.
"""

from weightsmith.options.option import Option as Option
from weightsmith.options.option import assignment as assignment
from weightsmith.options.option import find_option as find_option
from weightsmith.options.option import named as named
from weightsmith.options.option import option_error as option_error
from weightsmith.options.option import option_records as option_records
from weightsmith.options.option import options_of as options_of
from weightsmith.options.option import read_options as read_options
from weightsmith.options.records import APPROXIMATIONS as APPROXIMATIONS
from weightsmith.options.records import SPOOL_BYTES as SPOOL_BYTES
from weightsmith.options.records import ExtractSettings as ExtractSettings
from weightsmith.options.records import QuantizeSettings as QuantizeSettings
from weightsmith.options.records import RecipeOptions as RecipeOptions
from weightsmith.options.records import RunOptions as RunOptions
from weightsmith.options.records import TransplantSettings as TransplantSettings
from weightsmith.options.records import output_dtype as output_dtype
