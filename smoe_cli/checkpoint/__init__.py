"""Checkpoints: which tensors an expert owns, the streaming rewrite, and the proof that nothing changed."""
