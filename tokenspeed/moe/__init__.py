"""Sparse feed-forward layers: which experts a token goes to, and who computes them."""
