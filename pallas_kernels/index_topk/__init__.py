"""Index scores over packed keys, exact Top-K, candidate blocks (report 2.3)."""
