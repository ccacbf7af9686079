"""What a client does with chain and committee: paying, asking for a plan, checking it, receipts."""
