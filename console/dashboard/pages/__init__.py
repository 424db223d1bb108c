"""One module for each page: its queries, and the values of its template."""
