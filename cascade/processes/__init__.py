"""Tiers in processes of their own, on one machine: each has its own interpreter lock, and so the library what a server has."""
