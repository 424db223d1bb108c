"""One module for each page: what it asks, and the values of its template."""
