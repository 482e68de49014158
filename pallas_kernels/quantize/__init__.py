"""Block quantisers of the KV caches and decoders of the released weights."""
