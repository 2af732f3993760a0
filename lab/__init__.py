"""What finds out whether something is true: measurements, laws, claims, and methods on trial."""
