"""Encoders: texts in, one vector or one score of each out."""
