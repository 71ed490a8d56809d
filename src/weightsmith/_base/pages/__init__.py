"""Reports as pages: one HTML file each, which needs no network, no other file and no server.

values.py    what a page shows: facts, tables, heat maps, curves; how numbers and names are written
html.py      a page as HTML, and its file; page.css and page.js go into it
svg.py       heat maps and curves as SVG, for pages and model cards
notebook.py  sentences, facts and short tables of a page in a notebook
terminal.py  facts, sentences and tables of a page on the terminal
"""

from weightsmith._base.pages.html import check_page as check_page
from weightsmith._base.pages.html import to_html as to_html
from weightsmith._base.pages.html import write_html as write_html
from weightsmith._base.pages.html import write_page as write_page
from weightsmith._base.pages.notebook import Shown as Shown
from weightsmith._base.pages.svg import heat_maps as heat_maps
from weightsmith._base.pages.values import Code as Code
from weightsmith._base.pages.values import Column as Column
from weightsmith._base.pages.values import Curves as Curves
from weightsmith._base.pages.values import Facts as Facts
from weightsmith._base.pages.values import HeatMap as HeatMap
from weightsmith._base.pages.values import Mark as Mark
from weightsmith._base.pages.values import Page as Page
from weightsmith._base.pages.values import Table as Table
