"""This project against other engines on the same weights and prompts, in one run."""
