"""State files of PyTorch, read without unpickling."""
