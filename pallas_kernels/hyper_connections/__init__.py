"""Residual update, input mixing and coefficient projection of hyper-connections (report 2.4.1)."""
