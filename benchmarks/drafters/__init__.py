"""Every drafter beside every other; see `__main__`."""
