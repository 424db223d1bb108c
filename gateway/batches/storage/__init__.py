"""The plug point of places that files are kept in."""
