"""Every figure of README and docs comes from `benchmarks/results`: this writes them into the pages.

    make figures

What is between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by the table of that name, or by the words within a
sentence. A test compares the pages with the documents.
"""
