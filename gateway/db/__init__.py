"""SQL: the tables, the engine that reaches them, and the check that both fit together."""
