"""Other ways to place experts, first-class beside the Cross-Entropy search: baselines and exact answers."""
