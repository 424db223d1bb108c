"""What people see: the dashboard, the admin API, and the login to both."""
