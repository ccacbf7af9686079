"""Decoding text step by step: sampling, sequential and lookahead decoders."""
