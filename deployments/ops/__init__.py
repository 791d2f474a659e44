"""Operation: metrics, traces, learning, the launch of a server."""
