"""Routed experts of many rows: gate, up and down projection of a group in one kernel."""
