"""Cases that ms-swift trains: its own command line, in a process of its own, as the reports started it."""
