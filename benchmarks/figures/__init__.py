"""Every figure of README and docs comes from `benchmarks/results`: this writes them into the pages.

    make figures

`docs/figures.md` is written whole. In other pages, what is between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced
by the table of that name, or by the words within a sentence. A test compares both with the documents.
"""
