"""What several tests use: tiny models and data, commands, and ways to read what runs leave."""
