"""GPT: pre-norm blocks, GELU, learned positions; the attention is one of :data:`strobe_tools.train.attention.ATTENTIONS`, or absent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe_tools.train.attention import ATTENTIONS
from strobe_tools.train.config import Config

_WIDTH = 64  # the number of logits is a multiple of it: tensor cores compute products of an odd width at a fifth of their speed


class SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.attend = ATTENTIONS[config.attention]
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.config.heads, self.config.head_dim)).unbind(2)  # (B, S, H, D)
        dropout = self.config.dropout if self.training else 0.0
        return self.out(self.attend(q, k, v, dropout, self.config.block_size).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention: SelfAttention | None = None
        if config.attention != "none":
            self.norm_attention = nn.LayerNorm(config.d_model)
            self.attention = SelfAttention(config)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.mlp = nn.Sequential(nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.sequence, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tie_weights:
            self.head.weight = self.token.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, S, vocabulary) of the next token, for tokens (B, S), S at most config.sequence. positions (S,): the positions of the
        tokens in their sequences; None: from 0 on."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        weight = self.head.weight
        if missing := -len(weight) % _WIDTH:
            weight = F.pad(weight, (0, 0, 0, missing))
        return F.linear(self.norm(x), weight)[..., : self.config.vocab_size]

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of tokens[:, 1:] given the tokens before each."""
        return F.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, *, temperature: float = 0.8, top_k: int = 50, generator: torch.Generator) -> Tensor:
        """Continues the prompt (S,) by ``length`` sampled tokens."""
        training = self.training
        self.eval()
        tokens = prompt[None]
        for _ in range(length):
            logits = self(tokens[:, -self.config.sequence :])[0, -1].float() / temperature
            best = logits.topk(min(top_k, logits.numel()))
            pick = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, best.indices[pick][None]], 1)
        self.train(training)
        return tokens[0]
