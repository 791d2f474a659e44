"""Between clients and the full tier: who is admitted, and the doors: HTTP, gRPC, chat prompts and replies."""
