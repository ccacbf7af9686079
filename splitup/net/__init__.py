"""Connections between parties: signed HTTP, data links, and relays."""
