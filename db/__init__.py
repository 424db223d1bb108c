"""SQL: the tables, the engine that connects to them, money, and the check of the schema's version."""
