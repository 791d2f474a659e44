"""Decisions about drafting: which tiers take part, what a pass scores, when it waits, what a replica is worth."""
