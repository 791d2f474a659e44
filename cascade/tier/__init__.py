"""A tier: one model, many sessions, one loop; which of them have a place in memory, and what goes into a pass."""
