"""From committed outputs to money: draws, verification, and settlement."""
