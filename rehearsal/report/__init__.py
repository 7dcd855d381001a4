"""What is shown of jobs: live, and as a page."""
