"""Set what cuBLAS reads before torch starts CUDA."""

import os

# for `torch.use_deterministic_algorithms`, without which gradients differ in their last bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
