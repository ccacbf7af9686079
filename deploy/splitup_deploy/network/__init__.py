"""A network's contracts on a real chain: what a file says, made so, and compared with the chain."""
