"""Kubernetes without a cluster: what controllers make of manifests, an emulator that runs the pods, and an API server for kubectl."""
