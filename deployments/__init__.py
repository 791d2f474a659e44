"""Everything that uses Ray, gRPC or HTTP: a deployment for each tier, joined by links, behind a router."""
