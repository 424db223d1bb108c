"""docker-compose.yml as it is shipped, on a real Docker: ``make compose``."""
