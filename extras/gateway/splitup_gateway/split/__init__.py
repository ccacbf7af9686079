"""The server of models whose ends stay on a device (``splitup serve --private``)."""
