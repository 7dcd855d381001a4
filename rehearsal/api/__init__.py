"""The endpoint: AWS's APIs as a training job needs them."""
