"""The kernel database: what was measured, as Parquet files that any tool can read."""
