"""What a running server tells of itself: logs, statistics, traces."""
