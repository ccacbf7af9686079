"""Finding the first operation that two parties disagree about, and judging it."""
