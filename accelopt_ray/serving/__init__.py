"""Language models of one's own: what to start, how to ask whether it is ready, how to end it."""
