"""A published pair on this machine: Qwen2.5-Coder-Instruct 1.5B, for which 0.5B drafts."""
