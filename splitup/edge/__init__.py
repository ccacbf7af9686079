"""Exported models (``splitup-deploy export``) on the device itself, without a network."""
