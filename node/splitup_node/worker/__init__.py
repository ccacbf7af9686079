"""The process that owns a device, and the daemon's side of it."""
