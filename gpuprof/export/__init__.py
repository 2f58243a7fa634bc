"""Deployment maps in the formats of other tools: Kubernetes, KServe, Triton, Ray Serve, mig-parted, Envoy."""
