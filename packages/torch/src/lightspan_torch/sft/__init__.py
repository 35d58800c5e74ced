"""Supervised fine-tuning on recorded chats.

`algorithm` trains, `chat_dataset` reads the chats, `checkpoint` is what an interrupted run leaves.
"""

from lightspan_torch.sft.algorithm import SFT

__all__ = ["SFT"]
