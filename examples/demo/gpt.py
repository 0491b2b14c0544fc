# SPDX-License-Identifier: Apache-2.0
"""A small GPT in plain torch: pre-norm blocks, causal attention, output tied to the embedding.

The architecture is that of GPT-2 (Radford et al., 2019). With Adam, a parameter of four bytes takes
twelve in a checkpoint: itself and two moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of a model; `width` is a multiple of `heads`."""

    layers: int
    heads: int
    width: int
    context: int  # tokens that the model sees at once
    vocabulary: int


class Block(nn.Module):
    """One layer: attention over the tokens so far, then a perceptron for each token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes the tokens of `x`, of shape (batch, tokens, width); returns the same shape."""
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head width)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape of `x`, (batch, tokens, width)."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """The whole model, from bytes to the logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)
        self.output.weight = self.token_embedding.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (batch, tokens, vocabulary) for int64 tokens (batch, tokens)."""
        positions = torch.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        logits: torch.Tensor = self.output(self.norm(self.blocks(x)))
        return logits

    def parameter_count(self) -> int:
        """Numbers that the optimizer learns; the tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
