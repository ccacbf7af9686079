"""Processes that compute what strangers wrote: without network, files or other processes."""
