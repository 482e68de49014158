"""Joint attention over a window and selected entries (spec 3.6)."""
