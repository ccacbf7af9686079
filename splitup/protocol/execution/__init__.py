"""An execution under way: queues, routes, logs, and failover."""
