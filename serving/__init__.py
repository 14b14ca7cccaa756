"""vLLM: the platform and worker that serve an artifact, and what the NxDI-based vLLM plugin lacks for hybrid models."""
