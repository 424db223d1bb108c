"""The console: the dashboard, the admin API, and the login to both."""
