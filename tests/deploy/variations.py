"""Small random checkpoints of families that vary what others have: norms, routers, factors, order.

The names and shapes of their weights are those that Hugging Face's library saves:
``golden/make_golden.py`` writes them to ``golden/variation_shapes.json``, beside the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.deploy.checkpoints import GOLDEN, Case, save_checkpoint
from tests.deploy.mixtures import Shapes

SHAPES = GOLDEN / "variation_shapes.json"


def iter_shapes(case: Case) -> Shapes:
    """Yield every weight's name and shape, as they were saved."""
    name = next(name for name, one in CASES.items() if one is case)
    for weight, shape in json.loads(SHAPES.read_text())[name].items():
        yield weight, tuple(shape)


_YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8}
_GROWING = {
    **_YARN,
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}
_MAMBA = {
    "shared_intermediate_size": 20,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
}
_GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 40,
}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, float("inf")],
}
_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,
}
_INDEXED = {"index_topk": 5, "index_head_dim": 12, "index_n_heads": 8}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_EXPERTS,
            "head_dim": 16,
            "intermediate_size": 32,
            "attention_bias": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 150_000,
            "rope_scaling": {**_YARN, "rope_type": "yarn", "truncate": False},
            "initial_context_length": 8,
            "experts_per_token": 2,
            "swiglu_limit": 1.5,
        },
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        "olmo3",
        {
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 500_000,
            "rope_scaling": {**_YARN, "rope_type": "yarn", "attention_factor": 1.2},
        },
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "cohere2",
        {
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "rope_theta": 1000.0,
            "tie_word_embeddings": True,
            "position_embedding_type": "rope_gptj",
            "use_parallel_block": True,
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        "ministral3",
        {"head_dim": 16, "rope_parameters": _GROWING, "sliding_window": None},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        "mistral4",
        {
            **_LATENT,
            "rope_interleave": True,
            "rope_parameters": {**_GROWING, "partial_rotary_factor": 0.4},
        },
    ),
    "granite": ("GraniteForCausalLM", "granite", {**_GRANITE, "attention_bias": True}),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        "granitemoe",
        {**_GRANITE, **_EXPERTS, "num_hidden_layers": 1},
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {**_GRANITE, **_EXPERTS, "num_hidden_layers": 1, "shared_intermediate_size": 20},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_GRANITE,
            **_EXPERTS,
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
    "granite-4-dense": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_GRANITE,
            **_MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 1,
            "layer_types": ["attention"],
            "position_embedding_type": "rope",
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **_NEMOTRON,
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M-*",
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron-3": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "E*",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "llama4_text",
        {
            **_EXPERTS,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_temperature_tuning": True,
            "use_qk_norm": True,
            "rope_theta": 1000.0,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-e": (
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA4,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 12,
            "layer_types": [*(3 * ["sliding_attention", "full_attention"])],
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 3.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": "vision",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {layer: {"head_dim": 24} for layer in "02"},
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "deepseek-v3.2": (
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        {**_LATENT, **_INDEXED, "rope_theta": 1000.0},
    ),
    "glm-5": (
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {
            **_LATENT,
            **_INDEXED,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {
            **_EXPERTS,
            "head_dim": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "rotary_dim": 8,
            "rope_theta": 1000.0,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        "phimoe",
        {
            **_EXPERTS,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
            "router_jitter_noise": 0.4,
            "rope_theta": 1000.0,
        },
    ),
}
CASES = {
    name: Case(architecture, kind, change, shapes=iter_shapes)
    for name, (architecture, kind, change) in _TABLE.items()
}


def save_mxfp4(directory: Path) -> None:
    """Write gpt-oss with experts in MXFP4, of random numbers and scales."""
    save_checkpoint(directory, CASES["gpt-oss"])
    path, random = directory / "model.safetensors", np.random.RandomState(3)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, out = tensors.pop(name).shape
        shape = (count, out, inner // 32)
        tensors[f"{name}_blocks"] = random.randint(0, 256, (*shape, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = random.randint(122, 125, shape).astype(np.uint8)
    save_file(tensors, path)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": [*skipped, "lm_head"]}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(config))
