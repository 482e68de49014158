"""The projections and experts of a decoder layer for one row a request."""
