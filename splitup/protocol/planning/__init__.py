"""From a request to a plan: signed requests, selection, and challenges to a choice."""
