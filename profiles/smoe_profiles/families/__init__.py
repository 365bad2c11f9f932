"""One table of model families, and how a model's config becomes its table of MoE layers."""
