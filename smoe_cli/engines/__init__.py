"""Placements out to serving engines and in from them."""
