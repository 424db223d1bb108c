"""SQL: the tables, the engine that reaches them, money, and the check that tables and code fit together."""
