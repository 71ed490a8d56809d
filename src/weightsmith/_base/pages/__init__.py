"""Reports as pages: one HTML file each, which needs no network, no other file and no server.

values.py    what a page shows: facts, tables, heat maps, curves; how numbers and names are written; charts as JSON
colours.py   the scales of heat maps
html.py      a page as HTML, and its file; page.css and page.js go into it
grid.py      heat maps of a page; charts.css and charts.js are theirs
svg.py       heat maps and curves as SVG, for model cards and notebooks
notebook.py  the verdict, charts, facts and short tables of a page in a notebook
terminal.py  facts, tables and heat maps of a page on the terminal, then the verdict
"""

from weightsmith._base.pages.html import chart_style as chart_style
from weightsmith._base.pages.html import charts_html as charts_html
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
from weightsmith._base.pages.values import Pictures as Pictures
from weightsmith._base.pages.values import Table as Table
