"""The embedded backend: `engine` samples, `learner` updates weights, `sft` imitates chats."""
