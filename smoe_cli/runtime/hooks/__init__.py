"""Shuffles inside other engines (experimental): rows change places around what the engine does itself."""
