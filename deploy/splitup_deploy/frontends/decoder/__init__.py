"""The step function of decoder-only language models, traced with tinygrad."""
