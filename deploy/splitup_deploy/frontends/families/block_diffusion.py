"""The families that write blocks of tokens: what they add to the shapes of other families.

SDAR (arXiv 2510.06303) has the shapes of Qwen3, with and without experts, and Fast-dLLM v2
(arXiv 2509.26328) that of Qwen2. Their published configurations leave out what their own code
holds as constants: the size of a block and the mask token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import DiffusionInfo
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import Read, read_qwen2, read_qwen3
from splitup_deploy.frontends.families.mixture_of_experts import read_qwen3_moe

# Fields of the code that trained SDAR.
_SDAR_TRAINING: Final = (
    "fuse_cross_entropy",
    "debug",
    "ep_size",
    "micro_forward",
    "skip_checkpoint",
    "use_deepep",
)


def read_sdar(fields: Fields, context: int | None) -> DecoderConfig:
    """Read an SDARForCausalLM configuration."""
    return _add_sdar_blocks(fields, read_qwen3(fields, context))


def read_sdar_moe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read an SDARMoeForCausalLM configuration."""
    fields.expect("use_sliding_window", False)  # versions of its code differ
    return _add_sdar_blocks(fields, read_qwen3_moe(fields, context))


def read_fast_dllm(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Fast_dLLM_QwenForCausalLM configuration; its logits are of the next token."""
    fields.rename({"bd_size": "block_size"})
    return _add_blocks(fields, read_qwen2(fields, context), 32, 151_665, are_shifted=True)


ARCHITECTURES: Final[dict[str, Read]] = {
    "SDARForCausalLM": read_sdar,
    "SDARMoeForCausalLM": read_sdar_moe,
    "Fast_dLLM_QwenForCausalLM": read_fast_dllm,
}


def _add_sdar_blocks(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    fields.skip(*_SDAR_TRAINING)
    fields.rename({"block_length": "block_size"})
    return _add_blocks(fields, config, 4, 151_669)


def _add_blocks(
    fields: Fields, config: DecoderConfig, size: int, mask_id: int, *, are_shifted: bool = False
) -> DecoderConfig:
    """Return the configuration with blocks; ``size`` and ``mask_id`` are the family's own."""
    size = fields.get_integer("block_size", size)
    mask_id = fields.get("mask_token_id", mask_id)
    if type(mask_id) is not int or not 0 <= mask_id < config.vocab:
        raise InvalidModel(
            f"config.json has the mask token {mask_id!r:.40} and a vocabulary of {config.vocab}: "
            "write the mask token's number as mask_token_id"
        )
    if size > config.context:
        raise InvalidModel(
            f"a block of {size} tokens does not fit a context of {config.context} positions"
        )
    return replace(
        config, diffusion=DiffusionInfo(block_size=size, mask_id=mask_id, are_shifted=are_shifted)
    )
