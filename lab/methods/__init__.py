"""Methods on trial: each one file, through the doors that every user has."""
