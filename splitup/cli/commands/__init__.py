"""The commands of ``splitup``, one module each."""
