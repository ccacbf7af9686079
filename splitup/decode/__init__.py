"""Decoding text step by step: sampling, and decoders without I/O."""
