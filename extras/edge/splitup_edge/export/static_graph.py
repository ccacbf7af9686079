"""A decoder's step as a static graph: the one description behind tinygrad, ONNX and ExecuTorch.

The graph is ONNX as plain data (``splitup_deploy.frontends.onnx.onnx_graph``) of few operations.
``onnx_file`` writes it as a file, which the market's ONNX front end traces with tinygrad;
``torch_module`` runs it with torch, for ExecuTorch. Its inputs and outputs are those of
``splitup_edge.static_step``. Weights are float32.

What a row sees is in the masks alone: causal chunks, trees, blocks and sliding windows are one
graph. A product with the cache has the cache as its left side where that is possible, because
runtimes copy the right side of a product of two computed values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

import numpy as np
from splitup_deploy.frontends.decoder.decoder_config import Clamped, DecoderConfig
from splitup_deploy.frontends.decoder.rotary import Rope, RopeTable
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.onnx.onnx_graph import OnnxGraph, OnnxModel, OnnxPort, OnnxTensor

from splitup.core.errors import InvalidModel
from splitup_edge.export.graph_builder import GraphBuilder
from splitup_edge.export.static_experts import are_plain, compute_experts
from splitup_edge.static_step import StaticShape

OPSET: Final = 23  # the first with RMSNormalization


def make_shape(config: DecoderConfig, block: int) -> StaticShape:
    """Return the sizes of a decoder's static step; raises InvalidModel for an impossible block."""
    if not 1 <= block <= config.context:
        raise InvalidModel(
            f"a block of {block} rows does not fit {config.context} positions; "
            f"give --block 1 to {config.context}"
        )
    local = config.local
    windows = tuple(
        local.window if local is not None and layer in local.layers else 0
        for layer in range(config.layers)
    )
    return StaticShape(
        config.layers,
        config.kv_heads,
        config.head_dim,
        config.context,
        block,
        windows if any(windows) else (),
    )


# What a static graph takes from a decoder's configuration. Anything else has to be the default.
_HELD: Final = frozenset(
    "layers hidden intermediate heads kv_heads head_dim vocab context norm_epsilon rope tied local "
    "latent recurrent diffusion qkv_bias output_bias mlp_bias qk_norm wide_qk_norm fused "
    "output_gate unit_norms pre_norms post_norms unturned activation attention_scale attention_cap "
    "logit_cap embedding_scale experts".split()
)


def build_static_step(config: DecoderConfig, weights: Weights, shape: StaticShape) -> OnnxModel:
    """Describe one step of a decoder as a static graph.

    Raises InvalidModel for parts that such a graph does not have here.
    """
    _check_parts(config)
    return _StaticStep(config, weights, shape).build()


def _check_parts(config: DecoderConfig) -> None:
    parts = {
        "latent attention": config.latent is not None,
        "recurrent layers": config.recurrent is not None,
        "gates behind attention": config.output_gate,
    }
    found = [part for part, is_there in parts.items() if is_there]
    found += [
        f"a variation ({field.name})"
        for field in fields(config)
        if field.name not in _HELD and getattr(config, field.name) != field.default
    ]
    if isinstance(config.activation, Clamped):
        found.append("a bounded activation")
    if config.local is not None and config.local.aligned:
        found.append("windows that end at multiples of their size")
    experts = config.experts
    if experts is not None and not are_plain(experts):
        found.append("experts of another form than gate, up and down projection")
    if found:
        raise InvalidModel(
            f"the model has {found[0]}, which a static graph does not hold: models with plain "
            "attention in all layers can be exported, with experts or without"
        )


