"""Code that all examples share: a small model, its warm start, and the command line of training."""
