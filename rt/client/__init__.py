"""The parts that an application uses: publisher, subscriber, and their background work."""
