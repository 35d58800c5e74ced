"""Supervised fine-tuning on recorded chats.

`algorithm` trains, `chat_dataset` reads chats from a store, `rendering` converts chats to token
ids, `updates` is the loop over batches, `checkpoint` saves interrupted runs.
"""

from lightspan_torch.sft.algorithm import SFT

__all__ = ["SFT"]
