"""What a run costs on this host, for people to compare. Nothing here is a test: a time depends on the machine."""
