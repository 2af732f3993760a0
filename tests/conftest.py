"""No test may reach for the network: a hub name that is not cached fails at once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
