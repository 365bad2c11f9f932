"""Two small trained Mixture-of-Experts models, so that everything runs offline, and the script that made them."""
