"""LoRA adapters that are applied to encrypted hidden states (docs/guides/encrypted-adapters.md)."""
