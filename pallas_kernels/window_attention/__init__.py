"""Banded causal attention over the sliding window (report 2.1, spec 3.6 and 17)."""
