"""Speculative decoding: trees of drafts, verified by the model in one step."""
