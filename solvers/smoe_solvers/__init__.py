"""Placement and prediction on arrays: numpy, scipy and numba; no files, no torch, no model names."""
