"""Traces: one request is one trace over all processes, see docs/tracing.md. Off unless the environment asks for it."""
