"""AWS's side: what a request may be, its errors in the service's words, and clients."""
