"""Metrics: every series by name, and their export to Ray."""
