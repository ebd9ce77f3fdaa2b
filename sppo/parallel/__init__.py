"""Process groups and communication between ranks."""
