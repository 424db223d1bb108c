"""File storage backends."""
