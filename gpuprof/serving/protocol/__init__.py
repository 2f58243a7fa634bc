"""The Open Inference Protocol v2 over HTTP and gRPC, and the pages beside it."""
