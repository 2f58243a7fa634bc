"""The edge: Envoy between untrusted clients and the router, for TLS, HTTP/2, gRPC, tokens, deadlines and limits."""
