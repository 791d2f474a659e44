"""What processes report: every series by name, pages of routers and Ray's endpoints."""
