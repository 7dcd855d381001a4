"""Says what it was given."""

import sys

print("GIVEN", sys.argv[1:], flush=True)
