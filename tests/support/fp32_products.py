"""Products of 16-bit matrices in float32 on the CPU; on a GPU, torch.mm computes them with ``out_dtype``."""

import torch


def fp32_products(a, b):
    """Stands in for the product of ppo_ds/compute/linear_logprobs.py on a GPU."""
    return torch.mm(a.float(), b.float()) if a.dtype in (torch.float16, torch.bfloat16) else torch.mm(a, b)
