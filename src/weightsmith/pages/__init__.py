"""Reports as pages: one HTML file each, which needs no network, no other file and no server.

values.py  what a page shows: facts, tables, heat maps, curves; how numbers and names are written
html.py    a page as HTML, and its file; page.css and page.js go into it
svg.py     heat maps and curves as SVG, for pages and model cards
"""

from weightsmith.pages.html import check_page as check_page
from weightsmith.pages.html import to_html as to_html
from weightsmith.pages.html import write_page as write_page
from weightsmith.pages.svg import heat_maps as heat_maps
from weightsmith.pages.values import Code as Code
from weightsmith.pages.values import Column as Column
from weightsmith.pages.values import Curves as Curves
from weightsmith.pages.values import Facts as Facts
from weightsmith.pages.values import HeatMap as HeatMap
from weightsmith.pages.values import Mark as Mark
from weightsmith.pages.values import Page as Page
from weightsmith.pages.values import Table as Table
