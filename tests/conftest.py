"""Set before torch and huggingface_hub are imported, here and in the processes that tests start."""

import os

# No test may reach for the network: a hub name that is not cached fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread: tiny models are faster with it, and processes that are compared to the bit round alike.
os.environ["OMP_NUM_THREADS"] = "1"
