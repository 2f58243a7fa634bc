"""Deployment maps in the words of other tools: Kubernetes, KServe, Triton, Ray Serve, mig-parted."""
