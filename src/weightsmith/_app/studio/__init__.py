"""`weightsmith studio`: a local web page on which models are chosen, a merge is mixed, previewed, tried, run and compared.

The text of the recipe is the document. Every control edits it in place and is drawn from it.

    places.py    the folders that may be read and written
    edits.py     edits of a recipe's text that keep all the rest of it
    draft.py     a recipe as controls, and the edits that controls make
    check.py     problems of a recipe, by line and column
    work.py      one merge at a time: progress, cancel, resume
    compare.py   continuations and perplexities, with transformers; a recipe's result is merged in memory
    kept.py      recipe and runs on disk
    board.py     values that the page shows, with revisions
    show.py      values as HTML
    tasks.py     tries, sweeps, searches, comparisons: one at a time
    session.py   what can be done on the page, one method for each; threads that follow the recipe and the merge
    server.py    HTTP: who is answered, and what. The only module that imports Starlette

    studio.html, studio.css    the page
    link.js      edits to the server in order, its state back
    controls.js  sliders, curves, numbers by part
    desk.js      models, strips, methods, the recipe's text
    result.js    preview, try, sweep, runs, reports
    studio.js    what follows from which change

What a browser sends is untrusted. Every model of a recipe and every name of an output is checked against `Places` by the
function that uses it, whatever the page offered. Nothing that a recipe or a model brings is executed.
"""
