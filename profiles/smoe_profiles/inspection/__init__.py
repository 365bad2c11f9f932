"""Looking at a trace before anything is built on it: its numbers, and the signs that it was recorded wrongly."""
