"""An index of the chain's events, and what pages show of the network."""
