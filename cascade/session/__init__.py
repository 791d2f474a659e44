"""One request at one tier: a pure state machine, its branches and rounds."""
