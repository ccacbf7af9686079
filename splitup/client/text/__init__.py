"""Texts: tokens, chat templates, grammars, vectors of texts, drafts for speculative decoding."""
