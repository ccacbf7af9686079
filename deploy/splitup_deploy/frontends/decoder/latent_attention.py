"""Multi-head latent attention: a position's keys and values are one compressed row of the cache.

A row holds the compressed form of all heads' keys and values, and a part of the key that rope
rotates and all heads share; for sparse attention also the key of its indexer. Keys are never
expanded. Instead a query is projected into the compressed space, where all heads read the same
rows, and the result is expanded to values. The arithmetic equals that of the expanded form, summed
in another order.
Sources: arXiv 2405.04434, section 2.1 and appendix C; llama.cpp's src/models/deepseek2.cpp.
"""

from __future__ import annotations

from tinygrad.tensor import Tensor

from splitup_deploy.frontends.decoder.caches import Cache, open_cache
from splitup_deploy.frontends.decoder.decoder_config import Latent
from splitup_deploy.frontends.decoder.sparse_positions import SparseCache, compute_index_key
from splitup_deploy.frontends.decoder.step_function import Step


def attend_compressed(
    step: Step, x: Tensor, layer: int, latent: Latent
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return x plus the attention of one layer, and its cache [rows, rank + turned]."""
    c, rows, mark = step.config, step.rows, step.tracer.mark
    label, block = f"block {layer} attention", f"model.layers.{layer}"
    prefix, fixed, rank = f"{block}.self_attn", c.head_dim - latent.turned, latent.rank
    h = step.norm(x, f"{block}.input_layernorm.weight", f"{label}: norm")
    query, low_query = _compute_query(step, h, prefix, label, latent)  # [rows, heads, head_dim]
    name, width = f"{prefix}.kv_a_proj_with_mqa", rank + latent.turned
    low = step.project(h, name, [(name, width)], c.hidden, bias=False)
    low = mark(low, f"{label}: compressed k, v")
    shared = low[:, rank:].reshape(rows, 1, latent.turned)
    moving = Tensor.cat(query[:, :, fixed:], shared, dim=1)
    if c.rope.pairs:
        moving = step.rotate(moving, c.heads + 1, layer, label)
    weight = step.norm_weight(f"{prefix}.kv_a_layernorm.weight", rank)
    normed = mark(step.normalise(low[:, :rank], weight, latent.norm_epsilon), f"{label}: kv norm")
    parts, indexer = [normed, moving[:, c.heads]], latent.indexer
    if indexer is not None:
        parts.append(compute_index_key(step, h, layer, indexer))
    fresh = step.round_for_cache(Tensor.cat(*parts, dim=1), f"{label}: cache row")
    cache: Cache = open_cache(step, layer)
    held = cache.write(fresh)
    if indexer is not None:
        keys, held = held[:, width:], held[:, :width]
        cache = SparseCache(cache, step, h, low_query, keys, layer, indexer)
    brought = _bring(step, query[:, :, :fixed], prefix, latent)
    brought = mark(brought, f"{label}: query of compressed k")
    query = Tensor.cat(brought, moving[:, : c.heads], dim=2)
    query = mark(step.grow(query, layer, label), f"{label}: query")
    mixed = step.read_cache(
        layer,
        cache,
        query.reshape(rows, 1, c.heads, 1, width),
        held.reshape(held.shape[0], 1, width),
        held[:, :rank].reshape(held.shape[0], 1, rank),
    )
    values = mark(
        _expand(step, mixed.reshape(rows, c.heads, rank), prefix, latent), f"{label}: expanded v"
    )
    name = f"{prefix}.o_proj"
    branch = step.project(
        values, name, [(name, c.hidden)], c.heads * latent.value_dim, c.output_bias
    )
    x = step.add(x, branch, f"{block}.post_attention_layernorm.weight", label)
    return x, cache.updates


def _compute_query(
    step: Step, h: Tensor, prefix: str, label: str, latent: Latent
) -> tuple[Tensor, Tensor]:
    """Return queries, and what they are expanded from."""
    c, mark = step.config, step.tracer.mark
    inner, name = c.hidden, f"{prefix}.q_proj"
    if latent.query_rank is not None:
        name, inner = f"{prefix}.q_a_proj", latent.query_rank
        h = mark(step.project(h, name, [(name, inner)], c.hidden, bias=False), f"{label}: q rank")
        weight = step.norm_weight(f"{prefix}.q_a_layernorm.weight", inner)
        h = mark(step.normalise(h, weight, latent.norm_epsilon), f"{label}: q norm")
        name = f"{prefix}.q_b_proj"
    query = step.project(h, name, [(name, c.heads * c.head_dim)], inner, bias=False)
    return mark(query, f"{label}: q").reshape(step.rows, c.heads, c.head_dim), h


def _get_expansion(step: Step, prefix: str, latent: Latent) -> Tensor:
    """Return every head's expansion of keys, then of values: [heads, fixed + value_dim, rank]."""
    c, rest = step.config, step.config.head_dim - latent.turned + latent.value_dim
    source = step.weights.get(f"{prefix}.kv_b_proj.weight", c.heads * rest, latent.rank)
    return step.tensor(source).reshape(c.heads, rest, latent.rank)


def _bring(step: Step, query: Tensor, prefix: str, latent: Latent) -> Tensor:
    """Project queries [rows, heads, fixed] into the compressed space: [rows, heads, rank]."""
    c, rows, fixed, rank = step.config, step.rows, int(query.shape[2]), latent.rank
    if latent.split:
        source = step.weights.get(f"{prefix}.k_b_proj.weight", c.heads, rank, fixed)
        weight = step.tensor(source).reshape(1, c.heads, rank, fixed)
        return (query.reshape(rows, c.heads, 1, fixed) * weight).sum(3)
    weight = _get_expansion(step, prefix, latent)[:, :fixed].reshape(1, c.heads, fixed, rank)
    return (query.reshape(rows, c.heads, fixed, 1) * weight).sum(2)


def _expand(step: Step, mixed: Tensor, prefix: str, latent: Latent) -> Tensor:
    """Expand the heads' results, [rows, heads, rank], to values [rows, heads * value_dim]."""
    c, rows, rank, size = step.config, step.rows, latent.rank, latent.value_dim
    if latent.split:
        weight = step.tensor(step.weights.get(f"{prefix}.v_b_proj.weight", c.heads, size, rank))
    else:
        weight = _get_expansion(step, prefix, latent)[:, c.head_dim - latent.turned :]
    weight = weight.reshape(1, c.heads, size, rank)
    product = mixed.reshape(rows, c.heads, 1, rank) * weight
    return product.sum(3).reshape(rows, c.heads * size)
