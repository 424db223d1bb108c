"""The admin API: organizations, teams, keys and the audit log, for programs and for the pages."""
