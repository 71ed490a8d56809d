"""`weightsmith studio`: a local web page on which models are chosen, a merge is set up, looked at, run and compared.

The text of the recipe is the state: controls write into it, and are drawn from it.

    places.py    the folders that may be read and written
    draft.py     a recipe as controls: what they show, and what they write. Pure
    check.py     what is wrong with a recipe, by line and column
    work.py      one merge at a time: progress, cancel, resume
    compare.py   continuations and perplexities, with transformers
    show.py      values as HTML
    session.py   what can be done on the page, one method for each
    page.py      the page. The only module that imports Gradio. What the browser may load
    controls.js, studio.css    sliders and curves; how the page looks

What a browser sends is untrusted: every model of a recipe and every name of an output is checked against `Places` by the
function that uses it, whatever the page offered. Nothing that a recipe or a model brings is executed.
"""
