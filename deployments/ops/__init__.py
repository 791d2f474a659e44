"""What operators see and start: metrics, traces, scaling, the audit, the launch of a server."""
