"""What the gateway refuses before it costs anything."""
