"""The families of language models: how their configurations are read."""