class _StaticStep(GraphBuilder):
    def build(self) -> OnnxModel:
        c, s = self.config, self.shape
        table = self.hold(self.weights.get("model.embed_tokens.weight", c.vocab, c.hidden))
        self.place = self.reshape("positions", s.block)
        self.caches = self.reshape("kv_cache", 2 * s.layers * s.kv_heads, s.max_len, s.head_dim)
        self.masks = self.reshape("attention_mask", s.layers, s.block, s.max_len + s.block)
        self.inserts = self.reshape("insert_matrix", s.layers, s.max_len, s.block)
        self.keeps = self.reshape("keep_mask", s.layers, s.max_len, 1)
        x = self.add("Gather", table, self.reshape("input_ids", s.block), axis=0)
        x = self.scale(x, c.embedding_scale)
        caches: list[str] = []
        for layer in range(c.layers):
            x, fresh = self.attend(x, layer)
            caches += fresh
            x = self.feed_forward(x, layer)
        x = self.norm(x, "model.norm.weight")
        if not c.tied:
            table = self.hold(self.weights.get("lm_head.weight", c.vocab, c.hidden))
        x = self.add("Gemm", x, table, transB=1)
        if c.logit_cap is not None:
            x = self.cap(x, c.logit_cap)
        self.add("Reshape", x, self.numbers(1, s.block, c.vocab), name="logits")
        joined = self.add("Concat", *caches, axis=0)
        cache = s.inputs["kv_cache"]
        self.add("Reshape", joined, self.numbers(*cache), name="updated_kv_cache")
        inputs = tuple(
            OnnxPort(name, "int64" if len(size) == 2 else "float32", size)
            for name, size in s.inputs.items()
        )
        outputs = (
            OnnxPort("logits", "float32", (1, s.block, c.vocab)),
            OnnxPort("updated_kv_cache", "float32", cache),
        )
        return OnnxModel(OnnxGraph(tuple(self.nodes), self.tensors, inputs, outputs), {"": OPSET})

    def norm(self, x: str, name: str, size: int = 0) -> str:
        """Return the RMS norm of the last axis, times a weight."""
        source = self.weights.get(name, size or self.config.hidden)
        weight = self.hold(source, 1.0 if self.config.unit_norms else 0.0)
        return self.add("RMSNormalization", x, weight, axis=-1, epsilon=self.epsilon)

    def norm_input(self, x: str, name: str) -> str:
        """Return the input of attention or MLP, which few models do not normalise."""
        return self.norm(x, name) if self.config.pre_norms else x

    def add_branch(self, x: str, branch: str, norm: str) -> str:
        if self.config.post_norms:
            branch = self.norm(branch, norm)
        return self.add("Add", x, branch)

    def cap(self, x: str, most: float) -> str:
        """Return most * tanh(x / most)."""
        return self.scale(self.add("Tanh", self.scale(x, 1.0 / most)), most)

    def rotate(self, heads: str, layer: int) -> str:
        """Return heads [block, heads, head_dim], turned by position where the layer does so."""
        c, block = self.config, self.shape.block
        if layer in c.unturned:
            return heads
        is_local = c.local is not None and layer in c.local.layers
        rope = c.local.rope if c.local is not None and is_local else c.rope
        half = rope.pairs
        cosine, sine = (
            self.reshape(self.look_up_angles(rope, part, is_local), block, 1, half)
            for part in ("cos", "sin")
        )
        first, second = self.cut(heads, 2, 0, half), self.cut(heads, 2, half, 2 * half)
        turned = [
            self.add("Sub", self.add("Mul", first, cosine), self.add("Mul", second, sine)),
            self.add("Add", self.add("Mul", second, cosine), self.add("Mul", first, sine)),
        ]
        if 2 * half < c.head_dim:
            turned.append(self.cut(heads, 2, 2 * half, c.head_dim))
        return self.add("Concat", *turned, axis=2)

    def look_up_angles(self, rope: Rope, part: str, is_local: bool) -> str:
        """Return the cosines or sines of the rows' positions, [block, pairs]; once per graph."""
        name = f"rope.{'local.' * is_local}{part}"
        if name not in self.tensors:
            length = self.shape.max_len
            [data] = RopeTable(rope, length).read()
            table = np.frombuffer(data, np.float32).reshape(length, 2, rope.pairs)
            values = np.ascontiguousarray(table[:, 0 if part == "cos" else 1])
            self.tensors[name] = OnnxTensor(name, "float32", values.shape, values.tobytes())
            self.add("Gather", name, self.place, axis=0, name=f"{name}.rows")
        return f"{name}.rows"

    def norm_heads(self, x: str, prefix: str, kind: str, count: int) -> str:
        """Return query or key heads [block, count, head_dim], normalised if the model does so."""
        c, block = self.config, self.shape.block
        name = f"{prefix}.self_attn.{kind}_norm.weight"
        if c.wide_qk_norm:
            x = self.norm(x, name, count * c.head_dim)
        x = self.reshape(x, block, count, c.head_dim)
        return self.norm(x, name, c.head_dim) if c.qk_norm else x

    def attend(self, x: str, layer: int) -> tuple[str, list[str]]:
        """Return x plus the attention of a layer, and the layer's new keys and new values."""
        c, s = self.config, self.shape
        prefix, groups = f"model.layers.{layer}", c.heads // c.kv_heads
        h = self.norm_input(x, f"{prefix}.input_layernorm.weight")
        parts = [
            (f"{kind}_proj", count * c.head_dim)
            for kind, count in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        ]
        q, k, v = self.project_parts(h, f"{prefix}.self_attn", "qkv_proj", parts, c.qkv_bias)
        q = self.rotate(self.norm_heads(q, prefix, "q", c.heads), layer)
        k = self.rotate(self.norm_heads(k, prefix, "k", c.kv_heads), layer)
        q = self.add("Transpose", q, perm=(1, 2, 0))  # [heads, head_dim, block]
        if groups > 1:  # the groups of a key head side by side: [kv_heads, head_dim, groups, block]
            q = self.reshape(q, c.kv_heads, groups, c.head_dim, s.block)
            q = self.add("Transpose", q, perm=(0, 2, 1, 3))
        q = self.reshape(q, c.kv_heads, c.head_dim, groups * s.block)
        new = [
            self.add(
                "Transpose", self.reshape(part, s.block, c.kv_heads, c.head_dim), perm=(1, 0, 2)
            )
            for part in (k, v)
        ]  # [kv_heads, block, head_dim]
        old = [
            self.cut(self.caches, 0, place * s.kv_heads, (place + 1) * s.kv_heads)
            for place in (2 * layer, 2 * layer + 1)
        ]  # [kv_heads, max_len, head_dim]
        mixed = self.mix(q, old, new, layer, groups)
        name = f"{prefix}.self_attn.o_proj"
        branch = self.project(mixed, name, c.hidden, c.heads * c.head_dim, c.output_bias)
        x = self.add_branch(x, branch, f"{prefix}.post_attention_layernorm.weight")
        keep = self.cut(self.keeps, 0, layer, layer + 1)
        insert = self.cut(self.inserts, 0, layer, layer + 1)  # [1, max_len, block]
        return x, [
            self.add("Add", self.add("Mul", before, keep), self.insert(insert, rows))
            for before, rows in zip(old, new, strict=True)
        ]

    def insert(self, matrix: str, rows: str) -> str:
        """Return new rows [kv_heads, block, head_dim] at their places in a cache, else zeros."""
        s = self.shape
        if s.block == 1:  # each product of the matrix is one product of numbers
            return self.add("Mul", matrix, rows)
        flat = self.reshape(
            self.add("Transpose", rows, perm=(1, 0, 2)), 1, s.block, s.kv_heads * s.head_dim
        )
        spread = self.add("MatMul", matrix, flat)  # [1, max_len, kv_heads * head_dim]
        spread = self.reshape(spread, s.max_len, s.kv_heads, s.head_dim)
        return self.add("Transpose", spread, perm=(1, 0, 2))

    def mix(self, q: str, old: Sequence[str], new: Sequence[str], layer: int, groups: int) -> str:
        """Return the values that the queries see, [block, heads * head_dim].

        q is [kv_heads, head_dim, groups * block]; keys and values are the cache and the new rows.
        """
        c, s = self.config, self.shape
        length, queries = s.max_len + s.block, groups * s.block
        scores = self.add(
            "Concat", *(self.add("MatMul", keys[0], q) for keys in (old, new)), axis=1
        )  # [kv_heads, length, queries]
        scores = self.add("Transpose", scores, perm=(0, 2, 1))
        scores = self.scale(scores, c.attention_scale or 1.0 / math.sqrt(c.head_dim))
        if c.attention_cap is not None:
            scores = self.cap(scores, c.attention_cap)
        scores = self.reshape(scores, c.heads, s.block, length)
        scores = self.add("Add", scores, self.cut(self.masks, 0, layer, layer + 1))
        shares = self.add("Softmax", scores, axis=-1)
        shares = self.reshape(shares, c.kv_heads, queries, length)
        mixed = self.add(
            "Add",
            self.add("MatMul", self.cut(shares, 2, 0, s.max_len), old[1]),
            self.add("MatMul", self.cut(shares, 2, s.max_len, length), new[1]),
        )
        mixed = self.reshape(mixed, c.heads, s.block, c.head_dim)
        mixed = self.add("Transpose", mixed, perm=(1, 0, 2))
        return self.reshape(mixed, s.block, c.heads * c.head_dim)

    def feed_forward(self, x: str, layer: int) -> str:
        """Return x plus the gated MLP of a layer, or its experts."""
        c, prefix = self.config, f"model.layers.{layer}"
        norm = "pre_feedforward" if c.post_norms else "post_attention"
        h = self.norm_input(x, f"{prefix}.{norm}_layernorm.weight")
        experts = c.experts
        if experts is None or layer in experts.dense_layers:
            branch = self.compute_gated_mlp(h, f"{prefix}.mlp", c.intermediate)
        else:
            branch = compute_experts(self, h, layer, experts)
        return self.add_branch(x, branch, f"{prefix}.post_feedforward_layernorm.weight")
