"""The operations of the graph format: one table, and the functions that its entries name."""
