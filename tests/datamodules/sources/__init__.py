"""Reading texts, pairs and documents from files and from the hub."""
