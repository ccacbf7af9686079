"""What the modes run on: nodes as processes, models, delaying proxies, echo servers."""
