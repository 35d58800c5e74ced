"""A web page for runs, rollouts, calls, prompts and production: `lightspan ui`."""
