"""The admin API: organisations, teams, keys and the audit log, for programs and for the pages."""
