"""Running a placement: shuffles fused into tensor parallelism's collectives, expert-parallel layers, generation."""
