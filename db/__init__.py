"""SQL: tables, database engine, money, and the check of the schema's version."""
