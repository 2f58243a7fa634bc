"""What FLOPs and bytes say of ops that nobody measured."""
