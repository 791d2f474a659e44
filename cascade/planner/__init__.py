"""Decisions about drafting: which tiers draft, what a pass scores, when it waits, what a draft tier is worth."""
