"""Autoscaling by what a replica is worth, under Ray Serve."""
