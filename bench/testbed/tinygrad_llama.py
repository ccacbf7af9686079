"""A Llama in tinygrad's own words, with its own jit: what a step on a device is compared with.

Nothing of SplitUp runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp

GetWeight = Callable[[str, tuple[int, ...]], np.ndarray[Any, Any]]


def iter_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every weight's name, as Hugging Face's files have it, and its shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    cached = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", cached), ("v", cached), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)


class Llama:
    """One token per step; the cache holds ``context`` positions."""

    def __init__(self, config: dict[str, Any], context: int, get: GetWeight) -> None:
        self.config = config
        self.weights = {
            name: Tensor(get(name, shape)).realize() for name, shape in iter_shapes(config)
        }
        heads, hidden = self.config["num_attention_heads"], self.config["hidden_size"]
        self.heads, self.size = heads, hidden // heads
        self.kv_heads = self.config["num_key_value_heads"]
        powers = self.config["rope_theta"] ** (np.arange(0, self.size, 2) / self.size)
        angles = np.arange(context)[:, None] / powers
        self.cosine, self.sine = (
            Tensor(f(angles).astype(np.float32)).realize() for f in (np.cos, np.sin)
        )
        shape = (2, 1, self.kv_heads, context, self.size)
        self.caches = [
            Tensor.zeros(*shape).contiguous().realize()
            for _ in range(self.config["num_hidden_layers"])
        ]
        self.step = TinyJit(self._step)

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name].T

    def _normalise(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        # without this it computes the mean again for every element of the product that follows
        return (x * mean.rsqrt() * self.weights[name]).contiguous()

    def _rotate(self, x: Tensor, at: UOp) -> Tensor:
        half = self.size // 2
        cosine, sine = self.cosine[at : at + 1], self.sine[at : at + 1]
        a, b = x[..., :half], x[..., half:]
        return (a * cosine - b * sine).cat(b * cosine + a * sine, dim=-1)

    def _step(self, token: Tensor, at: UOp) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][token]
        for layer, cache in enumerate(self.caches):
            prefix = f"model.layers.{layer}."
            h = self._normalise(x, prefix + "input_layernorm.weight")
            q, k, v = (
                self._multiply(h, f"{prefix}self_attn.{name}_proj.weight")
                .reshape(1, 1, -1, self.size)
                .transpose(1, 2)
                for name in "qkv"
            )
            q, k = self._rotate(q, at), self._rotate(k, at)
            cache[:, :, :, at : at + 1, :].assign(Tensor.stack(k, v)).realize()
            keys, values = cache[0, :, :, : at + 1, :], cache[1, :, :, : at + 1, :]
            mixed = q.scaled_dot_product_attention(keys, values, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(1, 1, -1)
            x = x + self._multiply(mixed, prefix + "self_attn.o_proj.weight")
            h = self._normalise(x, prefix + "post_attention_layernorm.weight")
            gate = self._multiply(h, prefix + "mlp.gate_proj.weight").silu().contiguous()
            up = self._multiply(h, prefix + "mlp.up_proj.weight")
            x = x + self._multiply((gate * up).contiguous(), prefix + "mlp.down_proj.weight")
            x = x.contiguous()
        tied = self.config["tie_word_embeddings"]
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return self._multiply(self._normalise(x, "model.norm.weight"), head).float().realize()
