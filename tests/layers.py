"""Layers with random numbers, which the tests of encoder and decoder share."""

from functools import partial

import torch

from transformer_lib.multihead import MultiHeadAttention


def shaken(module, seed=0):
    """The module with every parameter drawn anew, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            gain = "norm" in name and "weight" in name
            p.copy_(1 + 0.2 * noise if gain else 0.2 * noise)
    return module


def by_formula(module):
    """The module with its attention by the explicit formula, not torch's kernel."""
    for part in module.modules():
        if isinstance(part, MultiHeadAttention):
            part.forward = partial(part.forward, need_weights=True)
    return module
