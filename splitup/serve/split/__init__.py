"""Split inference: the server side of models whose ends stay on a device."""
