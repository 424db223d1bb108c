"""A local inference server: owns its process, detects its kind, and waits until it is ready."""
