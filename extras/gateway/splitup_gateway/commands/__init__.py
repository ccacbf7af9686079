"""What users of the gateway type."""
