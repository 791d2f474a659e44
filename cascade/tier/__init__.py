"""A tier: one model, many sessions, one loop; which sessions have memory, and which rows make up a pass."""
