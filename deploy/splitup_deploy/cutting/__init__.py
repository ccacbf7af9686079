"""Cutting a traced model into tasks that fit a GPU's memory."""
