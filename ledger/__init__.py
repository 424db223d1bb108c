"""Usage accounting: from the USAGE stream into SQL, and from SQL into reports."""
