"""What operators see and start: metrics, traces, scaling, the launch of a server."""
