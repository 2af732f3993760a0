"""Programs that use the core without being a part of it."""
