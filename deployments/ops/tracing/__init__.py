"""Traces: one request is one trace over all processes, see docs/howto/observe.md. Off unless the environment asks for it."""
