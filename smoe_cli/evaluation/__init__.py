"""What smoe evaluate does: states, requests and predicted times, measured on held-out rows."""
