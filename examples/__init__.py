"""What uses the core without being a part of it."""
