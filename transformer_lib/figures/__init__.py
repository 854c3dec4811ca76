"""What draws the figures, one module a chapter."""
