"""Other ways to place experts, first-class beside the Cross-Entropy search: baselines and exact answers.

A method is a function (problem, generator, stop) -> placement: [E] int32, every rank with its share, each expert where
it may be. Optional packages are imported when a method runs.
"""
