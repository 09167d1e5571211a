"""Models: what they are sent, how they are reached, and what is read from their replies."""
