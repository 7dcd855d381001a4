"""What people see of jobs: the live view and the report page."""
