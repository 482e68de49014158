"""Serving: prefill, decode, bounded replay, the two stores and generation."""
