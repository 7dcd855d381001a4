"""The web page at the endpoint's address: jobs, as they run and as they were."""
