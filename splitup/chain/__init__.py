"""The contracts, called and followed over JSON-RPC."""
