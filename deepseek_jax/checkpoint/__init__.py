"""Parameters and training state on disk."""
