"""Draft and target models in processes of their own, behind gRPC, and who drives them."""
