"""The Open Inference Protocol v2 over HTTP and gRPC, with metrics and the OpenAPI document."""
