"""What the examples share: a small model, its warm start, and the command that trains."""
