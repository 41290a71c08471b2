"""What an application uses: publisher, subscriber, and what they do in the background."""
