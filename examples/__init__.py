"""Programs that use the library without being a part of it."""
