"""Drafters that live in the pass of a model: heads that read its hidden states, and layers of its own."""
