"""Training: data, loss, optimizer, step and loop."""
