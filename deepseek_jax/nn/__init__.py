"""The model: rows in, hidden states out."""
