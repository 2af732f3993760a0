"""The ground floor: files, what made them, and the words of errors."""
