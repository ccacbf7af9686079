"""Split inference: what a device and its server say to each other, and a device's side."""
