"""What processes report: every series by name, pages of routers, Ray's endpoints, drift of acceptance."""
