"""Measured points of the database, and interpolation between them."""
