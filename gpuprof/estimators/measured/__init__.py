"""What the database has: measured points, and what lies between them."""
