"""Everything that knows Ray and gRPC: a deployment for each tier, joined by links, behind a router."""
