"""Published pairs: how often their drafts were accepted and what their passes took, and what the simulator makes of it."""
