"""What the suite does, from single blocks to whole runs of several processes."""
