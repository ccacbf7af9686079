"""Keys, signatures, and proofs."""
