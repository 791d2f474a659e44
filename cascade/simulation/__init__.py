"""The cascade in virtual time: the real loops, sessions and answers around given costs, delays and agreement."""
