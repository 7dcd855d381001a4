"""What requests to the endpoint may have, its keys, and clients that send them."""
