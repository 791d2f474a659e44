"""The cascade in virtual time: the real loops, sessions and answers, with given costs, delays and agreement."""
