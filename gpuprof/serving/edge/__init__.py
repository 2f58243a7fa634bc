"""The edge: Envoy between strangers and the router, for TLS, HTTP/2, gRPC, tokens, deadlines and limits."""
