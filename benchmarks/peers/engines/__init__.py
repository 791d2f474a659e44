"""One module an engine: each has ``load(setup)``, and knows nothing of the others. They run in environments of their own."""
