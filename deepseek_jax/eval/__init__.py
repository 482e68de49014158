"""Measurements of a model: perplexity, retrieval, resumed serving, parity with golden files."""
