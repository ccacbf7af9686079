"""What the modes measure on: nodes as processes, models, delays, echo servers."""
