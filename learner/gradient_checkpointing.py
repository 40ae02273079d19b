"""Gradient checkpointing (Chen et al. 2016): a layer's activations are computed again when its gradient is due."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpoint_layers(decoder: nn.Module) -> None:
    """Keeps only the inputs of each layer of `decoder` from the forward pass, at the price of a second one.

    Not by transformers' own switch: it wants the model in training mode, with dropout, and makes the embeddings'
    outputs require a gradient, which under adapters is a backward pass through layers that nothing trains.

    Raises:
        ValueError: the model's layers cannot be checkpointed.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(decoder).__name__} has no layers for gradient_checkpointing: switch the setting off")
    for layer in layers:
        layer.training = True  # of the layer itself, not of what is in it
        layer.gradient_checkpointing = True
        recomputed: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = recomputed
