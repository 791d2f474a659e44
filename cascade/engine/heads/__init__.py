"""Drafters that live in the pass of a model and read its hidden states: Medusa, EAGLE, EAGLE-3."""
