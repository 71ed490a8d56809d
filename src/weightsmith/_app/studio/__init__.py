"""`weightsmith studio`: a local web page on which models are chosen, a merge is mixed, previewed, tried, run and compared.

The text of the recipe is the document. Every control edits it in place and is drawn from it.

    places.py    the folders that may be read and written
    edits.py     edits of a recipe's text in place
    draft.py     a recipe as controls, and the edits that controls make
    check.py     problems of a recipe, by line and column, in the page's words, with the controls that mend them
    work.py      the state that the page shows; one merge at a time: progress, cancel, resume
    kept.py      recipe and runs on disk
    show.py      values as HTML
    tasks.py     tries, sweeps, searches, comparisons: one at a time
    session.py   the actions of the page; threads that check and preview the recipe, and watch the merge; the demo's models
    server.py    access control and routes. The only module that imports Starlette

    studio.html, studio.css    the page
    link.js      sends edits in order, receives the state
    controls.js  sliders, curves, numbers by part
    mix.js       models, strips, methods, the recipe's text
    result.js    preview, try, sweep, runs, reports
    studio.js    redraws what changed; actions of the buttons, and why one cannot be used

It imports public names of weightsmith only, as a program of its own would.

Input from browsers is untrusted. Every function that uses a model or an output name checks it against `Places`. Code from
recipes and models is never executed.
"""
