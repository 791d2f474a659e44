"""Between clients and the full tier: admission, the HTTP and gRPC endpoints, chat prompts and replies."""
