"""The kernel database: measurements as Parquet files that any tool can read."""
